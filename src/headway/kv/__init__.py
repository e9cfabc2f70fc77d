"""The KV cache as tensors: formats of its numbers, and copies of blocks between device and host."""
