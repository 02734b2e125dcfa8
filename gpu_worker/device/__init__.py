"""Memory and row operations of one device."""
