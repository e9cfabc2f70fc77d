"""The requests of traffic logs as work to simulate."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from headway.errors import ConfigError
from headway.predict.traffic_log import read_traffic
from headway_lab.workload.bench_requests import BenchRequest, highest_token_id


def traffic_work(
    paths: Sequence[str | Path], *, vocab_size: int, num_requests: int | None = None, seed: int = 0
) -> list[BenchRequest]:
    """The last requests of these logs, with times from the first arrival on; `ConfigError` if times are missing."""
    records = read_traffic(paths, most_records=num_requests).records
    named = ", ".join(map(str, paths))
    if not records:
        raise ConfigError(f"The traffic log {named} has no request that ended by itself.")
    times = [record.arrival_s for record in records if record.arrival_s is not None]
    if len(times) < len(records):
        raise ConfigError(
            f"{len(records) - len(times)} of {len(records)} requests of the traffic log {named} have no time of "
            "arrival (arrival_s), and without it their load cannot be replayed."
        )
    rng, highest, first_s = random.Random(seed), highest_token_id(vocab_size), min(times)
    work = [
        BenchRequest(
            [rng.randint(0, highest) for _ in range(max(record.features.keys.num_prompt_tokens, 1))],
            max(record.num_output_tokens, 1),
            arrival_s=time_s - first_s,
        )
        for record, time_s in zip(records, times, strict=True)
    ]
    return sorted(work, key=lambda request: request.arrival_s)
