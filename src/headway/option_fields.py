"""How an option is declared and how its value is checked: the fields of `headway.config` and of the server's options.

A declaration has everything that other places show or need: the help text, the possible values, what help calls the
value. Command-line flags, environment variables, keys of a configuration file and the reference pages come from it.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import re
import types
import typing
from dataclasses import field
from typing import Any, TypeVar

from headway.errors import ConfigError, did_you_mean

_T = TypeVar("_T")


def option(
    default: _T,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
    aliases: tuple[str, ...] = (),
    takes_several: bool = False,
    is_secret: bool = False,
) -> _T:
    """A dataclass field that carries its own documentation.

    `aliases` are other names of the same option. `takes_several`: the flag of a list takes several values at once, as
    in vLLM's `--served-model-name a b c`. The value of an option that `is_secret` is shown nowhere.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "metavar": metavar,
        "aliases": aliases,
        "takes_several": takes_several,
        "is_secret": is_secret,
    }
    return field(default=default, metadata=metadata)


def check_values(section: Any) -> None:
    """Raise `ConfigError` for the first field whose value is not one of its choices, or not of its declared type.

    Numbers and paths of other libraries become Python's own types. A bool is not accepted as a number, nor a float as
    an integer.
    """
    hints = typing.get_type_hints(type(section))
    for option_field in dataclasses.fields(section):
        value = getattr(section, option_field.name)
        checked = checked_value(option_field, hints[option_field.name], value)
        if checked is not value:
            object.__setattr__(section, option_field.name, checked)


def checked_value(option_field: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    """The value for a field of this type, as `check_values` would leave it. Raises `ConfigError` if it is none."""
    name, choices = option_field.name, option_field.metadata["choices"]
    given = f"one of type {type(value).__name__}" if option_field.metadata["is_secret"] else shown(value)
    if choices is not None and not (isinstance(value, str) and value in choices):
        hint_text = did_you_mean(str(value), choices)
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; not {given}.{hint_text}")
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and types.NoneType in kinds:
        return None
    converted = _converted(value, next(kind for kind in kinds if kind is not types.NoneType))
    if converted is None:
        wanted = " or ".join(_TYPE_NAMES[kind] for kind in kinds)
        raise ConfigError(f"{name} must be {wanted}, not {given}.")
    return converted


_TYPE_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "True or False",
    tuple[str, ...]: "a list of texts",
    types.NoneType: "None",
}


def shown(value: object) -> str:
    """A value as errors show it: cut off where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _converted(value: Any, kind: Any) -> Any:
    """The value converted to this type; `None` if it is not of the type."""
    if kind is str:
        return value if isinstance(value, str) else os.fspath(value) if isinstance(value, os.PathLike) else None
    if kind == tuple[str, ...]:
        is_list = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
        return tuple(value) if is_list else None
    if kind is bool:
        return value if isinstance(value, bool) else None
    if isinstance(value, bool) or type(value) in (int, kind):
        return None if isinstance(value, bool) else value
    wanted = numbers.Integral if kind is int else numbers.Real
    return kind(value) if isinstance(value, wanted) else None


def check_not_negative(section: Any, name: str) -> None:
    """Raise `ConfigError` if the field is a number below zero, or none."""
    value = getattr(section, name)
    if value is not None and not 0 <= value < math.inf:
        raise ConfigError(f"{name} must be a number that is not negative, not {value!r}.")


def check_at_least(section: Any, name: str, least: int) -> None:
    """Raise `ConfigError` if the field is below `least`."""
    value = getattr(section, name)
    if value is not None and value < least:
        raise ConfigError(f"{name} must be at least {least}, not {value}.")


_BYTE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(text: str) -> int:
    """'2GiB' → 2147483648. Accepts a plain number of bytes and the usual decimal and binary units."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _BYTE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or math.isinf(float(match[1])):
        raise ConfigError(f"'{text}' is not a number of bytes. Write e.g. 500MB, 2GiB or 2147483648.")
    return int(float(match[1]) * unit)
