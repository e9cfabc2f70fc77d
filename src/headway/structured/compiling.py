"""From a grammar's text to a matcher at its start.

Most grammars compile in a millisecond or two. But some short ones keep llguidance busy for ever, take gigabytes, or end
the process by its stack, and a thread in there cannot be stopped. A grammar that might be one of them is compiled once
for nothing, in a process that is thrown away:

    engine ──a socket for each trial──▶ nursery ──fork──▶ trial: compiles, says how it went, and is gone

The nursery holds the tokenizer's trie and has one thread, so that forking it is quick and safe.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from headway.errors import HeadwayError, InvalidRequestError
from headway.structured.compiler_errors import plain_reason

if TYPE_CHECKING:
    from headway.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

COMPILE_THREADS = 4
GRAMMARS_KEPT = 128
MEMORY_KEPT = 512 * 1024 * 1024
MEMORY_OF_ONE = 64 * 1024 * 1024
"""Of a grammar that many follow, before it gets no more lexers."""
TRIAL_S = 0.4
"""Of a processor's time, so that a busy machine refuses no more than an idle one. The engine takes as long again."""
TRIAL_WALL_S = 10.0
TRIAL_MEMORY = 256 * 1024 * 1024
NURSERY_START_S = 60.0
STACK_BYTES = 512 * 1024 * 1024
"""llguidance follows rules and references by recursion, and a process whose stack ends is gone. The largest grammar
that it takes (65,000 symbols) needs about 160 MiB; memory that is not used costs nothing."""
LIMITS = LLParserLimits(max_items_in_row=6_000, initial_lexer_fuel=1_000_000, max_grammar_size=200_000)
"""An object needs four items in a row for each optional property."""
TOO_COMPLEX = "it takes too long or too much memory to compile; make it smaller"

REFUSAL = "structured_outputs cannot be used: "
"""How messages begin that blame a request's grammar."""
OWN_GRAMMAR = "%llguidance {}\n"
"""How the grammars begin that Headway writes; those that come from a request do not."""
_LIGHT_CHARS = 6_000
_UNSURE = re.compile(r'"pattern|%lark|\d{3}')
"""A regex, a grammar inside another one, a count of a hundred or more."""
_LIGHT_BYTES = 1024 * 1024
_SHOWN_ERROR_CHARS = 400
_stack_size_lock = threading.Lock()
_Result = TypeVar("_Result")


class Compiled:
    """What is kept of a grammar."""

    def __init__(self, grammar: str, start: LLMatcher, num_bytes: int) -> None:
        self.grammar = grammar
        self.starts = [start]
        """Matchers at the grammar's start; who follows an answer takes a copy of one. Copies share the lexer, behind a
        lock, so that masks of one lexer are computed one after the other: a grammar that many follow gets more."""
        self.is_growing = False
        self._lexer_bytes = num_bytes
        self._num_given = 0

    def next_start(self) -> LLMatcher:
        """One of them, in turn."""
        self._num_given += 1
        return self.starts[self._num_given % len(self.starts)]

    @property
    def num_bytes(self) -> int:
        return self._lexer_bytes * len(self.starts)

    def may_grow(self, max_lexers: int) -> bool:
        """Whether one more lexer can be had."""
        return len(self.starts) < max_lexers and self.num_bytes + self._lexer_bytes <= MEMORY_OF_ONE


