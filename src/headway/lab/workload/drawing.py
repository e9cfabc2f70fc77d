"""What every kind of content draws from: lengths, random ids, a tokenizer, and generators that are independent.

Each aspect has a generator of its own, made from the seed and a name. Another rate therefore changes no prompt, another
length of answers no arrival, and fewer requests are the first ones of more.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headway.errors import ConfigError
from headway.lab.workload.distributions import Distribution, draw_length
from headway.lab.workload.limits import Limits
from headway.lab.workload.requests import highest_token_id
from headway.lab.workload.trace_rows import Trace, TraceRow

if TYPE_CHECKING:
    from headway.tokenizer import Tokenizer


@dataclass(frozen=True)
class Draft:
    """A request before it is known when it comes."""

    prompt_token_ids: list[int]
    num_output_tokens: int
    after: int | None = None
    """Number of the draft that this one follows."""
    think_s: float = 0.0


@dataclass(frozen=True)
class Size:
    """Lengths that belong together."""

    num_input_tokens: int
    num_output_tokens: int


@dataclass(frozen=True)
class Lengths:
    """Where lengths come from: a distribution each, or the rows of a trace."""

    input: Distribution | None = None
    output: Distribution | None = None
    trace: Trace | None = None


@dataclass(frozen=True)
class Drawing:
    """One draw of a workload."""

    seed: int
    vocab_size: int
    lengths: Lengths
    limits: Limits
    tokenizer: Tokenizer | None = None
    _vocabulary: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # One object for each id, shared by all prompts: a list of ids drawn from it costs 8 bytes a token, not 36.
        object.__setattr__(self, "_vocabulary", list(range(highest_token_id(self.vocab_size) + 1)))

    def rng(self, aspect: str) -> random.Random:
        """The generator of this aspect, from its beginning."""
        return random.Random(f"{self.seed}/{aspect}")

    def ids(self, rng: random.Random, count: int) -> list[int]:
        """Random token ids."""
        return rng.choices(self._vocabulary, k=count)

    def rows(self, count: int) -> list[TraceRow]:
        """So many of the trace's rows."""
        if self.lengths.trace is None:
            raise ConfigError("This workload needs a table [trace] with a 'file'.")
        return self.lengths.trace.take(count, self.rng("trace"))

    def sizes(self, count: int) -> Iterator[Size]:
        """Both lengths of so many requests, not yet limited."""
        inputs, outputs = self.input_lengths(count), self.output_lengths(count)
        return (Size(num_in, num_out) for num_in, num_out in zip(inputs, outputs))

    def input_lengths(self, count: int) -> Iterator[int]:
        """Of prompts."""
        if self.lengths.input is not None:
            return self._drawn(self.lengths.input, count, "input")
        return (self._told(row.num_input_tokens, "input") for row in self.rows(count))

    def output_lengths(self, count: int) -> Iterator[int]:
        """Of answers. From the same row as the prompt's, where both come from the trace."""
        if self.lengths.output is not None:
            return self._drawn(self.lengths.output, count, "output")
        return (self._told(row.num_output_tokens, "output") for row in self.rows(count))

    def tokens(self, text: str) -> list[int]:
        """The ids of a text, and nothing around it."""
        return self._a_tokenizer().encode(text, add_special_tokens=False)

    def prompt_tokens(self, text: str, *, is_chat: bool) -> list[int]:
        """The ids of a whole prompt: with what the model expects around a text, or as the first turn of a chat."""
        tokenizer = self._a_tokenizer()
        if is_chat:
            return self.tokens(tokenizer.apply_chat_template([{"role": "user", "content": text}]))
        return tokenizer.encode(text)

    def _drawn(self, distribution: Distribution, count: int, aspect: str) -> Iterator[int]:
        rng = self.rng(aspect)
        return (draw_length(distribution, rng) for _ in range(count))

    def _told(self, length: int | None, side: str) -> int:
        if length is None:
            raise ConfigError(f"The trace has no {side}_tokens: give the workload a table [{side}].")
        return length

    def _a_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ConfigError("This workload has prompts of text and needs the model's tokenizer to draw them.")
        return self.tokenizer
