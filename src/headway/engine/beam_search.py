"""The decisions of a beam search, which keeps the few most likely continuations. See `beam_requests` for the rest.

    "The" ─┬─ " cat" ─┬─ " sat"   -2.1    goes on                       width 2
           │          └─ <end>    -2.4    ends: a hypothesis
           └─ " dog" ─┬─ " ran"   -2.9    goes on
                      └─ " is"    -3.4    falls out

After each position all continuations of all beams are ranked by the sum of their logprobs. Those among the first
`width` that end become hypotheses; the first `width` that do not end are the beams of the next position. Hypotheses are
ranked by sum / length**length_penalty, and the best `width` of them are kept. At `max_tokens` everything ends.

Ties are broken deterministically: the continuation of the better beam comes first, then the smaller token id. Of equal
hypotheses the older one comes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from headway.core import TokenLogprobs

Ending = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class BeamRules:
    """The parameters of a search. The names are those of `SamplingParams`."""

    width: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: frozenset[int]
    length_penalty: float
    early_stopping: bool | str

    @property
    def num_top(self) -> int:
        """How many of the most likely next tokens of each beam are needed, so that at least `width` of them do not end
        it."""
        return self.width + len(self.stop_token_ids)


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence of output tokens, and how likely it is."""

    token_ids: tuple[int, ...] = ()
    cum_logprob: float = 0.0
    parent: int = 0
    """The index of its parent among the live beams of the previous position."""
    ending: Ending | None = None
    """Why the beam has ended, if it has. With "stop", its last token is the stop token."""


class BeamSearch:
    """The beams of one request. A search begins with a single live beam that has no tokens."""

    def __init__(self, rules: BeamRules) -> None:
        self.rules = rules
        self.live = [Beam()]
        """The live beams, the best first. Empty when the search is over."""
        self.hypotheses: list[Beam] = []
        """Sequences that have ended, the best first."""
        self.num_tokens = 0
        """The number of tokens of all beams so far, including beams that were dropped later."""

    def advance(self, found: Sequence[TokenLogprobs]) -> None:
        """Advance by one position, given the `num_top` most likely next tokens of each live beam."""
        width = self.rules.width
        parents, self.live = self.live, []
        for place, beam in enumerate(self._ranked(parents, found)):
            if beam.ending is None:
                self.live.append(beam)
                self.num_tokens += 1
            elif place < width:
                self.hypotheses.append(beam)
                self.num_tokens += 1
            if place + 1 >= width and len(self.live) == width:
                break
        self.hypotheses = self._best(self.hypotheses, width)
        if self._is_decided():
            self.live = []

    def best(self, count: int) -> list[Beam]:
        """The best sequences found so far, whether they have ended or not."""
        return self._best([*self.hypotheses, *self.live], count)

    def score(self, beam: Beam) -> float:
        """The score by which sequences of different lengths are compared."""
        return self._score(beam.cum_logprob, max(len(beam.token_ids), 1))

    def _score(self, cum_logprob: float, length: int) -> float:
        score: float = cum_logprob / length**self.rules.length_penalty
        return score

    def _best(self, beams: Iterable[Beam], count: int) -> list[Beam]:
        return sorted(beams, key=self.score, reverse=True)[:count]

    def _ranked(self, parents: Sequence[Beam], found: Sequence[TokenLogprobs]) -> Iterator[Beam]:
        """All continuations, the most likely first."""
        ranked = sorted(
            (-(beam.cum_logprob + logprob), parent, token_id)
            for parent, (beam, top) in enumerate(zip(parents, found, strict=True))
            for token_id, logprob in zip(top.top_ids, top.top_logprobs, strict=True)
        )
        length = len(parents[0].token_ids) + 1
        stops = self.rules.stop_token_ids
        at_the_end: Ending | None = "length" if length >= self.rules.max_tokens else None
        for negative, parent, token_id in ranked:
            if token_id not in stops:
                yield Beam((*parents[parent].token_ids, token_id), -negative, parent, at_the_end)
            elif length > self.rules.min_tokens:
                yield Beam((*parents[parent].token_ids, token_id), -negative, parent, "stop")

    def _is_decided(self) -> bool:
        """Whether the search ends although beams are live: see `SamplingParams.early_stopping`."""
        if not self.live or len(self.hypotheses) < self.rules.width:
            return False
        if self.rules.early_stopping is True:
            return True
        best = self.live[0]
        length = len(best.token_ids)
        if self.rules.early_stopping == "never" and self.rules.length_penalty > 0:
            length = self.rules.max_tokens
        return self._score(best.cum_logprob, length) <= self.score(self.hypotheses[-1])
