"""The messages between the front end and engine processes, and their transport.

messages          typed records, carried as msgpack         frames      where one ends and the next begins
channel           the engine's end of a socket              greeting    between machines: versions, and a shared secret
shared_channel    one engine, several front ends
"""
