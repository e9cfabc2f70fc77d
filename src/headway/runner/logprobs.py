"""Log-probabilities of chosen, given and most likely tokens, from the model's unmodified logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headway.core import TokenLogprobs

# Rows of a prompt whose log-softmax is held at one time: 64 rows of a 150k vocabulary are 40 MB.
PROMPT_ROWS_AT_A_TIME = 64


def gather_logprobs(logprobs: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Records for the rows of `logprobs` [R, V] (a log-softmax): one token and `num_top[r]` most likely ones each."""
    if not len(token_ids):
        return []
    chosen = torch.as_tensor(token_ids, dtype=torch.int64, device=logprobs.device).unsqueeze(1)
    chosen_logprobs = logprobs.gather(1, chosen)
    ranks = _ranks(logprobs, chosen_logprobs)
    top_ids, top_logprobs = _top(logprobs, num_top)
    return [
        TokenLogprobs(int(token), logprob, rank, ids, values)
        for token, logprob, rank, ids, values in zip(
            token_ids, chosen_logprobs.squeeze(1).tolist(), ranks, top_ids, top_logprobs, strict=True
        )
    ]


def prompt_logprobs(logits: Tensor, next_token_ids: Tensor | Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """For each row of `logits` [T, V], the logprobs at the prompt position that follows it, where `next_token_ids`
    [T] stand."""
    tokens = next_token_ids.tolist() if isinstance(next_token_ids, Tensor) else [int(t) for t in next_token_ids]
    if len(tokens) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits but {len(tokens)} next tokens")
    records: list[TokenLogprobs] = []
    for start in range(0, len(tokens), PROMPT_ROWS_AT_A_TIME):
        part = tokens[start : start + PROMPT_ROWS_AT_A_TIME]
        rows = torch.log_softmax(logits[start : start + len(part)].float(), dim=-1)
        records += gather_logprobs(rows, part, [num_top] * len(part))
    return records


def _ranks(logprobs: Tensor, of: Tensor) -> list[int]:
    """1 + how many values of each line are above the one in `of` [R, 1]."""
    if logprobs.device.type == "cpu":  # numpy counts a line several times faster
        return [int(np.count_nonzero(line > value)) + 1 for line, value in zip(logprobs.numpy(), of.numpy())]
    ranks: list[int] = ((logprobs > of).sum(dim=1) + 1).tolist()
    return ranks


def _top(logprobs: Tensor, num_top: Sequence[int]) -> tuple[list[list[int]], list[list[float]]]:
    vocab_size = logprobs.shape[1]
    most = min(max(num_top), vocab_size)
    if most == 0:
        return [[] for _ in num_top], [[] for _ in num_top]
    # One more than asked for shows whether equally likely tokens lie on both sides of the cut.
    values, indices = torch.topk(logprobs, min(most + 1, vocab_size), dim=1)
    rows_of_ids: list[list[int]] = []
    rows_of_values: list[list[float]] = []
    for row, (row_values, row_ids) in enumerate(zip(values.tolist(), indices.tolist(), strict=True)):
        count = min(num_top[row], vocab_size)
        pairs = list(zip(row_values, row_ids, strict=True))
        if 0 < count < len(pairs) and row_values[count - 1] == row_values[count]:
            tied = (logprobs[row] >= values[row, count - 1]).nonzero().squeeze(1)
            pairs = list(zip(logprobs[row, tied].tolist(), tied.tolist(), strict=True))
        pairs.sort(key=lambda pair: (-pair[0], pair[1]))
        rows_of_ids.append([token for _, token in pairs[:count]])
        rows_of_values.append([value for value, _ in pairs[:count]])
    return rows_of_ids, rows_of_values
