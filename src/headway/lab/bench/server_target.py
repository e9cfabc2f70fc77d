"""A load on a server: how it is reached, warmed up and talked to."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from headway.errors import ConfigError
from headway.lab.bench.datasets import DEFAULT_VOCAB_SIZE, Dataset, Draw
from headway.lab.bench.http_client import Address, HttpClient, allow_many_connections
from headway.lab.bench.load import Sender, ServedRun, offer
from headway.lab.bench.rounds import Progress
from headway.lab.bench.served import Dialect, ServedRequest
from headway.lab.bench.server_facts import ServerFacts, ask_facts, texts_of
from headway.lab.bench.surroundings import device_name
from headway.lab.bench.targets import Judging, Outcome, alike

_T = TypeVar("_T")


@dataclass(frozen=True)
class ServerOptions:
    """How to reach a server, and how to talk to it."""

    base_url: str
    kind: Literal["completions", "chat"] = "completions"
    endpoint: str = "/v1/completions"
    model: str | None = None
    api_key: str | None = None
    temperature: float = 0.0
    ignore_eos: bool = False
    extra_body: dict[str, Any] = field(default_factory=dict)
    is_plain: bool = False
    """Requests say nothing about their scheduling."""
    max_concurrency: int | None = None
    timeout_s: float = 6 * 3600.0
    sample_every_s: float = 0.5
    """0: its metrics are not asked for."""
    num_warmups: int = 0
    vocab_size: int | None = None


class ServerTarget:
    """A server with OpenAI's API."""

    def __init__(self, options: ServerOptions, judging: Judging | None = None) -> None:
        """Asks the server for its model. `ServerUnreachableError` if it does not answer."""
        self.options = options
        self._judging = judging or Judging()
        self._address = Address.of(options.base_url)
        self.facts: ServerFacts = run_async(self._ask())
        self.name = f"{self.facts.model} at {options.base_url}"
        self._is_warm = False

    def draw(self, dataset: Dataset, wanted: Draw) -> list[ServedRequest]:
        vocab_size = self.options.vocab_size or self.facts.vocab_size or DEFAULT_VOCAB_SIZE
        work = dataset.draw(dataclasses.replace(wanted, vocab_size=vocab_size))
        if self.options.kind == "chat":
            work = run_async(self._as_text(work))
        return work

    def run(self, work: Sequence[ServedRequest], progress: Progress | None = None) -> Outcome:
        """The first run is preceded by the warm-up."""
        run = run_async(self._run(work, progress))
        return Outcome(
            self._judging.metrics(work, run.timelines, run.duration_s),
            run.timelines,
            run.samples,
            run.errors,
            run.late_s,
            run.num_short,
        )

    def close(self) -> None:
        """Nothing is held between runs."""

    @property
    def machine(self) -> str:
        """The server, and where its load comes from."""
        return f"server at {self.options.base_url}, load from {device_name('cpu')}"

    async def _ask(self) -> ServerFacts:
        client = self._client()
        try:
            return await ask_facts(client, self.options.model)
        finally:
            client.close()

    async def _as_text(self, work: Sequence[ServedRequest]) -> list[ServedRequest]:
        client = self._client()
        prompts = [request.prompt for request in work if not isinstance(request.prompt, str)]
        try:
            texts = iter(await texts_of(client, prompts, self.facts.model))
        finally:
            client.close()
        return [
            request if isinstance(request.prompt, str) else dataclasses.replace(request, prompt=next(texts))
            for request in work
        ]

    async def _run(self, work: Sequence[ServedRequest], progress: Progress | None) -> ServedRun:
        options, client = self.options, self._client()
        allow_many_connections()
        dialect = Dialect(
            options.kind,
            self.facts.model,
            options.temperature,
            options.ignore_eos,
            options.extra_body,
            options.is_plain,
        )

        def sender(requests: Sequence[ServedRequest]) -> Sender:
            return Sender(requests, client, dialect, endpoint=options.endpoint, timeout_s=options.timeout_s)

        try:
            if not self._is_warm:
                await self._warm_up(sender, work)
            return await offer(
                work,
                sender(work).send,
                max_concurrency=options.max_concurrency,
                sampled=client if options.sample_every_s else None,
                sample_every_s=options.sample_every_s,
                progress=progress,
            )
        finally:
            client.close()

    async def _warm_up(
        self, sender: Callable[[Sequence[ServedRequest]], Sender], work: Sequence[ServedRequest]
    ) -> None:
        self._is_warm = True
        warm_up = alike(work, self.options.num_warmups)
        run = await offer(warm_up, sender(warm_up).send)
        if warm_up and len(run.errors) == len(warm_up):
            raise ConfigError(f"The server refuses the warm-up: {run.errors[0]}")

    def _client(self) -> HttpClient:
        key = self.options.api_key
        return HttpClient(self._address, {"authorization": f"Bearer {key}"} if key else {})


def run_async(work: Coroutine[Any, Any, _T]) -> _T:
    """On an event loop of its own; on uvloop's where there is one, which is faster."""
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        return runner.run(work)


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
