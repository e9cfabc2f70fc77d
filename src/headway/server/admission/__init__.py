"""Admission control: which requests may enter the engine's queue, and in which service class."""
