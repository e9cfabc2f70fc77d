"""The engine as a process of its own: its protocol, its loop, and the client that talks to it."""
