"""A cost model from a device's data sheet and a model's shape: bytes over bandwidth, flops over peak, and constants.

    W   bytes of a rank's weights that a step multiplies with;  F  flops of its linear layers for one token
    K   bytes of keys and values of one token;                  H  flops of the output projection for one token

    decode of n rows      √( (W/b)² + (n·(F + H)/f)² )                 + K·context/k + layers·l + s
    chunks of n tokens    √( (W/b)² + (n·F/f)² ) + H·sampled rows/f    + K·context/k + layers·c + s
                          + 4·q·layers·pairs/a

Reading weights and multiplying overlap, but not wholly: where both take as long, they take 1.4 times as long together.
b and k are the bandwidth times the shares of it that the engine's kernels reach for weights and for the cache. f and a
are the peak times the shares that its linear layers and its attention reach. l, c and s are the time of a layer, and of
a step, that neither explains: kernels that begin and end. `Shares` has these eight numbers, and where they come from.

The cost model of the simulator has straight lines between its knees, and so this one meets the formula at the knees.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headway.config import EngineConfig
from headway.core.step_work import StepWork
from headway.errors import ConfigError
from headway.models.costs import ModelCosts, model_costs
from headway.worker.memory_needs import PlannedModel, planned_model
from headway_lab.sim.calibration import CACHE_OPTIONS, Calibration, HostTime
from headway_lab.sim.cost_model import ROW_KNEES, TOKEN_KNEES, CostModel
from headway_lab.size.data_sheets import DataSheet


@dataclass(frozen=True)
class Shares:
    """What the engine reaches of a data sheet.

    The first eight were fitted to what Llama 3.1 8B in bfloat16 did on an H200: the steps of its calibration
    (h200-llama31-8b), its rows `b1`, `b64` and `prefill` in benchmarks/RESULTS.md, and those of its shards for two and
    four ranks in docs/results/tensor_parallel.md. `python benchmarks/data_sheet_shares.py --fit` fits them again.
    Without `--fit` it measures their error on models and formats that they were not fitted to.
    """

    weights: float = 0.913
    """Of the bandwidth, for weights."""
    cache: float = 0.825
    """Of the bandwidth, for keys and values."""
    matmul: float = 0.679
    """Of the peak, for linear layers of large chunks."""
    attention: float = 0.319
    """Of the peak, for the pairs of tokens that chunks compare."""
    layer_s: float = 29.8e-6
    """Seconds of a layer beside its bytes and flops, if a step decodes several rows."""
    lone_layer_s: float = 14.1e-6
    """The same for a single row, which has kernels of its own."""
    chunk_layer_s: float = 60.5e-6
    """The same for chunks of prompts, whose kernels are launched one by one."""
    step_s: float = 117e-6
    """Seconds of a step: its inputs, the sampler."""
    int4_weights: float = 0.46
    """Of the bandwidth, for weights of 4 bits, whose kernels have more to compute. From the row `b1` of INT4 in
    docs/results/quantization.md."""
    host: HostTime = field(default_factory=lambda: HostTime(748e-6, 2.8e-6, 113e-6, 2.9e-6))
    """The host's time, as calibrated beside an H200 (h200-llama31-8b)."""


MEASURED = Shares()


@dataclass(frozen=True)
class RankCosts:
    """The bytes and flops of one rank, in the number formats that it runs with."""

    costs: ModelCosts
    """Of the rank."""
    num_layers: int
    weight_format: str
    """The format of the linear layers: "none" for floats."""


def rank_costs(planned: PlannedModel, weight_format: str) -> RankCosts:
    """What each rank of this model reads and computes."""
    needs = planned.needs
    whole = model_costs(planned.config, bytes_per_weight=1.0, kv_bytes_per_token=needs.kv_bytes_per_token)
    ranks = needs.num_ranks
    costs = dataclasses.replace(
        whole,
        weight_bytes=planned.step_weight_bytes,
        linear_flops_per_token=whole.linear_flops_per_token / ranks,
        attention_flops_per_pair=whole.attention_flops_per_pair / ranks,
        output_flops=whole.output_flops / ranks,
        output_bytes=planned.output_weight_bytes,
    )
    return RankCosts(costs, planned.config.num_layers, weight_format)


