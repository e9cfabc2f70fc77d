"""Log-probabilities of chosen, given and most likely tokens, from the model's unmodified logits.

They are computed on the logits' device and copied as one tensor of 32-bit words, so that the host goes on during the
copy. `token_logprobs` turns the words into records once they have arrived.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headway.core.scheduler_output import TokenLogprobs

LINES_AT_A_TIME = 64
"""How many lines' log-softmax is held at one time. For a 150k vocabulary they take some 150 MB, sorting included."""


def logprob_words(logits: Tensor, token_ids: Tensor, num_top: int, named_ids: Tensor | None = None) -> Tensor:
    """For each line: the token's logprob and rank, the `num_top` most likely ids, their logprobs, and the logprobs of
    the line's `named_ids` [R, N]. Returns int32 [R, 2 + 2 num_top + N].

    Floats are stored as their bits. On a GPU nothing waits for the device. A negative token counts as token 0.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, token_ids.clamp(min=0).long().unsqueeze(1))
    top_ids = _most_likely(logprobs, num_top)
    top = logprobs.gather(1, top_ids)
    words = [chosen.view(torch.int32), _ranks(logprobs, chosen), top_ids.int(), top.view(torch.int32)]
    if named_ids is not None:
        words.append(logprobs.gather(1, named_ids.long()).view(torch.int32))
    return torch.cat(words, dim=1)


def token_logprobs(
    words: Tensor,
    token_ids: Sequence[int],
    num_top: Sequence[int],
    named_ids: Sequence[Sequence[int]] | None = None,
) -> list[TokenLogprobs]:
    """One record per line of `words`, which is on the host: the logprobs of the chosen token, of the `num_top[r]` most
    likely tokens, and of `named_ids[r]`."""
    num_named = max(map(len, named_ids), default=0) if named_ids else 0
    most = (words.shape[1] - 2 - num_named) // 2
    ranks, ids = words[:, 1].tolist(), words[:, 2 : 2 + most].tolist()
    chosen = words[:, :1].contiguous().view(torch.float32).squeeze(1).tolist()
    top = words[:, 2 + most : 2 + 2 * most].contiguous().view(torch.float32).tolist()
    records = [
        TokenLogprobs(token_id, chosen[line], ranks[line], ids[line][:count], top[line][:count])
        for line, (token_id, count) in enumerate(zip(token_ids, num_top, strict=True))
    ]
    if not num_named or named_ids is None:
        return records
    named = words[:, 2 + 2 * most :].contiguous().view(torch.float32).tolist()
    return [
        replace(record, named_ids=wanted, named_logprobs=values[: len(wanted)]) if wanted else record
        for record, wanted, values in zip(records, named_ids, named, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Logprobs of a step's tokens on their way to the host: which lines ask for them, and how many each."""

    lines: list[int]
    num_top: list[int]
    parts: list[Tensor]
    named_ids: list[tuple[int, ...]] | None = None
    """Further tokens whose logprobs each line asks for. None: no line does."""

    def result(self, token_ids: Sequence[int]) -> Iterator[tuple[int, TokenLogprobs]]:
        """Yields (line, logprobs). `token_ids` are those of all lines of the step."""
        tokens = [token_ids[line] for line in self.lines]
        records = token_logprobs(torch.cat(self.parts), tokens, self.num_top, self.named_ids)
        return zip(self.lines, records, strict=True)


def _ranks(logprobs: Tensor, of: Tensor) -> Tensor:
    """For each line, 1 + the number of values above the one in `of` [R, 1]; int32 [R, 1]."""
    if logprobs.is_cpu:  # numpy counts a line several times faster
        counts = [np.count_nonzero(line > value) for line, value in zip(logprobs.numpy(), of.numpy(), strict=True)]
        return torch.tensor(counts, dtype=torch.int32).unsqueeze(1) + 1
    return (logprobs > of).sum(dim=1, keepdim=True, dtype=torch.int32) + 1


def _most_likely(logprobs: Tensor, count: int) -> Tensor:
    """Ids of the largest values of each line, the largest first and equal ones by id; [R, count]."""
    if count == 0:
        return logprobs.new_empty((len(logprobs), 0), dtype=torch.int64)
    if logprobs.is_cpu:
        return _most_likely_on_host(logprobs, count)
    # Integers with the value in the high bits and the id in the low ones have no ties, so the selection is determined.
    bits = logprobs.view(torch.int32).long()
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(logprobs.shape[1], device=logprobs.device)
    return 0xFFFFFFFF - (((ordered << 32) + (0xFFFFFFFF - ids)).topk(count, dim=1).values & 0xFFFFFFFF)


def _most_likely_on_host(logprobs: Tensor, count: int) -> Tensor:
    """As `_most_likely`, by selecting floats: twice as fast on a CPU. Lines with ties at the cut are selected again."""
    # One more than asked for shows whether equally likely tokens lie on both sides of the cut.
    values, ids = (part.numpy() for part in torch.topk(logprobs, min(count + 1, logprobs.shape[1]), dim=1))
    chosen = np.empty((len(ids), count), dtype=np.int64)
    for line in range(len(ids)):
        line_values, line_ids = values[line], ids[line]
        if count < len(line_ids) and line_values[count - 1] == line_values[count]:
            whole = logprobs[line].numpy()
            line_ids = np.flatnonzero(whole >= line_values[count - 1])
            line_values = whole[line_ids]
        chosen[line] = line_ids[np.lexsort((line_ids, -line_values))[:count]]
    return torch.from_numpy(chosen)
