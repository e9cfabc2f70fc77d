"""An engine without a model and with a clock of its own: a step takes a known time and gives each request a token."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from headway.core.request_options import RequestOptions
from headway.core.token_time import TokenTimeStats
from headway.core.utilisation import UtilisationStats
from headway.outputs import CompletionOutput, RequestMetrics, RequestOutput
from headway.sampling_params import SamplingParams
from headway.tracing import span


class ScriptedEngine:
    """Runs at most `max_running` requests, in order of arrival; the first step of a request gives its first token."""

    def __init__(self, *, step_s: float = 0.01, max_running: int = 8, lose: Sequence[str] = ()) -> None:
        self.clock_s = 0.0
        self.slept_s: list[float] = []
        self.num_steps = 0
        self._errors: dict[str, str] = {}
        self._step_s = step_s
        self._max_running = max_running
        self._lose = lose
        self._live: dict[str, tuple[SamplingParams, bool, float]] = {}
        self._times: dict[str, list[float]] = {}
        self.core = SimpleNamespace(scheduler=_Scheduler(self))
        self.utilisation = SimpleNamespace(stats=UtilisationStats())

    def now(self) -> float:
        return self.clock_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept_s.append(seconds)
        self.clock_s += seconds

    def prepare(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, options: RequestOptions
    ) -> SimpleNamespace:
        assert params.ignore_eos and not params.detokenize
        return SimpleNamespace(request_id=request_id, params=params)

    def forecast(self, prepared: SimpleNamespace) -> SimpleNamespace | None:
        """Expect a first token after as many steps as there are requests; nothing before the first step."""
        if not self.num_steps:
            return None
        return SimpleNamespace(first_token_s=self._step_s * (len(self._live) + 1))

    def submit(self, prepared: SimpleNamespace, *, stream: bool) -> None:
        self._live[prepared.request_id] = (prepared.params, stream, self.clock_s)
        self._times[prepared.request_id] = []

    def add_request(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, options: RequestOptions, *, stream: bool
    ) -> None:
        self.submit(self.prepare(request_id, prompt, params, options), stream=stream)

    def has_unfinished_requests(self) -> bool:
        return bool(self._live)

    def step(self) -> SimpleNamespace:
        """As much of an `EngineStep` as is looked at."""
        with span("schedule", running=len(self._live)):
            running = list(self._live)[: self._max_running]
        self.clock_s += self._step_s
        self.num_steps += 1
        outputs = (self._advance(request_id) for request_id in running)
        changed = [output for output in outputs if output is not None]
        errors, self._errors = self._errors, {}
        return SimpleNamespace(outputs=changed, errors=errors)

    def _advance(self, request_id: str) -> RequestOutput | None:
        params, stream, arrival_s = self._live[request_id]
        times = self._times[request_id]
        is_lost = request_id in self._lose
        if is_lost:
            self._errors[request_id] = "lost on purpose"
        else:
            times.append(self.clock_s)
        finished = is_lost or len(times) == params.max_tokens
        if finished:
            del self._live[request_id]
        if not (stream or finished):
            return None
        completions = [CompletionOutput(index, "", [0] * len(times)) for index in range(params.n)]
        metrics = RequestMetrics(arrival_s, arrival_s, times[0] if times else None, self.clock_s, num_preemptions=1)
        return RequestOutput(request_id, None, [0], None, completions, finished, metrics=metrics)

    @property
    def live(self) -> list[str]:
        """Requests that have not ended, in order of arrival."""
        return list(self._live)

    @property
    def max_running(self) -> int:
        return self._max_running


class _Scheduler:
    """As much of a scheduler as is looked at between two steps. A request holds one of ten blocks."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self.token_time = SimpleNamespace(stats=TokenTimeStats())

    @property
    def running(self) -> list[str]:
        return self._engine.live[: self._engine.max_running]

    @property
    def in_batch(self) -> list[str]:
        return self.running

    @property
    def live(self) -> SimpleNamespace:
        return SimpleNamespace(waiting=self._engine.live[self._engine.max_running :])

    @property
    def kv_cache(self) -> SimpleNamespace:
        return SimpleNamespace(num_used_blocks=len(self.running), num_blocks=10)