class GrammarCompiler:
    """Compiles grammars for one tokenizer. For any number of threads; the work itself runs without Python's lock."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = max(vocab_size, tokenizer.vocab_size)
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, Future[Compiled]] = OrderedDict()  # grammars that are kept, or on their way
        self._prepare_lock = threading.Lock()
        self._prepared: LLTokenizer | None = None
        self._trials: Trials | None = None
        self._is_closed = False
        # Grammars that take milliseconds do not wait for others.
        self._light = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammars")
        self._heavy = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar trials")

    @property
    def can_prepare(self) -> bool:
        """Whether the tokenizer has what grammars need: an end token."""
        return bool(self._tokenizer.eos_token_ids)

    def prepare(self) -> LLTokenizer:
        """Build the tokenizer's trie, which takes half a second for 50,000 tokens. Once."""
        with self._prepare_lock:
            if self._prepared is None:
                if not self.can_prepare:
                    raise InvalidRequestError(
                        "structured output needs an end token, and the model's tokenizer names none",
                        param="structured_outputs",
                    )
                self._prepared = _trie(**self._trie_parts())
            return self._prepared

    def prepare_trials(self) -> Trials:
        """Begin to start the nursery, if there is none."""
        with self._prepare_lock:
            if self._trials is None:
                self._trials = Trials(self._trie_parts())
            return self._trials

    def close(self) -> None:
        """End the nursery and the threads."""
        with self._lock:
            self._is_closed = True
        self._light.shutdown(wait=False, cancel_futures=True)
        self._heavy.shutdown(wait=False, cancel_futures=True)
        with self._prepare_lock:
            if self._trials is not None:
                self._trials.close()
                self._trials = None

    def compile(self, grammar: str) -> LLMatcher:
        """A matcher of one's own at the grammar's start. Raises `InvalidRequestError` with what is wrong with it."""
        return self.submit(grammar).result().starts[0].deep_copy()

    def submit(self, grammar: str) -> Future[Compiled]:
        """Compile it beside everything else; at once if it is kept. Who comes meanwhile waits for the same."""
        with self._lock:
            job = self._jobs.get(grammar)
            if job is None:
                threads = self._heavy if needs_trial(grammar) else self._light
                job = self._jobs[grammar] = threads.submit(self._compile, grammar)
            else:
                self._jobs.move_to_end(grammar)
                return job
        job.add_done_callback(lambda job: self._settle(grammar, job))
        return job

    def _compile(self, grammar: str) -> Compiled:
        tokenizer = self.prepare()
        num_bytes = self.prepare_trials().run(grammar) if needs_trial(grammar) else _LIGHT_BYTES
        return Compiled(grammar, _on_large_stack(lambda: compile_grammar(tokenizer, grammar)), num_bytes)

    def grow(self, compiled: Compiled) -> None:
        """Give a grammar one more lexer, beside everything else."""
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
        """Keep what could be compiled, as long as there is room."""
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

    def _trie_parts(self) -> dict[str, Any]:
        ends = list(self._tokenizer.eos_token_ids)
        return {"tokenizer": self._tokenizer.backend.to_str(), "n_vocab": self.vocab_size, "eos_token": ends}


def _has_result(job: Future[Compiled]) -> bool:
    return job.done() and not job.cancelled() and job.exception() is None


