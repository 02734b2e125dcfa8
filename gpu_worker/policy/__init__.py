"""Which sequences run, which are parked, which come back. Pure: no torch, no sockets, no clock, no randomness."""
