"""Commands that measure: each prints a table, and some write their data with --out. Ratios within one run, with their spread."""
