"""The front end of engine processes: requests go to one of them and survive it.

engine_client ──► router ──► replicas (supervision) ◄── connection ──► engine processes
"""
