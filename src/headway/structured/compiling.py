"""Compiles a grammar's text in an engine into a matcher at the grammar's start.

Most grammars compile in a millisecond or two. But some short ones keep llguidance busy for ever, take gigabytes, or
overflow the stack and end the process. A grammar that might do so is first tried in a helper process (see
`helper_processes`), unless the server has already tried it: then the request carries the memory that it took.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from llguidance import LLMatcher, LLTokenizer

from headway.errors import InvalidRequestError
from headway.structured.compile_grammar import TOO_COMPLEX, TRIAL_S, compile_grammar, refused
from headway.structured.grammars import OWN_GRAMMAR
from headway.structured.helper_jobs import (
    LEAST_BYTES,
    Compiles,
    GrammarJob,
    Refusal,
    decode_result,
    encode_job,
    make_trie,
)
from headway.structured.helper_processes import STACK_BYTES, HelperProcesses, Limits

if TYPE_CHECKING:
    from headway.tokenizer import Tokenizer

COMPILE_THREADS = 4
HEAVY_THREADS = 2
"""The number of threads for grammars that may take long. They compete with the engine's steps for processors."""
HEAVY_NICENESS = 10
GRAMMARS_KEPT = 128
MEMORY_KEPT = 128 * 1024 * 1024
MEMORY_OF_ONE = 64 * 1024 * 1024
"""The most memory of a grammar that many requests use; beyond it the grammar gets no more lexers."""
TRIAL_LIMITS = Limits(cpu_s=TRIAL_S, wall_s=10.0)
_LIGHT_CHARS = 6_000
_UNSURE = re.compile(r'"pattern|%lark|\d{3}')
"""Signs that a grammar may be slow: a regex, a nested grammar, or a count of a hundred or more."""
_stack_size_lock = threading.Lock()
_Result = TypeVar("_Result")


