"""What paging costs in the attention kernel, and what the size of a block wastes: both over the size of the block."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway_lab.bench.attention_times import AttentionWork, Effort, HeadShape, LayoutTimes, measure_layouts
from headway_lab.claims.claim import Chart, Line, Outcome, change, percent, sentences, times
from headway_lab.claims.context import Claim, Context
from headway_lab.claims.published_workloads import chat
from headway_lab.claims.testbed import SimulatedTestbed


@dataclass(frozen=True)
class Layers:
    """What is timed on a kind of device: the heads of a model, and a step of each kind."""

    model: str
    shape: HeadShape
    decode: AttentionWork
    chunk: AttentionWork
    effort: Effort

    @property
    def text(self) -> str:
        decode, chunk = self.decode, self.chunk
        return (
            f"one layer of {self.model}: {decode.num_requests} requests that decode with {decode.context:,} tokens "
            f"each, and a chunk of {chunk.num_new:,} new tokens behind {chunk.context - chunk.num_new:,} known"
        )


@dataclass(frozen=True)
class PagingSetup:
    """The blocks that are compared, the layers that are timed, and the lengths in the cache."""

    block_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    usual: int = 16
    """The default of most engines."""
    kv_tokens: int = 262_144
    least_percent: float = 0.1
    """On the picture, this stands for all that is less."""
    layers: Mapping[str, Layers] = dataclasses.field(
        default_factory=lambda: {
            "cpu": Layers(
                "SmolLM2-135M",
                HeadShape(9, 3, 64, "float16", "float32"),
                AttentionWork(16, 1, 1024),
                AttentionWork(1, 128, 2048),
                Effort(past_cache_bytes=80e6, max_rounds=101, quantile=0.2),
            ),
            "cuda": Layers(
                "Llama 3.1 8B",
                HeadShape(32, 8, 128, "bfloat16", "bfloat16"),
                AttentionWork(64, 1, 2048),
                AttentionWork(1, 2048, 8192),
                Effort(past_cache_bytes=400e6, max_rounds=201, seconds=10.0, calls_per_graph=16),
            ),
        }
    )


SETUP = PagingSetup()
_DECODE, _CHUNK = "decode", "chunk"
Kernels = Mapping[int, Mapping[str, LayoutTimes]]
"""Block size → kind of step → times."""


def measure_paging_cost(context: Context) -> Outcome:
    is_cpu = context.testbed.is_cpu
    own = context.testbed.block_size
    sizes = sorted({*SETUP.block_sizes, own})
    empty, lengths = _empty_shares(context, sizes)
    kernels = _measure_kernels(context, "cpu" if is_cpu else "cuda", sizes) if context.where == "engine" else {}
    losses = {kind: _losses(kernels, kind) for kind in (_DECODE, _CHUNK)} if kernels else {}
    lines = [Line("KV memory kept and empty (simulated)", sizes, _shown(empty))]
    lines += [Line(f"attention time lost, {kind} (measured)", sizes, _shown(loss)) for kind, loss in losses.items()]
    return Outcome(
        value=100 * (kernels[own][_DECODE].ratio - 1) if kernels else 100 * empty[SETUP.usual],
        unit="% of attention time" if kernels else "% empty",
        ours=_ours(kernels, empty, own),
        workload=sentences(
            [
                f"Kernels: {SETUP.layers['cpu' if is_cpu else 'cuda'].text}." if kernels else "",
                f"Waste: {lengths}.",
            ]
        ),
        differs=_differs(kernels, losses, empty, own),
        where=context.where,
        chart=Chart(
            "The size of a block: what it wastes and what it costs",
            "% lost",
            lines=tuple(lines),
            x="tokens in a block",
            log_x=True,
            log_y=True,
            levels={"cost of paging as published, from": 5.0, "to": 10.0},
            caption="Attention time: scattered blocks of this size against contiguous blocks of the size that is "
            f"fastest. {SETUP.least_percent:g}% stands for all that is less.",
        ),
        numbers={f"blocks of {size}": _columns(size, empty, kernels) for size in sizes},
    )


def _empty_shares(context: Context, sizes: Sequence[int]) -> tuple[dict[int, float], str]:
    """By block size, the share of the slots in allocated blocks that hold no token, and on which work. Simulated, since
    it follows from lengths and scheduling alone."""
    simulated = (
        context if context.where == "simulator" else dataclasses.replace(context, testbed=SimulatedTestbed.open())
    )
    drawn = chat(simulated, simulated.sized(tiny=20, short=150, full=600))
    shares = {
        size: simulated.run(
            f"blocks of {size}", drawn.at_once(), kv_tokens=SETUP.kv_tokens // simulated.divisor, block_size=size
        ).mean_waste
        for size in sizes
    }
    return shares, f"{len(drawn.work):,} requests at once, {drawn.text}, simulated; KV memory for " + (
        f"{SETUP.kv_tokens // simulated.divisor:,} tokens"
    )


def _measure_kernels(context: Context, device: str, sizes: Sequence[int]) -> dict[int, dict[str, LayoutTimes]]:
    layers = SETUP.layers[device]
    effort = layers.effort
    if context.is_quick:
        effort = dataclasses.replace(effort, seconds=effort.seconds / 2)
    kernels: dict[int, dict[str, LayoutTimes]] = {}
    for size in sizes:
        context.say(f"attention on blocks of {size}")
        kernels[size] = {
            kind: measure_layouts(device, layers.shape, work, size, effort)
            for kind, work in ((_DECODE, layers.decode), (_CHUNK, layers.chunk))
        }
    return kernels


def _losses(kernels: Kernels, kind: str) -> dict[int, float]:
    """By block size, by how much scattered blocks are slower than the fastest contiguous ones."""
    best_s = min(by_kind[kind].contiguous_s for by_kind in kernels.values())
    return {size: by_kind[kind].scattered_s / best_s - 1 for size, by_kind in kernels.items()}


def _shown(shares: Mapping[int, float]) -> Sequence[float]:
    return [max(100 * share, SETUP.least_percent) for share in shares.values()]


def _columns(size: int, empty: Mapping[int, float], kernels: Kernels) -> dict[str, float]:
    columns = {"empty, %": 100 * empty[size]}
    for kind, layouts in kernels.get(size, {}).items():
        columns |= {
            f"{kind}: contiguous, µs": 1e6 * layouts.contiguous_s,
            f"{kind}: scattered, µs": 1e6 * layouts.scattered_s,
            f"{kind}: scattered over contiguous": layouts.ratio,
        }
    return columns


def _ours(kernels: Kernels, empty: Mapping[int, float], own: int) -> str:
    waste = f"{percent(empty[SETUP.usual])} of the slots are empty in blocks of {SETUP.usual}, "
    waste += f"{percent(empty[SETUP.block_sizes[-1]])} in blocks of {SETUP.block_sizes[-1]}"
    if not kernels:
        return waste
    extra = {kind: percent(layouts.ratio - 1, signed=True) for kind, layouts in kernels[own].items()}
    return f"scattered blocks of {own} against contiguous ones: decode {extra[_DECODE]}, chunk {extra[_CHUNK]}; {waste}"


def _differs(kernels: Kernels, losses: Mapping[str, Mapping[int, float]], empty: Mapping[int, float], own: int) -> str:
    shown = [size for size in empty if size in (1, SETUP.usual, own, SETUP.block_sizes[-1])]
    halves = (
        "A request leaves half of its last block empty on average, so the waste doubles with the block: "
        + " / ".join(f"{percent(empty[size])} in blocks of {size}" for size in shown)
        + "."
    )
    if not kernels:
        return sentences([halves, "What scattered blocks cost the kernel is measured on a device: --on engine."])
    best = min(losses[_DECODE], key=lambda size: losses[_DECODE][size])
    smallest = min(kernels)
    small = times(1 + losses[_DECODE][smallest])
    return sentences(
        [
            "Both sides are one kernel, which always reads a block table: the published cost is that of a paged kernel "
            "against another one without tables.",
            f"Scattering alone costs decode {percent(change(kernels[own][_DECODE].ratio, 1.0), signed=True)} "
            f"with blocks of {own}; blocks of {smallest} take {small} the time of the best, since a token is no longer "
            "read with its neighbours.",
            f"The fastest blocks for scattered decodes had {best} tokens here; the default of this device is {own}.",
            halves,
        ]
    )


PAGING_COST = Claim(
    id="paging-cost",
    title="The price of paging, by the size of a block",
    published="Paging costs 5–10% of attention's time; small blocks waste less memory, large ones need fewer look-ups: "
    "16 is the usual default.",
    source="Kwon et al., PagedAttention / vLLM (SOSP 2023), section 7, and guides to serving engines",
    workload="decode and prefill with block sizes of 1 to 256",
    method="The same attention kernel on contiguous and on scattered blocks, in turns; empty slots in the cache.",
    measure=measure_paging_cost,
    engine="always",
)