def data_sheet_seconds(
    work: StepWork, rank: RankCosts, sheet: DataSheet, shares: Shares = MEASURED, *, num_tokens: float | None = None
) -> float:
    """Seconds that a step of this work takes by the formula above. `num_tokens` may stand for another number of tokens
    than the work's."""
    costs, bandwidth, peak = rank.costs, 1e9 * sheet.bandwidth_gb_s, 1e12 * sheet.tflops
    linear_bytes = costs.weight_bytes - costs.output_bytes
    weights = shares.int4_weights if rank.weight_format == "int4" else shares.weights
    read_s = linear_bytes / (weights * bandwidth) + costs.output_bytes / (shares.weights * bandwidth)
    linear_s = costs.linear_flops_per_token / (shares.matmul * _linear_peak(rank, sheet))
    output_s = costs.output_flops / (shares.matmul * peak)
    context_s = costs.kv_bytes_per_token * work.num_context_tokens / (shares.cache * bandwidth)
    number = work.num_tokens if num_tokens is None else num_tokens
    if not work.num_chunks:
        layer_s = shares.lone_layer_s if work.num_tokens == 1 else shares.layer_s
        computed_s = number * (linear_s + output_s)
        return math.hypot(read_s, computed_s) + context_s + rank.num_layers * layer_s + shares.step_s
    pairs_s = costs.attention_flops_per_pair * work.num_chunk_pairs / (shares.attention * peak)
    own_s = math.hypot(read_s, number * linear_s) + work.num_sampled * output_s + pairs_s
    return own_s + context_s + rank.num_layers * shares.chunk_layer_s + shares.step_s


def _linear_peak(rank: RankCosts, sheet: DataSheet) -> float:
    """Flops a second of the format that linear layers multiply in. Weights of 4 bits become floats before they are
    multiplied; how fast 8-bit integers are was not measured, and they count as floats."""
    return 1e12 * (sheet.fp8_tflops or sheet.tflops if rank.weight_format == "fp8" else sheet.tflops)


def data_sheet_cost(rank: RankCosts, sheet: DataSheet, shares: Shares = MEASURED) -> CostModel:
    """The formula as a cost model of the simulator."""

    def rows(number: float) -> float:
        return data_sheet_seconds(StepWork(2, 2, 2, 0), rank, sheet, shares, num_tokens=number)

    def tokens(number: float) -> float:
        return data_sheet_seconds(StepWork(2, 1, 0, 0, 1), rank, sheet, shares, num_tokens=number)

    lone_s = data_sheet_seconds(StepWork(1, 1, 1, 0), rank, sheet, shares)
    costs, bandwidth, row_lines = rank.costs, 1e9 * sheet.bandwidth_gb_s, _lines(rows, ROW_KNEES)
    return CostModel(
        (
            *row_lines,
            *_lines(tokens, TOKEN_KNEES),
            costs.output_flops / (shares.matmul * 1e12 * sheet.tflops),
            0.0,
            costs.kv_bytes_per_token / (shares.cache * bandwidth),
            costs.attention_flops_per_pair / (shares.attention * 1e12 * sheet.tflops),
            0.0,
        ),
        lone_factor=lone_s / _value(row_lines, ROW_KNEES, 1.0),
    )


