"""The command line: starts the processes and shows them; decides nothing."""
