"""The worker: a model on one device, from loading to running steps."""
