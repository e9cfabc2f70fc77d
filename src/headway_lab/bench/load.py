"""Load on a server: each request goes out when it is due, whether or not the server keeps up (an open loop).

Latencies count from the time a request was due, not from when this program sent it. With `max_concurrency` some
requests wait here for their turn. As in vLLM's benchmark that wait is not counted, so that a closed loop of a fixed
number of clients can be measured too.

Meanwhile samples of the server's batch are read from its Prometheus metrics. Headway and vLLM use the same names after
their prefixes; llama.cpp has different ones. A server without them is asked once.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from headway.core.utilisation import UNKNOWN, Utilisation
from headway.progress import Meter
from headway_lab.bench.http_client import BadResponseError, HttpClient
from headway_lab.bench.replay import Agenda
from headway_lab.bench.served import AnswerReader, Dialect, ServedRequest, ServedTimeline, error_text
from headway_lab.bench.served_utilisation import ServerCounters
from headway_lab.bench.timelines import BatchSample, percentile

_NAMES = {
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
    "kv_cache_usage_perc": "kv",
    "requests_processing": "running",
    "requests_deferred": "waiting",
    "kv_cache_usage_ratio": "kv",
}

Send = Callable[[int, float, float], Awaitable[ServedTimeline]]
"""(number of the request, when it arrived after the start, the start on the clock) → its timeline"""


async def sample_server(
    client: HttpClient,
    into: list[BatchSample],
    *,
    started_s: float,
    every_s: float,
    counters: ServerCounters | None = None,
) -> None:
    """Sample the metrics until cancelled, or until the server turns out to have none. `counters` reads them too."""
    while True:
        try:
            response = await client.send("GET", "/metrics")
        except (OSError, BadResponseError):
            return
        at_s = time.perf_counter() - started_s
        text = response.body.decode("utf-8", "replace")
        sample = read_metrics(text, at_s) if response.status == 200 else None
        if sample is None:
            return
        if counters is not None:
            counters.read(text)
        into.append(sample)
        await asyncio.sleep(every_s)


def read_metrics(text: str, at_s: float) -> BatchSample | None:
    """Read a sample from the metrics' text; `None` if the batch is not in it. For several engines behind one address it
    has sums, and the mean of the caches."""
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


@dataclass(frozen=True)
class ServedRun:
    timelines: Sequence[ServedTimeline]
    duration_s: float
    samples: Sequence[BatchSample] = ()
    utilisation: Utilisation = UNKNOWN
    """How well the server used its devices, if its metrics say so."""

    @property
    def errors(self) -> list[str]:
        """The errors of the requests that failed, in order."""
        return [timeline.error for timeline in self.timelines if timeline.error is not None]

    @property
    def num_short(self) -> int:
        """The number of answers with another number of tokens than asked for."""
        return sum(timeline.is_short for timeline in self.timelines)

    @property
    def late_s(self) -> float:
        """The 99th percentile of how late this program sent its requests."""
        return percentile([timeline.sent_s - timeline.arrival_s for timeline in self.timelines], 99)


class Sender:
    """Sends the requests of some work to one endpoint and reads their answers. Bodies are made before the first is
    sent."""

    def __init__(
        self, work: Sequence[ServedRequest], client: HttpClient, dialect: Dialect, *, endpoint: str, timeout_s: float
    ) -> None:
        self._work = work
        self._bodies = [dialect.body(request) for request in work]
        self._client = client
        self._endpoint = endpoint
        self._timeout_s = timeout_s

    async def send(self, index: int, arrival_s: float, started_s: float) -> ServedTimeline:
        """Send one request and return its timeline, which has the error if there is one."""
        request = self._work[index]
        timeline = ServedTimeline(arrival_s, request.num_prompt_tokens, request.num_output_tokens)
        timeline.sent_s = time.perf_counter() - started_s
        reader = AnswerReader(timeline, started_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.send("POST", self._endpoint, self._bodies[index], on_body=reader.feed)
        except TimeoutError:
            timeline.error = f"no answer within {self._timeout_s:g} s"
        except BadResponseError as error:
            timeline.error = f"the answer is not HTTP: {error}"
        except OSError as error:
            timeline.error = str(error) or type(error).__name__
        except (ValueError, TypeError, LookupError, AttributeError):
            timeline.error = "the stream has an event that is not of OpenAI's form"
        else:
            if response.status == 200:
                reader.end()
            else:
                timeline.error = f"HTTP {response.status}: {_reason(response.body)}"
        if timeline.error is not None and timeline.finished_s is None:
            timeline.finished_s = time.perf_counter() - started_s
        return timeline


def _reason(body: bytes) -> str:
    try:
        return error_text(json.loads(body))
    except ValueError:
        return error_text(body.decode("utf-8", "replace"))


async def offer(
    work: Sequence[ServedRequest],
    send: Send,
    *,
    max_concurrency: int | None = None,
    sampled: HttpClient | None = None,
    sample_every_s: float = 0.5,
    progress: Meter | None = None,
) -> ServedRun:
    """Send the work at its times and wait for all answers. Meanwhile the server of `sampled` is asked for its metrics,
    if there is one."""
    load = _Load(work, send, max_concurrency, progress)
    gc.collect()
    samples: list[BatchSample] = []
    counters = ServerCounters()
    started_s = time.perf_counter()
    sampling = None
    if sampled is not None:
        sampling = asyncio.create_task(
            sample_server(sampled, samples, started_s=started_s, every_s=sample_every_s, counters=counters)
        )
    try:
        timelines = await load.run(started_s)
        return ServedRun(timelines, time.perf_counter() - started_s, samples, counters.utilisation)
    finally:
        if sampling is not None:
            sampling.cancel()


class _Load:
    def __init__(
        self, work: Sequence[ServedRequest], send: Send, max_concurrency: int | None, progress: Meter | None
    ) -> None:
        self._work = work
        self._send = send
        self._seats = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._progress = progress
        self._agenda = Agenda(work)
        self._timelines: dict[int, ServedTimeline] = {}
        self._has_news = asyncio.Event()

    async def run(self, started_s: float) -> list[ServedTimeline]:
        async with asyncio.TaskGroup() as tasks:
            while self._agenda:
                elapsed_s = time.perf_counter() - started_s
                for index, due_s in self._agenda.take_due(elapsed_s):
                    tasks.create_task(self._one(index, due_s, started_s))
                await self._until_next(started_s)
        return [self._timelines[index] for index in range(len(self._work))]

    async def _until_next(self, started_s: float) -> None:
        """Wait until a request is due, or until one has ended that others wait for."""
        if not self._agenda:
            return
        wait_s = self._agenda.next_due_s - (time.perf_counter() - started_s)
        self._has_news.clear()
        try:
            async with asyncio.timeout(None if wait_s == float("inf") else max(0.0, wait_s)):
                await self._has_news.wait()
        except TimeoutError:
            pass

    async def _one(self, index: int, due_s: float, started_s: float) -> None:
        arrival_s = due_s
        if self._seats is not None:
            has_to_wait = self._seats.locked()
            await self._seats.acquire()
            if has_to_wait:
                arrival_s = time.perf_counter() - started_s
        try:
            timeline = await self._send(index, arrival_s, started_s)
        finally:
            if self._seats is not None:
                self._seats.release()
        self._timelines[index] = timeline
        self._agenda.ended(index, time.perf_counter() - started_s)
        self._has_news.set()
        if self._progress is not None:
            self._progress.advance()
