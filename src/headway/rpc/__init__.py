"""The engine as a process of its own.

engine_client  ◄── channel (messages) ──►  engine_process: engine_loop ─► LLMEngine
supervision                                step_meter, step_snapshots
streams
"""
