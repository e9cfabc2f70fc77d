"""Published claims about serving, measured again: each has a workload, a way to measure it, and an outcome."""
