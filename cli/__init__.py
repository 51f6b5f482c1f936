"""The `tidegate` command: one file a command, and the supervisor of processes."""
