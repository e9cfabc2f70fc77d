"""What commands share: flags, tables and files, an engine that starts with a progress bar, a profile of its steps."""
