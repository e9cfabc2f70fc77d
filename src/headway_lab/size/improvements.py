"""What would make a token cheaper: each change is simulated alone, and its gain is the load that a device then carries.

The price of a token is that of a device's hour over what the device serves in it. So a change that lets a device carry
twice the load at the same promises halves the price. Another device costs something else: its gain says what it may
cost at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from headway.errors import HeadwayError
from headway.progress import Meter
from headway_lab.size.data_sheets import DEVICES
from headway_lab.size.deployment import BOUNDS, Deployment, Origin, deploy
from headway_lab.size.rates import Promised, highest_rate
from headway_lab.size.sizing import Effort, Sizing, breaking_objective


@dataclass(frozen=True)
class Change:
    """Something that could be different."""

    name: str
    promised: Promised
    is_other_device: bool = False


@dataclass(frozen=True)
class Improvement:
    """What a change brings."""

    name: str
    flags: dict[str, Any]
    """What has to be given for it, beside the answer's options."""
    device_rate: float
    """Requests a second for each device, with all promises kept."""
    gain: float
    """The same as a multiple of the answer's."""
    is_other_device: bool
    origin: Origin
    """Where its times come from."""

    @property
    def halves(self) -> bool:
        """Whether a token costs half, if the device costs the same."""
        return self.gain >= 2.0 and not self.is_other_device

    def most_price(self, price_per_hour: float, times_cheaper: float = 2.0) -> float:
        """What an hour of the device may cost for a token to be so many times cheaper."""
        return price_per_hour * self.gain / times_cheaper


class _Compared:
    """Deployments that are compared with the answer on the same requests. One whose times come from a data sheet is
    compared with the answer's own deployment by data sheet, so that what data sheets leave out is in both."""

    def __init__(self, sizing: Sizing, number: int) -> None:
        self._base, self._number = sizing.promised, number
        self._most = sizing.highest.rate / sizing.num_simulated or sizing.rate / sizing.num_replicas
        self._ceiling = sizing.highest.ceiling / sizing.num_simulated
        self._own_s = self._base.service_s(number)
        self._found: dict[bool, tuple[Promised, float]] = {}

    def highest(self, promised: Promised) -> float:
        """The highest rate of one replica."""
        factor = self._own_s / promised.service_s(self._number)
        return highest_rate(
            lambda rate: promised.trial(rate, self._number),
            guess=self._most * factor,
            ceiling=self._ceiling * factor,
            num_trials=2,
        ).rate

    def beside(self, origin: Origin) -> float:
        """The highest rate of the answer's replica, with times of the same origin."""
        by_sheet = origin == "data sheet" and self._base.deployment.origin != "data sheet"
        if by_sheet not in self._found:
            promised = self._base
            if by_sheet:
                deployment = self._base.deployment
                target = replace(deployment.target, calibration=None, uses_calibrations=False)
                promised = replace(promised, deployment=deploy(target, deployment.num_devices))
            self._found[by_sheet] = promised, self.highest(promised)
        return self._found[by_sheet][1]


def improvements(sizing: Sizing, *, effort: Effort, progress: Meter | None = None) -> list[Improvement]:
    """All changes, those with the largest gain first."""
    base, compared = sizing.promised, _Compared(sizing, effort.num_compared)
    each = sizing.highest_rate / sizing.num_devices
    changes, found = list(possible_changes(sizing, effort)), []
    for done, change in enumerate(changes):
        if progress is not None:
            progress.at(done, len(changes))
        deployment = change.promised.deployment
        own = compared.beside(deployment.origin) / base.deployment.num_devices
        gain = compared.highest(change.promised) / deployment.num_devices / own if own else 0.0
        flags = _new_flags(base, change)
        found.append(
            Improvement(change.name, flags, each * gain, gain, change.is_other_device, origin=deployment.origin)
        )
    return sorted(found, key=lambda one: -one.gain)


