"""RAM with a budget: leases on extents of one arena. No idea what a token is."""
