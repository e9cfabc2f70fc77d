"""How well steps use their device: the numbers that are counted, and the shares that follow from them.

    bandwidth   bytes that steps must read   / (busy time × the device's bandwidth)
    compute     flops of steps               / (busy time × the device's rate)          also called MFU
    ceiling     Σ of the longer of the two   / busy time       how near steps are to the least time that is possible
    useful      tokens of requests           / these and the tokens that only pad a batch to the size of a graph
    host        time in which requests were ready and no step ran   / this and busy time

Bytes, flops and times are counters, so a share over any span is a quotient of differences. The times that bytes and
flops take at the device's ceilings are counted rather than shares: they add up over replicas of different kinds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from headway.counters import Counter, Statistics


class UtilisationStats(Statistics):
    """Counts what steps take from their device. All numbers are of one rank, where a model is divided among several."""

    device_busy_s: Annotated[
        float, Counter("device_busy_seconds", "Time in which steps ran on the device.", by_replica=True)
    ] = 0.0
    host_wait_s: Annotated[
        float,
        Counter("device_host_wait_seconds", "Time in which requests were ready and the device waited for the host."),
    ] = 0.0
    read_bytes: Annotated[
        float,
        Counter(
            "estimated_read_bytes_per_gpu",
            "Bytes that steps had to read: the weights once for each step, and the keys and values of its requests.",
            by_replica=True,
        ),
    ] = 0.0
    flops: Annotated[
        float,
        Counter("estimated_flops_per_gpu", "Floating-point operations of steps, without padding.", by_replica=True),
    ] = 0.0
    read_s: Annotated[
        float, Counter("estimated_read_seconds", "Time that these bytes take at the device's measured bandwidth.")
    ] = 0.0
    compute_s: Annotated[
        float, Counter("estimated_compute_seconds", "Time that these operations take at the device's measured rate.")
    ] = 0.0
    ceiling_s: Annotated[
        float, Counter("estimated_ceiling_seconds", "The longer of the two times of each step, added up.")
    ] = 0.0
    num_step_tokens: Annotated[int, Counter("step_tokens", "Tokens of requests that steps computed.")] = 0
    num_padding_tokens: Annotated[
        int, Counter("step_padding_tokens", "Tokens computed only to fill a batch up to the size of its CUDA graph.")
    ] = 0
    nvml_busy_s: Annotated[float, Counter()] = 0.0
    """Time in which a kernel ran, as NVML counts it."""
    nvml_s: Annotated[float, Counter()] = 0.0
    """Time over which NVML was asked."""

    def since(self, before: UtilisationStats) -> UtilisationStats:
        """What was counted after `before`, an earlier copy."""
        names = self.__struct_fields__
        return UtilisationStats(*(getattr(self, name) - getattr(before, name) for name in names))

    def copy(self) -> UtilisationStats:
        """The numbers as they are now."""
        return self.since(UtilisationStats())


SHARES: dict[str, tuple[str, tuple[str, ...]]] = {
    "bandwidth": ("read_s", ("device_busy_s",)),
    "compute": ("compute_s", ("device_busy_s",)),
    "ceiling": ("ceiling_s", ("device_busy_s",)),
    "useful": ("num_step_tokens", ("num_step_tokens", "num_padding_tokens")),
    "host": ("host_wait_s", ("host_wait_s", "device_busy_s")),
    "nvml": ("nvml_busy_s", ("nvml_s",)),
}
"""Each share is a counter over the sum of others."""


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Shares between 0 and 1 over some span; `None`: not known. A share of a ceiling may exceed 1 where a cache serves
    what is counted as read from memory."""

    bandwidth: float | None = None
    compute: float | None = None
    ceiling: float | None = None
    useful: float | None = None
    host: float | None = None
    nvml: float | None = None

    @staticmethod
    def of(stats: UtilisationStats) -> Utilisation:
        """The shares in what was counted. Without the device's ceilings there are no shares of them."""
        shares: dict[str, float | None] = {}
        for name, (part, parts) in SHARES.items():
            whole = sum(getattr(stats, each) for each in parts)
            is_known = whole > 0 and (stats.ceiling_s > 0 or name not in ("bandwidth", "compute", "ceiling"))
            shares[name] = getattr(stats, part) / whole if is_known else None
        return Utilisation(**shares)

    def as_json(self) -> dict[str, Any]:
        """The shares that are known, by name."""
        each = {name: getattr(self, name) for name in SHARES}
        return {name: round(share, 4) for name, share in each.items() if share is not None}

    def __str__(self) -> str:
        words = {
            "bandwidth": "bandwidth",
            "compute": "compute (MFU)",
            "ceiling": "of the ceilings",
            "useful": "useful tokens",
            "host": "waits for the host",
            "nvml": "NVML",
        }
        shown = ((word, getattr(self, name)) for name, word in words.items())
        return " · ".join(f"{word} {100 * share:.1f}%" for word, share in shown if share is not None)


UNKNOWN = Utilisation()
