"""Counters, access log and spans."""
