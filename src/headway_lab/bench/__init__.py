"""Benchmarks: fixed scenarios, the floors to compare them with, replayed traffic, and profiles of single steps."""
