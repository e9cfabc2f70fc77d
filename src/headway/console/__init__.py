"""Parts that commands share: flags, tables and files, starting an engine with a progress bar, and profiling steps."""
