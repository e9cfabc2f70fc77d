"""Which token sequences spell the words that a request must not contain."""

from __future__ import annotations

from collections.abc import Sequence

from headway.tokenizer.tokenizer import Tokenizer


def spell_bad_words(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The distinct token sequences of `words`.

    A word is banned as it is spelled at the start of a text and, since most vocabularies have other tokens for it
    there, as it is spelled after a space.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word
        for spelling in (bare, " " + bare):
            sequences[tuple(tokenizer.encode(spelling, add_special_tokens=False))] = None
    sequences.pop((), None)
    return [list(tokens) for tokens in sequences]
