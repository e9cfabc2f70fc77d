"""Who guesses a request's next tokens.

Guesses come from what has been: the longest end of a request's tokens that it has had before.

    tokens    … the cat sat on the mat , and the cat sat
                            └─ draft: on the mat ,      ▲ the last three tokens were there before

Text that is edited, summarised, quoted or repeated has much of that; other text has hardly any. Under a grammar, what
it leaves no choice about comes first.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple, Protocol

from headway.core.request import Request
from headway.settings import MAX_DRAFT_TOKENS, SchedulerSettings

MIN_MATCH = 2
"""Tokens that must have been there before, in this order."""
MAX_MATCH = 16
"""A longer match says no more."""
FORCED = MAX_MATCH + 1
"""Stands for the length of a match where a grammar leaves no choice."""
MOST_UNREAD = 64
"""Tokens that a draft model may have to read before it guesses."""
UNKNOWN = (-1,) * MAX_DRAFT_TOKENS
"""A draft that the runner makes."""
_TOKEN_BYTES = array("i").itemsize


def create_proposer(config: SchedulerSettings) -> Proposer:
    """The one that the options ask for."""
    if config.spec_synthetic_acceptance:
        return MadeUpProposer()
    return ModelProposer() if config.speculation == "draft" else NgramProposer()


class Draft(NamedTuple):
    """A guess."""

    token_ids: tuple[int, ...]
    """-1: not known here, but to the runner."""
    num_matched: int
    """On how many tokens before it the guess rests, from `MIN_MATCH` to `MAX_MATCH`, or `FORCED`."""


class Proposer(Protocol):
    """Who guesses."""

    prior_chance: float
    """Of a guess before any of its kind has been verified: enough to be tried where that may pay."""

    knows_tokens: bool
    """Whether it goes by the tokens that a request has, and says which it guesses: those that were not verified can be
    checked later."""

    def propose(self, request: Request, max_tokens: int) -> Draft | None:
        """What may follow a request's known tokens, at most so many."""
        ...

    def note_verified(self, request: Request) -> None:
        """A guess for the request's known tokens is going to be verified, or part of it."""
        ...

    def forget_finished(self) -> None:
        """Drop what is known of requests that have ended."""
        ...


class NgramProposer:
    """Looks up drafts in the tokens of requests. It copies them once, as they become known."""

    prior_chance = 0.5
    knows_tokens = True

    def __init__(self) -> None:
        self._tokens: dict[Request, _TokenBytes] = {}

    def propose(self, request: Request, max_tokens: int) -> Draft | None:
        """What may follow a request's known tokens, at most so many; None if their end has not been there before."""
        known = self._tokens.get(request)
        if known is None:
            known = self._tokens[request] = _TokenBytes(request)
        size = known.take_new(request)
        start = known.follow(MIN_MATCH) if size > MIN_MATCH else None
        if start is None:
            return None
        shortest, longest = MIN_MATCH, min(MAX_MATCH, size - 1)
        while shortest < longest:  # where a longer end was, the shorter ones were too
            middle = (shortest + longest + 1) // 2
            found = known.follow(middle)
            if found is None:
                longest = middle - 1
            else:
                shortest, start = middle, found
        token_ids = known.tokens(start, start + max_tokens)
        while len(token_ids) < max_tokens:  # the guess runs into itself: a repetition
            token_ids.append(token_ids[len(token_ids) - (size - start)])
        return Draft(tuple(token_ids), shortest)

    def note_verified(self, request: Request) -> None:
        """There is nothing to note."""

    def forget_finished(self) -> None:
        """Drop the tokens of requests that have ended."""
        self._tokens = {request: known for request, known in self._tokens.items() if not request.status.is_finished}


class ModelProposer:
    """Guesses of a second model, which the runner makes (`headway.runner.draft_model`). That has read as much of a
    request as it had when it guessed for it last, or entered the batch: one that is far ahead of that is left alone."""

    prior_chance = 0.8
    knows_tokens = False

    def __init__(self) -> None:
        self._read: dict[Request, tuple[int, int]] = {}  # how often it had been preempted, and tokens that it had

    def propose(self, request: Request, max_tokens: int) -> Draft | None:
        """As many as wanted."""
        num_known = request.num_known_tokens
        num_preemptions, num_read = self._read.get(request, (0, request.num_prompt_tokens))
        if num_preemptions < request.num_preemptions:  # all that it had has been computed again
            num_read = num_known
            self._read[request] = request.num_preemptions, num_read
        return None if num_known - num_read > MOST_UNREAD else Draft(UNKNOWN[:max_tokens], MAX_MATCH)

    def note_verified(self, request: Request) -> None:
        """It reads what it goes by."""
        self._read[request] = request.num_preemptions, request.num_known_tokens

    def forget_finished(self) -> None:
        """Drop what is known of requests that have ended."""
        self._read = {request: read for request, read in self._read.items() if not request.status.is_finished}


class MadeUpProposer:
    """Guesses for benchmarks with synthetic acceptance: it does not matter what they are."""

    prior_chance = 0.5
    knows_tokens = False

    def propose(self, request: Request, max_tokens: int) -> Draft | None:
        """The request's last token, over and over."""
        return Draft((request.output_token_ids[-1],) * max_tokens, MAX_MATCH)

    def note_verified(self, request: Request) -> None:
        """There is nothing to note."""

    def forget_finished(self) -> None:
        """There is nothing to forget."""


class _TokenBytes:
    """A request's known tokens as bytes, which are searched fast."""

    def __init__(self, request: Request) -> None:
        self._bytes = bytearray(array("i", request.prompt_token_ids).tobytes())

    def take_new(self, request: Request) -> int:
        """Add what has become known; returns how many tokens there are."""
        num_read = len(self._bytes) // _TOKEN_BYTES
        self._bytes += array("i", request.output_token_ids[num_read - request.num_prompt_tokens :]).tobytes()
        return len(self._bytes) // _TOKEN_BYTES

    def follow(self, num_tokens: int) -> int | None:
        """Where the last so many tokens have been before, for the last time: the place behind them."""
        end = self._bytes[-num_tokens * _TOKEN_BYTES :]
        at = self._bytes.rfind(end, 0, -_TOKEN_BYTES)
        while at > 0 and at % _TOKEN_BYTES:  # across tokens
            at = self._bytes.rfind(end, 0, at + len(end) - 1)
        return None if at < 0 else at // _TOKEN_BYTES + num_tokens

    def tokens(self, start: int, end: int) -> list[int]:
        return array("i", bytes(self._bytes[start * _TOKEN_BYTES : end * _TOKEN_BYTES])).tolist()
