"""Workloads: which requests come, when, and how long they are. One source for measuring and for simulating."""
