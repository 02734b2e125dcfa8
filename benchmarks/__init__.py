"""Commands that measure: each prints a table and, with --out, writes its data. Ratios within one run, with their spread."""
