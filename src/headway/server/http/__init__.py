"""The HTTP layer: connections, bodies and access control."""
