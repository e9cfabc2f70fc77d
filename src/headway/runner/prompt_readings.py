"""What requests want to know of their prompts: rare, and the one part of a step that waits for a device.

The hidden state at position p gives the logprobs of the prompt token at p + 1; the mean of all, or the last of them, is
a vector that stands for the prompt. A prompt may come in several chunks, and each gives its own part.
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
    """By request id, those that the step's hidden states of all tokens give."""
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
    """By request id, what the step's hidden states add to the vectors of prompts."""
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
    """For each line of `logits` [T, V], the logprobs at the prompt position that follows it, where `next_token_ids` [T]
    stand."""
    tokens = torch.tensor(next_token_ids, dtype=torch.int64)
    if len(tokens) != len(logits):
        raise ValueError(f"{len(logits)} rows of logits but {len(tokens)} next tokens")
    records: list[TokenLogprobs] = []
    for lines, part in zip(logits.split(LINES_AT_A_TIME), tokens.split(LINES_AT_A_TIME), strict=True):
        words = logprob_words(lines, part.to(logits.device), num_top).cpu()
        records += token_logprobs(words, part.tolist(), [num_top] * len(part))
    return records
