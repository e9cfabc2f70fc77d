"""What a search may change: the options of an engine, or of several, with the values that each may have."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError
from headway.front.roles import TOGETHER, Roles
from headway_lab.sim.calibration import Calibration
from headway_lab.sim.cost_model import Link
from headway_lab.sim.kv_variant import with_kv_format
from headway_lab.sim.setup import Setup, set_up
from headway_lab.sim.sim_comparison import capacity
from headway_lab.workload.bench_requests import BenchRequest

if TYPE_CHECKING:
    from headway_lab.tune.formats import Formats

Options = Mapping[str, Any]

_SEQS = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
_ITLS = (0.0, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 75.0, 100.0, 150.0, 200.0, 300.0, 500.0)
_CHUNKS = (None, 32, 64, 128, 256, 512, 1024, 2048)

_OF_FLEET = ("router", "roles")
"""Options that all replicas share, and not of each engine."""

_UNORDERED = ("scheduling_policy", "prefill_mode", "router", "kv_cache_dtype", "speculation")


@dataclass(frozen=True)
class Space:
    """Values of each knob, in order where they have one."""

    calibration: Calibration
    default: Options
    """The calibrated engine's options, with the given ones in their place."""
    knobs: Mapping[str, Sequence[Any]]
    fixed: Mapping[str, Any]
    """The given options. Other options that are not knobs keep their calibrated values."""
    num_replicas: int = 1
    link: Link = field(default_factory=Link)
    price_per_hour: float | None = None
    """The price of one device for an hour."""
    acceptance: float = 0.0
    """The tokens of a step with guesses, in the mean; 0 if they are not searched."""

    @property
    def num_devices(self) -> int:
        """The devices of all ranks of all replicas."""
        return self.num_replicas * self.calibration.tensor_parallel_size

    @staticmethod
    def of(
        calibration: Calibration,
        work: Sequence[BenchRequest],
        fixed: Options,
        *,
        num_replicas: int = 1,
        routers: Sequence[str] = ("round-robin",),
        has_roles: bool = False,
        link: Link | None = None,
        formats: Formats | None = None,
        price_per_hour: float | None = None,
    ) -> Space:
        """What can be searched for this work on one machine, or on several. With several, the router is an option too,
        and so are roles, if wanted. `formats` are those that the calibration can say something about."""
        setup = set_up(calibration, fixed)
        if has_roles and not setup.cache.shares_prefixes:
            raise ConfigError("--roles: blocks of other replicas are found in the prefix cache, which is off.")
        limits = setup.scheduler
        knobs: dict[str, Sequence[Any]] = {
            "max_num_seqs": _up_to(_SEQS, 2 * limits.max_num_seqs),
            "max_num_batched_tokens": _up_to(_TOKENS, 2 * limits.max_num_batched_tokens),
            "target_itl_ms": _ITLS,
            "max_chunk_tokens": [c for c in _CHUNKS if c is None or c < 2 * limits.max_num_batched_tokens],
            "scheduling_policy": _policies(work),
            "prefill_mode": ("chunked", "prefill-first", "decode-first"),
        }
        if formats is not None:  # first, since a format is worth more than a limit of the scheduler
            knobs = {**formats.knobs(calibration, fixed), **knobs}
        options = {**limits.as_options(), "kv_cache_dtype": setup.cache.kv_cache_dtype}
        default = {name: options[name] for name in knobs}
        searched = {name: _with(values, default[name]) for name, values in knobs.items() if name not in fixed}
        if num_replicas > 1:
            default["router"] = routers[0]
            searched |= {"router": routers} if len(routers) > 1 else {}
            if has_roles:
                default["roles"] = TOGETHER
                apart = (Roles(number, num_replicas - number) for number in range(1, num_replicas))
                searched["roles"] = [TOGETHER, *map(str, apart)]
        acceptance = 0.0 if formats is None else formats.acceptance
        return Space(
            calibration,
            default,
            searched,
            dict(fixed),
            num_replicas,
            link or Link(),
            price_per_hour=price_per_hour,
            acceptance=acceptance,
        )

    def set_up(self, options: Options) -> Setup:
        """The setup of each replica. `ConfigError` if its engine would refuse the options."""
        return set_up(self.machine(options), self.of_engine(options), link=self.link)

    def machine(self, options: Options) -> Calibration:
        """The calibration, or what is known of the same machine with another KV format."""
        kv_format = options.get("kv_cache_dtype", self.default.get("kv_cache_dtype"))
        if kv_format == self.default.get("kv_cache_dtype"):
            return self.calibration
        return with_kv_format(self.calibration, kv_format)

    def of_engine(self, options: Options) -> dict[str, Any]:
        """The options with the given ones, without the router and roles."""
        own = {**self.fixed, **{name: value for name, value in options.items() if name not in _OF_FLEET}}
        if own.get("kv_cache_dtype") == self.default.get("kv_cache_dtype"):
            own.pop("kv_cache_dtype", None)  # the calibrated one, which a simulation has anyway
        if self.acceptance and own.get("speculation", "off") != "off":
            own["spec_synthetic_acceptance"] = self.acceptance
        return own

    def capacity(self, options: Options, work: Sequence[BenchRequest]) -> float:
        """Requests each second that all replicas together serve with full batches."""
        roles = roles_in(options)
        most = capacity(work, self.machine(options), self.of_engine(options), link=self.link, roles=roles)
        return most if roles is not None else self.num_replicas * most

    def is_valid(self, options: Options) -> bool:
        """Whether the engine would take these options, and no other options mean the same."""
        if options["max_num_batched_tokens"] < options["max_num_seqs"]:
            return False
        if options["prefill_mode"] != "chunked" and options != self.default and options["target_itl_ms"]:
            return "target_itl_ms" not in self.knobs  # with whole prompts the target has no effect, so 0 is the same
        chunk = options["max_chunk_tokens"]
        if chunk is not None and chunk >= options["max_num_batched_tokens"] and "max_chunk_tokens" in self.knobs:
            return options == self.default
        try:
            self.set_up(options)
        except ConfigError:
            return False
        return True

    def draw(self, rng: random.Random) -> dict[str, Any]:
        """Draw valid options."""
        while True:
            drawn = {**self.default, **{name: rng.choice(values) for name, values in self.knobs.items()}}
            if self.is_valid(drawn):
                return drawn

    def neighbours(self, options: Options) -> Iterator[dict[str, Any]]:
        """Yield valid options that differ in one knob: by the next value on either side of an ordered knob, by any
        value of another."""
        for name, values in self.knobs.items():
            place = list(values).index(options[name])
            is_ordered = name not in _UNORDERED
            near = range(max(place - 1, 0), min(place + 2, len(values))) if is_ordered else range(len(values))
            for other in near:
                changed = {**options, name: values[other]}
                if other != place and self.is_valid(changed):
                    yield changed

    def fleets(self) -> Iterator[dict[str, Any]]:
        """Yield every router with all roles, with no other option changed; the default comes first."""
        names = [name for name in _OF_FLEET if name in self.knobs]
        for values in itertools.product(*(self.knobs[name] for name in names)):
            yield {**self.default, **dict(zip(names, values, strict=True))}

    def changes(self, options: Options) -> dict[str, Any]:
        """The options that differ from the default."""
        return {name: value for name, value in options.items() if value != self.default[name]}


def roles_in(options: Options) -> Roles | None:
    """The roles of the replicas; `None` if all replicas do both."""
    text = options.get("roles", TOGETHER)
    return None if text == TOGETHER else Roles.parse(text)


def _policies(work: Sequence[BenchRequest]) -> list[str]:
    """The policies that can use something in this work."""
    options = [request.options for request in work]
    found = ["fcfs", "mlfq", "prefix"]
    if any(one.predicted_tokens is not None for one in options):
        found += ["sjf", "srpt", "hrrn"]
    if any(one.ttft_target_s is not None or one.tpot_target_s is not None for one in options):
        found.append("slo")
    if len({one.priority for one in options}) > 1:
        found.append("priority")
    if len({one.tenant for one in options}) > 1:
        found.append("fair")
    return found


def _up_to(values: Sequence[int], most: int) -> list[int]:
    return [value for value in values if value <= most]


def _with(values: Sequence[Any], default: Any) -> Sequence[Any]:
    """The values with the default among them, in its place."""
    if default in values:
        return list(values)
    if all(isinstance(value, int | float) for value in [*values, default]):
        return sorted([*values, default])
    return [*values, default]
