"""A load on an engine in this process, without HTTP."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headway.errors import ConfigError
from headway.lab.bench.datasets import Dataset, Draw
from headway.lab.bench.online import Replay, replay
from headway.lab.bench.rounds import Progress, check_room
from headway.lab.bench.served import ServedRequest
from headway.lab.bench.surroundings import device_name
from headway.lab.bench.targets import Judging, Outcome, alike
from headway.lab.workload.requests import BenchRequest, highest_token_id

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine


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

    def run(self, work: Sequence[ServedRequest], progress: Progress | None = None) -> Outcome:
        """Every run has a salt of its own: requests share prefixes with each other, not with those of earlier runs. The
        first one is preceded by the warm-up."""
        if not self._num_runs and self._num_warmups:
            self._replay(alike(work, self._num_warmups))
        done = self._replay(work, progress)
        metrics = self._judging.metrics(work, done.timelines, done.duration_s)
        lost = [str(index) for index, timeline in enumerate(done.timelines) if not timeline.is_complete]
        errors = [done.errors.get(name, "it did not get exactly its tokens") for name in lost]
        return Outcome(metrics, done.timelines, done.samples, errors)

    def _replay(self, work: Sequence[ServedRequest], progress: Progress | None = None) -> Replay:
        self._num_runs += 1
        requests = [self._bench_request(request) for request in work]
        check_room(requests, self._engine.plan.max_model_len)
        return replay(self._engine, requests, temperature=self._temperature, progress=progress)

    @property
    def machine(self) -> str:
        """What the engine runs on."""
        return device_name(self._engine.plan.device)

    def close(self) -> None:
        """Ends the engine."""
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
