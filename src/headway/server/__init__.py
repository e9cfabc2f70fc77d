"""The server: an HTTP front end and, in a process of its own, the engine."""
