"""What all peers share: the workload, how it is timed, and the line that is printed.

Each peer script fills in a `Peer`; `measure` runs it. Greedy, end-of-sequence ignored, every request submitted at once.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

BATCH1_PROMPT_TOKENS = 64
BATCH1_OUTPUT_TOKENS = 128


@dataclass(frozen=True)
class WorkItem:
    """One request: its prompt as token ids, and exactly how many tokens to generate."""

    prompt_ids: list[int]
    max_tokens: int


class Peer(Protocol):
    """An engine that is already started."""

    name: str
    version: str
    settings: str

    def run(self, items: Sequence[WorkItem]) -> list[int]:
        """Complete all items, as concurrently as the engine can. Returns how many tokens each one got."""
        ...

    def peak_rss_bytes(self) -> int:
        """Most memory the engine's process has held."""
        ...


def arguments(description: str) -> argparse.ArgumentParser:
    """The arguments every peer understands."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("workload", type=Path, help='JSON list of {"prompt_ids": [...], "max_tokens": n}')
    parser.add_argument("--limit", type=int, help="only the first N requests")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser


def load(path: Path, limit: int | None = None) -> list[WorkItem]:
    """Read a workload: a list of requests, or a dict with the list under "requests"."""
    data = json.loads(path.read_text())
    rows = data["requests"] if isinstance(data, dict) else data
    return [WorkItem(row["prompt_ids"], row["max_tokens"]) for row in rows][:limit]


def measure(peer: Peer, items: Sequence[WorkItem], *, start_s: float) -> None:
    """Warm up, time the batch and a single request, and print one line of JSON."""
    peer.run([WorkItem(items[0].prompt_ids[:8], 4)])
    elapsed_s = _timed(peer, items)
    num_in = sum(len(item.prompt_ids) for item in items)
    num_out = sum(item.max_tokens for item in items)
    prompt = (items[0].prompt_ids * BATCH1_PROMPT_TOKENS)[:BATCH1_PROMPT_TOKENS]
    # Two runs that differ only in the number of tokens: the difference is pure decoding, whatever the prompt costs.
    first_s = _timed(peer, [WorkItem(prompt, 1)])
    whole_s = _timed(peer, [WorkItem(prompt, BATCH1_OUTPUT_TOKENS)])
    result = {
        "engine": peer.name,
        "version": peer.version,
        "settings": peer.settings,
        "num_requests": len(items),
        "output_tok_s": round(num_out / elapsed_s, 1),
        "total_tok_s": round((num_in + num_out) / elapsed_s, 1),
        "batch1_tok_s": round((BATCH1_OUTPUT_TOKENS - 1) / (whole_s - first_s), 1),
        "start_s": round(start_s, 2),
        "peak_rss_mib": round(peer.peak_rss_bytes() / 2**20),
    }
    print(json.dumps(result))


def own_peak_rss_bytes() -> int:
    """For peers that live in this process."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _timed(peer: Peer, items: Sequence[WorkItem]) -> float:
    started = time.perf_counter()
    counts = peer.run(items)
    elapsed_s = time.perf_counter() - started
    for item, count in zip(items, counts, strict=True):
        if count != item.max_tokens:
            raise SystemExit(f"{peer.name} generated {count} tokens where {item.max_tokens} were asked for")
    return elapsed_s
