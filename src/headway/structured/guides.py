"""Which tokens may come next: a guide for each request whose answer must fit a grammar, or a part of the vocabulary.

    note         the tokens that were chosen
    begin        matchers read them, and the masks of a step's guided requests are computed, in threads while it runs; a
                 request whose grammar has ended, or broke, is named

A mask is a bit per token. The engine hands a step's masks to the executor between forward and sampling.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.core.scheduler_output import RequestUpdate
from headway.errors import InvalidRequestError
from headway.sampling_params import SamplingParams
from headway.structured.compiling import Compiled, GrammarCompiler, refused

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

MAX_MASK_THREADS = 8
USERS_OF_A_LEXER = 4
"""So many requests of one grammar make do with one."""
MOVED_TOKENS = 1_000
"""That are read again in a step, at most, because their request is moved to another lexer."""
_EVERYTHING = np.uint32(0xFFFFFFFF)


class TokenMasks(NamedTuple):
    """What guided requests of a step may choose from."""

    request_ids: tuple[str, ...]
    bits: NDArray[np.uint32]
    """[requests, words]: bit i of word w allows token 32 w + i."""


class GuideEnd(NamedTuple):
    """A request that its guide ends."""

    request_id: str
    error: str | None
    """None: its grammar allows nothing more, and its end tokens may not be chosen."""


class _Guide:
    """What one request may say next."""

    def __init__(self, compiled: Compiled | None, allowed: NDArray[np.uint32] | None, params: SamplingParams) -> None:
        self.compiled = compiled
        self.allowed = allowed
        self.tokens: list[int] = []
        """The request's answer."""
        self.start: LLMatcher | None = None
        """The matcher whose copy this request follows, and whose lexer it uses."""
        self.matcher: LLMatcher | None = None
        self._num_read = 0  # of the tokens, by the matcher
        self._ignores_eos = params.ignore_eos
        self._min_tokens = params.min_tokens
        if compiled is not None:
            self.start = compiled.next_start()
            self.matcher = self.start.deep_copy()

    def read(self) -> str | None:
        """Take in chosen tokens; what is wrong with them, which can only be a fault of the matcher's."""
        unread, self._num_read = self.tokens[self._num_read :], len(self.tokens)
        matcher = self.matcher
        if matcher is None or not unread or matcher.consume_tokens(unread):
            return None
        return refused(matcher.get_error() or "the grammar is at its end").args[0]

    def move(self, start: LLMatcher) -> None:
        """Use another lexer from now on."""
        matcher = start.deep_copy()
        if matcher.consume_tokens(self.tokens[: self._num_read]):
            self.start, self.matcher = start, matcher

    @property
    def is_at_end(self) -> bool:
        """Whether nothing but an end token may follow, and that may not."""
        is_barred = self._ignores_eos or self._num_read < self._min_tokens
        return is_barred and self.matcher is not None and self.matcher.is_stopped()


class GuidedStep(NamedTuple):
    """What guides say of a step."""

    masks: TokenMasks
    ends: tuple[tuple[GuideEnd, _Guide], ...]
    """Requests that are over; whatever is chosen for them in this step does not count."""


