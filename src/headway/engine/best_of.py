"""`best_of`: more completions are made than are returned, and the most likely ones win.

What is compared is the log-probability per token, the end-of-sequence token included: the sum would favour short ones.
"""

from __future__ import annotations

import math

from headway.outputs import CompletionOutput
from headway.sampling_params import SamplingParams


def choose_best(completions: list[CompletionOutput], params: SamplingParams) -> list[CompletionOutput]:
    """The `n` best, numbered anew from the best on; of equals, the one that came first. Logprobs were needed to find
    them and are shown only if they were asked for."""
    best = sorted(completions, key=_rank)[: params.n]
    for index, completion in enumerate(best):
        completion.index = index
        if params.logprobs is None:
            completion.logprobs = completion.cumulative_logprob = None
    return best


def _rank(completion: CompletionOutput) -> tuple[bool, float]:
    """Smallest first. A failure comes before everything else, since it must not be hidden behind the others."""
    assert completion.cumulative_logprob is not None
    num_tokens = len(completion.token_ids)
    per_token = completion.cumulative_logprob / num_tokens if num_tokens else -math.inf
    return (completion.finish_reason != "error", -per_token)
