"""Metrics, access log and tracing spans."""
