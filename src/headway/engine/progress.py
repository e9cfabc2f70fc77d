"""How far requests have come that give no output before their end: beam searches, and those with `best_of`."""

from __future__ import annotations

from typing import NamedTuple


class Progress(NamedTuple):
    """What one step has done for one of them."""

    request_id: str
    num_started: int
    """Sequences that got their first token. A search starts with all its beams at once."""
    num_tokens: int
    """Tokens that were added to its sequences, whether or not these are going to be returned."""
