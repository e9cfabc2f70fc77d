"""The target of a load: a server or the engine in this process. Both give the same kind of outcome."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from headway.core.utilisation import UNKNOWN, Utilisation
from headway.errors import ConfigError
from headway_lab.bench.datasets import Dataset, Draw
from headway_lab.bench.environment import device_name
from headway_lab.bench.online_metrics import SHOWN_PERCENTILES, OnlineMetrics
from headway_lab.bench.pricing import Pricing
from headway_lab.bench.replay import Replay, check_room, replay
from headway_lab.bench.served import ServedRequest
from headway_lab.bench.slo_targets import Targets, own_targets
from headway_lab.bench.timelines import BatchSample, RequestTimeline
from headway_lab.workload.bench_requests import BenchRequest, highest_token_id

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine
    from headway.progress import Meter


@dataclass(frozen=True)
class Outcome:
    metrics: OnlineMetrics
    timelines: Sequence[RequestTimeline]
    samples: Sequence[BatchSample] = ()
    errors: Sequence[str] = ()
    late_s: float = 0.0
    """How late requests were sent (99th percentile), which the load generator itself adds to latencies."""
    num_short: int = 0
    """Answers with another number of tokens than asked for."""
    utilisation: Utilisation = UNKNOWN
    """How well the device was used, where that is known."""


@dataclass(frozen=True)
class Judging:
    """How the metrics of an outcome are computed."""

    targets: Targets | None = None
    """Targets for every request. `None`: the requests' own targets, if they have any."""
    percents: Sequence[float] = SHOWN_PERCENTILES
    price_per_hour: float | None = None
    """The price of a device. `None`: tokens have no prices."""

    def metrics(
        self,
        work: Sequence[ServedRequest],
        timelines: Sequence[RequestTimeline],
        duration_s: float,
        *,
        num_devices: int = 1,
        prompt_share: float | None = None,
    ) -> OnlineMetrics:
        """The metrics of a run of this work, on so many devices. `prompt_share`: see `Pricing`."""
        targets = self.targets or own_targets([request.options for request in work])
        found = OnlineMetrics.of(timelines, duration_s, targets=targets, percents=self.percents)
        if self.price_per_hour is None:
            return found
        return found.priced(Pricing(self.price_per_hour, num_devices, prompt_share))


class Target(Protocol):
    """A server or an engine that answers requests."""

    name: str

    @property
    def machine(self) -> str: ...

    def draw(self, dataset: Dataset, wanted: Draw) -> list[ServedRequest]:
        """Draw requests that the target can take, with its own vocabulary and tokenizer."""
        ...

    def run(self, work: Sequence[ServedRequest], progress: Meter | None = None) -> Outcome:
        """Put a load on it and wait for all answers."""
        ...

    def close(self) -> None:
        """Release what it holds; it is not used again."""
        ...


def alike(work: Sequence[ServedRequest], number: int) -> list[ServedRequest]:
    """`number` requests like the first ones, all at once. They have different contents, or else the prefix cache would
    have those of the measured ones."""
    rng = random.Random("warm-up")
    return [_like(work[place % len(work)], rng) for place in range(number)]


def _like(request: ServedRequest, rng: random.Random) -> ServedRequest:
    """A request of the same length without an arrival time, with different contents."""
    if isinstance(request.prompt, str):
        return ServedRequest(f"{rng.getrandbits(32):x} {request.prompt}", request.num_output_tokens)
    highest = max(request.prompt, default=0)
    return ServedRequest([rng.randint(0, highest) for _ in request.prompt], request.num_output_tokens)


class EngineTarget:
    """An engine in this process, stepped by this thread."""

    def __init__(
        self,
        engine: LLMEngine,
        *,
        name: str,
        temperature: float = 0.0,
        judging: Judging | None = None,
        num_warmups: int = 0,
    ) -> None:
        self.name = name
        self._engine = engine
        self._temperature = temperature
        self._judging = judging or Judging()
        self._num_warmups = num_warmups
        self._num_runs = 0

    def draw(self, dataset: Dataset, wanted: Draw) -> list[ServedRequest]:
        vocab_size = highest_token_id(self._engine.model_config.vocab_size) + 1
        return dataset.draw(dataclasses.replace(wanted, vocab_size=vocab_size, tokenizer=self._engine.tokenizer))

    def run(self, work: Sequence[ServedRequest], progress: Meter | None = None) -> Outcome:
        """Run the work. Every run has a new salt: its requests share prefixes with each other, not with those of
        earlier runs. The first run is preceded by the warm-up."""
        if not self._num_runs and self._num_warmups:
            self._replay(alike(work, self._num_warmups))
        done = self._replay(work, progress)
        metrics = self._judging.metrics(
            work,
            done.timelines,
            done.duration_s,
            num_devices=self._engine.plan.num_ranks,
            prompt_share=done.prompt_share,
        )
        lost = [str(index) for index, timeline in enumerate(done.timelines) if not timeline.is_complete]
        errors = [done.errors.get(name, "it did not get exactly its tokens") for name in lost]
        return Outcome(metrics, done.timelines, done.samples, errors, utilisation=done.utilisation)

    def _replay(self, work: Sequence[ServedRequest], progress: Meter | None = None) -> Replay:
        self._num_runs += 1
        requests = [self._bench_request(request) for request in work]
        check_room(requests, self._engine.plan.max_model_len)
        return replay(self._engine, requests, temperature=self._temperature, progress=progress)

    @property
    def machine(self) -> str:
        return device_name(self._engine.plan.device)

    def close(self) -> None:
        self._engine.shutdown()

    def _bench_request(self, request: ServedRequest) -> BenchRequest:
        ids = request.prompt
        if isinstance(ids, str):
            if self._engine.tokenizer is None:
                raise ConfigError("The model has no tokenizer, so its prompts must be token ids.")
            ids = self._engine.tokenizer.encode(ids)
        salt = f"{self._num_runs}/{request.options.cache_salt or ''}"
        return BenchRequest(
            ids,
            request.num_output_tokens,
            arrival_s=request.arrival_s,
            options=dataclasses.replace(request.options, cache_salt=salt),
            after=request.after,
            think_s=request.think_s,
        )
