"""The least time that a piece of work can take on a machine, from the model's shape and the machine's ceilings.

Generating is bound by bytes, reading prompts by arithmetic. So

    floor     = decode + prefill
    decode    = Σ over decode steps (W + K · c) / bandwidth
    prefill   = Σ over requests (2·P·L  +  2·q·L·(L+1)·layers  +  2·V·H) / rate

with

    c   tokens in the cache of all running requests at that step
    L   prompt length

and the model's costs `W`, `K`, `P`, `q`, `V` and `H` as `headway.models.costs` defines them.

The three terms of a prompt are its linear layers, its causal attention (query·key and weight·value, 2 flops per
multiply-add, half of the square), and the output projection of its last token.

The steps are counted out: as many requests as may run at once start together; the first token of each comes out of its
prompt, each later one takes a step; when one has ended the next takes its place. A request with o tokens of output thus
takes part in o - 1 steps, and at the i-th of them has L + i tokens in the cache.

The bandwidth and the rate are measured (`headway.worker.ceilings`).

The floor ignores that the arithmetic of prompts could overlap with the bytes of a decode step, and that a cache may be
too small for all requests. It assumes perfect overlap of everything else.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from headway.models.costs import ModelCosts
from headway.worker.ceilings import Ceilings
from headway_lab.bench.timelines import RequestTimeline, RoundTimes
from headway_lab.workload.bench_requests import BenchRequest, Work


@dataclass(frozen=True)
class DecodeSteps:
    """The decode steps of some work, and the sum over them of the tokens in the cache."""

    num_steps: int
    num_cached_tokens: int


@dataclass(frozen=True)
class Floor:
    """The least time of a piece of work."""

    decode_s: float
    prefill_s: float
    times: RoundTimes
    """The floor in the form of a measured round."""


def work_floor(work: Work, costs: ModelCosts, ceilings: Ceilings, *, max_num_seqs: int) -> Floor:
    """The floor of work whose requests are all there at the start."""
    steps = count_decode_steps(work, max_num_seqs)
    num_bytes = costs.weight_bytes * steps.num_steps + costs.kv_bytes_per_token * steps.num_cached_tokens
    decode_s = num_bytes / ceilings.bandwidth_bytes_s
    prefill_s = sum(_prompt_flops(request, costs) for request in work) / ceilings.flops_s
    times = RoundTimes.of(
        work, elapsed_s=decode_s + prefill_s, pace_s=decode_s / steps.num_steps if steps.num_steps else None
    )
    return Floor(decode_s, prefill_s, times)


def count_decode_steps(work: Work, max_num_seqs: int) -> DecodeSteps:
    """Count the work's steps without a model; stretches in which no request begins or ends are summed at once."""
    waiting = [
        (request.num_prompt_tokens, request.num_output_tokens - 1)
        for request in reversed(work)
        for _ in range(request.num_choices)
        if request.num_output_tokens > 1
    ]
    running: list[tuple[int, int]] = []  # (step after which it ends, tokens in the cache then)
    now = num_cached = total = 0
    while waiting or running:
        while waiting and len(running) < max_num_seqs:
            prompt, num_steps = waiting.pop()
            heapq.heappush(running, (now + num_steps, prompt + num_steps))
            num_cached += prompt
        num_steps = running[0][0] - now
        total += num_steps * num_cached + len(running) * num_steps * (num_steps + 1) // 2
        num_cached += len(running) * num_steps
        now += num_steps
        while running and running[0][0] == now:
            num_cached -= heapq.heappop(running)[1]
    return DecodeSteps(now, total)


def timeline_alone(request: BenchRequest, costs: ModelCosts, ceilings: Ceilings) -> RequestTimeline:
    """When the tokens of a request would come if it had the machine to itself: no load can be faster.

    Its first token takes the arithmetic of the prompt or one read of the weights, whichever is longer.
    """
    weights_s = costs.weight_bytes / ceilings.bandwidth_bytes_s
    kv_s = costs.kv_bytes_per_token / ceilings.bandwidth_bytes_s
    now = request.arrival_s + max(weights_s, costs.prompt_flops(request.num_prompt_tokens) / ceilings.flops_s)
    times = [now]
    for num_cached in range(request.num_prompt_tokens + 1, request.num_prompt_tokens + request.num_output_tokens):
        now += weights_s + kv_s * num_cached
        times.append(now)
    return RequestTimeline(request.arrival_s, request.num_prompt_tokens, request.num_output_tokens, times)


def _prompt_flops(request: BenchRequest, costs: ModelCosts) -> float:
    """A prompt is computed once for each of its choices."""
    return costs.prompt_flops(request.num_prompt_tokens) * request.num_choices
