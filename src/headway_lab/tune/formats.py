"""Formats that a search may choose: of the weights, of the KV cache, block sizes and guesses; and why others are not.

A calibration is that of one format of the weights and one block size, so others are searched if a calibration of each
is given. A KV format changes memory and the bytes that are read, which a calibration with 16 bits can say. Guesses need
their acceptance, which depends on the texts; a step that verifies them costs what one with as many rows costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.errors import ConfigError
from headway_lab.sim.calibration import Calibration
from headway_lab.sim.kv_variant import KV_FORMATS, can_change_kv


@dataclass(frozen=True)
class Formats:
    """The formats to search beside those of the calibration."""

    kv_formats: Sequence[str] = ()
    acceptance: float = 0.0
    """The tokens that a step with guesses brings, in the mean; 0: not known, so guesses are not searched."""

    def knobs(self, calibration: Calibration, fixed: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
        """The values to search; none of an option that is given."""
        found: dict[str, Sequence[Any]] = {}
        if self.kv_formats and "kv_cache_dtype" not in fixed and can_change_kv(calibration):
            found["kv_cache_dtype"] = list(self.kv_formats)
        if self.acceptance and "speculation" not in fixed:
            found["speculation"] = ["off", "ngram"]
        return found

    def not_searched(self, calibrations: Sequence[Calibration], fixed: Mapping[str, Any]) -> str:
        """A sentence on what cannot be priced from these calibrations, and why."""
        reasons = []
        if len({one.dtype for one in calibrations}) == 1:
            reasons.append(
                f"weight formats, because {_all(calibrations)} that of {calibrations[0].dtype} (give --calibration for "
                "each)"
            )
        sizes = sorted({one.block_size for one in calibrations})
        if len(sizes) == 1 and "block_size" not in fixed:
            reasons.append(
                f"block_size, because steps were measured with blocks of {sizes[0]} tokens, and what others change in "
                "their time is not known (give --calibration for each)"
            )
        if "kv_cache_dtype" not in fixed and not (self.kv_formats and all(map(can_change_kv, calibrations))):
            reasons.append(f"kv_cache_dtype, because {self._no_kv(calibrations)}")
        if not self.acceptance and "speculation" not in fixed:
            reasons.append(
                "speculation, because how many guesses are right depends on the texts (give --acceptance, from "
                "spec_decode_… of /metrics)"
            )
        return f"Not searched: {'; '.join(reasons)}." if reasons else ""

    def _no_kv(self, calibrations: Sequence[Calibration]) -> str:
        if not self.kv_formats:
            return "other formats change answers (give --kv-formats, e.g. int8,fp8)"
        one = next(each for each in calibrations if not can_change_kv(each))
        return (
            f"what a smaller format costs can be derived from 16 bits on a GPU, not from {one.kv_dtype} on {one.device}"
        )


def parse_kv_formats(text: str | None, *, default: Sequence[str] = ()) -> list[str]:
    """The KV formats of a flag, separated by commas; "none" for none."""
    if text is None:
        return list(default)
    names = [] if text == "none" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in KV_FORMATS:
            raise ConfigError(f"--kv-formats: '{name}' is none of {', '.join(KV_FORMATS)}, nor none.")
    return list(dict.fromkeys(names))


def check_calibrations(found: Sequence[Calibration]) -> None:
    """`ConfigError` unless these are of one model, and differ in something that a search may choose."""
    if len({(one.model, one.vocab_size) for one in found}) > 1:
        raise ConfigError("--calibration: several have to be of one model, in other formats or numbers of ranks.")
    if len({_form(one) for one in found}) < len(found):
        raise ConfigError(
            "--calibration: two have the same number of ranks (tensor_parallel_size), formats and machine; give one of "
            "them."
        )


def name_of_machine(calibration: Calibration) -> str:
    """A calibration's formats, as text: fp8 weights, bfloat16 activations, KV fp8, blocks of 64."""
    ranks = f", {calibration.tensor_parallel_size} ranks" if calibration.tensor_parallel_size > 1 else ""
    return f"{calibration.dtype}, KV {calibration.kv_dtype}, blocks of {calibration.block_size}{ranks}"


def _form(one: Calibration) -> tuple[Any, ...]:
    return one.tensor_parallel_size, one.dtype, one.kv_dtype, one.block_size, one.device_name


def _all(calibrations: Sequence[Calibration]) -> str:
    return "the calibration is" if len(calibrations) == 1 else "each calibration is"
