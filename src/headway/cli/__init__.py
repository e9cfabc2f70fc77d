"""The command line: one module per sub-command, flags made from the dataclasses that own the options."""
