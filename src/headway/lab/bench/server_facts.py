"""What has to be known about a server before it is loaded: its model, its vocabulary, and the text of tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headway.lab.bench.http1 import BadResponseError
from headway.lab.bench.http_client import HttpClient, ServerUnreachableError
from headway.lab.bench.served import error_text

MAX_DETOKENIZING = 16
ASK_TIMEOUT_S = 10.0
"""A server that takes longer to name its model is not well, or is none."""


@dataclass(frozen=True)
class ServerFacts:
    """What a server says about its model."""

    model: str
    vocab_size: int | None
    max_model_len: int | None


async def ask_facts(client: HttpClient, model: str | None = None) -> ServerFacts:
    """From /v1/models: the named model, or the first one. `ServerUnreachableError` says what is wrong."""
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
    """The texts of token ids, from the server's own tokenizer (/detokenize)."""
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
