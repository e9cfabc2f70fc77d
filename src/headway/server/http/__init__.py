"""HTTP itself: connections, bodies, who may come in."""
