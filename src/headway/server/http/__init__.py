"""HTTP itself: connections, bodies, access control."""
