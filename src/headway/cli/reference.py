"""`headway options`: the reference of every option, as text or as the Markdown page docs/options.md."""

from __future__ import annotations

import argparse
import re
import textwrap
from itertools import groupby

from headway.console.flags import SEED_CLASH, FlagSpec, engine_flags, sampling_flags

_TITLES = {
    "model": "Model",
    "cache": "KV cache",
    "scheduler": "Scheduler",
    "prediction": "Length prediction",
    "device": "Device",
    "sampling": "Sampling (`SamplingParams`)",
}
_INTRODUCTION = """\
# Options

<!-- Written by `make docs` from headway/config.py and headway/sampling_params.py. Do not edit. -->

The same names work everywhere: `LLM(block_size=32)` in Python, `--block-size 32` on the command line. An unknown name
is an error that points at the nearest valid one. What is `True` or `False` in Python, such as
`LLM(enable_prefix_caching=False)`, is a flag that is given or negated: `--enable-prefix-caching`,
`--no-enable-prefix-caching`. Numbers of bytes may carry a unit on the command line: `2GiB`, `500MB`.

The environment variable of an option is `HEADWAY_` and its name in capitals: `HEADWAY_BLOCK_SIZE=32`. In a file for
`--config` it is `block_size = 32`. [configuration.md](configuration.md) says which commands read them. Sampling options
belong to requests and have neither.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--markdown", action="store_true", help="Print docs/options.md.")


def run(arguments: argparse.Namespace) -> int:
    print(markdown() if arguments.markdown else plain_text(), end="")
    return 0


def markdown() -> str:
    """The whole of docs/options.md."""
    parts = [_INTRODUCTION]
    for section, specs in groupby([*engine_flags(), *sampling_flags()], key=lambda spec: spec.section):
        parts.append(f"\n## {_TITLES[section]}\n\n| option | default | meaning |\n|---|---|---|\n")
        parts.extend(_markdown_row(spec) for spec in specs)
    return "".join(parts)


def plain_text() -> str:
    """The reference as plain text for a terminal."""
    lines: list[str] = []
    for section, specs in groupby(
        [*engine_flags(), *sampling_flags(without=SEED_CLASH)], key=lambda spec: spec.section
    ):
        lines += ["", _TITLES[section].replace("`", "")]
        for spec in specs:
            default = f"  [{spec.default_text}]" if spec.default_text else ""
            lines.append(f"  {spec.flag}{default}")
            lines += textwrap.wrap(_meaning(spec), width=88, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines[1:]) + "\n"


def _markdown_row(spec: FlagSpec) -> str:
    default = f"`{spec.default_text}`" if spec.default_text else ""
    meaning = _meaning(spec).replace("|", "\\|")
    return f"| `{spec.name}` | {default} | {meaning} |\n"


def _meaning(spec: FlagSpec) -> str:
    if not spec.choices or set(spec.choices) <= set(re.findall(r"[\w-]+", spec.help)):
        return spec.help
    return f"{spec.help} One of: {', '.join(spec.choices)}."
