"""An engine without a model and an API in front of it, for the page: seats, chunks, blocks and preemptions are real.

All long prompts begin with the same few blocks. It has the interface of `EngineClient` that the live view uses.
`python -m tests.unit.server.scripted_engine` serves it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headway.config import EngineConfig
from headway.engine.llm_engine import LLMEngine
from headway.engine_process.engine_report import EngineCounters, SnapshotMaker
from headway.executor.fake import FakeExecutor
from headway.front.engine_client import Health
from headway.front.watch_streams import SnapshotStream
from headway.sampling_params import SamplingParams
from headway.server.api.api_errors import ApiError
from headway.server.live.live_page import LiveHubs, Prices, live_routes
from headway.wire.engine_stats import EngineStats
from headway.wire.messages import BlockSnapshot, EngineReady, StepSnapshot
from headway.worker.ceilings import Ceilings
from tests.unit.no_model import nominal_config, nominal_plan

MAX_MODEL_LEN, VOCAB_SIZE = 2048, 49152
COMMON = list(range(64))
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
    num_output_tokens: int = 0

    @property
    def is_done(self) -> bool:
        return self.num_output_tokens >= self.max_tokens


class ScriptedEngine:
    """Steps in a task of its own; a step takes `step_s` and a little for each token."""

    def __init__(self, *, num_blocks: int = 320, max_num_seqs: int = 16, step_s: float = 0.03) -> None:
        limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 256}
        shape = {"num_blocks": num_blocks, "block_size": 16}
        self.info: EngineReady | None = EngineReady(
            model="HuggingFaceTB/SmolLM2-135M-Instruct",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            device="cpu",
            dtype="float32",
            **limits,
            **shape,
        )
        self.health = Health(True, "")
        self.replicas: list[Any] = []
        self.role: str | None = None
        self.viewers: list[SnapshotStream] = []
        self._step_s = step_s
        self._engine = engine = LLMEngine(
            EngineConfig.from_options(**limits, block_size=16).resolve("cpu"),
            executor=FakeExecutor(lambda request_id, num_tokens: 1),
            tokenizer=None,
            model_config=nominal_config(vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN),
            plan=dataclasses.replace(
                nominal_plan(**shape, max_model_len=MAX_MODEL_LEN),
                step_weight_bytes=10**6,
                ceilings=Ceilings(1e8, 1e10),
            ),
        )
        self._counters = EngineCounters(engine.core.scheduler, engine.beams, utilisation=engine.utilisation.stats)
        self._snapshots = SnapshotMaker(engine.core.scheduler, engine.beams)
        self._requests: dict[str, Pretended] = {}
        self._numbers = itertools.count()
        self._arrival = asyncio.Event()

    @property
    def problem(self) -> str | None:
        return None if self.health.ok else self.health.reason

    @property
    def stats(self) -> EngineStats | None:
        return self._counters.stats()

    def watch(self, place: int = 0) -> SnapshotStream:
        viewer = SnapshotStream(self.viewers.remove)
        self.viewers.append(viewer)
        viewer.push(self._snapshots.blocks())
        return viewer

    def submit(self, *, num_prompt_tokens: int, max_tokens: int) -> Pretended:
        number = next(self._numbers)
        request = Pretended(f"chatcmpl-{number:04x}", num_prompt_tokens, max_tokens)
        common = COMMON if num_prompt_tokens > len(COMMON) else []
        prompt = [*common, *[1000 + number] * (num_prompt_tokens - len(common))]
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self._engine.submit(self._engine.prepare(request.request_id, prompt, params), stream="delta")
        self._requests[request.request_id] = request
        self._arrival.set()
        return request

    def abort(self, request: Pretended) -> None:
        self._requests.pop(request.request_id, None)
        self._engine.abort(request.request_id)
        self._snapshots.note_blocks_changed()

    async def run(self) -> None:
        while True:
            if not self._engine.has_unfinished_requests():
                self._tell(self._snapshots.blocks())
                self._arrival.clear()
                await self._arrival.wait()
            await self._step()

    async def _step(self) -> None:
        step = self._engine.step()
        step_s = self._step_s + step.report.snapshot.output.num_scheduled_tokens * 1e-4
        await asyncio.sleep(step_s)
        num_new_tokens = 0
        for output in step.outputs:
            if (request := self._requests.get(output.request_id)) is not None:
                request.num_output_tokens += len(output.outputs[0].token_ids)
                num_new_tokens += len(output.outputs[0].token_ids)
        self._counters.take(step.report, num_new_tokens=num_new_tokens)
        self._tell(msgspec.structs.replace(self._snapshots.snapshot(step.report), step_s=step_s))

    def _tell(self, snapshot: StepSnapshot | BlockSnapshot) -> None:
        for viewer in self.viewers:
            viewer.push(snapshot)


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


def create_app(
    engine: ScriptedEngine | ScriptedReplicas, *, api_key: str | None = None, prices: Prices | None = None
) -> Starlette:
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

    hubs = LiveHubs(engine, is_draining=lambda: app.state.is_draining, prices=prices)
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
