"""Workloads from TOML files and from dicts of the same form. docs/workloads.md has every key.

requests = 500
arrivals = { kind = "poisson", rate = 4.0 }
input = { kind = "lognormal", median = 400, sigma = 1.0, cap = 4000 }
output = 128

[content]
kind = "shared_prefix"
prefixes = 8
prefix_tokens = 512
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway_lab.workload.arrivals import Arrivals, AtOnce, Recorded, Trace, read_arrivals, read_trace
from headway_lab.workload.catalogue import find_workload
from headway_lab.workload.content import (
    Content,
    Lengths,
    RandomContent,
    read_block_content,
    read_prompt_content,
    read_shared_prefixes,
)
from headway_lab.workload.conversations import read_conversation_content
from headway_lab.workload.input_files import OptionsTable
from headway_lab.workload.lengths import Distribution, Limits, read_distribution, read_limits
from headway_lab.workload.workload import Workload, read_classes

KEYS = ("name", "summary", "requests", "trace", "arrivals", "input", "output", "content", "limits", "classes")
CONTENT_KINDS = ("random", "prompts", "shared_prefix", "blocks", "conversations")

Folders = tuple[Path, ...]


def load_workload(path: str | Path, *, data_dir: str | Path | None = None, **overrides: Any) -> Workload:
    """Read a TOML file, or a shipped workload by its name. Files that it names are searched beside it (for a shipped
    one in the current folder) and then in `data_dir`. `overrides` are keys of the file; the keys of a table are merged
    into the file's table. `ConfigError` names the file, the key and what is allowed."""
    found = find_workload(path)
    file = found.file
    options = _over(_load(file), overrides)
    if isinstance(options.get("name", ""), str):
        options.setdefault("name", file.stem)
    try:
        return _read(options, (found.data_folder, *_folders(data_dir)))
    except ConfigError as error:
        raise ConfigError(f"workload '{path}': {error}") from None


def workload_from_options(
    options: Mapping[str, Any], *, base: Path | None = None, data_dir: str | Path | None = None
) -> Workload:
    """Make a workload from the content of such a file. `base`: where files that it names are searched first (default:
    here)."""
    try:
        return _read(options, (base or Path(), *_folders(data_dir)))
    except ConfigError as error:
        raise ConfigError(f"workload: {error}") from None


def parse_overrides(texts: Iterable[str]) -> dict[str, Any]:
    """`["limits.max_input=2000"]` → `{"limits": {"max_input": 2000}}`: values as in TOML, a bare word is a text."""
    merged: dict[str, Any] = {}
    for text in texts:
        key, is_there, value = text.partition("=")
        if not is_there or not key.strip():
            raise ConfigError(f"'{text}' is not KEY=VALUE, e.g. limits.max_input=2000.")
        for part in reversed(key.strip().split(".")):
            value = {part: _parse_value(value) if isinstance(value, str) else value}  # type: ignore[assignment]
        merged = _over(merged, value)  # type: ignore[arg-type]
    return merged


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def _load(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"workload '{file}': the file cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"workload '{file}': it is not valid TOML: {error}") from None


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge tables, unless the one above is of another kind, and replace everything else."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and value.get("kind") in (None, old.get("kind")):
            value = _over(old, value)
        merged[key] = value
    return merged


def _folders(data_dir: str | Path | None) -> Folders:
    if data_dir is None:
        return ()
    folder = Path(data_dir).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"there is no data directory '{data_dir}'.")
    return (folder,)


def _read(options: Mapping[str, Any], folders: Folders) -> Workload:
    table = OptionsTable(options).only(*KEYS)
    trace = read_trace(table.table("trace"), folders) if "trace" in table else None
    lengths = Lengths(_length(table, "input", folders), _length(table, "output", folders), trace)
    return Workload(
        table.text("name", "workload"),
        lengths,
        table.text("summary") if "summary" in table else "",
        num_requests=table.whole("requests") if "requests" in table else None,
        arrivals=_arrivals(table, trace, folders),
        content=_content(table, lengths, folders),
        limits=read_limits(table.table("limits")) if "limits" in table else Limits(),
        classes=read_classes(table.raw("classes")) if "classes" in table else (),
    )


def _length(table: OptionsTable, side: str, folders: Folders) -> Distribution | None:
    """The distribution of a length; None if it comes from the trace or is not given."""
    return read_distribution(table.raw(side), f"{side}: ", folders=folders) if side in table else None


def _arrivals(table: OptionsTable, trace: Trace | None, folders: Folders) -> Arrivals:
    """The arrivals. Without a table they are those of the trace, if its rows are in order; otherwise all at once."""
    if "arrivals" in table:
        return read_arrivals(table.table("arrivals"), trace, folders)
    return Recorded(trace) if trace is not None and not trace.is_shuffled else AtOnce()


def _content(table: OptionsTable, lengths: Lengths, folders: Folders) -> Content:
    """The content, checked against the lengths: none may be missing, and none may be without effect."""
    asked = table.table("content") if "content" in table else OptionsTable({"kind": "random"}, "content: ")
    kind = asked.choice("kind", CONTENT_KINDS)
    has_own_input = kind in ("prompts", "blocks") or (kind == "conversations" and "file" in asked)
    if has_own_input and lengths.input is not None:
        table.fail(f"input: content of kind '{kind}' has prompts of its own length; [limits] max_input cuts them")
    if not has_own_input and lengths.input is None and lengths.trace is None:
        table.fail("'input' is needed: how long prompts are")
    has_own_output = (kind == "prompts" and "answer_field" in asked) or (kind == "conversations" and "file" in asked)
    if not has_own_output and lengths.output is None and lengths.trace is None:
        table.fail("'output' is needed: how long answers are")
    return _read_content(kind, asked, lengths, folders)


def _read_content(kind: str, asked: OptionsTable, lengths: Lengths, folders: Folders) -> Content:
    if kind == "prompts":
        return read_prompt_content(asked, folders)
    if kind == "shared_prefix":
        return read_shared_prefixes(asked, folders)
    if kind == "conversations":
        return read_conversation_content(asked, folders)
    if kind == "blocks":
        if lengths.trace is None:
            asked.fail("content of kind 'blocks' needs a table [trace] with block ids")
        return read_block_content(asked)
    asked.only("kind")
    return RandomContent()
