"""The traffic log: one line of JSON for each request that has ended, to learn lengths from.

By default (`hashed`) a line holds the numbers that predictors work on, not the prompt: counts of hashed n-grams, some
hashes, lengths. They cannot be turned back into the text, but a guess can be checked against them: treat a log as
pseudonymous, not as anonymous. With `ids` a line holds the token ids and what else is known, so that other features can
be made of it later.

Every line is written by one call, so that several engines can share a file; a crash can cut the last line, no other.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from headway.errors import ConfigError
from headway.predict.base import PromptView, TrafficLogError
from headway.predict.features import (
    FEATURES_VERSION,
    GRAM_COLUMNS,
    HEAD_LENGTHS,
    KEY_BITS,
    NUM_TURNS,
    TAIL_LENGTHS,
    PromptFeatures,
    PromptKeys,
    prompt_features,
)
from headway.predict.text_cues import NUM_CUES

logger = logging.getLogger(__name__)

LogContent = Literal["hashed", "ids"]
LOG_CONTENTS: tuple[str, ...] = get_args(LogContent)
LINE_VERSION = 1
MOST_LINE_BYTES = 16 * 2**20
"""A longer line was not written by Headway."""
MOST_TOKENS = 2**31 - 1

USED_REASONS = ("stop", "length")
ENDED_EARLY = ("abort", "error")
"""Finish reasons of answers whose length says nothing about how long they would have been."""


@dataclass(frozen=True, slots=True)
class TrafficRecord:
    """A request that ended by itself or was cut at the most tokens it could have."""

    features: PromptFeatures
    num_output_tokens: int
    is_cut: bool
    """Whether the answer was cut, and would have been at least this long."""
    arrival_s: float | None


class TrafficLog:
    """Appends to a file. If the log can no longer be written, it is closed with a warning, and serving goes on."""

    def __init__(self, path: str | Path, content: str = "hashed") -> None:
        if content not in LOG_CONTENTS:
            raise ConfigError(f"The content of a traffic log is one of {', '.join(LOG_CONTENTS)}; not {content!r}.")
        self._content = content
        self._path = Path(path)
        try:
            # Only the owner may read the file, because prompts are private.
            self._file: int | None = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            self._end_cut_line()
        except OSError as error:
            raise TrafficLogError(f"Cannot write the traffic log '{path}': {error.strerror}.") from error

    def write(
        self, prompt: PromptView, *, num_output_tokens: int, finish_reason: str | None, arrival_s: float | None = None
    ) -> None:
        """Add a request that has ended: by itself, cut, aborted or failed."""
        if self._file is None:
            return
        row: dict[str, Any] = {
            "v": LINE_VERSION,
            "arrival_s": arrival_s,
            "prompt_tokens": len(prompt.prompt_token_ids),
            "output_tokens": num_output_tokens,
            "finish_reason": finish_reason,
            "max_tokens": prompt.max_tokens,
            "temperature": prompt.temperature,
        }
        row |= _hashed_content(prompt) if self._content == "hashed" else _plain_content(prompt)
        line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        try:
            os.write(self._file, line)
        except OSError as error:
            logger.warning("traffic log %s: %s; nothing more is written to it", self._path, error.strerror)
            self.close()

    def close(self) -> None:
        """Write nothing more. Can be called again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> TrafficLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_cut_line(self) -> None:
        """End a line that a crash has cut, so that the next line is not lost with it."""
        assert self._file is not None
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")


@dataclass(slots=True)
class TrafficRead:
    records: list[TrafficRecord]
    num_lines: int = 0
    num_bad: int = 0
    """The number of lines that could not be parsed."""
    num_ended_early: int = 0
    """Requests that were aborted or failed; not among the records."""


def read_traffic(
    paths: Sequence[str | Path], *, most_records: int | None = None, progress: Callable[[int], None] | None = None
) -> TrafficRead:
    """Read logs in turn. Bad lines are counted, and warned of once per file; a last line that was cut off is normal.

    Only the last `most_records` usable ones are kept. `progress(num_lines)` is called now and then.
    """
    read = TrafficRead([])
    for path in paths:
        bad_before, first_bad = read.num_bad, ""
        try:
            for number, line in enumerate(_lines(Path(path)), 1):
                problem = _take(line, read)
                first_bad = first_bad or (problem and f"line {number}: {problem}")
                if most_records is not None and len(read.records) >= 2 * most_records:
                    del read.records[:-most_records]
                if progress is not None and read.num_lines % 1000 == 0:
                    progress(read.num_lines)
        except OSError as error:
            raise TrafficLogError(f"Cannot read the traffic log '{path}': {error.strerror}.") from error
        if read.num_bad > bad_before:
            logger.warning("%s: skipped %d bad lines (%s)", path, read.num_bad - bad_before, first_bad)
    if most_records is not None:
        del read.records[: max(0, len(read.records) - most_records)]
    return read


