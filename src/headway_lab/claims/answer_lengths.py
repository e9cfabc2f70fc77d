"""How long a model's answers are, by temperature and top-p: measured on an engine, or as recorded once.

`answer_lengths.json` has the lengths that the embedded model gave (`benchmarks/answer_lengths.py` writes it), for
simulations, in which no model chooses an end.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from headway.sampling_params import SamplingParams
from headway_lab.claims.context import Infeasible

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine
    from headway.progress import Meter

FILE_NAME = "answer_lengths.json"

PROMPTS = (
    "What is the capital of France?",
    "Why is the sky blue? One sentence, please.",
    "Name three colours.",
    "How do I boil an egg?",
    "What is 12 times 9?",
    "Tell me what a lighthouse is for.",
    "Translate 'good morning' into Spanish.",
    "Is a tomato a fruit or a vegetable?",
    "Give me two reasons to go for a walk.",
    "Write one line that sells a pencil.",
    "Why do cats purr?",
    "What does a beekeeper do?",
    "Write a short poem about rain.",
    "List five things to pack for the mountains.",
    "Explain how a bicycle stays upright.",
    "Tell me a story about a lost key.",
)
"""Questions with short and with long answers. A quick run asks the first ones, whose answers are mostly short."""


@dataclass(frozen=True)
class Sampling:
    temperature: float
    top_p: float

    def __str__(self) -> str:
        if self.temperature == 0:
            return "greedy"
        return f"T {self.temperature:g}" + (f", top-p {self.top_p:g}" if self.top_p < 1 else "")


SAMPLINGS = (
    Sampling(0.0, 1.0),
    Sampling(0.7, 1.0),
    Sampling(1.0, 1.0),
    Sampling(1.3, 1.0),
    Sampling(0.7, 0.9),
    Sampling(1.0, 0.9),
    Sampling(1.3, 0.9),
)


@dataclass(frozen=True)
class Answers:
    """The answers under one way of sampling: for each prompt, the lengths of its samples."""

    sampling: Sampling
    num_prompt_tokens: Sequence[int]
    """By prompt."""
    lengths: Sequence[Sequence[int]]
    """By prompt and sample."""
    max_tokens: int
    """Answers are cut off there."""

    @property
    def flat(self) -> list[int]:
        """The lengths of all answers."""
        return [length for samples in self.lengths for length in samples]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.flat)

    @property
    def spread(self) -> float:
        """The coefficient of variation: standard deviation over mean."""
        return statistics.pstdev(self.flat) / self.mean

    @property
    def spread_of_a_prompt(self) -> float:
        """The same between answers to one prompt, which greedy answers do not differ in."""
        variances = [statistics.pvariance(samples) for samples in self.lengths]
        return math.sqrt(statistics.fmean(variances)) / self.mean

    @property
    def share_cut(self) -> float:
        """The share of answers that reached the maximum."""
        return sum(length >= self.max_tokens for length in self.flat) / len(self.flat)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Tokens of prompt and answer, of all answers."""
        return [(num_in, length) for num_in, samples in zip(self.num_prompt_tokens, self.lengths) for length in samples]


def measure_answers(
    engine: LLMEngine, *, num_prompts: int, num_samples: int, max_tokens: int, progress: Meter | None = None
) -> list[Answers]:
    """Answer the first prompts in every way of sampling, all in one batch, which changes no answer: each sample has its
    own seed. `Infeasible` if the model has no chat template or random weights."""
    tokenizer = engine.tokenizer
    if tokenizer is None or tokenizer.chat_template is None or engine.config.model.load_format == "dummy":
        raise Infeasible("answers have to mean something to end by themselves: choose a chat model with its weights")
    prompts = [
        engine.preparer.chat_token_ids([{"role": "user", "content": prompt}]) for prompt in PROMPTS[:num_prompts]
    ]
    names = []
    for way, sampling in enumerate(SAMPLINGS):
        for place, prompt in enumerate(prompts):
            for sample in range(num_samples if sampling.temperature else 1):
                names.append(f"{way}/{place}/{sample}")
                params = SamplingParams(
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    max_tokens=max_tokens,
                    seed=sample,
                    detokenize=False,
                )
                engine.add_request(names[-1], prompt, params, stream=False)
    lengths: dict[str, int] = {}
    while engine.has_unfinished_requests():
        stepped = engine.step()
        if stepped.errors:
            raise RuntimeError(f"an answer failed: {next(iter(stepped.errors.values()))}")
        for output in stepped.outputs:
            if output.finished:
                lengths[output.request_id] = len(output.outputs[0].token_ids)
                if progress is not None:
                    progress.advance()
    num_in = [len(prompt) for prompt in prompts]

    def samples_of(way: int, place: int) -> list[int]:
        found = [lengths[name] for name in names if name.startswith(f"{way}/{place}/")]
        return found * (num_samples // len(found))  # a greedy answer is the same each time

    return [
        Answers(sampling, num_in, [samples_of(way, place) for place in range(len(prompts))], max_tokens)
        for way, sampling in enumerate(SAMPLINGS)
    ]


def num_answers(num_prompts: int, num_samples: int) -> int:
    """How many answers `measure_answers` makes."""
    return num_prompts * sum(num_samples if sampling.temperature else 1 for sampling in SAMPLINGS)


@dataclass(frozen=True)
class Recorded:
    """Answers that were measured before, and where."""

    origin: str
    answers: Sequence[Answers]

    def as_json(self) -> dict[str, Any]:
        return {"origin": self.origin, "answers": [asdict(answers) for answers in self.answers]}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Recorded:
        answers = [Answers(**{**one, "sampling": Sampling(**one["sampling"])}) for one in document["answers"]]
        return Recorded(document["origin"], answers)


def recorded() -> Recorded:
    """The lengths that are part of this package."""
    return Recorded.from_json(json.loads(resources.files(__package__).joinpath(FILE_NAME).read_text(encoding="utf-8")))
