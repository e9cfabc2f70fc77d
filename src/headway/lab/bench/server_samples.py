"""What a server tells about its batch while it is loaded, read from its Prometheus metrics.

Headway and vLLM use the same names after their prefixes; llama.cpp has its own. A server that tells nothing is not
asked again.
"""

from __future__ import annotations

import asyncio
import math
import time

from headway.lab.bench.batch_samples import BatchSample
from headway.lab.bench.http1 import BadResponseError
from headway.lab.bench.http_client import HttpClient

_NAMES = {
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
    "kv_cache_usage_perc": "kv",
    "requests_processing": "running",
    "requests_deferred": "waiting",
    "kv_cache_usage_ratio": "kv",
}


async def sample_server(client: HttpClient, into: list[BatchSample], *, started_s: float, every_s: float) -> None:
    """Until cancelled, or until the server has nothing to tell."""
    while True:
        try:
            response = await client.send("GET", "/metrics")
        except (OSError, BadResponseError):
            return
        at_s = time.perf_counter() - started_s
        sample = read_metrics(response.body.decode("utf-8", "replace"), at_s) if response.status == 200 else None
        if sample is None:
            return
        into.append(sample)
        await asyncio.sleep(every_s)


def read_metrics(text: str, at_s: float) -> BatchSample | None:
    """`None` if the batch is not in it. Of several engines behind one address: sums, and the mean of the caches."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, _, value = line.rpartition(" ")
        what = _NAMES.get(name.partition("{")[0].rpartition(":")[2])
        if what is not None and math.isfinite(number := float(value)):
            found.setdefault(what, []).append(number)
    if "running" not in found:
        return None
    kv = found.get("kv", [])
    return BatchSample(
        at_s=at_s,
        num_running=round(sum(found["running"])),
        num_waiting=round(sum(found.get("waiting", []))),
        kv_used=sum(kv) / len(kv) if kv else math.nan,
    )
