"""How long one HTTP request's completions are going to be, and afterwards how long they were."""

from __future__ import annotations

import math
import time

from headway.predict import PromptView
from headway.rpc.messages import EngineReady
from headway.server.admission.length_desk import Ended, Guesses, LengthDesk
from headway.server.api.jobs import Job
from headway.server.api.prompts import Prompt
from headway.server.metrics.prometheus import ServerMetrics
from headway.server.services import Services


class Forecast:
    """Of one job; told of each of its completions once. Choices are numbered through all prompts."""

    def __init__(
        self,
        job: Job,
        prompts: list[PromptView],
        predicted: Guesses,
        *,
        desk: LengthDesk,
        metrics: ServerMetrics,
        arrival_s: float,
    ) -> None:
        self.predicted = predicted
        """Output tokens of each prompt's completions; None: nobody knows."""
        self._prompts = prompts
        self._desk = desk
        self._metrics = metrics
        self._n = job.n
        self._arrival_s = arrival_s
        self._unfinished = set(range(job.num_choices))

    def note_end(self, index: int, num_tokens: int, finish_reason: str) -> None:
        """A choice has ended."""
        self._unfinished.discard(index)
        number = index // self._n
        self._desk.note_end(Ended(self._prompts[number], num_tokens, finish_reason, self._arrival_s))
        predicted = self.predicted[number]
        if predicted is not None and finish_reason in ("stop", "length"):
            self._metrics.observe_prediction_error(abs(math.log(predicted / max(num_tokens, 1))))

    def close(self, num_tokens: list[int]) -> None:
        """Choices that have not ended never will; so many tokens each choice has got."""
        for index in sorted(self._unfinished):
            self.note_end(index, num_tokens[index], "abort")


async def forecast(job: Job, services: Services, *, arrival_s: float) -> Forecast | None:
    """Ask for the lengths of a job's completions; None where nobody predicts and nothing is logged. The job came at
    `arrival_s`, in seconds since 1970.

    A beam search has no length that could be foreseen like this, and where only the prompt is wanted there is none.
    """
    desk = services.lengths
    if desk is None or job.hide_output or job.params.use_beam_search:
        return None
    prompts = [_view(job, prompt, services.info) for prompt in job.prompts]
    started_s = time.perf_counter()
    predicted = await desk.predict(prompts)
    if desk.predicts:
        services.metrics.observe_prediction(time.perf_counter() - started_s, num_missing=predicted.count(None))
    return Forecast(job, prompts, predicted, desk=desk, metrics=services.metrics, arrival_s=arrival_s)


def _view(job: Job, prompt: Prompt, info: EngineReady) -> PromptView:
    """As the engine would see it, which cuts `max_tokens` to what fits into the context."""
    room = info.max_model_len - len(prompt.token_ids)
    max_tokens = job.params.max_tokens
    return PromptView(
        prompt.token_ids,
        max_tokens=room if max_tokens is None else min(max_tokens, room),
        temperature=job.params.temperature,
        text=prompt.text,
        user=job.options.tenant or None,
    )
