"""Made-up traffic in which one word of the prompt decides how long the answer gets."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from headway.predict import PromptView, TrafficRecord
from headway.predict.features import prompt_features

TASKS = {900: 8.0, 901: 30.0, 902: 120.0, 903: 480.0}
"""A token that names a task, and the typical length of its answers."""
TEMPLATE_HEAD, TEMPLATE_TAIL = [1, 2, 3, 4], [5, 6, 7]


@dataclass(frozen=True)
class Sample:
    prompt: PromptView
    num_output_tokens: int
    finish_reason: str

    @property
    def record(self) -> TrafficRecord:
        return TrafficRecord(
            features=prompt_features(self.prompt),
            num_output_tokens=self.num_output_tokens,
            is_cut=self.finish_reason == "length",
            arrival_s=None,
        )


def make_traffic(count: int, *, seed: int = 0, max_tokens: int = 2000) -> list[Sample]:
    """Prompts of random length and words, the task's token somewhere in them; lengths scatter by about a fifth."""
    draw = random.Random(seed)
    samples = []
    for _ in range(count):
        task = draw.choice(list(TASKS))
        words = [draw.randrange(100, 800) for _ in range(draw.randrange(5, 40))]
        words.insert(draw.randrange(len(words)), task)
        length = max(1, round(TASKS[task] * math.exp(draw.gauss(0, 0.2))))
        samples.append(
            Sample(
                PromptView([*TEMPLATE_HEAD, *words, *TEMPLATE_TAIL], max_tokens=max_tokens, temperature=0.0),
                min(length, max_tokens),
                "stop" if length < max_tokens else "length",
            )
        )
    return samples
