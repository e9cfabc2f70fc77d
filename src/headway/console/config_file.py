"""Options in a file: TOML with one `name = value` for each, under the names of the flags, with - or _.

model = "Qwen/Qwen3-8B"
port = 9000
kv-cache-memory = "20GiB"
served-model-name = ["qwen", "chat"]
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from headway.config import RENAMED_OPTIONS
from headway.console.flags import FlagSpec
from headway.errors import ConfigError, did_you_mean
from headway.option_fields import parse_bytes, shown
from headway.text_files import read_decoded

_LONG_KEY = re.compile(r"""(?<![\w"'-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){32}""")
"""A key of many parts: a.a.a.a. The decoder takes a time that grows with the square of their number."""


def read_config_file(path: str, specs: Iterable[FlagSpec]) -> dict[str, Any]:
    """The values of a file, by option. `specs` are all options that there are, of whatever command, so that one file
    serves several commands. Raises `ConfigError`, which names the file and the key."""
    try:
        table = read_decoded(path, _decode, "TOML", most_bytes=2**16)
        return _values(table, {name: spec for spec in specs for name in (spec.name, *spec.aliases)})
    except ConfigError as error:
        hint = " Headway's files are TOML, not YAML: port = 9000." if path.endswith((".yaml", ".yml")) else ""
        raise ConfigError(f"{path}: {error}{hint}") from None


def _decode(text: str) -> dict[str, Any]:
    if _LONG_KEY.search(text):
        raise RecursionError
    return tomllib.loads(text)


def _values(table: Mapping[str, Any], specs: Mapping[str, FlagSpec]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in specs:
            raise ConfigError(_why_unknown(key, name, value, specs))
        spec = specs[name]
        if spec.name in values:
            raise ConfigError(f"'{keys[spec.name]}' and '{key}' are the same option; give one of them.")
        values[spec.name], keys[spec.name] = _value(spec, value), key
    return values


def _why_unknown(key: str, name: str, value: Any, specs: Mapping[str, FlagSpec]) -> str:
    if isinstance(value, dict):
        return f"there are no tables, and [{key}] is one: all options stand at the top."
    if name in RENAMED_OPTIONS:
        return f"the option {shown(key)} is now {' and '.join(RENAMED_OPTIONS[name])}."
    return f"unknown option {shown(key)}.{did_you_mean(name, tuple(specs))}"


def _value(spec: FlagSpec, value: Any) -> Any:
    """The value as the dataclass keeps it. What flags cannot say, a file cannot say either: NaN and infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{spec.name} must be a finite number, not {value}.")
    if isinstance(value, str) and spec.metavar == "BYTES":
        try:
            value = parse_bytes(value)
        except ConfigError as error:
            raise ConfigError(f"{spec.name}: {error}") from None
    elif isinstance(value, str) and spec.repeatable:
        value = (value,)
    return value if spec.check is None else spec.check(value)