class Guides:
    """The guides of all live requests of one engine; for the thread that drives it, which need not wait for them."""

    def __init__(self, compiler: GrammarCompiler | None, vocab_size: int) -> None:
        self._compiler = compiler
        self._num_words = -(-(vocab_size if compiler is None else compiler.vocab_size) // 32)
        self.live: dict[str, _Guide] = {}
        """By request id."""
        self._num_threads = min(MAX_MASK_THREADS, os.cpu_count() or 1)
        self._threads: ThreadPoolExecutor | None = None
        self._masks: LLExecutor | None = None

    def compile(self, grammar: str) -> Future[Compiled]:
        """Compile a grammar in another thread, before a request with it is added. Raises `InvalidRequestError`, or its
        result does, if that cannot be."""
        if self._compiler is None:
            raise InvalidRequestError(
                "structured output needs a tokenizer, and this model has none", "structured_outputs"
            )
        return self._compiler.submit(grammar)

    def prepare(self) -> None:
        """Do now what would make the first grammar slow."""
        if self._compiler is not None and self._compiler.can_prepare:
            self._compiler.prepare_trials()
            self._compiler.prepare()

    def add(self, request_id: str, params: SamplingParams) -> None:
        """Guide a request from its first token on. Its grammar should have been compiled."""
        compiled = None if params.grammar is None else self.compile(params.grammar).result()
        allowed = None
        if params.allowed_token_ids is not None:
            allowed = _bits(params.allowed_token_ids, self._num_words)
        self.live[request_id] = _Guide(compiled, allowed, params)

    def drop(self, request_id: str) -> None:
        """Forget a request, guided or not."""
        self.live.pop(request_id, None)

    def guided(self, request_ids: Iterable[str]) -> list[str]:
        """Those of them that have a guide."""
        return [request_id for request_id in request_ids if request_id in self.live]

    def note(self, updates: Iterable[RequestUpdate]) -> None:
        """Take in what a step brought. Requests that have ended lose their guide."""
        for update in updates:
            guide = self.live.get(update.request_id)
            if guide is not None:
                if update.finish_status is None and update.held_status is None:
                    guide.tokens += update.new_token_ids
                else:
                    del self.live[update.request_id]

    def begin(self, request_ids: Sequence[str]) -> Future[GuidedStep]:
        """Read what was noted, and find what these requests may choose next: in threads, beside everything else. It
        must be awaited before the next `note` or `begin`."""
        if self._threads is None:
            from llguidance import LLExecutor

            self._threads = ThreadPoolExecutor(1, thread_name_prefix="masks")
            self._masks = LLExecutor(num_threads=self._num_threads)
        guides = [self.live[request_id] for request_id in request_ids]
        return self._threads.submit(self._compute, tuple(request_ids), guides)

    def take_ends(self, step: GuidedStep) -> list[GuideEnd]:
        """The requests that their guides end in this step; those that have ended otherwise meanwhile left out."""
        ends = [end for end, guide in step.ends if self.live.get(end.request_id) is guide]
        for end in ends:
            del self.live[end.request_id]
        return ends

    def close(self) -> None:
        """Stop the threads and processes."""
        if self._compiler is not None:
            self._compiler.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _compute(self, request_ids: tuple[str, ...], guides: Sequence[_Guide]) -> GuidedStep:
        errors = {line: error for line, guide in enumerate(guides) if (error := guide.read()) is not None}
        bits = np.empty((len(guides), self._num_words), dtype=np.uint32)
        matchers = self._spread(guides)
        if matchers:
            assert self._masks is not None
            num_bytes = self._num_words * bits.itemsize
            self._masks.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, num_bytes, len(guides))
        ends = []
        for line, (request_id, guide) in enumerate(zip(request_ids, guides, strict=True)):
            if guide.allowed is not None:
                bits[line] = guide.allowed if guide.matcher is None else bits[line] & guide.allowed
            if guide.matcher is not None and line not in errors and guide.matcher.is_error():
                errors[line] = refused(guide.matcher.get_error()).args[0]
            if line in errors or guide.is_at_end:
                ends.append((GuideEnd(request_id, errors.get(line)), guide))
                bits[line] = _EVERYTHING
        return GuidedStep(TokenMasks(request_ids, bits), tuple(ends))

    def _spread(self, guides: Sequence[_Guide]) -> list[tuple[LLMatcher, int]]:
        """The matchers, after some were moved from lexers that too many use. Those with one lexer are side by side:
        neighbours are given to one thread."""
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

    def _balance(self, compiled: Compiled, groups: list[list[int]], guides: Sequence[_Guide]) -> None:
        """Share the guides of a grammar among its lexers, and have another one made if there are too few."""
        num_users = sum(map(len, groups))
        if num_users > len(groups) * USERS_OF_A_LEXER and compiled.may_grow(self._num_threads):
            assert self._compiler is not None
            self._compiler.grow(compiled)
        fair = max(-(-num_users // len(groups)), USERS_OF_A_LEXER)
        num_tokens = 0
        for group in groups:
            group.sort(key=lambda line: len(guides[line].tokens), reverse=True)
            while len(group) > fair and (num_tokens := num_tokens + len(guides[group[-1]].tokens)) <= MOVED_TOKENS:
                number, other = min(enumerate(groups), key=lambda entry: len(entry[1]))
                guides[group[-1]].move(compiled.starts[number])
                other.append(group.pop())


def _bits(token_ids: Sequence[int], num_words: int) -> NDArray[np.uint32]:
    flags = np.zeros(num_words * 32, dtype=np.uint8)
    flags[list(token_ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.uint32)
