"""Prepares schemas, grammars and tools of requests in helper processes, and caches the results.

    digest ──► kept? ──► in work for another request? ──► slot for short jobs ──► slot for long jobs ──► kept
                                                          0.15 s of processor     2 s

Each job is first tried as a short one, so that ordinary schemas never wait for the few that take long. A job that does
not finish in that time waits for a slot for long jobs. Clients take slots in turn. When the last client that waits for
a job has left, the job is cancelled and its process killed.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Protocol

from headway.server.admission.fair_slots import FairSlots
from headway.server.api.api_errors import overloaded
from headway.server.limits import LIMITS
from headway.structured.compile_grammar import TOO_COMPLEX, refused
from headway.structured.helper_jobs import JobResult, Refusal, decode_result, encode_job
from headway.structured.helper_processes import HelpersLostError, Limits
from headway.structured.output_shape import Shape, ShapeJob

SHORT = Limits(cpu_s=0.15, wall_s=10.0)
LONG = Limits(cpu_s=2.0, wall_s=30.0, niceness=19)


class Helpers(Protocol):
    """Interface of `HelperProcesses`, which run the jobs. Tests have their own implementation."""

    def prepare(self) -> None: ...
    async def run_async(self, job: bytes, limits: Limits) -> bytes | None: ...
    def close(self) -> None: ...


class Shaper:
    """Runs and caches the jobs of one event loop."""

    def __init__(self, create_helpers: Callable[[], Helpers], *, num_cores: int | None = None) -> None:
        """`create_helpers` is called once, when helpers are first needed; the engine must be ready by then. Short jobs
        take at most half of `num_cores` and long ones a quarter. None means all cores of this machine."""
        self._create_helpers = create_helpers
        self._helpers: Helpers | None = None
        num_cores = num_cores or os.cpu_count() or 1
        self._short = FairSlots(max(1, num_cores // 2))
        self._long = FairSlots(max(1, num_cores // 4))
        self._in_work: dict[bytes, _Work] = {}
        self._num_of_client: Counter[str] = Counter()
        self._kept = _Kept()

    def prepare(self) -> None:
        """Start the processes, so that the first request does not wait for them. Any thread may call this."""
        self._ready().prepare()

    def close(self) -> None:
        """End the processes."""
        if self._helpers is not None:
            self._helpers.close()

    async def shape(self, job: ShapeJob, *, client: str) -> Shape:
        """Return the job's result. Raises `InvalidRequestError` for an invalid job and 429 if too many jobs wait."""
        encoded = encode_job(job)
        digest = hashlib.blake2b(encoded, digest_size=16).digest()
        answer = self._kept.get(digest)
        if answer is None:
            answer = await self._in_work_or_new(digest, encoded, client)
        if isinstance(answer, Refusal):
            raise answer.error()
        assert isinstance(answer, Shape)
        return answer

    async def _in_work_or_new(self, digest: bytes, encoded: bytes, client: str) -> JobResult:
        work = self._in_work.get(digest)
        if work is None:
            self._check_room(client)
            work = self._in_work[digest] = _Work(asyncio.ensure_future(self._do(digest, encoded, client)))
        work.num_waiting += 1
        try:
            return await asyncio.shield(work.task)
        finally:
            work.num_waiting -= 1
            if not work.num_waiting:
                work.task.cancel()
                self._in_work.pop(digest, None)

    def _check_room(self, client: str) -> None:
        own = self._num_of_client[client]
        if own >= LIMITS.max_waiting_jobs_of_one or len(self._in_work) >= LIMITS.max_waiting_jobs:
            raise overloaded(
                f"{own if own >= LIMITS.max_waiting_jobs_of_one else len(self._in_work)} schemas, grammars or lists of "
                "tools are waiting to be compiled. Please retry later.",
                code="grammar_queue_full",
            )

    async def _do(self, digest: bytes, encoded: bytes, client: str) -> JobResult:
        self._num_of_client[client] += 1
        try:
            async with self._short.slot(client):
                found = await self._run(encoded, SHORT)
            if found is None:
                async with self._long.slot(client):
                    found = await self._run(encoded, LONG)
        finally:
            self._num_of_client[client] -= 1
            if not self._num_of_client[client]:
                del self._num_of_client[client]
        answer = Refusal(str(refused(TOO_COMPLEX)), "structured_outputs") if found is None else decode_result(found)
        self._kept.add(digest, answer, num_bytes=len(found or b""))
        return answer

    async def _run(self, encoded: bytes, limits: Limits) -> bytes | None:
        helpers = self._ready()
        try:
            return await helpers.run_async(encoded, limits)
        except HelpersLostError:
            return await helpers.run_async(encoded, limits)  # this starts a new nursery

    def _ready(self) -> Helpers:
        if self._helpers is None:
            self._helpers = self._create_helpers()
        return self._helpers


class _Work:
    """A job in progress, shared by all requests that wait for it."""

    def __init__(self, task: asyncio.Future[JobResult]) -> None:
        self.task = task
        self.num_waiting = 0


class _Kept:
    """A bounded cache of the most recently used results."""

    def __init__(self) -> None:
        self._answers: OrderedDict[bytes, tuple[JobResult, int]] = OrderedDict()
        self._num_bytes = 0

    def get(self, digest: bytes) -> JobResult | None:
        found = self._answers.get(digest)
        if found is None:
            return None
        self._answers.move_to_end(digest)
        return found[0]

    def add(self, digest: bytes, answer: JobResult, *, num_bytes: int) -> None:
        self._answers[digest] = (answer, num_bytes)
        self._num_bytes += num_bytes
        while len(self._answers) > LIMITS.max_kept_shapes or self._num_bytes > LIMITS.max_kept_shape_bytes:
            _, (_, freed) = self._answers.popitem(last=False)
            self._num_bytes -= freed
