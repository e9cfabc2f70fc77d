"""Command-line flags made from the dataclasses that own the options, so that no option is declared twice.

An engine option is a field of a section of `headway.config`, a server option a field of `ServerConfig`, a sampling
option a field of `SamplingParams`. The type hint decides how text becomes a value, the field's default is shown in the
help, and a flag that is not given is left out of the result, so that each dataclass applies its own default.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import json
import math
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from headway.config import RENAMED_OPTIONS, iter_options
from headway.errors import ConfigError, did_you_mean
from headway.option_fields import checked_value, parse_bytes
from headway.sampling_params import SamplingParams

SEED_CLASH = frozenset({"seed"})
"""Sampling fields that commands leave out: the engine's --seed already seeds every request of a command."""


@dataclasses.dataclass(frozen=True)
class FlagSpec:
    """One option as the command line and the reference page show it."""

    name: str
    help: str
    default: Any
    section: str
    metavar: str | None
    choices: tuple[str, ...] | None
    convert: Callable[[str], Any]
    repeatable: bool = False
    takes_several: bool = False
    """Whether a repeatable flag takes several values at once."""
    is_switch: bool = False
    is_engines: bool = False
    """Whether it is an option of the engine. Many commands take these, but only `--help-all` shows them."""
    aliases: tuple[str, ...] = ()
    """Other names of the same option."""
    is_secret: bool = False
    """Whether the value must not be shown."""
    check: Callable[[Any], Any] | None = None
    """Returns a value as the dataclass keeps it, or raises `ConfigError` if its type is another, or it is not one of
    the choices. Only for options of the engine and of the server."""

    @property
    def flag(self) -> str:
        return _flag(self.name)

    @property
    def flags(self) -> list[str]:
        """The flag, and those of its other names."""
        return [self.flag, *map(_flag, self.aliases)]

    @property
    def usage(self) -> str:
        """The flag, with its --no- form if it is a switch, or with its choices if it has some."""
        if self.is_switch:
            return f"{self.flag} or --no-{self.flag.removeprefix('--')}"
        return f"{self.flag} {'|'.join(self.choices)}" if self.choices else self.flag

    @property
    def default_text(self) -> str:
        """The default as help shows it; empty if the help sentence already explains what happens without a value."""
        if self.default is None or self.repeatable:
            return ""
        if isinstance(self.default, bool):
            return str(self.default)
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


def engine_flags(defaults: Mapping[str, Any] | None = None) -> list[FlagSpec]:
    """Every option of the engine. `defaults` are the command's own defaults, which the help shows instead."""
    return [
        dataclasses.replace(
            option_flag(section, field), default=(defaults or {}).get(field.name, field.default), is_engines=True
        )
        for section, field in iter_options()
    ]


def option_flag(section: type, field: dataclasses.Field[Any]) -> FlagSpec:
    """The flag of a field that was declared with `option`."""
    hint = _hints(section)[field.name]
    metavar, is_list = field.metadata["metavar"], isinstance(field.default, tuple)
    is_seconds = field.name.endswith("_s") and _unwrap_optional(hint)[0] is float
    return FlagSpec(
        name=field.name,
        help=field.metadata["help"],
        default=field.default,
        section=_section_title(section),
        metavar=metavar or ("SECONDS" if is_seconds else _metavar(hint)),
        choices=field.metadata["choices"],
        convert=memory_size if metavar == "BYTES" else str if is_list else converter(hint),
        repeatable=is_list,
        takes_several=field.metadata["takes_several"],
        is_switch=is_switch(hint),
        aliases=field.metadata["aliases"],
        is_secret=field.metadata["is_secret"],
        check=functools.partial(checked_value, field, hint),
    )


_hints = functools.cache(typing.get_type_hints)


def sampling_flags(defaults: Mapping[str, Any] | None = None, *, without: Collection[str] = ()) -> list[FlagSpec]:
    """Every field of `SamplingParams` but `without`. `defaults` are the command's own."""
    hints = typing.get_type_hints(SamplingParams)
    texts = _field_docs(SamplingParams)
    specs = []
    for field in dataclasses.fields(SamplingParams):
        if not field.init or field.name in without:
            continue
        hint = hints[field.name]
        pairs, is_record = "Mapping" in str(hint), "StructuredOutputsParams" in str(hint)
        specs.append(
            FlagSpec(
                name=field.name,
                help=texts[field.name],
                default=(defaults or {}).get(field.name, field.default),
                section="sampling",
                metavar="ID=BIAS" if pairs else "JSON" if is_record else _metavar(hint),
                choices=None,
                convert=_id_and_bias if pairs else _json_object if is_record else converter(hint),
                repeatable=pairs or "Sequence" in str(hint),
                is_switch=is_switch(hint),
            )
        )
    return specs


