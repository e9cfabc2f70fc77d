"""The options of a command, each from where it was given first: flag, environment variable, file, default.

    --port 9000   >   HEADWAY_PORT=9000   >   port = 9000 in the file of --config   >   the default

A command adds its flags with `add_settled_flags` and reads them with `settle`. `SettledOptions.toml` is what
--print-config prints: a file that gives the same options again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from headway.config import EngineConfig
from headway.console.config_file import read_config_file
from headway.console.flags import FlagSpec, add_flags, chosen, engine_flags
from headway.console.option_variables import CONFIG_VARIABLE, read_variables, unknown_variables
from headway.errors import ConfigError


def add_settled_flags(parser: argparse.ArgumentParser, specs: list[FlagSpec]) -> None:
    """Add these flags, and those that name a file with options and print what was settled."""
    group = parser.add_argument_group("configuration")
    group.add_argument(
        "--config",
        metavar="FILE",
        help="A TOML file with options, for example 'port = 9000'. Flags and the environment's HEADWAY_... variables "
        f"come before it. (default: ${CONFIG_VARIABLE})",
    )
    group.add_argument(
        "--print-config",
        action="store_true",
        help="Print the options as a TOML file for --config, each with where it comes from, and end.",
    )
    add_flags(parser, specs)


@dataclass(frozen=True)
class Setting:
    """The value of an option, and who gave it."""

    value: Any
    sources: tuple[str, ...]
    """As an operator knows them: "--port", "$HEADWAY_PORT", "headway.toml". Only secrets have several."""


def settle(
    arguments: argparse.Namespace,
    specs: Sequence[FlagSpec],
    known: Sequence[FlagSpec],
    *,
    model: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> SettledOptions:
    """Read the options that were given by flags, environment and file, and warn of variables without a meaning. `specs`
    are the command's options. `known` are those of all commands, because they may share a file. `model` is a model that
    was named without --model."""
    for line in unknown_variables(known, environment).values():
        print(f"Warning: {line}", file=sys.stderr)
    given: dict[str, list[Setting]] = {spec.name: [] for spec in specs}  # what counts first stands first
    flags = chosen(arguments, list(specs))
    if model is not None:
        if flags.get("model") not in (None, model):
            raise ConfigError("MODEL and --model name two models; give one of them.")
        flags.pop("model", None)
        given["model"].append(Setting(model, ("MODEL",)))
    for spec in specs:
        if spec.name in flags:
            value = flags[spec.name] if spec.check is None else spec.check(flags[spec.name])
            given[spec.name].append(Setting(value, (spec.flag,)))
    for name, (value, variable) in read_variables(specs, environment).items():
        given[name].append(Setting(value, (f"${variable}",)))
    file = arguments.config or environment.get(CONFIG_VARIABLE)
    if file:
        for name, value in read_config_file(file, known).items():
            if name in given:
                given[name].append(Setting(value, (file,)))
    return SettledOptions(specs, {spec.name: _first(spec, found) for spec in specs if (found := given[spec.name])})


def _first(spec: FlagSpec, found: list[Setting]) -> Setting:
    """The setting that counts. Secrets of a list, such as API keys, count from wherever they come."""
    if not (spec.is_secret and spec.repeatable):
        return found[0]
    values = tuple(dict.fromkeys(value for setting in found for value in setting.value))
    return Setting(values, tuple(source for setting in found for source in setting.sources))


class SettledOptions:
    """What was given for the options of a command."""

    def __init__(self, specs: Sequence[FlagSpec], settings: Mapping[str, Setting]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self.settings = dict(settings)
        """By option. An option that was not given is left out: its default counts."""

    def given(self, names: Collection[str] | None = None) -> dict[str, Any]:
        """The values that were given, of these options or of all."""
        return {name: each.value for name, each in self.settings.items() if names is None or name in names}

    def engine_config(self) -> EngineConfig:
        """The configuration of the engine. Raises `ConfigError`, as `naming_sources` words it."""
        with self.naming_sources():
            return EngineConfig.from_options(**self.given({spec.name for spec in engine_flags()}))

    @contextlib.contextmanager
    def naming_sources(self) -> Iterator[None]:
        """Within this context, a `ConfigError` also says where the options that it names come from, unless that is the
        command line."""
        try:
            yield
        except ConfigError as error:
            words = set(re.findall(r"\w+", str(error).replace("-", "_")))
            places = [
                f"{name} comes from {' and '.join(setting.sources)}"
                for name, setting in self.settings.items()
                if name in words and not setting.sources[0].startswith(("--", "MODEL"))
            ]
            raise ConfigError(f"{error} ({'; '.join(places)})" if places else str(error)) from error

    def toml(self) -> str:
        """A configuration file with all options. Those without a value, and secrets, are comments."""
        lines = [
            "# Settled options. A flag comes before an environment variable, that before the file, that before the "
            "default."
        ]
        rows: list[tuple[str, str]] = []
        for name, spec in self._specs.items():
            setting = self.settings.get(name, Setting(spec.default, ("default",)))
            rows.append((_assignment(spec, setting.value), ", ".join(setting.sources)))
        width = min(48, max(len(text) for text, _ in rows))
        lines += [f"{text:<{width}}  # {_one_line(source)}" for text, source in rows]
        return "\n".join(lines) + "\n"


def _assignment(spec: FlagSpec, value: Any) -> str:
    """A line of the file, without its comment."""
    if value is None:
        return f"# {spec.name}: none"
    if spec.is_secret and value:
        return f"# {spec.name}: {len(value)} given; not shown, because it is secret"
    text = _toml(value)
    if isinstance(value, str) and _has_password(value):
        return f"# {spec.name}: given; not shown, because it has a password"
    if not _is_utf8(text):
        return f"# {spec.name}: given; not shown, because it is not UTF-8"
    return f"{spec.name} = {text}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):  # JSON's strings are TOML's, but for the character DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _one_line(text: str) -> str:
    """The text as a comment may have it."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _is_utf8(text: str) -> bool:
    """Whether it is text that a file can have. Names of files may be others."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _has_password(text: str) -> bool:
    """Whether the text is a URL with a password in it."""
    try:
        return "://" in text and urlsplit(text).password is not None
    except ValueError:
        return False
