"""The live page at `/`, which shows the running batch."""
