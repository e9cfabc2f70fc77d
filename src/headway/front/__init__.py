"""The front end of engine processes. It sends each request to one of them; the request survives that process.

engine_client ──► router ──► replicas (supervision) ◄── connection ──► engine processes
"""