class Compiled:
    """A compiled grammar as it is cached."""

    def __init__(self, grammar: str, start: LLMatcher, num_bytes: int) -> None:
        self.grammar = grammar
        self.starts = [start]
        """Matchers at the grammar's start; each answer uses a copy of one. Copies share a lexer and its lock, so masks
        of one lexer are computed one after the other. A grammar that many requests use gets more lexers."""
        self.is_growing = False
        self._lexer_bytes = num_bytes
        self._num_given = 0

    def next_start(self) -> LLMatcher:
        """The next of these matchers, in turn."""
        self._num_given += 1
        return self.starts[self._num_given % len(self.starts)]

    @property
    def num_bytes(self) -> int:
        return self._lexer_bytes * len(self.starts)

    def may_grow(self, max_lexers: int) -> bool:
        """Whether the grammar may get one more lexer."""
        return len(self.starts) < max_lexers and self.num_bytes + self._lexer_bytes <= MEMORY_OF_ONE


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Thread-safe; the work itself runs without the interpreter lock."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = max(vocab_size, tokenizer.vocab_size)
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, Future[Compiled]] = OrderedDict()  # grammars that are cached or being compiled
        self._prepare_lock = threading.Lock()
        self._prepared: LLTokenizer | None = None
        self._helpers: HelperProcesses | None = None
        self._is_closed = False
        # Grammars that take milliseconds do not wait for others.
        self._light = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammars")
        self._heavy = ThreadPoolExecutor(HEAVY_THREADS, thread_name_prefix="heavy grammars", initializer=_give_way)

    @property
    def can_prepare(self) -> bool:
        """Whether the tokenizer has what grammars need: an end token."""
        return bool(self._tokenizer.eos_token_ids)

    def prepare(self) -> LLTokenizer:
        """Build the tokenizer's trie once, which takes half a second for 50,000 tokens."""
        with self._prepare_lock:
            if self._prepared is None:
                if not self.can_prepare:
                    raise InvalidRequestError(
                        "structured output needs an end token, and the model's tokenizer names none",
                        param="structured_outputs",
                    )
                self._prepared = make_trie(**trie_parts(self._tokenizer, self.vocab_size))
            return self._prepared

    @property
    def helpers(self) -> HelperProcesses:
        """The helper processes in which untried grammars are compiled first."""
        with self._prepare_lock:
            if self._helpers is None:
                self._helpers = HelperProcesses(trie_parts(self._tokenizer, self.vocab_size))
            return self._helpers

    def close(self) -> None:
        """End the nursery and the threads."""
        with self._lock:
            self._is_closed = True
        self._light.shutdown(wait=False, cancel_futures=True)
        self._heavy.shutdown(wait=False, cancel_futures=True)
        with self._prepare_lock:
            if self._helpers is not None:
                self._helpers.close()
                self._helpers = None

    def compile(self, grammar: str) -> LLMatcher:
        """A new matcher at the grammar's start. Raises `InvalidRequestError`, which says what is wrong with the
        grammar."""
        return self.submit(grammar).result().starts[0].deep_copy()

    def submit(self, grammar: str, num_bytes: int | None = None) -> Future[Compiled]:
        """Compile a grammar in a thread; a cached one is returned at once. Concurrent calls share one compilation.

        `num_bytes` is the memory that a trial elsewhere took; None if the grammar has not been tried.
        """
        with self._lock:
            job = self._jobs.get(grammar)
            if job is None:
                threads = self._heavy if needs_trial(grammar) else self._light
                job = self._jobs[grammar] = threads.submit(self._compile, grammar, num_bytes)
            else:
                self._jobs.move_to_end(grammar)
                return job
        job.add_done_callback(lambda job: self._settle(grammar, job))
        return job

    def _compile(self, grammar: str, num_bytes: int | None) -> Compiled:
        tokenizer = self.prepare()
        if num_bytes is None:
            num_bytes = self._try(grammar) if needs_trial(grammar) else LEAST_BYTES
        return Compiled(grammar, _on_large_stack(lambda: compile_grammar(tokenizer, grammar)), num_bytes)

    def _try(self, grammar: str) -> int:
        """Compile a grammar in a helper process. Returns how much memory that took."""
        found = self.helpers.run(encode_job(GrammarJob(grammar)), TRIAL_LIMITS)
        answer = Refusal(str(refused(TOO_COMPLEX)), "structured_outputs") if found is None else decode_result(found)
        if isinstance(answer, Refusal):
            raise answer.error()
        assert isinstance(answer, Compiles)
        return answer.num_bytes

    def grow(self, compiled: Compiled) -> None:
        """Give a grammar one more lexer, in another thread."""
        with self._lock:
            if compiled.is_growing or self._is_closed:
                return
            compiled.is_growing = True
            self._heavy.submit(self._grow, compiled)

    def _grow(self, compiled: Compiled) -> None:
        tokenizer = self.prepare()
        compiled.starts.append(_on_large_stack(lambda: compile_grammar(tokenizer, compiled.grammar)))
        compiled.is_growing = False  # unless that failed: then it stays as it is

    def _settle(self, grammar: str, job: Future[Compiled]) -> None:
        """Cache a compiled grammar, as long as there is room."""
        with self._lock:
            if not _has_result(job):
                del self._jobs[grammar]
            done = {text: job.result().num_bytes for text, job in self._jobs.items() if _has_result(job)}
            num_bytes = sum(done.values())
            for text in list(done)[:-1]:
                if len(done) <= GRAMMARS_KEPT and num_bytes <= MEMORY_KEPT:
                    break
                num_bytes -= done.pop(text)
                del self._jobs[text]


def trie_parts(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """The parts of a tokenizer that `make_trie` needs."""
    return {
        "tokenizer": tokenizer.backend.to_str(),
        "n_vocab": max(vocab_size, tokenizer.vocab_size),
        "eos_token": list(tokenizer.eos_token_ids),
    }


def _give_way() -> None:
    """Lower the priority of this thread and those it starts below the engine's steps. Only Linux has niceness per
    thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), HEAVY_NICENESS)


def _has_result(job: Future[Compiled]) -> bool:
    return job.done() and not job.cancelled() and job.exception() is None


def needs_trial(grammar: str) -> bool:
    """Whether a grammar might not compile in milliseconds. Small ones that Headway wrote, from a schema without
    regexes and large counts, do."""
    return len(grammar) > _LIGHT_CHARS or not grammar.startswith(OWN_GRAMMAR) or _UNSURE.search(grammar) is not None


def _on_large_stack(work: Callable[[], _Result]) -> _Result:
    """Run `work` in a new thread with a large stack."""
    done: Future[_Result] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="grammar", daemon=True)
    with _stack_size_lock:
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    return done.result()
