"""The calibration of a machine and an engine, which `headway calibrate` writes and every simulation reads.

The file is JSON. It has the cost model with its errors, the host's time, the KV memory, and the options of the measured
engine. A simulation runs with those options unless others are given.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from headway.config import CacheConfig, SchedulerConfig, check_names
from headway.errors import ConfigError, did_you_mean
from headway.models.costs import ModelCosts
from headway.settings import CacheSettings, SchedulerSettings
from headway.worker.ceilings import Ceilings
from headway.worker.step_costs import planned_costs
from headway_lab.bench.environment import device_name, versions
from headway_lab.sim.cost_model import CostModel, Link, Ranks, non_negative_least_squares
from headway_lab.sim.drafting import Drafting

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine


_OUTLIER = 5.0  # times the median: another process had the core

FORMAT = 2
_KIND = "headway calibration"


@dataclass(frozen=True)
class HostTime:
    """The host's seconds for a step, and for each request in it. Where steps overlap, this time runs beside the
    device's work."""

    before_s: float = 0.0
    before_row_s: float = 0.0
    after_s: float = 0.0
    after_row_s: float = 0.0

    def before(self, num_rows: int) -> float:
        """Seconds from the end of the step before until this step is on the device."""
        return self.before_s + self.before_row_s * num_rows

    def after(self, num_rows: int) -> float:
        """Seconds from the device's result until the tokens are out."""
        return self.after_s + self.after_row_s * num_rows

    def scaled(self, factor: float) -> HostTime:
        """A host that takes `factor` times as long."""
        return HostTime(**{name: factor * value for name, value in asdict(self).items()})

    @staticmethod
    def fit(steps: Sequence[tuple[int, float, float]]) -> HostTime:
        """Fit to (requests, seconds before, seconds after) of measured steps."""
        if not steps:
            return HostTime()
        rows, before, after = (np.array(side, dtype=np.float64) for side in zip(*steps, strict=True))
        return HostTime(*_line(rows, before), *_line(rows, after))

    def as_json(self) -> dict[str, float]:
        return asdict(self)

    @staticmethod
    def from_json(document: dict[str, Any]) -> HostTime:
        """Read what `as_json` made; `ValueError` or `TypeError` for anything else."""
        host = HostTime(**{name: float(value) for name, value in document.items()})
        if min(asdict(host).values()) < 0.0:
            raise ValueError("the host's time is negative")
        return host


def _line(rows: np.ndarray[Any, np.dtype[np.float64]], seconds: np.ndarray[Any, np.dtype[np.float64]]) -> list[float]:
    """Fit a line and return (constant, seconds per row)."""
    usual = seconds <= _OUTLIER * np.median(seconds)
    terms = np.stack([np.ones(int(usual.sum())), rows[usual]], axis=1)
    return [float(c) for c in non_negative_least_squares(terms, seconds[usual])]


@dataclass(frozen=True)
class Machine:
    """One device with its KV memory, and the host beside it."""

    cost: CostModel
    num_blocks: int
    block_size: int
    max_model_len: int
    overlap: bool = False
    """Whether a step is planned while another runs."""
    host: HostTime = field(default_factory=HostTime)
    num_host_slots: int = 0
    restore_block_s: float = 0.0
    bytes_per_block: int = 0
    ranks: Ranks = field(default_factory=Ranks)
    """What each rank sends, if the machine is one of several devices that have a part of the model each."""
    drafting: Drafting = field(default_factory=Drafting)
    link: Link = field(default_factory=Link)
    """The link from each rank to the others, and to other machines."""
    costs: ModelCosts | None = None
    """Bytes and flops of the model, if they are known; with `ceilings` they give the utilisation."""
    ceilings: Ceilings | None = None


