"""What may enter the engine's queue, and in which class."""
