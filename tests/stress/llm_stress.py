"""Many threads and random interrupts on one `LLM`: every call returns or raises its own error, and nothing is lost.

    python -m tests.stress.llm_stress --seconds 600                     an engine whose model is a function
    python -m tests.stress.llm_stress --seconds 600 --model embedded    the embedded model

A phase is one `LLM` in one batching mode with a small cache. The main thread and others call it in all ways: calls,
streams read to the end, closed early, dropped unread, calls within streams, aborts, searches, failing steps. The main
thread is interrupted at random moments, by exceptions of several kinds. Then everything has to be idle: invariants
hold, all blocks are free, and memory has not grown since the first phases.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from headway import LLM, SamplingParams
from headway.engine.llm_engine import LLMEngine
from headway.errors import RequestFailedError
from headway.outputs import CompletionOutput
from tests.integration.attack_observer import memory_bytes
from tests.unit.engine.scripted_logprobs import VOCAB_SIZE, ScriptedExecutor, make_engine
from tests.unit.engine_process.small_engine import small_tokenizer

MODES = ("continuous", "static", "dynamic")
PHASE_S = 3.0
NUM_THREADS = 3
MOST_GROWTH_BYTES = 64 * 2**20
SMALL = {"max_num_seqs": 6, "max_num_batched_tokens": 32, "batch_window_ms": 1.0}
TOKENIZER = small_tokenizer()
LETTERS = [TOKENIZER.decode([token_id]) for token_id in range(3, VOCAB_SIZE)]
FAILED_STEP = "the kernel caught fire"


class Oops(BaseException):
    """An interrupt that is no KeyboardInterrupt."""


INTERRUPTS: tuple[type[BaseException], ...] = (KeyboardInterrupt, KeyboardInterrupt, SystemExit, Oops, TimeoutError)


def llm_of(engine: LLMEngine) -> LLM:
    """An `LLM` on an engine that is there already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLMEngine, "from_config", lambda config, *, progress: engine)
        return LLM()


@dataclass
class Counts:
    """What has happened; threads add to it."""

    events: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in sorted(self.events.items()))


