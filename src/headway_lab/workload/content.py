"""Contents of prompts: random ids, shared prefixes, recorded blocks, or texts of a file.

Each aspect has its own generator, made from the seed and a name. So a different rate changes no prompt, a different
length of answers changes no arrival, and a smaller number of requests gives the first ones of a larger number.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from headway.errors import ConfigError
from headway_lab.workload.arrivals import MOONCAKE_BLOCK_TOKENS, Trace, TraceRow
from headway_lab.workload.bench_requests import highest_token_id
from headway_lab.workload.input_files import MOST_TOKENS, DataFile, OptionsTable, Row, field_of, number_of
from headway_lab.workload.lengths import Distribution, Limits, check_tokens, draw_length, read_distribution

if TYPE_CHECKING:
    from headway.tokenizer import Tokenizer


_MOST_PREFIXES = 1_000_000
_USUAL_FIELDS = ("prompt", "question", "turns", "text")


@dataclass(frozen=True)
class Draft:
    """A request before its arrival time is known."""

    prompt_token_ids: list[int]
    num_output_tokens: int
    after: int | None = None
    """The number of the draft that this one follows."""
    think_s: float = 0.0


@dataclass(frozen=True)
class Size:
    """The lengths of a prompt and its answer."""

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
        """A new generator of this aspect."""
        return random.Random(f"{self.seed}/{aspect}")

    def ids(self, rng: random.Random, count: int) -> list[int]:
        return rng.choices(self._vocabulary, k=check_tokens(count, "A prompt, or a part of one,"))

    def rows(self, count: int) -> list[TraceRow]:
        """The next `count` rows of the trace."""
        if self.lengths.trace is None:
            raise ConfigError("This workload needs a table [trace] with a 'file'.")
        return self.lengths.trace.take(count, self.rng("trace"))

    def sizes(self, count: int) -> Iterator[Size]:
        """The lengths of `count` prompts and answers, before limits."""
        inputs, outputs = self.input_lengths(count), self.output_lengths(count)
        return (Size(num_in, num_out) for num_in, num_out in zip(inputs, outputs))

    def input_lengths(self, count: int) -> Iterator[int]:
        if self.lengths.input is not None:
            return self._drawn(self.lengths.input, count, "input")
        return (self._told(row.num_input_tokens, "input") for row in self.rows(count))

    def output_lengths(self, count: int) -> Iterator[int]:
        """The lengths of `count` answers. If both come from the trace, they are from the same rows as the prompts'."""
        if self.lengths.output is not None:
            return self._drawn(self.lengths.output, count, "output")
        return (self._told(row.num_output_tokens, "output") for row in self.rows(count))

    def tokens(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        return self._a_tokenizer().encode(text, add_special_tokens=False)

    def prompt_tokens(self, text: str, *, is_chat: bool) -> list[int]:
        """The ids of a whole prompt: with the tokens that the model expects around a text, or as the first turn of a
        chat."""
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


class Content(Protocol):
    @property
    def has_text(self) -> bool:
        """Whether drawing it needs a tokenizer."""

    def draw(self, drawing: Drawing, count: int) -> list[Draft]:
        """Draw `count` requests."""

    def num_available(self, trace: Trace | None) -> int | None:
        """How many requests there are before one is repeated; None if there is no end."""


def rows_in(trace: Trace | None) -> int | None:
    """How many requests a trace has; None if there is no trace."""
    return None if trace is None else len(trace.read())


@dataclass(frozen=True)
class RandomContent:
    has_text: ClassVar[bool] = False

    def draw(self, drawing: Drawing, count: int) -> list[Draft]:
        rng = drawing.rng("ids")
        drafts = []
        for size in drawing.sizes(count):
            num_out = drawing.limits.output(size.num_output_tokens)
            num_in = drawing.limits.input(size.num_input_tokens, num_out)
            drafts.append(Draft(drawing.ids(rng, num_in), num_out))
        return drafts

    def num_available(self, trace: Trace | None) -> int | None:
        return rows_in(trace)


@dataclass(frozen=True)
class SharedPrefixes:
    weights: tuple[float, ...]
    """The share of each prefix, relative to the sum of all weights."""
    prefix_tokens: Distribution

    has_text: ClassVar[bool] = False

    def draw(self, drawing: Drawing, count: int) -> list[Draft]:
        rng = drawing.rng("prefixes")
        prefixes = [drawing.ids(rng, draw_length(self.prefix_tokens, rng)) for _ in self.weights]
        choosing, writing = drawing.rng("prefix choice"), drawing.rng("ids")
        drafts = []
        for size in drawing.sizes(count):
            prefix = choosing.choices(prefixes, self.weights)[0]
            num_out = drawing.limits.output(size.num_output_tokens)
            prompt = prefix + drawing.ids(writing, size.num_input_tokens)
            drafts.append(Draft(drawing.limits.cut(prompt, num_out), num_out))
        return drafts

    def num_available(self, trace: Trace | None) -> int | None:
        return rows_in(trace)


def read_shared_prefixes(table: OptionsTable, folders: tuple[Path, ...]) -> SharedPrefixes:
    """Read the table `[content]`."""
    table.only("kind", "prefixes", "prefix_tokens", "weights", "zipf")
    count = table.whole("prefixes", most=_MOST_PREFIXES)
    if "weights" in table and "zipf" in table:
        table.fail("either 'weights' or 'zipf' says how often each prefix comes, not both")
    if "weights" in table:
        weights = table.weights("weights", count)
    else:
        exponent = table.number("zipf", 0.0, is_above=False, most=100.0)
        weights = tuple(place**-exponent for place in range(1, count + 1))
    if "prefix_tokens" not in table:
        table.fail("'prefix_tokens' is needed")
    length = read_distribution(table.raw("prefix_tokens"), "content: prefix_tokens: ", folders=folders)
    return SharedPrefixes(weights, length)


@dataclass(frozen=True)
class BlockContent:
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    scales_output: bool = True
    """Whether answers shrink like prompts; only if their length comes from the trace."""

    has_text: ClassVar[bool] = False

    def draw(self, drawing: Drawing, count: int) -> list[Draft]:
        rows = drawing.rows(count)
        wanted = {block_id for row in rows for block_id in self._ids(row)}
        blocks = {number: drawing.ids(drawing.rng(f"block {number}"), self.block_tokens) for number in wanted}
        drafts = []
        for row, length in zip(rows, drawing.output_lengths(count)):
            num_out = drawing.limits.output(self._scaled(length, drawing))
            check_tokens(len(self._ids(row)) * self.block_tokens, "A prompt")
            prompt = list(itertools.chain.from_iterable(blocks[number] for number in self._ids(row)))
            drafts.append(Draft(drawing.limits.cut(prompt, num_out), num_out))
        return drafts

    def num_available(self, trace: Trace | None) -> int | None:
        return rows_in(trace)

    def _ids(self, row: TraceRow) -> tuple[int, ...]:
        if row.block_ids is None:
            raise ConfigError("The trace has no block ids (hash_ids): content of kind 'blocks' needs them.")
        return row.block_ids

    def _scaled(self, length: int, drawing: Drawing) -> int:
        if not self.scales_output or drawing.lengths.output is not None:
            return length
        return max(1, round(length * self.block_tokens / MOONCAKE_BLOCK_TOKENS))


def read_block_content(table: OptionsTable) -> BlockContent:
    """Read the table `[content]`."""
    table.only("kind", "block_tokens", "scale_output")
    return BlockContent(
        table.whole("block_tokens", MOONCAKE_BLOCK_TOKENS, most=MOST_TOKENS), table.switch("scale_output", True)
    )


@dataclass(frozen=True)
class PromptContent:
    file: DataFile
    field: str | None = None
    """The field of the prompt; None: the first of the usual names that exists. If it is a list (`turns`), its first
    item counts."""
    answer_field: str | None = None
    """The field with an answer's text or number of tokens, for its length; None: lengths come from the workload."""
    is_chat: bool = False
    """Whether prompts are put into the model's chat template."""
    is_shuffled: bool = False

    has_text: ClassVar[bool] = True

    def draw(self, drawing: Drawing, count: int) -> list[Draft]:
        rows = list(self.file.rows())
        if not rows:
            raise ConfigError(f"The data file '{self.file.name}' has no rows.")
        if self.is_shuffled:
            drawing.rng("order").shuffle(rows)
        rows = [rows[place % len(rows)] for place in range(count)]
        lengths = drawing.output_lengths(count) if self.answer_field is None else None
        drafts = []
        for line, row in rows:
            length = next(lengths) if lengths is not None else self._answer_length(row, line, drawing)
            num_out = drawing.limits.output(length)
            prompt = drawing.prompt_tokens(self._text(row, line), is_chat=self.is_chat)
            if not prompt:
                raise self.file.fail(line, "the prompt is empty")
            drafts.append(Draft(drawing.limits.cut(prompt, num_out), num_out))
        return drafts

    def num_available(self, trace: Trace | None) -> int | None:
        return sum(1 for _ in self.file.rows())

    def _text(self, row: Row, line: int) -> str:
        name = self.field or next((usual for usual in _USUAL_FIELDS if usual in row), _USUAL_FIELDS[0])
        value: Any = field_of(row, name, file=self.file, line=line)
        if isinstance(value, list) and value:
            value = value[0]
        if not isinstance(value, str):
            raise self.file.fail(line, f"'{name}' must be a text, or a list that begins with one")
        return value

    def _answer_length(self, row: Row, line: int, drawing: Drawing) -> int:
        assert self.answer_field is not None
        value = field_of(row, self.answer_field, file=self.file, line=line)
        if isinstance(value, str):
            return max(1, len(drawing.tokens(value)))
        return max(1, round(number_of(row, self.answer_field, file=self.file, line=line, most=MOST_TOKENS)))


def read_prompt_content(table: OptionsTable, folders: tuple[Path, ...]) -> PromptContent:
    """Read the table `[content]`."""
    table.only("kind", "file", "field", "answer_field", "chat", "order")
    return PromptContent(
        DataFile(table.text("file"), folders),
        field=table.text("field") if "field" in table else None,
        answer_field=table.text("answer_field") if "answer_field" in table else None,
        is_chat=table.switch("chat", False),
        is_shuffled=table.choice("order", ("file", "random"), "file") == "random",
    )
