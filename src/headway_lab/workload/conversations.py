"""Conversations: each turn's prompt is the one before, the answer to it, and the user's next message.

    turn 1   system + message 1
    turn 2   system + message 1 + answer 1 + message 2          sent think_s after the end of turn 1
    turn 3   ...

The answer in a prompt stands for the one that is going to be generated: it has its length, but other tokens. A
conversation ends before the turn that would be longer than the limits allow. A file of conversations is JSON Lines:

    history    [{"user": …, "bot": …}, …]                                  MT-Bench-101
    turns      ["…", "…"]            messages of users, without answers    MT-Bench, Spec-Bench
    messages   [{"role": "user", "content": …}, {"role": "assistant", …}]  as chat APIs have them
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headway.errors import ConfigError
from headway_lab.workload.arrivals import Trace
from headway_lab.workload.content import Draft, Drawing, rows_in
from headway_lab.workload.input_files import MOST_TOKENS, DataFile, OptionsTable, Row
from headway_lab.workload.lengths import Distribution, Lognormal, draw_length, read_distribution

DEFAULT_THINK_S = Lognormal(15.0, 1.0, 600.0)


@dataclass(frozen=True)
class Turn:
    message: str
    answer: str | None


@dataclass(frozen=True)
class ConversationFile:
    file: DataFile
    is_shuffled: bool = False

    def read(self) -> list[list[Turn]]:
        """Every conversation that has a turn."""
        talks = [_until_silence(self._talk(row, line)) for line, row in self.file.rows()]
        talks = [talk for talk in talks if talk]
        if not talks:
            raise ConfigError(f"The data file '{self.file.name}' has no conversations.")
        return talks

    def _talk(self, row: Row, line: int) -> list[Turn]:
        try:
            if "history" in row:
                return [Turn(_text(turn["user"]), _text(turn["bot"])) for turn in row["history"]]
            if "turns" in row:
                return [Turn(_text(turn), None) for turn in row["turns"]]
            return _from_messages(row["messages"])
        except (KeyError, TypeError, ValueError):
            raise self.file.fail(
                line, "it has no 'history' of {user, bot}, 'turns' of texts or 'messages' of {role, content}"
            ) from None


def _until_silence(talk: list[Turn]) -> list[Turn]:
    """The turns up to the first in which the user says nothing, which ends a conversation."""
    return list(itertools.takewhile(lambda turn: turn.message, talk))


def _from_messages(messages: list[dict[str, Any]]) -> list[Turn]:
    """The turns of a list of messages. Each is a message of the user, with the system's before it, and the assistant's
    answer."""
    turns: list[Turn] = []
    said: list[str] = []
    for message in messages:
        if message["role"] == "assistant":
            turns.append(Turn("\n".join(said), _text(message["content"])))
            said = []
        else:
            said.append(_text(message["content"]))
    return turns


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


@dataclass(frozen=True)
class Exchange:
    """A message of the user, and its answer."""

    message: list[int]
    answer: list[int]


class Talks(Protocol):
    """A source of conversations."""

    def talks(self, drawing: Drawing, count: int) -> Iterator[Iterator[Exchange]]:
        """Yield one conversation after the other, without end; `count` is the largest number of turns that is
        needed."""

    def num_available(self, trace: Trace | None) -> int | None:
        """How many turns there are before one is repeated; None if there is no end."""


@dataclass(frozen=True)
class ConversationContent:
    source: Talks
    think_s: Distribution = DEFAULT_THINK_S
    system_tokens: int = 0
    """The tokens of a system prompt with which all conversations begin."""

    @property
    def has_text(self) -> bool:
        return isinstance(self.source, RecordedTalks)

    def draw(self, drawing: Drawing, count: int) -> list[Draft]:
        system = drawing.ids(drawing.rng("system"), self.system_tokens)
        thinking = drawing.rng("think")
        drafts: list[Draft] = []
        for talk in self.source.talks(drawing, count):
            before: int | None = None
            history = system
            for exchange in talk:
                num_out = drawing.limits.output(len(exchange.answer))
                prompt = history + exchange.message
                fitting = drawing.limits.cut(prompt, num_out)
                if len(fitting) < len(prompt) and before is not None:
                    break
                think_s = 0.0 if before is None else max(0.0, self.think_s.draw(thinking))
                drafts.append(Draft(fitting, num_out, before, think_s))
                if len(drafts) == count:
                    return drafts
                before = len(drafts) - 1
                history = fitting + exchange.answer[:num_out]
        return drafts

    def num_available(self, trace: Trace | None) -> int | None:
        return self.source.num_available(trace)


@dataclass(frozen=True)
class RandomTalks:
    """Messages and answers of random ids, in the workload's lengths."""

    turns: Distribution

    def talks(self, drawing: Drawing, count: int) -> Iterator[Iterator[Exchange]]:
        rng, counting = drawing.rng("ids"), drawing.rng("turns")
        exchanges = (
            Exchange(drawing.ids(rng, size.num_input_tokens), drawing.ids(rng, size.num_output_tokens))
            for size in drawing.sizes(2 * count)  # one for each turn, and one for each that was too long
        )
        while True:
            yield itertools.islice(exchanges, draw_length(self.turns, counting))

    def num_available(self, trace: Trace | None) -> int | None:
        return rows_in(trace)


@dataclass(frozen=True)
class RecordedTalks:
    """Conversations of a file, repeated as needed. If it has no answers, their lengths are the workload's."""

    file: ConversationFile

    def talks(self, drawing: Drawing, count: int) -> Iterator[Iterator[Exchange]]:
        talks = self.file.read()
        if self.file.is_shuffled:
            drawing.rng("order").shuffle(talks)
        rng = drawing.rng("ids")
        lengths: Iterator[int] | None = None
        for talk in itertools.cycle(talks):
            exchanges = []
            for turn in talk:
                if turn.answer is not None:
                    answer = drawing.tokens(turn.answer)
                else:
                    lengths = lengths or self._lengths(drawing, count)
                    answer = drawing.ids(rng, next(lengths))
                exchanges.append(Exchange(drawing.tokens(turn.message), answer or drawing.ids(rng, 1)))
            yield iter(exchanges)

    def num_available(self, trace: Trace | None) -> int | None:
        return sum(map(len, self.file.read()))

    def _lengths(self, drawing: Drawing, count: int) -> Iterator[int]:
        if drawing.lengths.output is None and drawing.lengths.trace is None:
            name = self.file.file.name
            raise ConfigError(f"The conversations of '{name}' have no answers: give the workload a table [output].")
        return itertools.cycle(drawing.output_lengths(count))


def read_conversation_content(table: OptionsTable, folders: tuple[Path, ...]) -> ConversationContent:
    """Read the table `[content]`."""
    table.only("kind", "turns", "think_s", "system_tokens", "file", "order")
    if ("turns" in table) == ("file" in table):
        table.fail("conversations have either a number of 'turns' or a 'file'")
    if "file" in table:
        is_shuffled = table.choice("order", ("file", "random"), "file") == "random"
        source: Talks = RecordedTalks(ConversationFile(DataFile(table.text("file"), folders), is_shuffled))
    else:
        if "order" in table:
            table.fail("'order' goes with a 'file'")
        source = RandomTalks(read_distribution(table.raw("turns"), "content: turns: ", folders=folders))
    think: Distribution = DEFAULT_THINK_S
    if "think_s" in table:
        think = read_distribution(table.raw("think_s"), "content: think_s: ", folders=folders, is_time=True)
    return ConversationContent(source, think, table.whole("system_tokens", 0, least=0, most=MOST_TOKENS))
