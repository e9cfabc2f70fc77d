"""Faults that are put into copies of the source, one at a time, to see which tests catch them."""
