"""Grammars and texts: the embedded model's vocabulary, what a matcher takes, and what it allows next."""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Iterable, Iterator

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from headway.loader import open_checkpoint
from headway.loader.embedded import embedded_model_path
from headway.structured.compile_grammar import LIMITS
from headway.tokenizer import Tokenizer

BYTES = LLTokenizer("byte")


@functools.cache
def embedded_tokenizer() -> Tokenizer:
    return open_checkpoint(embedded_model_path()).tokenizer()


@functools.cache
def embedded_vocabulary() -> LLTokenizer:
    text = embedded_tokenizer()
    return LLTokenizer(text.backend.to_str(), eos_token=list(text.eos_token_ids))


def matcher_of(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), f"{matcher.get_error()}\n{grammar}"
    return matcher


def is_whole(matcher: LLMatcher, token_ids: list[int]) -> bool:
    """Whether the matcher takes them all, and nothing has to follow."""
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def allowed_by(mask: bytes | np.ndarray, *, but: Iterable[int] = ()) -> np.ndarray:
    """The tokens that a mask allows."""
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
    bits[list(but)] = 0
    return np.flatnonzero(bits)


def walk(
    tokenizer: LLTokenizer, matcher: LLMatcher, chance: random.Random, ways_out: list[list[int]], *, most: int
) -> tuple[list[int], bool]:
    """A random answer under the masks, and whether it may end there. It often takes a way out if there is one."""
    token_ids: list[int] = []
    while len(token_ids) < most and not matcher.is_stopped():
        if matcher.is_accepting() and chance.random() < 0.3:
            break
        open_ways = [one for one in ways_out if matcher.validate_tokens(one) == len(one)]
        if open_ways and chance.random() < 0.7:
            chosen = chance.choice(open_ways)
        else:
            allowed = allowed_by(matcher.compute_bitmask(), but=tokenizer.eos_tokens)
            if not len(allowed):
                break
            chosen = [int(chance.choice(allowed))]
        assert matcher.consume_tokens(chosen), matcher.get_error()
        token_ids += chosen
    return token_ids, matcher.is_accepting()


@contextlib.contextmanager
def soon(seconds: float = 1.0) -> Iterator[None]:
    """What happens inside takes little of the processor's time."""
    start_s = time.process_time()
    yield
    assert time.process_time() - start_s < seconds
