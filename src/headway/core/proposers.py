"""Proposers: they draft a request's next tokens.

The n-gram proposer looks for an earlier occurrence of the request's last tokens, as many of them as match:

    tokens    … the cat sat on the mat , and the cat sat
                            └─ draft: on the mat ,      ▲ the last three tokens occurred before

Text that is edited, summarised, quoted or repeated has many such matches; other text has hardly any. If a grammar
leaves no choice, its tokens are drafted instead.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple, Protocol

from headway.core.request import Request
from headway.settings import MAX_DRAFT_TOKENS, SchedulerSettings

MIN_MATCH = 2
"""The shortest match, in tokens, that a draft may rest on."""
MAX_MATCH = 16
"""The longest match that is looked for: a longer one makes a draft no more likely."""
FORCED = MAX_MATCH + 1
"""Used as the length of the match if a grammar leaves no choice."""
MOST_UNREAD = 64
"""How many tokens a draft model may have to read before it drafts."""
UNKNOWN = (-1,) * MAX_DRAFT_TOKENS
"""A draft whose tokens the runner makes; they are not known here."""
_TOKEN_BYTES = array("i").itemsize


def create_proposer(config: SchedulerSettings) -> Proposer:
    """Create the proposer that the options ask for."""
    if config.spec_synthetic_acceptance:
        return MadeUpProposer()
    return ModelProposer() if config.speculation == "draft" else NgramProposer()


class Draft(NamedTuple):
    """A guess of a request's next tokens."""

    token_ids: tuple[int, ...]
    """The guessed tokens; -1 is a token that only the runner knows."""
    num_matched: int
    """The length of the match that the guess rests on, from `MIN_MATCH` to `MAX_MATCH`, or `FORCED`."""


class Proposer(Protocol):
    """Drafts the next tokens of requests."""

    prior_chance: float
    """The assumed chance that a guess is right before any of its kind has been verified. It is high enough for drafts
    to be tried."""

    knows_tokens: bool
    """Whether it needs the values of a request's tokens and returns those that it guesses. Such guesses can be checked
    later even if they were not verified."""

    def propose(self, request: Request, max_tokens: int) -> Draft | None:
        """Return a draft of at most `max_tokens` tokens to follow a request's known ones; None if there is none."""
        ...

    def note_verified(self, request: Request) -> None:
        """Note that a draft for the request's known tokens is going to be verified, at least in part."""
        ...

    def forget_finished(self) -> None:
        """Forget requests that have ended."""
        ...


class NgramProposer:
    """Looks up drafts in the tokens of the request itself. It copies each token once, when it becomes known."""

    prior_chance = 0.5
    knows_tokens = True

    def __init__(self) -> None:
        self._tokens: dict[Request, _TokenBytes] = {}

    def propose(self, request: Request, max_tokens: int) -> Draft | None:
        """Return the tokens after the latest earlier occurrence of a request's last tokens, at most `max_tokens`; None
        if there is no such occurrence."""
        known = self._tokens.get(request)
        if known is None:
            known = self._tokens[request] = _TokenBytes(request)
        size = known.take_new(request)
        start = known.follow(MIN_MATCH) if size > MIN_MATCH else None
        if start is None:
            return None
        shortest, longest = MIN_MATCH, min(MAX_MATCH, size - 1)
        while shortest < longest:  # wherever a longer match occurs, the shorter ones occur too
            middle = (shortest + longest + 1) // 2
            found = known.follow(middle)
            if found is None:
                longest = middle - 1
            else:
                shortest, start = middle, found
        token_ids = known.tokens(start, start + max_tokens)
        while len(token_ids) < max_tokens:  # the draft reaches its own beginning: it repeats
            token_ids.append(token_ids[len(token_ids) - (size - start)])
        return Draft(tuple(token_ids), shortest)

    def note_verified(self, request: Request) -> None:
        """There is nothing to note."""

    def forget_finished(self) -> None:
        """Forget the tokens of requests that have ended."""
        self._tokens = {request: known for request, known in self._tokens.items() if not request.status.is_finished}


class ModelProposer:
    """Drafts of a second model, which the runner makes (`headway.runner.draft_model`). That model has read the tokens
    that a request had when it was admitted or last drafted for. A request with many more tokens by now gets no draft.
    """

    prior_chance = 0.8
    knows_tokens = False

    def __init__(self) -> None:
        self._read: dict[Request, tuple[int, int]] = {}  # preemptions and known tokens when its tokens were last read

    def propose(self, request: Request, max_tokens: int) -> Draft | None:
        """Return a draft of `max_tokens` tokens; None if the model would have too many tokens to read first."""
        num_known = request.num_known_tokens
        num_preemptions, num_read = self._read.get(request, (0, request.num_prompt_tokens))
        if num_preemptions < request.num_preemptions:  # all its tokens have been computed again, and read
            num_read = num_known
            self._read[request] = request.num_preemptions, num_read
        return None if num_known - num_read > MOST_UNREAD else Draft(UNKNOWN[:max_tokens], MAX_MATCH)

    def note_verified(self, request: Request) -> None:
        """Note that the model reads all known tokens of the request before it drafts."""
        self._read[request] = request.num_preemptions, request.num_known_tokens

    def forget_finished(self) -> None:
        """Forget requests that have ended."""
        self._read = {request: read for request, read in self._read.items() if not request.status.is_finished}


class MadeUpProposer:
    """Drafts for benchmarks with synthetic acceptance, where their tokens do not matter."""

    prior_chance = 0.5
    knows_tokens = False

    def propose(self, request: Request, max_tokens: int) -> Draft | None:
        """Return the request's last token, repeated."""
        return Draft((request.output_token_ids[-1],) * max_tokens, MAX_MATCH)

    def note_verified(self, request: Request) -> None:
        """There is nothing to note."""

    def forget_finished(self) -> None:
        """There is nothing to forget."""


class _TokenBytes:
    """A request's known tokens as bytes, which can be searched quickly."""

    def __init__(self, request: Request) -> None:
        self._bytes = bytearray(array("i", request.prompt_token_ids).tobytes())

    def take_new(self, request: Request) -> int:
        """Add tokens that have become known. Returns how many tokens there are."""
        num_read = len(self._bytes) // _TOKEN_BYTES
        self._bytes += array("i", request.output_token_ids[num_read - request.num_prompt_tokens :]).tobytes()
        return len(self._bytes) // _TOKEN_BYTES

    def follow(self, num_tokens: int) -> int | None:
        """Return the position after the latest earlier occurrence of the last `num_tokens` tokens, or None."""
        end = self._bytes[-num_tokens * _TOKEN_BYTES :]
        at = self._bytes.rfind(end, 0, -_TOKEN_BYTES)
        while at > 0 and at % _TOKEN_BYTES:  # the bytes match, but not at the start of a token
            at = self._bytes.rfind(end, 0, at + len(end) - 1)
        return None if at < 0 else at // _TOKEN_BYTES + num_tokens

    def tokens(self, start: int, end: int) -> list[int]:
        return array("i", bytes(self._bytes[start * _TOKEN_BYTES : end * _TOKEN_BYTES])).tolist()