class Player:
    """Makes random calls of one LLM, and knows what they should return."""

    def __init__(self, llm: LLM, expected: Callable[[list[int], SamplingParams], Any], counts: Counts, seed: str):
        self.llm = llm
        self.rng = random.Random(seed)
        self.counts = counts
        self._expected = expected
        self._answers: list[tuple[list[int], SamplingParams, list[Any]]] = []
        self._name = seed

    def play(self) -> None:
        """One call of any kind."""
        actions = (self.call, self.call, self.read, self.leave, self.drop, self.nest, self.abort, self.pair)
        action = self.rng.choice(actions)
        try:
            action()
            self.counts.events[action.__name__] += 1
        except RequestFailedError as error:
            if FAILED_STEP not in str(error):
                raise
            self.counts.events["failed"] += 1

    def call(self) -> None:
        jobs = [self._job() for _ in range(self.rng.choice([1, 1, 2, 5]))]
        prompts, params = [prompt for prompt, _ in jobs], [params for _, params in jobs]
        outputs = self.llm.generate(prompts, params, use_tqdm=self.rng.random() < 0.1)
        for job, output in zip(jobs, outputs, strict=True):
            self._check(*job, output.outputs)

    def read(self, *, num_streams: int = 1, calls: float = 0.0) -> None:
        """One stream after the other; this share of the outputs is followed by a call."""
        jobs = [self._job(streams=True) for _ in range(num_streams)]
        for job, stream in zip(jobs, [self.llm.stream(*job) for job in jobs], strict=True):
            outputs = []
            for output in stream:
                outputs.append(output)
                if self.rng.random() < calls:
                    self.call()
            assert outputs[-1].finished
            self._check(*job, outputs[-1].outputs)

    def leave(self) -> None:
        stream = self.llm.stream(*self._job(streams=True))
        for _ in range(self.rng.randrange(4)):
            next(stream, None)
        stream.close()
        assert list(stream) == []

    def drop(self) -> None:
        stream = self.llm.stream(*self._job(streams=True))
        if self.rng.random() < 0.5:
            next(stream, None)
        del stream

    def nest(self) -> None:
        self.read(calls=0.3)

    def pair(self) -> None:
        self.read(num_streams=2)

    def abort(self) -> None:
        name = f"{self._name}-{self.rng.random()}"
        stream = self.llm.stream(*self._job(streams=True), request_id=name)
        next(stream, None)
        last = self.llm.abort(name)
        assert last is None or last.finished
        list(stream)

    def _job(self, *, streams: bool = False) -> tuple[list[int], SamplingParams]:
        rng = self.rng
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 12))]
        common: dict[str, Any] = {
            "max_tokens": rng.randint(1, 16),
            "temperature": 0.0,
            "ignore_eos": rng.random() < 0.4,
            "stop_token_ids": rng.sample(range(3, VOCAB_SIZE), rng.choice([0, 0, 1])),
        }
        if not streams and rng.random() < 0.15:
            return prompt, SamplingParams(**common, n=2, best_of=3, use_beam_search=True)
        if rng.random() < 0.2:
            return prompt, SamplingParams(**{**common, "temperature": 1.0}, n=3)
        return prompt, SamplingParams(**common, stop=rng.choice([None, None, [rng.choice(LETTERS)]]))

    def _check(self, prompt: list[int], params: SamplingParams, outputs: list[CompletionOutput]) -> None:
        assert len(outputs) == params.n or params.use_beam_search
        assert all(each.finish_reason in ("stop", "length") for each in outputs), outputs
        if params.greedy or params.use_beam_search:
            found = [(each.text, each.token_ids, each.finish_reason, each.stop_reason) for each in outputs]
            self._answers.append((prompt, params, found))

    def verify(self) -> None:
        """Compare the answers until now with those expected; not to be interrupted."""
        for prompt, params, found in self._answers:
            expected = self._expected(prompt, params)
            assert expected is None or found == expected, f"{prompt} {params}: {found}, not {expected}"
        self._answers.clear()


def reference(prompt: list[int], params: SamplingParams) -> list[Any]:
    """What continuous batching answers to one request alone."""
    engine = make_engine(tokenizer=TOKENIZER, batching="continuous")
    engine.add_request("alone", prompt, params, stream=False)
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step().outputs
    return [(each.text, each.token_ids, each.finish_reason, each.stop_reason) for each in outputs[0].outputs]


class Interrupter:
    """Raises something in the main thread now and then, while it is armed."""

    def __init__(self, counts: Counts, rng: random.Random, *, mean_s: float) -> None:
        self._counts, self._rng, self._mean_s = counts, rng, mean_s
        self._is_armed = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        previous = signal.signal(signal.SIGALRM, self._interrupt)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)

    def run(self, action: Callable[[], None]) -> None:
        """Interrupted or not, it comes back from here."""
        try:
            try:
                self._is_armed = True
                signal.setitimer(signal.ITIMER_REAL, self._rng.expovariate(1 / self._mean_s) + 1e-5)
                action()
            finally:
                self._is_armed = False
        except INTERRUPTS:
            self._counts.events["interrupted"] += 1

    def _interrupt(self, signum: int, frame: object) -> None:
        if self._is_armed:
            if self._rng.random() < 0.3:  # sometimes another one follows, into what the first has set going
                signal.setitimer(signal.ITIMER_REAL, self._rng.expovariate(1 / 1e-4) + 1e-6)
            raise self._rng.choice(INTERRUPTS)


