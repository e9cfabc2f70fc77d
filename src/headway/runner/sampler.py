"""Chooses one token per row from the logits of a step: the same code for any device.

Order: raw logprobs are taken from the untouched logits → min_tokens → bad words → logit bias → penalties → greedy rows
take the maximum (the lowest id of equals); the others go through temperature → min_p → top_k → top_p → a draw.

Randomness has no state. The draw of a request's t-th output token uses one uniform number, a hash of (seed, t), so it
is the same after preemption, in any row, in any batch. The draw walks the cumulative weights of the kept tokens in
order of token id. Weights are exp((logit - max) / temperature) rounded to whole multiples of a power of two, chosen so
that float64 holds every sum of them exactly: sums do not depend on the order of adding, hence not on how a device
reduces nor on what else is in the batch. top_k and top_p keep all tokens that tie at the cut, so no filter depends on
how a sort orders equals either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headway.core import TokenLogprobs
from headway.runner.logprobs import gather_logprobs
from headway.runner.sampling_batch import Feature, IntArray, SamplingBatch

# Up to this top_k the draw works on the candidates alone instead of the whole vocabulary.
MAX_COMPACT_TOP_K = 1024
# Logits drawn from at one time: bounds the memory that the draw works in to a few tens of megabytes.
ELEMENTS_AT_A_TIME = 1 << 21
# Devices on which it pays to pick out the few weights that min_p and top_p can leave, line by line.
LINE_BY_LINE_DEVICES = frozenset({"cpu"})

NO_TOKEN = -1

_EDITS = Feature.PENALTIES | Feature.LOGIT_BIAS | Feature.BAD_WORDS | Feature.MIN_TOKENS
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_COUNTER_STEP = np.uint64(0xD1342543DE82EF95)


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One entry per sampled row, in the order given."""

    token_ids: list[int]
    """The chosen token; `NO_TOKEN` where the row failed."""
    logprobs: list[TokenLogprobs | None]
    """For rows that asked for logprobs."""
    errors: dict[int, str] = field(default_factory=dict)
    """Place in the given rows → why no token could be chosen there."""


class Sampler:
    """Stateless: everything it needs is in the batch."""

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[int], batch: SamplingBatch) -> SamplerOutput:
        """Choose a token for each of `rows`, where `logits` [R, V] float32 has one line per row.

        `logits` is consumed: bans, biases and penalties are written into it.
        """
        row_ids = np.asarray(rows, dtype=np.int64)
        if logits.shape != (len(row_ids), batch.vocab_size):
            raise ValueError(f"logits of shape {tuple(logits.shape)} for {len(row_ids)} rows of {batch.vocab_size}")
        if not len(row_ids):
            return SamplerOutput([], [])
        logits = logits.float()
        features = batch.features(row_ids)
        raw = _RawLogprobs(logits, row_ids, batch) if features & Feature.LOGPROBS else None
        if features & _EDITS:
            _edit_logits(logits, row_ids, batch, features)
        if features & Feature.RANDOM:
            tokens, maxima = _choose_mixed(logits, row_ids, batch)
        else:
            tokens, maxima = _argmax(logits)
        errors = _row_errors(maxima)
        for position in errors:
            tokens[position] = NO_TOKEN
        token_ids: list[int] = tokens.tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        if raw is not None:
            logprobs = raw.records(token_ids)
        return SamplerOutput(token_ids, logprobs, errors)


class _RawLogprobs:
    """Log-softmax of the rows that asked for it, kept until their tokens are known."""

    def __init__(self, logits: Tensor, rows: IntArray, batch: SamplingBatch) -> None:
        self._positions = batch.positions_with(rows, Feature.LOGPROBS)
        self._num_top = batch.num_logprobs[rows[self._positions]].tolist()
        self._values = torch.log_softmax(logits[_to(self._positions, logits)], dim=-1)

    def records(self, token_ids: Sequence[int]) -> list[TokenLogprobs | None]:
        records: list[TokenLogprobs | None] = [None] * len(token_ids)
        chosen = [token_ids[position] for position in self._positions]
        found = gather_logprobs(self._values, [max(token, 0) for token in chosen], self._num_top)
        for position, token, record in zip(self._positions.tolist(), chosen, found, strict=True):
            records[position] = None if token == NO_TOKEN else record
        return records