def _lines(path: Path) -> Iterator[bytes | None]:
    """Yields whole lines; None for one that is too long. Text after the last line end is a line being written or
    cut."""
    with path.open("rb") as file:
        while line := file.readline(MOST_LINE_BYTES):
            if line.endswith(b"\n"):
                yield line
            elif len(line) == MOST_LINE_BYTES:
                while (rest := file.readline(MOST_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield None


def _take(line: bytes | None, read: TrafficRead) -> str:
    """Add a line to the result. Returns what is wrong with the line; empty if nothing is."""
    if line is not None and not line.strip():
        return ""
    read.num_lines += 1
    try:
        if line is None:
            raise ValueError("it is too long")
        record = _parse(json.loads(line))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        read.num_bad += 1
        return f"no '{error.args[0]}'" if isinstance(error, KeyError) else str(error)
    if record is None:
        read.num_ended_early += 1
    else:
        read.records.append(record)
    return ""


def _parse(row: Any) -> TrafficRecord | None:
    if not isinstance(row, dict):
        raise ValueError("it is not an object")
    if row["v"] != LINE_VERSION:
        raise ValueError(f"version {row['v']!r} is not known")
    reason = row["finish_reason"]
    if reason in ENDED_EARLY:
        return None
    if reason not in USED_REASONS:
        raise ValueError(f"finish_reason {reason!r} is not known")
    num_output_tokens = _whole(row["output_tokens"], "output_tokens", MOST_TOKENS)
    features = _read_ids(row) if "prompt_token_ids" in row else _read_hashed(row)
    arrival_s = row.get("arrival_s")
    return TrafficRecord(
        features=features,
        num_output_tokens=num_output_tokens,
        is_cut=reason == "length",
        arrival_s=None if arrival_s is None else _real(arrival_s, "arrival_s"),
    )


# ---- the two kinds of content -------------------------------------------------------------------------------------


def _plain_content(prompt: PromptView) -> dict[str, Any]:
    return {"prompt_token_ids": list(prompt.prompt_token_ids), "text": prompt.text, "user": prompt.user}


def _hashed_content(prompt: PromptView) -> dict[str, Any]:
    features = prompt_features(prompt)
    return {
        "features": FEATURES_VERSION,
        "heads": features.keys.heads,
        "tails": features.keys.tails,
        "user": features.keys.user,
        "distinct_share": features.distinct_share,
        "turns": features.turns,
        "grams": base64.b64encode(features.grams).decode(),
        "cues": features.cues,
    }


def _read_ids(row: dict[str, Any]) -> PromptFeatures:
    ids, text, user = row["prompt_token_ids"], row.get("text"), row.get("user")
    if not isinstance(ids, list) or not ids:
        raise ValueError("prompt_token_ids is not a list of token ids")
    if not isinstance(text, str | None) or not isinstance(user, str | None):
        raise ValueError("text and user must be strings")
    return prompt_features(
        PromptView(
            prompt_token_ids=[_whole(token_id, "a token id", MOST_TOKENS) for token_id in ids],
            max_tokens=_max_tokens(row),
            temperature=_real(row["temperature"], "temperature"),
            text=text,
            user=user,
        )
    )


def _read_hashed(row: dict[str, Any]) -> PromptFeatures:
    if row["features"] != FEATURES_VERSION:
        raise ValueError(f"its features are of version {row['features']!r}, not {FEATURES_VERSION}")
    grams = base64.b64decode(row["grams"], validate=True)
    if len(grams) != GRAM_COLUMNS:
        raise ValueError(f"it has {len(grams)} n-gram counts, not {GRAM_COLUMNS}")
    cues = row["cues"]
    user = row["user"]
    keys = PromptKeys(
        heads=_hashes(row["heads"], len(HEAD_LENGTHS)),
        tails=_hashes(row["tails"], len(TAIL_LENGTHS)),
        user=None if user is None else _hashes([user], 1)[0],
        num_prompt_tokens=_whole(row["prompt_tokens"], "prompt_tokens", MOST_TOKENS),
        max_tokens=_max_tokens(row),
    )
    return PromptFeatures(
        keys=keys,
        temperature=_real(row["temperature"], "temperature"),
        distinct_share=_real(row["distinct_share"], "distinct_share"),
        turns=tuple(_real(number, "a number of turns") for number in _of_length(row["turns"], NUM_TURNS)),
        grams=grams,
        cues=None if cues is None else tuple(_real(cue, "a cue") for cue in _of_length(cues, NUM_CUES)),
    )


def _max_tokens(row: dict[str, Any]) -> int | None:
    value = row["max_tokens"]
    return None if value is None else max(1, _whole(value, "max_tokens", MOST_TOKENS))


def _hashes(values: Any, count: int) -> tuple[int, ...]:
    return tuple(_whole(value, "a hash", (1 << KEY_BITS) - 1) for value in _of_length(values, count))


def _of_length(values: Any, count: int) -> list[Any]:
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"a list of {count} numbers is of another size")
    return values


def _whole(value: Any, name: str, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{name} is not a whole number from 0 to {most}")
    return value


def _real(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is not a number")
    return float(value)