def play_phase(llm: LLM, seed: str, counts: Counts, *, seconds: float, expected: Any, mean_s: float) -> None:
    """All threads at once, then rest, then everything is checked."""
    until_s = time.monotonic() + seconds

    def keep_playing(name: str) -> None:
        player = Player(llm, expected, counts, name)
        try:
            while time.monotonic() < until_s:
                player.play()
                player.verify()
        except BaseException as error:
            counts.unexpected.append(f"{name}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=keep_playing, args=(f"{seed}-{index}",)) for index in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    player = Player(llm, expected, counts, f"{seed}-main")
    interrupter = Interrupter(counts, random.Random(seed), mean_s=mean_s)
    with interrupter.installed():
        while time.monotonic() < until_s:
            interrupter.run(player.play)
            player.verify()
    for thread in threads:
        thread.join()
    assert not counts.unexpected, counts.unexpected
    check_idle(llm)


def check_idle(llm: LLM) -> None:
    """Nothing is left of all the calls, and the next one works."""
    gc.collect()  # an exception of an interrupted call may have kept its stream
    stop_failing(llm)
    assert llm.generate([[5, 6]], SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)[0].finished
    assert not llm.engine.has_unfinished_requests()
    llm.engine.core.drain()
    llm.engine.check_invariants()
    assert llm.engine.core.scheduler.kv_cache.num_used_blocks == 0


def stop_failing(llm: LLM) -> None:
    executor = llm.engine.core.executor
    if isinstance(executor, ScriptedExecutor):
        executor.fails_at = lambda output: False


def scripted_llm(rng: random.Random, mode: str) -> LLM:
    """Sometimes steps fail, or overlap; the cache holds a few requests."""
    engine = make_engine(
        tokenizer=TOKENIZER, batching=mode, overlap=rng.random() < 0.5, num_blocks=rng.choice([16, 40]), **SMALL
    )
    failing, share = random.Random(rng.random()), rng.choice([0.0, 0.0, 0.01])

    def fails_at(output: object) -> bool:
        if failing.random() < share:
            raise RuntimeError(FAILED_STEP)
        return False

    engine.core.executor.fails_at = fails_at  # type: ignore[attr-defined]
    return llm_of(engine)


def run(*, seconds: float, seed: int = 0, model: str = "scripted", phase_s: float = PHASE_S) -> Counts:
    """Phase after phase, each in the next mode."""
    counts, rng, num_threads_before = Counts(), random.Random(seed), threading.active_count()
    until_s, phase, first_bytes = time.monotonic() + seconds, 0, 0
    llms = {
        mode: LLM(max_model_len=256, num_kv_blocks=24, batching=mode, **SMALL) for mode in MODES if model == "embedded"
    }
    while phase < len(MODES) or time.monotonic() < until_s:
        mode = MODES[phase % len(MODES)]
        llm = llms.get(mode) or scripted_llm(rng, mode)
        expected = (lambda prompt, params: None) if llms else reference
        mean_s = rng.choice([0.0005, 0.003, 0.02] if not llms else [0.01, 0.1])
        play_phase(llm, f"{seed}-{phase}", counts, seconds=phase_s, expected=expected, mean_s=mean_s)
        if not llms:
            llm.shutdown()
        del llm
        phase += 1
        gc.collect()
        now_bytes = memory_bytes(os.getpid())
        if phase == 2 * len(MODES):
            first_bytes = now_bytes
        print(f"{mode:10} {now_bytes / 2**20:6.0f} MiB  {counts}", file=sys.stderr, flush=True)
        assert not first_bytes or now_bytes < first_bytes + MOST_GROWTH_BYTES, "memory grows"
    assert threading.active_count() <= num_threads_before + len(llms)
    counts.events["phases"] = phase
    counts.events["first MiB"], counts.events["last MiB"] = first_bytes >> 20, now_bytes >> 20
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(2), "big"))
    parser.add_argument("--model", choices=["scripted", "embedded"], default="scripted")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", file=sys.stderr)
    print(run(seconds=arguments.seconds, seed=arguments.seed, model=arguments.model))


if __name__ == "__main__":
    main()
