"""Outputs with a form: grammars that constrain the model, and parsers that read what it wrote."""
