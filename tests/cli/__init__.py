"""The command line, the settings and the supervision of processes."""
