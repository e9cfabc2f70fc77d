"""Structured outputs: grammars that constrain the model, and parsers that read its output."""
