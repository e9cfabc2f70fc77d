"""Options as environment variables: HEADWAY_MAX_NUM_SEQS stands for --max-num-seqs, and so for every option.

    a number, a text        as after the flag: HEADWAY_KV_CACHE_MEMORY=2GiB
    a switch                true or false, on or off, 1 or 0
    a list                  with commas: HEADWAY_SERVED_MODEL_NAME=a,b. A secret is one text, commas and all.
    empty                   as if it were not set

Kubernetes sets variables for each service in the namespace. For a service named headway, HEADWAY_PORT is
tcp://10.0.0.7:8000. Such variables are no options, and nothing warns of them.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from headway.config import RENAMED_OPTIONS
from headway.console.flags import FlagSpec
from headway.errors import ConfigError, did_you_mean

PREFIX = "HEADWAY_"
CONFIG_VARIABLE = "HEADWAY_CONFIG"
"""Names a configuration file, as --config does."""
OTHER_VARIABLES = (
    CONFIG_VARIABLE,
    "HEADWAY_CACHE_DIR",
    "HEADWAY_DEBUG",
    "HEADWAY_FRONT_END",
    "HEADWAY_NATIVE_ISA",
    "HEADWAY_SECRET",
)
"""The variables that Headway reads and that are no options."""

_SWITCHES = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
_SERVICE_LINK = re.compile(
    r"HEADWAY_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)", re.ASCII
)
_LINK_TARGET = re.compile(r"(tcp|udp|sctp)://")


def variable_name(option: str) -> str:
    """The environment variable of an option: "max_num_seqs" → "HEADWAY_MAX_NUM_SEQS"."""
    return PREFIX + option.upper()


def read_variables(specs: Iterable[FlagSpec], environment: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """By option, the value that its variable gives, and the variable. Raises `ConfigError` for text that is no value of
    the option, and for an option whose two names are both set."""
    found: dict[str, tuple[Any, str]] = {}
    for spec in specs:
        for name in (spec.name, *spec.aliases):
            variable = variable_name(name)
            text = environment.get(variable, "")
            if not text or _is_from_kubernetes(variable, text):
                continue
            if spec.name in found:
                raise ConfigError(f"${found[spec.name][1]} and ${variable} are the same option; set one of them.")
            try:
                found[spec.name] = _value(spec, text), variable
            except (argparse.ArgumentTypeError, ConfigError) as error:
                raise ConfigError(f"${variable}: {error}") from None
    return found


def _value(spec: FlagSpec, text: str) -> Any:
    if spec.is_switch:
        if text.lower() not in _SWITCHES:
            raise ConfigError(f"'{text}' is neither true nor false.")
        value: Any = _SWITCHES[text.lower()]
    elif spec.is_secret:
        value = (text,)
    elif spec.repeatable:
        value = tuple(part.strip() for part in text.split(",") if part.strip())
    else:
        value = spec.convert(text)
    return value if spec.check is None else spec.check(value)


def unknown_variables(specs: Iterable[FlagSpec], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that begin with HEADWAY_ and have no meaning, where `specs` are all options that there are. Each
    with a sentence, for people, that names the nearest one with a meaning."""
    names = {name for spec in specs for name in (spec.name, *spec.aliases)}
    known = (*map(variable_name, sorted(names)), *OTHER_VARIABLES)
    former = {variable_name(name): now for name, now in RENAMED_OPTIONS.items()}
    found = {}
    for variable in sorted(environment):
        is_ours = variable.startswith(PREFIX) and not _is_from_kubernetes(variable, environment[variable])
        if not is_ours or variable in known:
            continue
        hint = did_you_mean(variable, known, by_beginning=False)
        if variable in former:
            hint = f" It is now {' and '.join(map(variable_name, former[variable]))}."
        found[variable] = f"The environment variable {variable} has no meaning.{hint}"
    return found


def _is_from_kubernetes(variable: str, value: str) -> bool:
    is_target = variable.endswith("PORT") and _LINK_TARGET.match(value) is not None
    return is_target or _SERVICE_LINK.fullmatch(variable) is not None