def _row_errors(maxima: npt.NDArray[np.float32]) -> dict[int, str]:
    """A row fails if its largest logit is no number: NaN anywhere, an overflow, or every token ruled out."""
    errors: dict[int, str] = {}
    for position in np.flatnonzero(~np.isfinite(maxima)).tolist():
        if maxima[position] == -np.inf:
            errors[position] = "no token is left to choose from: bans rule out the whole vocabulary"
        else:
            errors[position] = f"the model gave a logit of {maxima[position]}"
    return errors


# ------------------------------------------------------------------------------------------------------ editing logits


def _edit_logits(logits: Tensor, rows: IntArray, batch: SamplingBatch, features: Feature) -> None:
    if features & Feature.MIN_TOKENS:
        _ban(logits, _min_tokens_bans(rows, batch))
    if features & Feature.BAD_WORDS:
        _ban(logits, _bad_word_bans(rows, batch))
    if features & Feature.LOGIT_BIAS:
        _add_bias(logits, rows, batch)
    if features & Feature.PENALTIES:
        _penalise(logits, rows, batch)


def _ban(logits: Tensor, bans: list[tuple[int, Sequence[int] | IntArray]]) -> None:
    if not bans:
        return
    positions = np.repeat([position for position, _ in bans], [len(tokens) for _, tokens in bans])
    tokens = np.concatenate([np.asarray(tokens, dtype=np.int64) for _, tokens in bans])
    logits[_to(positions, logits), _to(tokens, logits)] = -torch.inf


def _min_tokens_bans(rows: IntArray, batch: SamplingBatch) -> list[tuple[int, Sequence[int] | IntArray]]:
    bans: list[tuple[int, Sequence[int] | IntArray]] = []
    for position in batch.positions_with(rows, Feature.MIN_TOKENS).tolist():
        blocked = batch.blocked_ids[rows[position]]
        assert blocked is not None
        bans.append((position, blocked))
    return bans


def _bad_word_bans(rows: IntArray, batch: SamplingBatch) -> list[tuple[int, Sequence[int] | IntArray]]:
    """The last token of each bad word whose other tokens are the last ones of the output."""
    bans: list[tuple[int, Sequence[int] | IntArray]] = []
    for position in batch.positions_with(rows, Feature.BAD_WORDS).tolist():
        words = batch.bad_words[rows[position]]
        assert words is not None
        banned = words.banned(batch.output_tail[rows[position]])
        if len(banned):
            bans.append((position, banned))
    return bans


def _add_bias(logits: Tensor, rows: IntArray, batch: SamplingBatch) -> None:
    positions = batch.positions_with(rows, Feature.LOGIT_BIAS)
    biases = [bias for row in rows[positions].tolist() if (bias := batch.bias[row]) is not None]
    lengths = [len(tokens) for tokens, _ in biases]
    tokens = np.concatenate([tokens for tokens, _ in biases])
    where = (_to(np.repeat(positions, lengths), logits), _to(tokens, logits))
    logits[where] += _to(np.concatenate([values for _, values in biases]), logits)


def _penalise(logits: Tensor, rows: IntArray, batch: SamplingBatch) -> None:
    """Repetition scales the logits of tokens in prompt or output away from "likely"; frequency and presence subtract
    for tokens in the output."""
    positions = batch.positions_with(rows, Feature.PENALTIES)
    seen = [state for row in rows[positions].tolist() if (state := batch.seen[row]) is not None]
    lengths = [len(state.ids) for state in seen]
    penalised_rows = np.repeat(rows[positions], lengths)
    counts = _to(np.concatenate([state.output_counts for state in seen]), logits)
    repetition = _to(batch.repetition_penalty[penalised_rows], logits)
    frequency = _to(batch.frequency_penalty[penalised_rows], logits)
    presence = _to(batch.presence_penalty[penalised_rows], logits)
    tokens = _to(np.concatenate([state.ids for state in seen]), logits)
    where = (_to(np.repeat(positions, lengths), logits), tokens)
    values = logits[where]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counts + presence * (counts > 0)
    logits[where] = values


# ---------------------------------------------------------------------------------------------------- choosing a token


