"""Conversations of a JSON Lines file, in one of three usual forms.

history    [{"user": …, "bot": …}, …]                                  MT-Bench-101
turns      ["…", "…"]            what users said, without answers      MT-Bench, Spec-Bench
messages   [{"role": "user", "content": …}, {"role": "assistant", …}]  as chat APIs have them
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from headway.errors import ConfigError
from headway.lab.workload.data_file import DataFile, Row


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
    """A turn in which the user says nothing ends a conversation."""
    return list(itertools.takewhile(lambda turn: turn.message, talk))


def _from_messages(messages: list[dict[str, Any]]) -> list[Turn]:
    """A message of the user, or of the system before it, waits for the answer of the assistant."""
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
