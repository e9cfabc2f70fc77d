"""Measuring: fixed scenarios, the floors they are held against, replayed traffic, and profiles of single steps."""
