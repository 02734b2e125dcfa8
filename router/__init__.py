"""One queue and one ledger between clients and workers."""