@dataclass(frozen=True)
class Calibration:
    """A measured engine."""

    cost: CostModel
    host: HostTime
    overlap: bool
    """Whether a step is planned while another runs."""
    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    drafting: Drafting = field(default_factory=Drafting)
    """What guesses add to steps, if the measured engine made some."""
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    """Options of the engine's scheduler, with the defaults of its device."""
    cache: Mapping[str, Any] = field(default_factory=dict)
    """The cache's options that a simulation uses."""
    num_host_slots: int = 0
    restore_block_s: float = 0.0
    bytes_per_block: int = 0
    tensor_parallel_size: int = 1
    """The number of ranks. If it is above 1, one rank was measured without waiting for the others; a simulation adds
    the transfers."""
    num_layers: int = 0
    hidden_size: int = 0
    model: str = ""
    device: str = ""
    device_name: str = ""
    dtype: str = ""
    kv_dtype: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    costs: ModelCosts | None = None
    """Bytes and flops of the model, or of one rank's part. Older files have neither these nor `ceilings`."""
    ceilings: Ceilings | None = None
    """What the device can do at most."""
    verified: Mapping[str, Any] | None = None
    """What `headway sim-check` has found about simulations with this file."""

    @staticmethod
    def of_engine(
        engine: LLMEngine, cost: CostModel, host: HostTime, *, drafting: Drafting | None = None, model: str = ""
    ) -> Calibration:
        """Read from the engine what a simulation has to know."""
        plan = engine.plan
        cache = engine.config.cache
        return Calibration(
            cost=cost,
            host=host,
            overlap=engine.core.executor.max_in_flight > 1,
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            max_model_len=plan.max_model_len,
            vocab_size=engine.model_config.vocab_size,
            drafting=drafting or Drafting(),
            scheduler=engine.config.scheduler.as_options(),
            cache={name: getattr(cache, name) for name in CACHE_OPTIONS},
            num_host_slots=plan.num_host_slots,
            restore_block_s=plan.restore_block_s,
            bytes_per_block=plan.bytes_per_block,
            num_layers=engine.model_config.num_layers,
            hidden_size=engine.model_config.hidden_size,
            tensor_parallel_size=plan.num_ranks,
            model=model,
            device=plan.device,
            device_name=device_name(plan.device),
            dtype=plan.dtype,
            kv_dtype=plan.kv_dtype,
            versions=versions(),
            costs=planned_costs(engine.model_config, plan),
            ceilings=plan.ceilings,
        )

    @property
    def ranks(self) -> Ranks:
        """What travels between the ranks of the model."""
        value_bytes = _VALUE_BYTES.get(self.dtype, 2)
        return Ranks(self.tensor_parallel_size, self.num_layers, self.hidden_size, self.vocab_size, value_bytes)

    def machine(self, *, num_blocks: int | None = None, link: Link | None = None) -> Machine:
        return Machine(
            cost=self.cost,
            num_blocks=num_blocks or self.num_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            overlap=self.overlap,
            host=self.host,
            num_host_slots=self.num_host_slots,
            restore_block_s=self.restore_block_s,
            bytes_per_block=self.bytes_per_block,
            ranks=self.ranks,
            drafting=self.drafting,
            link=link or Link(),
            costs=self.costs,
            ceilings=self.ceilings,
        )

    @property
    def device_kind(self) -> str:
        """The kind of device whose defaults hold for options that the file leaves open."""
        return "cuda" if self.device.startswith("cuda") else "cpu"

    def scheduler_settings(self, **options: Any) -> SchedulerSettings:
        """The measured engine's settings, with these options changed."""
        return SchedulerConfig(**{**self.scheduler, **options}).resolve(self.device_kind)

    def cache_settings(self, **options: Any) -> CacheSettings:
        """The measured cache's settings, with these options changed."""
        given = {**self.cache, **options}
        block_size = given.get("block_size") or self.block_size
        return CacheConfig(**{**given, "block_size": block_size}).resolve(self.device_kind)

    def scaled(self, factor: float) -> Calibration:
        """The same machine with all times multiplied by `factor`."""
        ceilings = None if self.ceilings is None else self.ceilings.scaled(1.0 / factor)
        return dataclasses.replace(
            self,
            cost=self.cost.scaled(factor),
            host=self.host.scaled(factor),
            drafting=self.drafting.scaled(factor),
            ceilings=ceilings,
        )

    def as_json(self) -> dict[str, Any]:
        """The content of the file."""
        plain = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        parts = {
            name: None if part is None else dataclasses.asdict(part)
            for name, part in (("costs", self.costs), ("ceilings", self.ceilings))
        }
        own = {"cost": self.cost.as_json(), "host": self.host.as_json(), "drafting": self.drafting.as_json()}
        return {"kind": _KIND, "format": FORMAT, **plain, **own, **parts}

    def save(self, path: str | Path) -> None:
        """Write the calibration as JSON; `ConfigError` if it cannot be written."""
        try:
            Path(path).write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"Cannot write the calibration '{path}': {error.strerror}.") from error

    @staticmethod
    def find(name_or_path: str | Path) -> Calibration:
        """Load a calibration from a file, or that of a shipped machine by its name."""
        shipped = shipped_machines()
        text = str(name_or_path)
        if text in shipped and not Path(text).exists():
            return Calibration.load(shipped[text])
        if Path(text).exists() or Path(text).suffix or Path(text).name != text:
            return Calibration.load(text)
        hint = did_you_mean(text, tuple(shipped)) or f" They are: {', '.join(shipped)}."
        raise ConfigError(
            f"There is neither a file '{text}' nor a machine of that name that is shipped.{hint} "
            "'headway calibrate --output FILE' measures this one."
        )

    @staticmethod
    def load(path: str | Path) -> Calibration:
        """Read what `save` wrote; `ConfigError` if it is something else."""
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"Cannot read the calibration '{path}': {error.strerror}.") from error
        except ValueError as error:
            raise ConfigError(f"'{path}' is no calibration: it is not JSON ({error}).") from error
        if not isinstance(document, dict) or document.pop("kind", None) != _KIND:
            raise ConfigError(f"'{path}' is no calibration; 'headway calibrate --output FILE' writes one.")
        found = document.pop("format", None)
        if found != FORMAT:
            raise ConfigError(f"The calibration '{path}' has format {found}, not {FORMAT}: calibrate again.")
        try:
            return _parse(document)
        except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
            reason = f"'{error.args[0]}' is missing" if isinstance(error, KeyError) else str(error).rstrip(".")
            raise ConfigError(f"The calibration '{path}' cannot be used: {reason}.") from error


