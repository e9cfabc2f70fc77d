"""Which token sequences spell the words that a request must not contain."""

from __future__ import annotations

from headway.sampling_params import SamplingParams
from headway.tokenizer.tokenizer import Tokenizer


def resolve_bad_words(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """The same parameters with the token sequences of `bad_words`.

    A word is banned as it is spelled at the start of a text and, since most vocabularies have other tokens for it
    there, as it is spelled after a space.
    """
    if not params.bad_words or params.bad_word_token_ids is not None:
        return params
    sequences: list[tuple[int, ...]] = []
    for word in params.bad_words:
        bare = word.lstrip() or word
        for spelling in (bare, " " + bare):
            tokens = tuple(tokenizer.encode(spelling, add_special_tokens=False))
            if tokens and tokens not in sequences:
                sequences.append(tokens)
    return params.with_bad_word_token_ids(sequences)