def add_flags(parser: argparse.ArgumentParser, specs: list[FlagSpec]) -> None:
    """Add these flags to `parser`, grouped by section. Flags that are not given stay out of the namespace. Only
    `--help-all` shows the engine's flags."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for spec in specs:
        if spec.section not in groups:
            groups[spec.section] = parser.add_argument_group(spec.section)
        group = groups[spec.section]
        details = "May be given several times." if spec.repeatable else ""
        if spec.default_text:
            details = f"(default: {spec.default_text})"
        common: dict[str, Any] = {
            "dest": spec.name,
            "default": argparse.SUPPRESS,
            "help": f"{spec.help} {details}".strip().replace("%", "%%"),
        }
        if spec.is_switch:
            action = group.add_argument(*spec.flags, action=argparse.BooleanOptionalAction, **common)
        elif spec.repeatable:
            several: dict[str, Any] = {"action": "extend", "nargs": "+"} if spec.takes_several else {"action": "append"}
            action = group.add_argument(*spec.flags, type=spec.convert, metavar=spec.metavar, **several, **common)
        elif spec.choices:
            action = group.add_argument(*spec.flags, choices=spec.choices, **common)
        else:
            action = group.add_argument(*spec.flags, type=spec.convert, metavar=spec.metavar, **common)
        if spec.is_engines and isinstance(parser, CommandParser):
            parser.leave_to_help_all(action)


def with_shape_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """These options, with the defaults that a built-in shape needs, because it has only random weights."""
    if options.get("model") is None:
        return dict(options)
    from headway.loader.builtin_shapes import BUILTIN_SHAPES

    needed = {"load_format": "dummy", "dtype": "bfloat16"} if options["model"] in BUILTIN_SHAPES else {}
    return {**needed, **options}


def chosen(
    namespace: argparse.Namespace, specs: list[FlagSpec], defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The given options, which override the command's own defaults. The dataclass supplies all other defaults."""
    given = {spec.name: getattr(namespace, spec.name) for spec in specs if hasattr(namespace, spec.name)}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return {**(defaults or {}), **given}


_SWITCH_VALUES = {"on": True, "true": True, "off": False, "false": False}


class CommandParser(argparse.ArgumentParser):
    """argparse without abbreviations, and with the nearest valid name in the error about an unknown one."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", functools.partial(argparse.HelpFormatter, max_help_position=30))
        super().__init__(allow_abbrev=False, **kwargs)
        self._only_in_help_all: list[tuple[argparse.Action, str | None]] = []

    def leave_to_help_all(self, action: argparse.Action) -> None:
        """Hide an option from `--help`, which then mentions `--help-all`."""
        if not self._only_in_help_all:
            self.add_argument(
                "--help-all",
                action=_HelpAll,
                help="Show the options of the engine, too: --model, --max-num-seqs and so on.",
            )
        self._only_in_help_all.append((action, action.help))
        action.help = argparse.SUPPRESS

    def show_all(self) -> None:
        """Show every option, as `--help-all` does."""
        for action, text in self._only_in_help_all:
            action.help = text

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """Parse, options and positionals in any order. An unknown option ends the process with code 2."""
        self._refuse_former_spellings(arguments)
        known = tuple(self._option_string_actions)
        namespace, unknown = self.parse_known_intermixed_args(arguments)
        if unknown:
            name = unknown[0].split("=", 1)[0]
            kind = "unknown option" if name.startswith("-") else "unexpected argument"
            self.error(f"{kind} '{name}'.{did_you_mean(name, known) if name.startswith('-') else ''}")
        return namespace

    def _refuse_former_spellings(self, arguments: list[str]) -> None:
        """Refuse former spellings, with an error that gives the present one: renamed options, and switches with "on" or
        "off" after them."""
        known = self._option_string_actions
        for argument, after in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
            flag, equals, value = argument.partition("=")
            former = flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else ""
            now = RENAMED_OPTIONS.get(former, ())
            if flag not in known and now and _flag(now[0]) in known:
                usages = {spec.name: spec.usage for spec in engine_flags()}
                self.error(f"the option '{flag}' is now {', and '.join(usages[name] for name in now)}.")
            value = value if equals else after
            if isinstance(known.get(flag), argparse.BooleanOptionalAction) and value in (*_SWITCH_VALUES, "auto"):
                positive, negative = known[flag].option_strings[:2]
                self.error(f"the option '{flag}' takes no value, and not '{value}': it is {positive} or {negative}.")

    def error(self, message: str) -> typing.NoReturn:
        self.exit(2, f"headway: error: {message}\nTry '{self.prog} --help'.\n")


class _HelpAll(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, CommandParser)
        parser.show_all()
        parser.print_help()
        parser.exit()


def suggest(action: argparse.Action, names: Sequence[str]) -> None:
    """Let shells complete a flag's value with these names, beside files."""
    setattr(action, _SUGGESTIONS, tuple(names))


