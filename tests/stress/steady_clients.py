"""Clients that ask one thing after another over kept connections, and know what the answers have to be."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT_S = 120.0


@dataclass
class Report:
    """What came of the requests of all clients."""

    num_whole: int = 0
    num_streams: int = 0
    num_tokens: int = 0
    failures: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.num_whole} whole answers and {self.num_streams} streams with {self.num_tokens} tokens: "
            f"{len(self.failures)} failed, {len(self.differences)} different"
        )

    @property
    def is_good(self) -> bool:
        return not self.failures and not self.differences


Expected = Mapping[str, list[int]]
"""The greedy tokens of each prompt, as many as are ever asked for."""


async def ask(http: httpx.AsyncClient, prompt: str, num_tokens: int, *, stream: bool) -> list[int]:
    """The tokens of a greedy completion. Raises `httpx.HTTPError`, or `ValueError` for an answer that is none."""
    body = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }
    token_ids: list[int] = []
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise ValueError(f"{answer.status_code} {(await answer.aread())[:200]!r}")
        if not stream:
            return list(json.loads(await answer.aread())["choices"][0]["token_ids"])
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                return token_ids
            if line:
                token_ids += _tokens_of(json.loads(line.removeprefix("data: ")))
    raise ValueError("the stream ended without [DONE]")


def _tokens_of(event: dict[str, Any]) -> list[int]:
    if "error" in event:
        raise ValueError(f"error in the stream: {event['error']}")
    return event["choices"][0].get("token_ids") or [] if event["choices"] else []


async def keep_asking(url: str, expected: Expected, report: Report, *, seed: int, is_over: Callable[[], bool]) -> None:
    """One client: every second request on average is a stream."""
    draw, prompts = random.Random(seed), sorted(expected)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
        while not is_over():
            prompt, stream = draw.choice(prompts), draw.random() < 0.5
            wanted = expected[prompt][: draw.randint(1, len(expected[prompt]))]
            try:
                found = await ask(http, prompt, len(wanted), stream=stream)
            except (httpx.HTTPError, ValueError) as error:
                report.failures.append(f"{prompt[:30]!r}, {len(wanted)} tokens, stream={stream}: {error!r}")
                await asyncio.sleep(0.1)
                continue
            report.num_streams += stream
            report.num_whole += not stream
            report.num_tokens += len(found)
            if found != wanted:
                report.differences.append(f"{prompt[:30]!r}: {found} and not {wanted}")


async def load(url: str, expected: Expected, *, num_clients: int, is_over: Callable[[], bool], seed: int = 0) -> Report:
    """All clients, until it is over."""
    report = Report()
    await asyncio.gather(
        *(keep_asking(url, expected, report, seed=seed + number, is_over=is_over) for number in range(num_clients))
    )
    return report