def needs_trial(grammar: str) -> bool:
    """Whether a grammar might not compile in milliseconds. Small ones that Headway wrote, from a schema without
    regexes and large counts, do."""
    return len(grammar) > _LIGHT_CHARS or not grammar.startswith(OWN_GRAMMAR) or _UNSURE.search(grammar) is not None


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile here and now."""
    try:
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise refused(matcher.get_error())
        matcher.compute_bitmask()  # fails, where it does, at the start: most of a grammar's lexer is made here
        if matcher.is_error():
            raise refused(matcher.get_error())
    except InvalidRequestError:
        raise
    except BaseException as error:  # a panic in llguidance is no `Exception`
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        logger.error("a grammar of %d characters broke the compiler: %s", len(grammar), error)
        raise refused("it breaks the grammar compiler") from None
    if matcher.is_stopped() and not matcher.is_accepting():
        raise refused("no text can match it")
    return matcher


def refused(reason: str) -> InvalidRequestError:
    """The error of a grammar that cannot be used, from what llguidance says."""
    text = plain_reason(reason)
    shown = text if len(text) <= _SHOWN_ERROR_CHARS else text[: _SHOWN_ERROR_CHARS - 3] + "..."
    return InvalidRequestError(REFUSAL + shown, param="structured_outputs")


def _trie(tokenizer: str, n_vocab: int, eos_token: list[int]) -> LLTokenizer:
    return LLTokenizer(tokenizer, n_vocab=n_vocab, eos_token=eos_token)


def _on_large_stack(work: Callable[[], _Result]) -> _Result:
    """Do it in a thread of its own, for its stack."""
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


# ---- trials ---------------------------------------------------------------------------------------------------------


class Trials:
    """The engine's side: the nursery, started at once and again should it be gone."""

    def __init__(self, trie_parts: dict[str, Any]) -> None:
        self._trie_parts = trie_parts
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        with self._lock:
            self._start()

    def run(self, grammar: str) -> int:
        """Compile a grammar in a process of its own, and return how much memory that took. Raises what `compile` would,
        also where it takes too long, takes too much, or dies."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._hand_over(theirs)
            ours.settimeout(NURSERY_START_S)
            try:
                ours.sendall(grammar.encode())
                ours.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(lambda: ours.recv(65536), b""))
            except OSError:
                answer = b""
        if not answer:
            if self._process is None or self._process.poll() is not None:
                raise HeadwayError("the process that tries grammars has died; the next request starts another one")
            raise refused(TOO_COMPLEX)
        found = json.loads(answer)
        if found["error"] is not None:
            raise refused(found["error"])
        return int(found["num_bytes"])

    def close(self) -> None:
        with self._lock:
            self._end()

    def _hand_over(self, trial: socket.socket) -> None:
        with self._lock:
            for _ in range(2):
                if self._control is None:
                    self._start()
                assert self._control is not None
                try:
                    socket.send_fds(self._control, [b"t"], [trial.fileno()])
                except OSError:
                    self._end()
                else:
                    return
        raise HeadwayError("the process that tries grammars cannot be started")

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for the engine; the nursery ends when the engine's socket does
            )
        threading.Thread(target=_feed, args=(self._process, self._trie_parts), name="nursery", daemon=True).start()

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _feed(process: subprocess.Popen[bytes], trie_parts: dict[str, Any]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError), process.stdin:
        process.stdin.write(json.dumps(trie_parts).encode())


def _run_nursery(control: socket.socket) -> None:
    """Until the engine has closed its end."""
    trie = _trie(**json.loads(sys.stdin.buffer.read()))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who has ended is forgotten
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        for descriptor in descriptors:
            if os.fork() == 0:
                control.close()
                _run_trial(trie, socket.socket(fileno=descriptor))
            os.close(descriptor)


def _run_trial(trie: LLTokenizer, channel: socket.socket) -> None:
    """In a process of its own, which this ends."""
    grammar = b"".join(iter(lambda: channel.recv(65536), b"")).decode()
    signal.setitimer(signal.ITIMER_PROF, TRIAL_S)  # without handlers these signals end the process
    signal.setitimer(signal.ITIMER_REAL, TRIAL_WALL_S)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a dying compiler says
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory(STACK_BYTES + TRIAL_MEMORY)
    before = _peak_bytes()
    found: dict[str, Any] = {"error": None, "num_bytes": 0}
    try:
        _kept = _on_large_stack(lambda: compile_grammar(trie, grammar))
        found["num_bytes"] = max(_peak_bytes() - before, _LIGHT_BYTES)
    except InvalidRequestError as error:
        found["error"] = str(error).removeprefix(REFUSAL)
    channel.sendall(json.dumps(found).encode())
    os._exit(0)


def _limit_memory(more: int) -> None:
    """Let this process take `more` bytes at most. Where a system does not tell what it has, time is the only limit."""
    if sys.platform == "linux":
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + more, size + more))


def _peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    _run_nursery(socket.socket(fileno=int(sys.argv[1])))
