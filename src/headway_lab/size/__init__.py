"""Sizing: how many devices a model needs for a load, at which price, and what would make it cheaper."""
