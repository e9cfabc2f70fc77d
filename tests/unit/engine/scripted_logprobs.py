"""An engine whose model is a function of the tokens so far, logprobs included."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, cast

from headway.core import ModelRunnerOutput, SampledTokens, SchedulerOutput, TokenLogprobs
from headway.engine.llm_engine import LLMEngine
from headway.executor.fake import FakeExecutor, FakeStep
from headway.outputs import RequestOutput
from headway.sampling_params import SamplingParams
from headway.tokenizer import Tokenizer
from tests.unit.no_model import all_outputs, engine_on

VOCAB_SIZE = 12
BLOCK_SIZE = 4


def next_logprobs(tokens: tuple[int, ...]) -> list[float]:
    """The model: some distribution for any tokens."""
    rng = random.Random(str(tokens))
    weights = [rng.random() ** 4 + 1e-3 for _ in range(VOCAB_SIZE)]
    return [math.log(weight / sum(weights)) for weight in weights]


def most_likely(tokens: tuple[int, ...], count: int) -> TokenLogprobs:
    """The model's choice after these tokens, and its `count` most likely ones."""
    logprobs = next_logprobs(tokens)
    order = sorted(range(VOCAB_SIZE), key=lambda token: (-logprobs[token], token))
    best = order[0]
    return TokenLogprobs(best, logprobs[best], 1, order[:count], [logprobs[token] for token in order[:count]])


class ScriptedExecutor(FakeExecutor):
    """Greedy, or by request id if the request is not. Keeps each request's tokens as a runner does."""

    def __init__(self, *, max_in_flight: int = 1) -> None:
        super().__init__(max_in_flight=max_in_flight)
        self.fails_at: Callable[[SchedulerOutput], bool] = lambda output: False
        self._tokens: dict[str, list[int]] = {}
        self._params: dict[str, SamplingParams] = {}

    def submit(self, output: SchedulerOutput) -> FakeStep:
        for new in output.new_requests:
            self._tokens[new.request_id] = [*new.prompt_token_ids, *new.output_token_ids]
            self._params[new.request_id] = cast(SamplingParams, new.sampling_params)
        return super().submit(output)

    def _answer(self, step: FakeStep, output: SchedulerOutput) -> ModelRunnerOutput:
        super()._answer(step, output)
        if self.fails_at(output):
            raise RuntimeError("the kernel caught fire")
        return ModelRunnerOutput(
            {share.request_id: self._sample(share.request_id) for share in output.scheduled if share.samples}, {}
        )

    def _sample(self, request_id: str) -> SampledTokens:
        tokens, params = self._tokens[request_id], self._params[request_id]
        found = most_likely(tuple(tokens), params.logprobs or 0)
        if not params.greedy:
            token_id = random.Random(f"{request_id}{tokens}").randrange(VOCAB_SIZE)
            found = TokenLogprobs(token_id, next_logprobs(tuple(tokens))[token_id], 1, [], [])
        tokens.append(found.token_id)
        return SampledTokens((found.token_id,), logprobs=() if params.logprobs is None else (found,))


def make_engine(
    *, overlap: bool = False, num_blocks: int = 128, tokenizer: Tokenizer | None = None, **options: Any
) -> LLMEngine:
    """An engine on this model."""
    executor = ScriptedExecutor(max_in_flight=2 if overlap else 1)
    return engine_on(executor, num_blocks=num_blocks, vocab_size=VOCAB_SIZE, tokenizer=tokenizer, **options)


def run_to_end(engine: LLMEngine, errors: dict[str, str] | None = None) -> dict[str, RequestOutput]:
    """Last outputs by request id. Failures are added to `errors`."""
    return {output.request_id: output for output in all_outputs(engine, errors)}