def shipped_machines() -> dict[str, Path]:
    """Calibrations that come with the package, by name."""
    folder = Path(str(files("headway_lab.sim") / "machines"))
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


CACHE_OPTIONS = ("enable_prefix_caching", "eviction_policy", "kv_allocation", "kv_cache_dtype")
_VALUE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_COUNTS = ("num_blocks", "block_size", "max_model_len", "vocab_size")


def _parse(document: dict[str, Any]) -> Calibration:
    names = {item.name for item in dataclasses.fields(Calibration)}
    if unknown := sorted(set(document) - names):
        raise ValueError(f"'{unknown[0]}' is not known")
    num_ranks = document.setdefault("tensor_parallel_size", 1)
    of_ranks = ("num_layers", "hidden_size") if num_ranks != 1 else ()
    for name in (*_COUNTS, "tensor_parallel_size", *of_ranks):
        if isinstance(document[name], bool) or not isinstance(document[name], int) or document[name] < 1:
            raise ValueError(f"{name} is {document[name]!r}, not a whole number of at least 1")
    for name in ("num_host_slots", "restore_block_s", "bytes_per_block"):
        value = document.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise ValueError(f"{name} is {value!r}, not a number that is not negative")
    if not isinstance(document["overlap"], bool):
        raise ValueError(f"overlap is {document['overlap']!r}, not true or false")
    parsed = Calibration(
        **{
            **document,
            "cost": CostModel.from_json(document["cost"]),
            "host": HostTime.from_json(document["host"]),
            "drafting": Drafting.from_json(document.get("drafting", {})),
            "costs": _part(ModelCosts, document.get("costs"), "costs"),
            "ceilings": _part(Ceilings, document.get("ceilings"), "ceilings"),
        }
    )
    check_names([*parsed.scheduler, *parsed.cache])
    parsed.scheduler_settings(), parsed.cache_settings()  # raise if the values are not this version's
    return parsed


_Part = TypeVar("_Part", ModelCosts, Ceilings)


def _part(kind: type[_Part], document: Any, name: str) -> _Part | None:
    """A record of numbers above 0, if the file has it."""
    if document is None:
        return None
    part = kind(**document)
    for item in dataclasses.fields(part):
        value = getattr(part, item.name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if item.name != "matmul_dtype" and not (is_number and value >= 0 and (value or kind is ModelCosts)):
            raise ValueError(f"{item.name} of {name} is {value!r}, not a number that makes sense")
    return part