def _argmax(logits: Tensor) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """Per line, the lowest id of the largest logit and that logit; NaN counts as the largest."""
    if logits.device.type == "cpu":
        lines = logits.numpy()
        tokens = lines.argmax(axis=1)
        return tokens, lines[np.arange(len(lines)), tokens]
    on_device = logits.argmax(dim=1, keepdim=True)
    maxima = logits.gather(1, on_device)
    return on_device.squeeze(1).cpu().numpy(), maxima.squeeze(1).cpu().numpy()


def _choose_mixed(logits: Tensor, rows: IntArray, batch: SamplingBatch) -> tuple[IntArray, npt.NDArray[np.float32]]:
    random = batch.positions_with(rows, Feature.RANDOM)
    if len(random) == len(rows):
        maxima = logits.amax(dim=1, keepdim=True)
        tokens = np.empty(len(rows), dtype=np.int64)
    else:
        tokens, host_maxima = _argmax(logits)
        maxima = _to(host_maxima[:, None], logits)
    top_k = batch.top_k[rows[random]]
    compact = (top_k > 0) & (top_k <= MAX_COMPACT_TOP_K)
    step = max(1, ELEMENTS_AT_A_TIME // batch.vocab_size)
    for group, has_small_top_k in ((random[compact], True), (random[~compact], False)):
        for start in range(0, len(group), step):
            part = group[start : start + step]
            draw = _Draw(_lines(logits, part), _lines(maxima, part), rows[part], batch)
            tokens[part] = (draw.among_top_k() if has_small_top_k else draw.among_all()).cpu().numpy()
    return tokens, maxima.cpu().numpy().ravel()


def _lines(table: Tensor, positions: IntArray) -> Tensor:
    """These lines of `table`, as a view where they lie together."""
    first, last = int(positions[0]), int(positions[-1])
    return table[first : last + 1] if last - first + 1 == len(positions) else table[_to(positions, table)]


class _Draw:
    """One draw for each line of `logits` [R, V], which is consumed; `maxima` [R, 1] are its largest values."""

    def __init__(self, logits: Tensor, maxima: Tensor, rows: IntArray, batch: SamplingBatch) -> None:
        features = batch.features(rows)
        self._logits = logits
        self._maxima = maxima
        self._inverse_temperature = _column(1 / batch.temperature[rows], logits)
        self._top_k = _column(batch.top_k[rows], logits) if features & Feature.TOP_K else None
        self._top_p = _column(batch.top_p[rows], logits) if features & Feature.TOP_P else None
        self._min_p = _column(batch.min_p[rows], logits) if features & Feature.MIN_P else None
        self._uniforms = uniforms(batch.seed[rows], batch.num_output_tokens[rows])
        self._quantum = 2.0 ** (batch.vocab_size.bit_length() - 53)

    def among_all(self) -> Tensor:
        """Draw from the whole vocabulary."""
        if self._top_k is not None:
            ordered = torch.topk(self._logits, int(self._top_k.max()), dim=1).values
            cut = ordered.gather(1, (self._top_k - 1).clamp_(min=0))
            self._logits.masked_fill_((self._logits < cut) & (self._top_k > 0), -torch.inf)
        return self._columns(self._logits)

    def among_top_k(self) -> Tensor:
        """Draw where every line has a top_k: on the candidates alone, unless equals of the last one are left out."""
        assert self._top_k is not None
        vocab_size = self._logits.shape[1]
        num_candidates = min(int(self._top_k.max()) + 1, vocab_size)
        values, ids = torch.topk(self._logits, num_candidates, dim=1)
        cut = values.gather(1, self._top_k - 1)
        if num_candidates < vocab_size and bool((values[:, -1:] == cut).any()):
            return self.among_all()
        values.masked_fill_(values < cut, -torch.inf)
        ids, order = ids.sort(dim=1)
        return ids.gather(1, self._columns(values.gather(1, order)).unsqueeze(1)).squeeze(1)

    def _columns(self, candidates: Tensor) -> Tensor:
        """Temperature, min_p, top_p and the draw. Columns must be in order of token id; `candidates` is consumed."""
        weights = candidates.sub_(self._maxima).mul_(self._inverse_temperature).exp_()
        # Adding and taking away a number whose last float32 bit is worth one quantum rounds to whole quanta.
        rounder = self._quantum * 2.0**23
        weights.add_(rounder).sub_(rounder)
        filtered = self._min_p is not None or self._top_p is not None
        if filtered and weights.device.type in LINE_BY_LINE_DEVICES:
            columns = self._columns_line_by_line(weights)
        else:
            if self._min_p is not None:
                weights.masked_fill_(weights < self._min_p, 0.0)
            if self._top_p is not None:
                weights.masked_fill_(weights < _nucleus_cut(weights, self._top_p), 0.0)
            cumulative = weights.cumsum(dim=1, dtype=torch.float64)
            totals = cumulative[:, -1:]
            targets = torch.minimum(_column(self._uniforms, weights) * totals, totals - self._quantum)
            columns = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
        # A line with NaN may point past the end; it is reported by its maximum.
        return columns.clamp_(max=candidates.shape[1] - 1)

    def _columns_line_by_line(self, weights: Tensor) -> Tensor:
        num_lines = len(weights)
        min_p = [0.0] * num_lines if self._min_p is None else self._min_p.ravel().tolist()
        top_p = [1.0] * num_lines if self._top_p is None else self._top_p.ravel().tolist()
        columns = torch.zeros(num_lines, dtype=torch.int64)
        for place, line in enumerate(weights.numpy()):
            ids, values = _kept(line, min_p[place], top_p[place])
            if len(ids):
                cumulative = values.cumsum(dtype=np.float64)
                target = min(self._uniforms[place] * cumulative[-1], cumulative[-1] - self._quantum)
                columns[place] = int(ids[cumulative.searchsorted(target, side="right")])
        return columns


def _nucleus_cut(weights: Tensor, top_p: Tensor) -> Tensor:
    """Per line the smallest weight in the smallest set of largest weights that reaches `top_p` of the total; [R, 1]."""
    ordered = weights.sort(dim=1, descending=True).values
    cumulative = ordered.cumsum(dim=1, dtype=torch.float64)
    place = torch.searchsorted(cumulative, top_p * cumulative[:, -1:])
    cut = ordered.gather(1, place.clamp_(max=ordered.shape[1] - 1))
    return cut.masked_fill_(top_p >= 1.0, 0.0)


def _kept(weights: npt.NDArray[np.float32], min_p: float, top_p: float) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """Places, in order, and values of the weights that min_p and then top_p keep."""
    if min_p <= 0.0:
        return _nucleus(weights, top_p)
    ids = np.flatnonzero(weights >= np.float32(min_p))
    places, values = _nucleus(weights[ids], top_p)
    return ids[places], values


def _nucleus(weights: npt.NDArray[np.float32], top_p: float) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """Places, in order, and values of the smallest set of largest weights that reaches `top_p` of the total.

    Weights of at most (1 - top_p) of the mean sum to at most (1 - top_p) of the total, so those above reach top_p: only
    they need sorting.
    """
    total = float(weights.sum(dtype=np.float64)) if top_p < 1.0 else 0.0
    possible = np.flatnonzero(weights > np.float32((1.0 - top_p) * total / max(1, len(weights)) * 0.999))
    values = weights[possible]
    if top_p >= 1.0 or not len(values):
        return possible, values
    ordered = np.sort(values)[::-1]
    place = int(np.cumsum(ordered, dtype=np.float64).searchsorted(top_p * total))
    kept = values >= ordered[min(place, len(ordered) - 1)]
    return possible[kept], values[kept]


def uniforms(seeds: npt.NDArray[np.uint64], counters: IntArray) -> npt.NDArray[np.float64]:
    """For each (seed, counter) a number in [0, 1) with 53 random bits: two rounds of a 64-bit finaliser."""
    mixed = _mix(seeds + _GOLDEN)
    mixed = _mix(mixed + counters.astype(np.uint64) * _COUNTER_STEP + _GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of 64-bit words in which each input bit moves about half of the output bits (splitmix64's)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _to(array: npt.NDArray[np.generic], like: Tensor) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.to(like.device) if like.device.type != "cpu" else tensor


def _column(array: npt.NDArray[np.generic], like: Tensor) -> Tensor:
    return _to(array[:, None], like)
