"""A pretended engine and an API in front of it, for the page: seats, chunks, blocks, preemptions, and no model at all.

Its prefix cache is simple: all long prompts begin with the same few blocks, and the other blocks of requests that are
done are kept until somebody needs them. It has the interface of `EngineClient` that the live view uses.
`python -m tests.unit.server.scripted_engine` serves it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headway.rpc.engine_client import Health
from headway.rpc.messages import (
    CACHED,
    SHARED,
    BlockMap,
    BlockRun,
    BlockSnapshot,
    EngineReady,
    EngineStats,
    SnapshotRow,
    StepSnapshot,
    WaitingRow,
)
from headway.rpc.streams import SnapshotStream
from headway.server.api.api_errors import ApiError
from headway.server.live.live_page import LiveHubs, live_routes

COMMON_BLOCKS = 4
SENTENCE = "a batch that never stops leaves no gap: every request makes headway. "
WORDS = tuple(f"{word} " for word in SENTENCE.split())
ANSWER = SENTENCE * 2
CUT_OFF_AFTER = 5


@dataclass
class Pretended:
    """A request of so many prompt tokens that wants so many of output."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def is_done(self) -> bool:
        return self.num_output_tokens >= self.max_tokens


class ScriptedEngine:
    """Steps in a task of its own; a step takes `step_s` and a little for each token."""

    def __init__(self, *, num_blocks: int = 320, max_num_seqs: int = 16, step_s: float = 0.03) -> None:
        self.info: EngineReady | None = EngineReady(
            model="HuggingFaceTB/SmolLM2-135M-Instruct",
            max_model_len=2048,
            vocab_size=49152,
            num_blocks=num_blocks,
            block_size=16,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=256,
            device="cpu",
            dtype="float32",
        )
        self.stats: EngineStats | None = EngineStats(num_free_blocks=num_blocks)
        self.health = Health(True, "")
        self.replicas: list[Any] = []
        self.role: str | None = None
        self.viewers: list[SnapshotStream] = []
        self._free = deque(range(num_blocks))
        self._kept: deque[int] = deque()
        self._common: list[int] = []
        self._running: list[Pretended] = []
        self._waiting: deque[Pretended] = deque()
        self._numbers = itertools.count()
        self._arrival = asyncio.Event()
        self._step_s = step_s

    @property
    def problem(self) -> str | None:
        return None if self.health.ok else self.health.reason

    def watch(self, place: int = 0) -> SnapshotStream:
        viewer = SnapshotStream(self.viewers.remove)
        self.viewers.append(viewer)
        viewer.push(BlockSnapshot(self._map()))
        return viewer

    def submit(self, *, num_prompt_tokens: int, max_tokens: int) -> Pretended:
        request = Pretended(f"chatcmpl-{next(self._numbers):04x}", num_prompt_tokens, max_tokens)
        self._waiting.append(request)
        self._arrival.set()
        return request

    def abort(self, request: Pretended) -> None:
        for requests in (self._running, self._waiting):
            if request in requests:
                requests.remove(request)
        self._release(request)
        self._count()

    async def run(self) -> None:
        for step_id in itertools.count():
            while not self._running and not self._waiting:
                self._arrival.clear()
                await self._arrival.wait()
            await self._step(step_id)

    async def _step(self, step_id: int) -> None:
        budget, rows, preempted = 256, [], []
        for request in list(self._running):
            if request in self._running:
                budget -= self._give(request, budget, rows, preempted)
        while self._waiting and budget > 0 and len(self._running) < self.info.max_num_seqs and not preempted:
            request = self._waiting[0]
            if self._num_available < -(-request.num_tokens // 16):
                break
            self._running.append(self._waiting.popleft())
            self._find_common(request)
            budget -= self._give(request, budget, rows, preempted)
        num_running = len(self._running)
        step_s = self._step_s + (256 - budget) * 1e-4
        await asyncio.sleep(step_s)
        finished = self._update(rows)
        num_tokens = 256 - budget
        has_decodes, has_chunks = any(r.is_decode for r in rows), any(not r.is_decode for r in rows)
        kind = "mixed" if has_decodes and has_chunks else "decode" if has_decodes else "prefill"
        self._count(num_steps=1, num_preemptions=len(preempted), step_s=step_s, num_step_tokens=num_tokens)
        snapshot = StepSnapshot(
            step_id=step_id,
            step_s=step_s,
            kind=kind,
            num_running=num_running,
            num_waiting=len(self._waiting),
            num_blocks=self.info.num_blocks,
            num_used_blocks=self.stats.num_used_blocks,
            num_used_slots=self.stats.num_used_slots,
            rows=rows,
            waiting=[WaitingRow(r.request_id, r.num_tokens) for r in itertools.islice(self._waiting, 8)],
            preempted=[request.request_id for request in preempted],
            finished=finished,
            blocks=self._map(),
        )
        for viewer in self.viewers:
            viewer.push(snapshot)

    def _give(self, request: Pretended, budget: int, rows: list[SnapshotRow], preempted: list[Pretended]) -> int:
        """Give a request its share of the step; the last to come makes room if there is none."""
        num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
        if num_tokens == 0:
            return 0
        while (
            missing := -(-(request.num_computed_tokens + num_tokens) // 16) - len(request.blocks)
        ) > self._num_available:
            victim = self._running[-1]
            self._running.remove(victim)
            self._release(victim)
            victim.num_computed_tokens = 0
            self._waiting.appendleft(victim)
            preempted.append(victim)
            if victim is request:
                return 0
        request.blocks += [self._take_block() for _ in range(missing)]
        is_decode = num_tokens == 1 and request.num_computed_tokens >= request.num_prompt_tokens
        rows.append(
            SnapshotRow(
                request.request_id,
                request.num_prompt_tokens,
                request.num_computed_tokens,
                request.num_output_tokens,
                num_tokens,
                len(request.blocks),
                is_decode,
                request.num_cached_tokens,
            )
        )
        request.num_cached_tokens = 0
        return num_tokens

    @property
    def _num_available(self) -> int:
        return len(self._free) + len(self._kept)

    def _take_block(self) -> int:
        if self._free:
            return self._free.popleft()
        self.stats.num_evicted_blocks += 1
        return self._kept.popleft()

    def _find_common(self, request: Pretended) -> None:
        """A request enters: its beginning may have been computed for another."""
        self.stats.num_queried_tokens += request.num_tokens
        if self._common and request.num_prompt_tokens > 16 * COMMON_BLOCKS:
            request.blocks = self._common.copy()
            request.num_computed_tokens = request.num_cached_tokens = 16 * COMMON_BLOCKS
            self.stats.num_hit_tokens += request.num_cached_tokens
            self.stats.num_saved_tokens += request.num_cached_tokens

    def _update(self, rows: list[SnapshotRow]) -> list[str]:
        """Computed tokens, new tokens, and who leaves."""
        by_id = {request.request_id: request for request in self._running}
        finished = []
        for row in rows:
            if (request := by_id.get(row.request_id)) is None:
                continue
            if row.num_output_tokens == 0 and row.num_computed_tokens == row.num_cached_tokens:
                self.stats.prompt_tokens += request.num_prompt_tokens
            request.num_computed_tokens += row.num_tokens
            if not self._common and request.num_computed_tokens > 16 * COMMON_BLOCKS:
                self._common = request.blocks[:COMMON_BLOCKS]
            if request.num_computed_tokens == request.num_tokens:
                request.num_output_tokens += 1
                self.stats.generation_tokens += 1
                request.news.set()
            if request.is_done:
                finished.append(request.request_id)
                self._running.remove(request)
                self._release(request)
        return finished

    def _release(self, request: Pretended) -> None:
        own = [block for block in request.blocks if block not in self._common]
        num_full = max(0, request.num_computed_tokens // 16 - (len(request.blocks) - len(own)))
        self._kept.extend(own[:num_full])
        self._free.extend(own[num_full:])
        self.stats.num_inserted_blocks += num_full
        request.blocks = []

    def _count(
        self, *, num_steps: int = 0, num_preemptions: int = 0, step_s: float = 0, num_step_tokens: int = 0
    ) -> None:
        stats = self.stats
        stats.num_running, stats.num_waiting = len(self._running), len(self._waiting)
        stats.num_free_blocks = len(self._free)
        tables = [request.blocks for request in self._running]
        stats.num_table_entries = sum(map(len, tables))
        stats.num_used_blocks = len({block for table in tables for block in table})
        stats.num_cached_blocks = self.info.num_blocks - len(self._free) - stats.num_used_blocks
        num_twice = 16 * (stats.num_table_entries - stats.num_used_blocks)
        stats.num_used_slots = sum(request.num_computed_tokens for request in self._running) - num_twice
        stats.num_steps += num_steps
        stats.num_preemptions += num_preemptions
        stats.step_s, stats.num_step_tokens = step_s, num_step_tokens

    def _map(self) -> BlockMap:
        owner_of: list[int | None] = [None] * self.info.num_blocks
        for block in (*self._kept, *self._common):
            owner_of[block] = CACHED
        for index, request in enumerate(self._running):
            for block in request.blocks:
                owner_of[block] = index if owner_of[block] in (None, CACHED) else SHARED
        runs = [BlockRun(owner, len(list(run))) for owner, run in itertools.groupby(owner_of)]
        return BlockMap([request.request_id for request in self._running], runs)


class ScriptedReplicas:
    """Several of them, which get requests in turn."""

    def __init__(self, *engines: ScriptedEngine) -> None:
        self.replicas = list(engines)
        self.health = Health(True, "")
        self._turns = itertools.cycle(engines)

    @property
    def info(self) -> EngineReady | None:
        return self.replicas[0].info

    @property
    def stats(self) -> EngineStats | None:
        return self.replicas[0].stats

    def watch(self, place: int = 0) -> SnapshotStream:
        return self.replicas[place].watch()

    def submit(self, *, num_prompt_tokens: int, max_tokens: int) -> Pretended:
        return next(self._turns).submit(num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)

    def abort(self, request: Pretended) -> None:
        for engine in self.replicas:
            engine.abort(request)

    async def run(self) -> None:
        await asyncio.gather(*(engine.run() for engine in self.replicas))


# ---- the API, as far as the page uses it ----------------------------------------------------------------------------


def create_app(engine: ScriptedEngine | ScriptedReplicas, *, api_key: str | None = None) -> Starlette:
    """The page, /live, and completions that come word by word.

    Questions with "fail" in them are refused, those with "break" are cut off by an error after a few words, and what
    follows "Repeat:" is the answer; what follows "Deltas:" is JSON with the deltas of the answer, and "Refuse:" is
    followed by the field that is to blame. `app.state.asked` keeps the messages of each chat request, and
    `app.state.bodies` all of it.
    """

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": app.state.model, "object": "model"}]})

    async def chat(request: Request) -> Response:
        body = await request.json()
        app.state.bodies.append(body)
        app.state.asked.append(body["messages"])
        question = body["messages"][-1]["content"]
        if "Refuse:" in question:
            field = question.partition("Refuse:")[2].strip()
            return JSONResponse({"error": {"message": f"{field}: not like this.", "param": field}}, status_code=400)
        if "Deltas:" in question:
            deltas = json.loads(question.partition("Deltas:")[2])
            job = engine.submit(num_prompt_tokens=10, max_tokens=len(deltas))
            return _stream(engine, [job], lambda i, delta: {"index": i, "delta": delta}, words=deltas)
        if "fail" in question:
            return JSONResponse({"error": {"message": "The question is too hard."}}, status_code=400)
        words = _pieces(question.partition("Repeat:")[2].lstrip()) if "Repeat:" in question else WORDS * 2
        num_tokens = min(len(words), body["max_tokens"])
        job = engine.submit(num_prompt_tokens=10 + len(question) // 4, max_tokens=num_tokens)
        num_whole = CUT_OFF_AFTER if "break" in question else None
        return _stream(
            engine, [job], lambda i, text: {"index": i, "delta": {"content": text}}, words=words, num_whole=num_whole
        )

    async def completions(request: Request) -> Response:
        body = await request.json()
        jobs = [engine.submit(num_prompt_tokens=len(p) // 4, max_tokens=body["max_tokens"]) for p in body["prompt"]]
        return _stream(engine, jobs, lambda i, text: {"index": i, "text": text})

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(engine.run())
        yield
        task.cancel()

    hubs = LiveHubs(engine, is_draining=lambda: app.state.is_draining)
    routes = [
        *live_routes(engine, hubs=hubs),
        Route("/v1/models", models),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
    ]

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return Response(error.body, status_code=error.status, media_type="application/json")

    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={ApiError: refuse})
    app.state.asked = []
    app.state.bodies = []
    app.state.is_draining = False
    app.state.model = "SmolLM2-135M-Instruct"
    if api_key is not None:
        app.add_middleware(_Lock, api_key=api_key)
    return app


class _Lock:
    """Everything but the page itself needs the key."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] == "/" or scope["path"].startswith("/web/")
        if is_open or dict(scope["headers"]).get(b"authorization") == self._key:
            await self._app(scope, receive, send)
        else:
            refusal = JSONResponse({"error": {"message": "No valid key was sent."}}, status_code=401)
            await refusal(scope, receive, send)


def _pieces(text: str) -> list[str]:
    """As tokens might be: a few characters each, also across words and marks."""
    return [text[at : at + 5] for at in range(0, len(text), 5)]


def _stream(
    engine: ScriptedEngine | ScriptedReplicas,
    jobs: list[Pretended],
    choice: Callable[[int, Any], dict[str, Any]],
    *,
    words: Sequence[Any] = WORDS,
    num_whole: int | None = None,
) -> StreamingResponse:
    """With `num_whole`, an error comes after so many tokens."""

    async def events() -> AsyncIterator[str]:
        sent = [0] * len(jobs)
        try:
            while not all(job.is_done for job in jobs) or any(s < j.num_output_tokens for s, j in zip(sent, jobs)):
                for index, job in enumerate(jobs):
                    while sent[index] < job.num_output_tokens:
                        sent[index] += 1
                        part = choice(index, words[(sent[index] - 1) % len(words)])
                        part["finish_reason"] = "length" if sent[index] == job.max_tokens else None
                        yield f"data: {json.dumps({'id': job.request_id, 'choices': [part]})}\n\n"
                if num_whole is not None and sent[0] >= num_whole:
                    yield f"data: {json.dumps({'error': {'message': 'The engine stopped.'}})}\n\ndata: [DONE]\n\n"
                    return
                await asyncio.sleep(0.005)
            usage = {"completion_tokens": sum(sent), "prompt_tokens": sum(job.num_prompt_tokens for job in jobs)}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            for job in jobs:
                engine.abort(job)

    return StreamingResponse(events(), media_type="text/event-stream")


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(create_app(ScriptedEngine()), host="127.0.0.1", port=8765, log_level="warning")
