"""A load on a server: how it is reached, what it says about its model, how it is warmed up."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from headway.errors import ConfigError
from headway_lab.bench.datasets import DEFAULT_VOCAB_SIZE, Dataset, Draw
from headway_lab.bench.environment import device_name
from headway_lab.bench.http_client import (
    Address,
    BadResponseError,
    HttpClient,
    ServerUnreachableError,
    allow_many_connections,
)
from headway_lab.bench.load import Sender, ServedRun, offer
from headway_lab.bench.load_target import Judging, Outcome, alike
from headway_lab.bench.served import Dialect, ServedRequest, error_text
from headway_lab.bench.server_time import ServerTime, ask_time

if TYPE_CHECKING:
    from headway.progress import Meter

MAX_DETOKENIZING = 16
ASK_TIMEOUT_S = 10.0
"""A server that takes longer to name its model is not healthy, or there is none."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class ServerFacts:
    """What a server says about its model."""

    model: str
    vocab_size: int | None
    max_model_len: int | None


async def ask_facts(client: HttpClient, model: str | None = None) -> ServerFacts:
    """Ask /v1/models for the named model, or the first one. `ServerUnreachableError` says what is wrong."""
    where = f"http{'s' if client.address.is_tls else ''}://{client.address.host_header}{client.address.prefix}"
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            response = await client.send("GET", "/v1/models")
    except TimeoutError:
        raise ServerUnreachableError(f"The server at {where} does not answer within {ASK_TIMEOUT_S:g} s.") from None
    except (OSError, BadResponseError) as error:
        raise ServerUnreachableError(
            f"No server answers at {where} ({error}). Name one with --port or --base-url."
        ) from error
    if response.status in (401, 403):
        raise ServerUnreachableError(
            f"The server at {where} asks for an API key that it knows: give it with --api-key."
        )
    cards = _cards(response.body) if response.status == 200 else []
    if not cards and model is None:
        raise ServerUnreachableError(f"The server at {where} names no model (status {response.status}); give --model.")
    card = next((card for card in cards if model in (None, card.get("id"))), {})
    return ServerFacts(
        model=model or str(card.get("id")),
        vocab_size=(card.get("meta") or {}).get("n_vocab"),
        max_model_len=card.get("max_model_len") or (card.get("meta") or {}).get("n_ctx"),
    )


def _cards(body: bytes) -> list[dict[str, Any]]:
    try:
        return [card for card in json.loads(body)["data"] if isinstance(card, dict)]
    except (ValueError, KeyError, TypeError):
        return []


async def texts_of(client: HttpClient, prompts: Sequence[Sequence[int]], model: str) -> list[str]:
    """The texts of token ids, by the server's own tokenizer (/detokenize)."""
    seats = asyncio.Semaphore(MAX_DETOKENIZING)

    async def text_of(ids: Sequence[int]) -> str:
        async with seats:
            try:
                response = await client.send(
                    "POST", "/detokenize", json.dumps({"model": model, "tokens": list(ids)}).encode()
                )
                answer = json.loads(response.body)
            except (OSError, BadResponseError, ValueError) as error:
                raise ServerUnreachableError(f"The server cannot turn tokens into text: {error}.") from error
        for key in ("prompt", "content"):  # ours and vLLM's; llama.cpp's
            if response.status == 200 and isinstance(answer, dict) and isinstance(answer.get(key), str):
                return str(answer[key])
        raise ServerUnreachableError(
            f"A chat needs text, and the server has no /detokenize to make it from tokens (status {response.status}: "
            f"{error_text(answer)[:120]}). Give texts: --dataset-name custom --dataset-path FILE.jsonl."
        )

    return list(await asyncio.gather(*map(text_of, prompts)))


@dataclass(frozen=True)
class ServerOptions:
    """How to reach a server, and how to send requests to it."""

    base_url: str
    kind: Literal["completions", "chat"] = "completions"
    endpoint: str = "/v1/completions"
    model: str | None = None
    api_key: str | None = None
    temperature: float = 0.0
    ignore_eos: bool = False
    extra_body: dict[str, Any] = field(default_factory=dict)
    is_plain: bool = False
    """Whether requests leave out their scheduling options."""
    max_concurrency: int | None = None
    timeout_s: float = 6 * 3600.0
    sample_every_s: float = 0.5
    """The interval at which metrics are read; 0: never."""
    num_warmups: int = 0
    vocab_size: int | None = None
    num_devices: int | None = None
    """The number of its devices; `None`: what it says, or one."""


class ServerTarget:
    """A server with OpenAI's API."""

    def __init__(self, options: ServerOptions, judging: Judging | None = None) -> None:
        """Ask the server for its model. `ServerUnreachableError` if it does not answer."""
        self.options = options
        self._judging = judging or Judging()
        self._address = Address.of(options.base_url)
        self.facts: ServerFacts = run_async(self._ask())
        self.name = f"{self.facts.model} at {options.base_url}"
        self._is_warm = False
        self._times = ServerTime(), ServerTime()
        """The server's counters before the last run and after it, if its tokens are to have prices."""

    def draw(self, dataset: Dataset, wanted: Draw) -> list[ServedRequest]:
        vocab_size = self.options.vocab_size or self.facts.vocab_size or DEFAULT_VOCAB_SIZE
        work = dataset.draw(dataclasses.replace(wanted, vocab_size=vocab_size))
        if self.options.kind == "chat":
            work = run_async(self._as_text(work))
        return work

    def run(self, work: Sequence[ServedRequest], progress: Meter | None = None) -> Outcome:
        """Run the work. The first run is preceded by the warm-up."""
        run = run_async(self._run(work, progress))
        before, after = self._times
        return Outcome(
            self._judging.metrics(
                work,
                run.timelines,
                run.duration_s,
                num_devices=self.options.num_devices or after.num_devices or 1,
                prompt_share=after.prompt_share(before),
            ),
            run.timelines,
            run.samples,
            run.errors,
            run.late_s,
            run.num_short,
            run.utilisation,
        )

    def close(self) -> None:
        """Do nothing, since no connection is kept between runs."""

    @property
    def machine(self) -> str:
        """The server, and where its load is generated."""
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

    async def _run(self, work: Sequence[ServedRequest], progress: Meter | None) -> ServedRun:
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
            before = await self._time(client)
            run = await offer(
                work,
                sender(work).send,
                max_concurrency=options.max_concurrency,
                sampled=client if options.sample_every_s else None,
                sample_every_s=options.sample_every_s,
                progress=progress,
            )
            self._times = before, await self._time(client)
            return run
        finally:
            client.close()

    async def _time(self, client: HttpClient) -> ServerTime:
        return ServerTime() if self._judging.price_per_hour is None else await ask_time(client)

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
    """Run on a new event loop; on uvloop's, which is faster, if it is installed."""
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        return runner.run(work)


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