def possible_changes(sizing: Sizing, effort: Effort) -> Iterator[Change]:
    """The changes that can be made to this answer."""
    yield from _formats(sizing.promised)
    if (found := breaking_objective(sizing)) is not None:
        objective, _ = found
        bounds = [
            f"{text.partition('=')[0]}={effort.looser * objective.bound:g}"
            if text.partition("=")[0] == objective.key
            else text
            for text in sizing.promised.load.promises
        ]
        name = f"promise {objective.key} ≤ {effort.looser * objective.bound:g} instead of {objective.bound:g}"
        yield Change(name, replace(sizing.promised, load=replace(sizing.promised.load, promises=bounds)))
    yield from _other_ranks(sizing.promised)
    yield from _devices(sizing.promised, effort.num_faster)


def _formats(promised: Promised) -> Iterator[Change]:
    target, sheet = promised.deployment.target, promised.deployment.target.sheet
    if sheet is None:
        return
    is_float = target.options.get("quantization", "auto") in ("auto", "none", "stored")
    is_plain_cache = target.options.get("kv_cache_dtype", "auto") in ("auto", "bfloat16", "bf16")
    knows_float8 = sheet.fp8_tflops is not None
    weights = [("quantization", "fp8")] if knows_float8 and is_float else []
    cache = [("kv_cache_dtype", "fp8" if knows_float8 else "int8")] if is_plain_cache else []
    small = [("quantization", "int4")] if is_float else []
    both = [*(weights or small), *cache]
    names = {"quantization": "weights in", "kv_cache_dtype": "KV cache in"}
    for options in [weights, small, cache, both if len(both) > 1 else []]:
        if options:
            name = " and ".join(f"{names[key]} {value.upper()}" for key, value in options)
            yield from _change(promised, name, dict(options), promised.deployment.num_devices)


def _change(promised: Promised, name: str, options: dict[str, Any], num_ranks: int) -> Iterator[Change]:
    """The change, if it is possible."""
    try:
        deployment = deploy(promised.deployment.target.with_options(**options), num_ranks)
    except HeadwayError:
        return
    yield Change(name, replace(promised, deployment=deployment))


def _other_ranks(promised: Promised) -> Iterator[Change]:
    now = promised.deployment.num_devices
    if promised.deployment.target.calibration is not None:
        return
    for number in (now // 2, 2 * now):
        if 1 <= number <= BOUNDS.most_ranks:
            devices = "device" if number == 1 else "devices"
            yield from _change(promised, f"{number} {devices} for each replica", {}, number)


def _devices(promised: Promised, num_faster: int) -> Iterator[Change]:
    """The next faster devices, and the next slower one, on which the model fits."""
    target = promised.deployment.target
    if target.sheet is None:
        return
    own = target.sheet
    faster = [sheet for sheet in DEVICES if sheet.bandwidth_gb_s > own.bandwidth_gb_s and sheet.name != own.name]
    slower = [sheet for sheet in DEVICES if sheet.bandwidth_gb_s < own.bandwidth_gb_s and sheet.name != own.name]
    faster.sort(key=lambda sheet: sheet.bandwidth_gb_s)
    slower.sort(key=lambda sheet: -sheet.bandwidth_gb_s)
    for sheets, most in ((faster, num_faster), (slower, 1)):
        num_found = 0
        for sheet in sheets:
            if num_found == most:
                break
            if (deployment := _fewest_devices(promised.deployment, sheet.name)) is not None:
                num_found += 1
                name = f"{sheet.name} instead of {own.name}"
                if deployment.num_devices > 1:
                    name += f", {deployment.num_devices} for each replica"
                yield Change(name, replace(promised, deployment=deployment), is_other_device=True)


def _fewest_devices(deployment: Deployment, device: str) -> Deployment | None:
    sheet = next(sheet for sheet in DEVICES if sheet.name == device)
    number = 1
    while number <= BOUNDS.most_ranks:
        try:
            return deploy(deployment.target.on(sheet), number)
        except HeadwayError:
            number *= 2
    return None


def _new_flags(base: Promised, change: Change) -> dict[str, Any]:
    before, after = base.deployment.serve_flags, change.promised.deployment.serve_flags
    return {name: value for name, value in after.items() if before.get(name) != value and name != "max_model_len"}
