"""What a server says in its metrics about the time of its steps and its devices, for prices of its tokens.

Only Headway's own server says it. Counters are read before a load and after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.core.token_time import TokenTimeStats
from headway_lab.bench.http_client import BadResponseError, HttpClient

_PROMPT, _OUTPUT, _DEVICES = "prompt_compute_seconds_total", "generation_compute_seconds_total", "devices"


@dataclass(frozen=True)
class ServerTime:
    """The counters at one moment; `None` for what the server does not say."""

    prompt_s: float | None = None
    output_s: float | None = None
    num_devices: int | None = None

    @staticmethod
    def of_metrics(text: str) -> ServerTime:
        """Read the counters from the text of the metrics."""
        found: dict[str, float] = {}
        for line in text.splitlines():
            if line.startswith("#"):
                continue
            name, _, value = line.rpartition(" ")
            what = name.partition("{")[0].rpartition(":")[2]
            if what in (_PROMPT, _OUTPUT, _DEVICES) and math.isfinite(number := float(value)):
                found[what] = found.get(what, 0.0) + number
        devices = found.get(_DEVICES)
        return ServerTime(found.get(_PROMPT), found.get(_OUTPUT), None if not devices else round(devices))

    def prompt_share(self, before: ServerTime) -> float | None:
        """The share of prompts in the time of the steps since `before`; `None` if it is not known."""
        marks = (self.prompt_s, self.output_s, before.prompt_s, before.output_s)
        if any(mark is None for mark in marks):
            return None
        prompt_s, output_s = self.prompt_s - before.prompt_s, self.output_s - before.output_s  # type: ignore[operator]
        if min(prompt_s, output_s) < 0:
            return None  # it was started again
        return TokenTimeStats(prompt_s, output_s).prompt_share


async def ask_time(client: HttpClient) -> ServerTime:
    """Ask a server for its counters. A server without them says nothing."""
    try:
        response = await client.send("GET", "/metrics")
        return ServerTime.of_metrics(response.body.decode("utf-8", "replace")) if response.status == 200 else _NOTHING
    except (OSError, BadResponseError, ValueError):
        return _NOTHING


_NOTHING = ServerTime()
