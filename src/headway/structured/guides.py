"""Which tokens may come next: a guide for each request whose answer must fit a grammar, or a part of the vocabulary.

    begin        matchers read their requests' new tokens, and threads compute the masks of a step's guided requests
                 while the step runs; requests whose grammar has ended or failed are reported
    forced       the tokens that must come next, which can be drafted; `num_fitting`: how many drafted tokens may follow

A mask has one bit per token; a request that verifies drafts has one mask per position. `headway.executor.guided` passes
a step's masks to the executor between forward and sampling.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.core.request import Request, RequestStatus
from headway.core.scheduler_output import ScheduledRequest
from headway.errors import InvalidRequestError
from headway.sampling_params import SamplingParams
from headway.structured.compile_grammar import refused
from headway.structured.compiling import Compiled, GrammarCompiler

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

MAX_MASK_THREADS = 8
USERS_OF_A_LEXER = 4
"""How many requests of one grammar share a lexer."""
MOVED_TOKENS = 1_000
"""The most tokens that are read again in a step because their requests move to another lexer."""
_EVERYTHING = np.uint32(0xFFFFFFFF)


class TokenMasks(NamedTuple):
    """The tokens that guided requests of a step may choose."""

    request_ids: tuple[str, ...]
    num_lines: tuple[int, ...]
    """For each request, the number of positions at which it chooses a token."""
    bits: NDArray[np.uint32]
    """[positions of all requests, words]: bit i of word w allows token 32 w + i."""


class GuideEnd(NamedTuple):
    """A request that its guide ends."""

    request_id: str
    error: str | None
    """None if the grammar allows nothing more, and the request may not choose end tokens."""


class Guide:
    """Tracks which tokens one request may choose next. It reads the request's own tokens."""

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        compiled: Compiled | None,
        allowed: NDArray[np.uint32] | None,
    ) -> None:
        self.request = request
        self.compiled = compiled
        self.allowed = allowed
        self.start: LLMatcher | None = None
        """The matcher whose copy this request follows, and whose lexer it uses."""
        self.matcher: LLMatcher | None = None
        self.error: str | None = None
        """Why the matcher refused a chosen token, which can only be a fault of the matcher."""
        self.num_read = 0
        """How many tokens of the answer the matcher has read."""
        self._ignores_eos = params.ignore_eos
        self._min_tokens = params.min_tokens
        if compiled is not None:
            self.start = compiled.next_start()
            self.matcher = self.start.deep_copy()

    def read(self) -> LLMatcher | None:
        """Read the tokens chosen since the last call. Returns the matcher, if it can tell what follows."""
        unread = self.request.output_token_ids[self.num_read :]
        self.num_read += len(unread)
        matcher = self.matcher
        if matcher is not None and unread and not matcher.consume_tokens(unread):
            self.error = refused(matcher.get_error() or "the grammar is at its end").args[0]
        return matcher if self.error is None else None

    def move(self, start: LLMatcher) -> None:
        """Use another lexer from now on."""
        matcher = start.deep_copy()
        if matcher.consume_tokens(self.request.output_token_ids[: self.num_read]):
            self.start, self.matcher = start, matcher

    @property
    def is_at_end(self) -> bool:
        """Whether only an end token could follow, and the request may not choose one."""
        is_barred = self._ignores_eos or self.num_read < self._min_tokens
        return is_barred and self.matcher is not None and self.matcher.is_stopped()

    @property
    def has_ended(self) -> bool:
        """Whether the request has ended."""
        status = self.request.status
        return status is not RequestStatus.RUNNING and status.is_finished


class GuidedShare(NamedTuple):
    """A guided request in a step that chooses a token for it."""

    guide: Guide
    drafts: Sequence[int]

    @property
    def is_next(self) -> bool:
        """Whether only this step's tokens are pending: all before them are known."""
        return self.guide.request.num_pending_tokens <= 1 + len(self.drafts)


