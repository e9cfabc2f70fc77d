"""Variants of an engine that one `headway sim-check` checks: number formats, speculation, limits of the batch.

    --variant "fp8 quantization=fp8 kv_cache_dtype=fp8"      a name, and the options that differ

Each variant is loaded, calibrated and checked by itself; the results are rows of one table.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.config import check_names
from headway.console.flags import engine_flags
from headway.errors import ConfigError
from headway_lab.sim.sim_accuracy import TOLERANCES, Check, percent_text

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_PLACE = "{variant}"


@dataclass(frozen=True)
class Variant:
    """A name, and the options that differ from those of the command."""

    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


def parse_variants(texts: Sequence[str]) -> list[Variant]:
    """The variants of the flags; one without a name if there are none."""
    variants = [_parse(text) for text in texts] or [Variant()]
    names = [variant.name for variant in variants]
    if len(set(names)) < len(names):
        raise ConfigError(f"--variant: each needs a name of its own, and these are {', '.join(names)}.")
    return variants


def _parse(text: str) -> Variant:
    name, *parts = text.split() or [""]
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"--variant '{text}': begin with a name, then OPTION=VALUE, e.g. 'fp8 quantization=fp8'.")
    flags = {flag.name: flag for flag in engine_flags()}
    options: dict[str, Any] = {}
    for part in parts:
        option, is_given, value = part.partition("=")
        option = option.removeprefix("--").replace("-", "_")
        if not is_given or not value:
            raise ConfigError(f"--variant {name}: '{part}' is not OPTION=VALUE.")
        check_names([option])
        try:
            options[option] = flags[option].convert(value)
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"--variant {name}: {option}: {error}.") from None
    return Variant(name, options)


def file_of(text: str | None, variant: Variant, *, num_variants: int) -> str | None:
    """The file of a variant: `{variant}` in its name stands for the variant's. `ConfigError` if several variants would
    write the same one."""
    if text is None:
        return None
    if num_variants > 1 and _PLACE not in text:
        raise ConfigError(f"'{text}' would be written by each variant: put {_PLACE} into its name.")
    return text.replace(_PLACE, variant.name or "default")


SHORT_TITLES = {
    "output_throughput": "throughput",
    "mean_ttft_ms": "mean TTFT",
    "mean_tpot_ms": "mean TPOT",
    "p99_ttft_ms": "P99 TTFT",
    "p99_tpot_ms": "P99 TPOT",
    "p99_itl_ms": "P99 ITL",
    "p99_e2el_ms": "P99 E2E",
}


def errors_table(checks: Sequence[Check], *, at_measured_speed: bool = False) -> tuple[list[str], list[list[str]]]:
    """(titles, rows): a row for each check, with the errors that have a bound; `!` marks those beyond. With
    `at_measured_speed`, the errors that remain without those in the time of steps."""
    rows = []
    for check in checks:
        found = {row.key: row for row in check.rows if row.key in TOLERANCES}
        errors = {key: row.error_at_measured_speed if at_measured_speed else row.error for key, row in found.items()}
        is_within = {key: error is None or abs(error) <= TOLERANCES[key] for key, error in errors.items()}
        cells = [
            f"{percent_text(errors[key])}{'' if is_within[key] else ' !'}" if key in errors else "–"
            for key in TOLERANCES
        ]
        rows.append([_title(check), *cells, f"{check.speed:.2f}", f"{sum(is_within.values())} of {len(found)}"])
    return ["variant, requests, load", *(SHORT_TITLES[key] for key in TOLERANCES), "speed", "kept"], rows


def _title(check: Check) -> str:
    load = "all at once" if check.rate is None else f"{check.load:.2g}" if check.load else f"{check.rate:.3g}/s"
    return f"{check.name}, {check.num_requests:,}, {load}"
