"""A round: all of the work is handed to the engine at once and the engine steps until nothing is left."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.errors import ConfigError, HeadwayError
from headway.lab.bench.times import RoundTimes
from headway.lab.workload.requests import BenchRequest, Work
from headway.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine
    from headway.engine.step_report import EngineStep
    from headway.outputs import RequestOutput

Step = Callable[[], "EngineStep"]
"""One step of the engine, perhaps watched."""

Progress = Callable[[], object]
"""Called when a request has ended."""


@dataclass(frozen=True)
class Round:
    """A measured round."""

    times: RoundTimes
    num_steps: int
    num_preemptions: int


def sampling_params(request: BenchRequest, temperature: float) -> SamplingParams:
    """Exactly as many tokens as the work says, and no text."""
    return SamplingParams(
        n=request.num_choices,
        temperature=temperature,
        max_tokens=request.num_output_tokens,
        ignore_eos=True,
        detokenize=False,
    )


def check_room(work: Work, max_model_len: int) -> None:
    """Refuse work that the engine would cut short, before any of it runs."""
    longest = max(request.num_prompt_tokens + request.num_output_tokens for request in work)
    if longest > max_model_len:
        raise ConfigError(
            f"The work has a request of {longest} tokens, prompt and output together, but the engine takes at most "
            f"{max_model_len}. Raise --max-model-len or the memory of the KV cache, or choose shorter work."
        )


def run_round(
    engine: LLMEngine,
    work: Work,
    *,
    temperature: float,
    step: Step | None = None,
    progress: Progress | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> Round:
    """Run the work to its end and time it. Raises if a request does not get exactly its tokens."""
    params = [sampling_params(request, temperature) for request in work]
    step = step or engine.step
    finished: dict[str, RequestOutput] = {}
    errors: dict[str, str] = {}
    num_steps = 0
    gc.collect()
    started_s = now()
    for index, (request, own_params) in enumerate(zip(work, params)):
        engine.add_request(str(index), request.prompt_token_ids, own_params, request.options, stream=False)
    while engine.has_unfinished_requests():
        num_steps += 1
        stepped = step()
        errors |= stepped.errors
        for output in stepped.outputs:
            if output.finished:
                finished[output.request_id] = output
                if progress is not None:
                    progress()
    elapsed_s = now() - started_s
    check_tokens(work, finished, errors)
    return Round(
        RoundTimes.of(work, elapsed_s=elapsed_s, pace_s=_mean_pace(finished.values())),
        num_steps,
        sum(output.metrics.num_preemptions for output in finished.values() if output.metrics is not None),
    )


def check_tokens(work: Work, finished: dict[str, RequestOutput], errors: dict[str, str]) -> None:
    """Raise unless each request has exactly the tokens that the work asked for."""
    for index, request in enumerate(work):
        output = finished.get(str(index))
        if output is None or str(index) in errors:
            raise HeadwayError(f"Request {index} of the work was lost: {errors.get(str(index), 'it never ended')}.")
        for completion in output.outputs:
            if len(completion.token_ids) != request.num_output_tokens:
                raise HeadwayError(
                    f"Request {index} of the work got {len(completion.token_ids)} tokens instead of "
                    f"{request.num_output_tokens}; the measurement is void."
                )


def _mean_pace(outputs: Iterable[RequestOutput]) -> float | None:
    paces = [
        output.metrics.time_per_output_token_s(len(output.outputs[0].token_ids))
        for output in outputs
        if output.metrics is not None
    ]
    known = [pace for pace in paces if pace is not None]
    return sum(known) / len(known) if known else None
