"""Prompt logprobs and pooled prompt vectors, for the requests that ask for them.

This is rare, and it is the one part of a step that waits for a device. The hidden state at position p gives the
logprobs of the prompt token at p + 1. The mean of all hidden states, or the last one, is a vector for the whole prompt.
A prompt may be computed in several chunks; each gives its own part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headway.core.scheduler_output import PooledPrompt, PromptLogprobs, TokenLogprobs
from headway.models.decoder import Decoder
from headway.runner.rows import StepRows, WantedPrompt
from headway.runner.token_logprobs import LINES_AT_A_TIME, logprob_words, token_logprobs


def logprobs_of_prompts(
    decoder: Decoder, hidden: Tensor, step: StepRows, wanted_prompts: Mapping[str, WantedPrompt]
) -> dict[str, PromptLogprobs]:
    """The prompt logprobs that a step's hidden states give, by request id."""
    found = {}
    for place, request_id in enumerate(step.request_ids):
        wanted = wanted_prompts.get(request_id)
        if wanted is not None and wanted.num_top is not None:
            lines, start = _chunk(hidden, step, place)
            values = _of_chunk(decoder, lines, wanted, start)
            if values:
                found[request_id] = PromptLogprobs(start + 1, tuple(values))
    return found


def pooled_prompts(
    hidden: Tensor, step: StepRows, wanted_prompts: Mapping[str, WantedPrompt]
) -> dict[str, PooledPrompt]:
    """What a step's hidden states add to the prompts' pooled vectors, by request id."""
    found = {}
    for place, request_id in enumerate(step.request_ids):
        wanted = wanted_prompts.get(request_id)
        if wanted is None or wanted.pooling is None:
            continue
        lines, start = _chunk(hidden, step, place)
        end = min(start + len(lines), len(wanted.token_ids))
        begin = max(start, len(wanted.token_ids) - 1) if wanted.pooling == "last" else start
        if begin < end:
            total = lines[begin - start : end - start].sum(dim=0, dtype=torch.float32)
            found[request_id] = PooledPrompt(begin, end - begin, total.cpu().numpy().tobytes())
    return found


def _chunk(hidden: Tensor, step: StepRows, place: int) -> tuple[Tensor, int]:
    """The hidden states of one request, and the position of the first."""
    first, after_last = step.query_start[place : place + 2].tolist()
    return hidden[first:after_last], int(step.seq_lens[place]) - (after_last - first)


def _of_chunk(decoder: Decoder, hidden: Tensor, wanted: WantedPrompt, start: int) -> list[TokenLogprobs]:
    assert wanted.num_top is not None
    next_tokens = wanted.token_ids[start + 1 : start + 1 + len(hidden)]
    values: list[TokenLogprobs] = []
    for offset in range(0, len(next_tokens), LINES_AT_A_TIME):
        tokens = next_tokens[offset : offset + LINES_AT_A_TIME]
        values += prompt_logprobs(decoder.logits(hidden[offset : offset + len(tokens)]), tokens, wanted.num_top)
    return values


def prompt_logprobs(logits: Tensor, next_token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """For each line of `logits` [T, V], the logprobs at the next prompt position, which holds the token in
    `next_token_ids` [T]."""
    tokens = torch.tensor(next_token_ids, dtype=torch.int64)
    if len(tokens) != len(logits):
        raise ValueError(f"{len(logits)} rows of logits but {len(tokens)} next tokens")
    records: list[TokenLogprobs] = []
    for lines, part in zip(logits.split(LINES_AT_A_TIME), tokens.split(LINES_AT_A_TIME), strict=True):
        words = logprob_words(lines, part.to(logits.device), num_top).cpu()
        records += token_logprobs(words, part.tolist(), [num_top] * len(part))
    return records
