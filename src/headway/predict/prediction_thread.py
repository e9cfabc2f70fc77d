"""Predicts answer lengths beside an event loop: questions come from the loop; a thread predicts, learns and logs.

    event loop   ask ──► waiting ─┐                    ┌─► guesses, with one call for all that waited
                 end ──► ended ───┴─► one thread ──────┴─► learn, log

The thread answers all questions that gathered while it was busy in one call, before it learns from ended requests. The
engine never waits for the thread. A request waits a limited time for its prediction and is then queued without one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from headway.predict.base import PromptView
from headway.predict.predictors import AnswerLengths

logger = logging.getLogger(__name__)

PATIENCE_S = 1.0
"""A request that has no guess after this time is queued without one."""
MOST_AT_ONCE = 64
"""The most questions answered together: the first of them waits for the last."""
MOST_ENDED = 10_000
"""The most ended requests that wait for the thread; further ones are neither learnt from nor logged."""
CLOSE_S = 5.0

Guesses = list[float | None]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Question:
    prompts: Sequence[PromptView]
    answer: asyncio.Future[Guesses]
    loop: asyncio.AbstractEventLoop


@dataclass(frozen=True, slots=True)
class Ended:
    """A completion that has ended."""

    prompt: PromptView
    num_output_tokens: int
    finish_reason: str
    arrival_s: float
    """In seconds since 1970."""


class PredictionThread:
    """Owns predictor and log: nothing else may use them from now on."""

    def __init__(self, lengths: AnswerLengths) -> None:
        self.predicts = lengths.predicts
        self._lengths = lengths
        self._news = threading.Condition()
        self._waiting: deque[_Question] = deque()
        self._ended: deque[Ended] = deque()
        self._has_lost = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="lengths", daemon=True)
        self._thread.start()

    async def predict(self, prompts: Sequence[PromptView]) -> Guesses:
        """A prediction for each prompt, or None; also None if the predictor fails."""
        if not self.predicts:
            return [None] * len(prompts)
        loop = asyncio.get_running_loop()
        question = _Question(prompts, loop.create_future(), loop)
        with self._news:
            self._waiting.append(question)
            self._news.notify()
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await question.answer
        except TimeoutError:
            return [None] * len(prompts)

    def note_end(self, ended: Ended) -> None:
        """Queue a completion, which the thread learns from and logs later."""
        with self._news:
            is_lost = len(self._ended) >= MOST_ENDED
            if not is_lost:
                self._ended.append(ended)
                self._news.notify()
        if is_lost and not self._has_lost:
            self._has_lost = True
            logger.warning("answers end faster than they can be logged and learnt from; some are passed over")

    def close(self) -> None:
        """Log the completions that have ended, and close the log. Can be called again."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join(CLOSE_S)

    # ---- in the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait():
                questions = _take(self._waiting, MOST_AT_ONCE)
                self._answer(questions)
                # As many as questions, so that they do not pile up; else one by one: with a log each takes 0.3 ms.
                for ended in _take(self._ended, max(1, len(questions))):
                    self._lengths.note_end(
                        ended.prompt,
                        num_output_tokens=ended.num_output_tokens,
                        finish_reason=ended.finish_reason,
                        arrival_s=ended.arrival_s,
                    )
        finally:
            self._lengths.close()

    def _wait(self) -> bool:
        """Wait until there is something to do. Returns False if there never will be."""
        with self._news:
            while not self._waiting and not self._ended:
                if self._closing:
                    return False
                self._news.wait()
            return True

    def _answer(self, questions: list[_Question]) -> None:
        """Answer questions. Those whose requests no longer wait are skipped."""
        questions = [question for question in questions if not question.answer.done()]
        guesses = iter(self._lengths.predict([prompt for question in questions for prompt in question.prompts]))
        for question in questions:
            own = [next(guesses) for _ in question.prompts]
            with contextlib.suppress(RuntimeError):  # its event loop has ended
                question.loop.call_soon_threadsafe(_give, question.answer, own)


def _give(answer: asyncio.Future[Guesses], guesses: Guesses) -> None:
    if not answer.done():
        answer.set_result(guesses)


def _take(queue: deque[_T], most: int) -> list[_T]:
    """The first `most` of them; the event loop may append meanwhile."""
    return [queue.popleft() for _ in range(min(most, len(queue)))]