def suggested(action: argparse.Action) -> tuple[str, ...]:
    """The names that `suggest` noted."""
    return getattr(action, _SUGGESTIONS, ())


_SUGGESTIONS = "headway_suggestions"


def count(least: int, most: int = 10**12) -> Callable[[str], int]:
    """A flag's type: a whole number from `least` to `most`."""

    def convert(text: str) -> int:
        if not text.isascii() or not text.isdigit() or (len(text) < 18 and int(text) < least):
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least {least}")
        if len(text) > 18 or int(text) > most:
            raise argparse.ArgumentTypeError(f"'{text}' is too large; the largest number here is {most:,}")
        return int(text)

    return convert


def parse_number(text: str, *, may_be_infinite: bool = False) -> float:
    """The number that a text on the command line stands for. Raises `ValueError` for any other text, NaN included. All
    fractional numbers are read here, so that no NaN goes further."""
    value = float(text)
    if math.isnan(value) or (math.isinf(value) and not may_be_infinite):
        raise ValueError(f"'{text}' is not a finite number")
    return value


def number(
    least: float = -math.inf, most: float = math.inf, *, is_above: bool = False, may_be_infinite: bool = False
) -> Callable[[str], float]:
    """A flag's type: a number from `least` to `most`. With `is_above`, `least` itself is too small."""
    bounds = [f"above {least:g}" if is_above else f"of at least {least:g}"] if least > -math.inf else []
    bounds += [f"of at most {most:,.10g}"] if most < math.inf else []

    def convert(text: str) -> float:
        try:
            value = parse_number(text, may_be_infinite=may_be_infinite)
        except ValueError:
            value = math.nan
        if not least <= value <= most or (is_above and value == least):
            raise argparse.ArgumentTypeError(f"'{text}' is not a number {' and '.join(bounds)}".rstrip())
        return value

    return convert


positive = number(0.0, is_above=True)


def is_switch(hint: Any) -> bool:
    """Whether a field of this type is a switch."""
    return _unwrap_optional(hint)[0] is bool


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _section_title(section: type) -> str:
    return section.__name__.removesuffix("Config").lower()


def _unwrap_optional(hint: Any) -> tuple[Any, bool]:
    """`int | None` → (int, True)."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        parts = [part for part in typing.get_args(hint) if part is not type(None)]
        return (parts[0] if len(parts) == 1 else hint), len(parts) < len(typing.get_args(hint))
    return hint, False


def _metavar(hint: Any) -> str | None:
    plain, _ = _unwrap_optional(hint)
    if "Sequence" in str(plain):
        return "ID" if "int" in str(plain) else "TEXT"
    return {int: "N", float: "X", str: "TEXT"}.get(plain)


def converter(hint: Any) -> Callable[[str], Any]:
    """The function that converts a flag's text to a value of this type."""
    plain, optional = _unwrap_optional(hint)
    kind: type = plain if plain in (int, float, str, bool) else (int if "int" in str(plain) else str)
    if kind is str:
        return str
    if kind is bool:
        return _on_or_off

    def convert(text: str) -> Any:
        if optional and text.lower() == "none":
            return None
        try:
            return parse_number(text) if kind is float else kind(text)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"'{text}' is not {wanted}{' or none' if optional else ''}") from None

    return convert


def _on_or_off(text: str) -> bool:
    """Convert the text of a switch that is given as a value, as in a list of values to try."""
    if text.lower() not in _SWITCH_VALUES:
        raise argparse.ArgumentTypeError(f"'{text}' is neither true nor false")
    return _SWITCH_VALUES[text.lower()]


def memory_size(text: str) -> int:
    """Bytes, as in "24GiB"."""
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _id_and_bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), parse_number(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not ID=BIAS, e.g. 42=-100") from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'\'{text}\' is no JSON object, e.g. {{"choice": ["yes", "no"]}}')
    return value


@functools.cache
def _field_docs(record: type) -> dict[str, str]:
    """The docstring under each field of a dataclass. Python drops these, so they are read from the source."""
    class_node = ast.parse(textwrap.dedent(inspect.getsource(record))).body[0]
    assert isinstance(class_node, ast.ClassDef)
    docs: dict[str, str] = {}
    for node, after in itertools.pairwise(class_node.body):
        match node, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
    return docs
