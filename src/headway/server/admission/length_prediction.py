"""Length predictions of one HTTP request, and how far off they were."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from headway.predict import PromptView
from headway.predict.prediction_thread import Ended, Guesses, PredictionThread
from headway.server.metrics.server_metrics import ServerMetrics


class Forecast:
    """The guesses for one HTTP request's completions, checked against how each of them ends.

    Each of the request's prompts has `n` completions; choices are numbered through all prompts.
    """

    def __init__(
        self,
        prompts: Sequence[PromptView],
        predicted: Guesses,
        *,
        n: int,
        thread: PredictionThread,
        metrics: ServerMetrics,
        arrival_s: float,
    ) -> None:
        self.predicted = predicted
        """Output tokens of each prompt's completions; None: not known."""
        self._prompts = prompts
        self._n = n
        self._thread = thread
        self._metrics = metrics
        self._arrival_s = arrival_s
        self._unfinished = set(range(n * len(prompts)))

    def note_end(self, index: int, num_tokens: int, finish_reason: str) -> None:
        """A choice has ended. To be called once for each."""
        self._unfinished.discard(index)
        number = index // self._n
        self._thread.note_end(Ended(self._prompts[number], num_tokens, finish_reason, self._arrival_s))
        predicted = self.predicted[number]
        if predicted is not None and finish_reason in ("stop", "length"):
            self._metrics.observe_prediction_error(abs(math.log(predicted / max(num_tokens, 1))))

    def close(self, num_tokens: list[int]) -> None:
        """End the choices that have not ended; `num_tokens` says what each choice has got."""
        for index in sorted(self._unfinished):
            self.note_end(index, num_tokens[index], "abort")


async def forecast(
    prompts: Sequence[PromptView], *, n: int, thread: PredictionThread, metrics: ServerMetrics, arrival_s: float
) -> Forecast:
    """Ask for the lengths of `n` completions of each prompt. The request came at `arrival_s`, in seconds since 1970."""
    started_s = time.perf_counter()
    predicted = await thread.predict(prompts)
    if thread.predicts:
        metrics.observe_prediction(time.perf_counter() - started_s, num_missing=predicted.count(None))
    return Forecast(prompts, predicted, n=n, thread=thread, metrics=metrics, arrival_s=arrival_s)