def moved(measured: CostModel, before: CostModel, after: CostModel) -> CostModel:
    """A measured cost model, after a change whose effect is known only by data sheet: every part of it changes by the
    ratio of the two models by data sheet."""
    num_rows = 1 + len(ROW_KNEES)

    def ratio_of(first: int, last: int, knees: Sequence[int]) -> tuple[float, ...]:
        def seconds(number: float) -> float:
            now, then, own = (_value(m.coefficients[first:last], knees, number) for m in (after, before, measured))
            return own * now / then

        return _lines(seconds, knees)

    ends = [
        own * now / then if then else own
        for own, now, then in zip(
            measured.coefficients[-5:], after.coefficients[-5:], before.coefficients[-5:], strict=True
        )
    ]
    return dataclasses.replace(
        measured,
        coefficients=(*ratio_of(0, num_rows, ROW_KNEES), *ratio_of(num_rows, -5, TOKEN_KNEES), *ends),
        lone_factor=measured.lone_factor * after.lone_factor / before.lone_factor,
    )


def _value(coefficients: Sequence[float], knees: Sequence[int], number: float) -> float:
    constant, *rest = coefficients
    return constant + sum(each * max(number - knee, 0) for each, knee in zip(rest, knees, strict=True))


def _lines(seconds: Callable[[float], float], knees: Sequence[int]) -> tuple[float, ...]:
    """The constant and a coefficient for each knee, of the lines that meet a function at the knees. The last line goes
    through twice the last knee."""
    points = [*knees, 2 * knees[-1]]
    values = [seconds(point) for point in points]
    slopes = [
        (above - below) / (right - left)
        for below, above, left, right in zip(values, values[1:], points, points[1:], strict=False)
    ]
    changes = [slope - last for slope, last in zip(slopes[1:], slopes, strict=False)]
    return (values[0], slopes[0], *changes)


class DoesNotFit(ConfigError):
    """The device has too little memory for the model."""


def data_sheet_calibration(
    config: EngineConfig, sheet: DataSheet, *, shares: Shares = MEASURED
) -> tuple[Calibration, PlannedModel]:
    """An engine with these options on this device, as if it had been calibrated there. Raises `DoesNotFit` if the model
    does not fit."""
    planned = planned_model(config)
    needs = planned.needs
    scheduler, cache = config.scheduler.resolve("cuda"), config.cache.resolve("cuda")
    gib = 2**30
    room = needs.room(sheet.memory_gb * gib, config.cache.gpu_memory_utilization)
    bytes_per_block = cache.block_size * needs.kv_bytes_per_token
    longest = -(-needs.max_model_len // cache.block_size)
    num_blocks = min(room // bytes_per_block, scheduler.max_num_seqs * longest)
    if num_blocks < longest:
        raise DoesNotFit(
            f"{planned.title} takes {needs.weight_bytes / gib:,.1f} GiB of weights on each of {needs.num_ranks} "
            f"devices and {needs.working_bytes / gib:,.1f} GiB of working space, which leaves "
            f"{room / gib:,.1f} GiB of {sheet.memory_gb:g} for a request of {needs.max_model_len:,} tokens."
        )
    weights = weight_format_of(config)
    calibration = Calibration(
        cost=data_sheet_cost(rank_costs(planned, weights), sheet, shares),
        host=shares.host,
        overlap=True,
        num_blocks=num_blocks,
        block_size=cache.block_size,
        max_model_len=needs.max_model_len,
        vocab_size=planned.config.vocab_size,
        scheduler=scheduler.as_options(),
        cache={name: getattr(config.cache, name) for name in CACHE_OPTIONS},
        bytes_per_block=bytes_per_block,
        tensor_parallel_size=needs.num_ranks,
        num_layers=planned.config.num_layers,
        hidden_size=planned.config.hidden_size,
        model=str(config.model.model),
        device="cuda",
        device_name=sheet.name,
        dtype=needs.formats,
        kv_dtype=needs.kv_dtype,
    )
    return calibration, planned


def weight_format_of(config: EngineConfig) -> str:
    """The format that the linear layers' weights get on a GPU; a shape has no stored format of its own."""
    return "none" if config.model.quantization in ("auto", "stored", "none") else config.model.quantization
