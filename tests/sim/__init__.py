"""The simulator holds, and would notice if it did not."""
