"""The engine as a process of its own.

engine_client  ◄── channel (messages) ──►  engine_process: engine_loop ─► LLMEngine
supervision      shared_channel: of many   engine_report
streams          ray_cluster: elsewhere
"""