class GuidedStep(NamedTuple):
    """The guides' results for a step."""

    masks: TokenMasks
    ends: tuple[GuideEnd, ...]
    """Requests that have ended; tokens chosen for them in this step do not count."""


class Guides:
    """The guides of all live requests of one engine. Used by the engine's thread, which need not wait for them."""

    def __init__(self, compiler: GrammarCompiler | None, vocab_size: int) -> None:
        self._compiler = compiler
        self._num_words = -(-(vocab_size if compiler is None else compiler.vocab_size) // 32)
        self.live: dict[str, Guide] = {}
        """By request id."""
        self._num_threads = min(MAX_MASK_THREADS, os.cpu_count() or 1)
        self._threads: ThreadPoolExecutor | None = None
        self._masks: LLExecutor | None = None

    def compile(self, params: SamplingParams) -> Future[Compiled]:
        """Compile a request's grammar in another thread, before the request is added. The call or its future raises
        `InvalidRequestError` if the grammar cannot be used."""
        assert params.grammar is not None
        if self._compiler is None:
            raise InvalidRequestError(
                "structured output needs a tokenizer, and this model has none", "structured_outputs"
            )
        return self._compiler.submit(params.grammar, params.grammar_bytes)

    def prepare(self) -> None:
        """Prepare now, so that the first grammar is not slow."""
        if self._compiler is not None and self._compiler.can_prepare:
            self._compiler.prepare()

    def add(self, request: Request) -> None:
        """Guide a request; it may have tokens already. Its grammar should have been compiled."""
        params = request.sampling_params
        assert params is not None
        compiled = None if params.grammar is None else self.compile(params).result()
        allowed = None
        if params.allowed_token_ids is not None:
            allowed = _bits(params.allowed_token_ids, self._num_words)
        self.live[request.request_id] = Guide(request, params, compiled, allowed)

    def forget_finished(self) -> None:
        """Drop the guides of requests that have ended."""
        ended = [request_id for request_id, guide in self.live.items() if guide.has_ended]
        for request_id in ended:
            del self.live[request_id]

    def shares(self, scheduled: Sequence[ScheduledRequest]) -> list[GuidedShare]:
        """The guided requests of a step that choose tokens in it."""
        live = self.live
        return [
            GuidedShare(live[share.request_id], share.drafts)
            for share in scheduled
            if share.samples and share.request_id in live
        ]

    def forced(self, request_id: str) -> Sequence[int]:
        """The tokens that must come next in a request's answer, tokenised as its text would be. Must not be called
        while a token of the answer is pending."""
        guide = self.live.get(request_id)
        matcher = None if guide is None else guide.read()
        return () if matcher is None else matcher.compute_ff_tokens()

    def num_fitting(self, request_id: str, token_ids: Sequence[int]) -> int:
        """How many of these tokens may follow. Must not be called while a token of the answer is pending."""
        guide = self.live.get(request_id)
        matcher = None if guide is None else guide.read()
        return len(token_ids) if matcher is None else matcher.validate_tokens(list(token_ids))

    def begin(self, step: Sequence[GuidedShare]) -> Future[GuidedStep]:
        """Compute in threads which tokens the requests of a step may choose, also after each of their drafts. Their
        tokens before this step must be known, and no further ones may be added until this is done."""
        if self._threads is None:
            from llguidance import LLExecutor

            self._threads = ThreadPoolExecutor(1, thread_name_prefix="masks")
            self._masks = LLExecutor(num_threads=self._num_threads)
        live = [share for share in step if not share.guide.has_ended]
        return self._threads.submit(self._compute, [one.guide for one in live], [list(one.drafts) for one in live])

    def close(self) -> None:
        """Stop the threads and processes."""
        if self._compiler is not None:
            self._compiler.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _compute(self, guides: Sequence[Guide], drafts: Sequence[list[int]]) -> GuidedStep:
        for guide in guides:
            guide.read()
        num_lines = [1 + len(own) for own in drafts]
        first_lines = list(itertools.accumulate(num_lines, initial=0))
        bits = np.empty((first_lines.pop(), self._num_words), dtype=np.uint32)
        self._write_masks(bits, self._spread(guides), first_lines, drafts)
        ends = []
        for guide, first, count in zip(guides, first_lines, num_lines, strict=True):
            own = bits[first : first + count]
            if guide.allowed is not None:
                own[:] = guide.allowed if guide.matcher is None else own & guide.allowed
            if guide.matcher is not None and guide.error is None and guide.matcher.is_error():
                guide.error = refused(guide.matcher.get_error()).args[0]
            if guide.error is not None or guide.is_at_end:
                ends.append(GuideEnd(guide.request.request_id, guide.error))
                own[:] = _EVERYTHING
        request_ids = tuple([guide.request.request_id for guide in guides])
        return GuidedStep(TokenMasks(request_ids, tuple(num_lines), bits), tuple(ends))

    def _write_masks(
        self,
        bits: NDArray[np.uint32],
        matchers: Sequence[tuple[LLMatcher, int]],
        first_lines: Sequence[int],
        drafts: Sequence[list[int]],
    ) -> None:
        """Write the masks of the matchers of guides at these positions."""
        assert self._masks is not None
        size = (bits.ctypes.data, self._num_words * bits.itemsize, len(bits))
        plain = [(matcher, first_lines[place]) for matcher, place in matchers if not drafts[place]]
        if plain:
            self._masks.unsafe_compute_mask_ptr(plain, *size)
        guessing = [(matcher, first_lines[place], own) for matcher, place in matchers if (own := drafts[place])]
        if guessing:
            for _, first, own in guessing:  # behind a guess that does not fit nothing is written, nor does it matter
                bits[first : first + 1 + len(own)] = _EVERYTHING
            self._masks.unsafe_compute_mask_ptr_with_draft_token(guessing, *size)

    def _spread(self, guides: Sequence[Guide]) -> list[tuple[LLMatcher, int]]:
        """The matchers and the positions of their guides, after moving some away from overused lexers. Matchers with
        the same lexer are adjacent, so that one thread gets them."""
        lexers: dict[int, list[int]] = {}
        for line, guide in enumerate(guides):
            if guide.start is not None:
                lexers.setdefault(id(guide.start), []).append(line)
        if max(map(len, lexers.values()), default=0) > USERS_OF_A_LEXER:
            for compiled in {guide.compiled for guide in guides} - {None}:
                assert compiled is not None
                self._balance(compiled, [lexers.setdefault(id(start), []) for start in compiled.starts], guides)
        lines = [line for group in lexers.values() for line in group]
        return [(matcher, line) for line in lines if (matcher := guides[line].matcher) is not None]

    def _balance(self, compiled: Compiled, groups: list[list[int]], guides: Sequence[Guide]) -> None:
        """Share the guides of a grammar among its lexers, and have another one made if there are too few."""
        num_users = sum(map(len, groups))
        if num_users > len(groups) * USERS_OF_A_LEXER and compiled.may_grow(self._num_threads):
            assert self._compiler is not None
            self._compiler.grow(compiled)
        fair = max(-(-num_users // len(groups)), USERS_OF_A_LEXER)
        num_tokens = 0
        for group in groups:
            group.sort(key=lambda line: guides[line].num_read, reverse=True)
            while len(group) > fair and (num_tokens := num_tokens + guides[group[-1]].num_read) <= MOVED_TOKENS:
                number, other = min(enumerate(groups), key=lambda entry: len(entry[1]))
                guides[group[-1]].move(compiled.starts[number])
                other.append(group.pop())


def _bits(token_ids: Sequence[int], num_words: int) -> NDArray[np.uint32]:
    flags = np.zeros(num_words * 32, dtype=np.uint8)
    flags[list(token_ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.uint32)
