"""Clients that ask again and again, whatever the answers are, until the block ends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

PAUSE_S = 0.2
"""After an answer that is an error."""


@contextlib.contextmanager
def asking(url: str, num_clients: int, body: Mapping[str, Any], path: str = "/v1/completions") -> Iterator[None]:
    """Keep `num_clients` clients busy with streams inside the block."""
    over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=60) as http:
            while not over.is_set():
                try:
                    with http.stream("POST", path, json={**body, "stream": True}) as answer:
                        for _ in answer.iter_lines():
                            if over.is_set():
                                return
                        failed = answer.status_code != 200
                except httpx.TransportError:
                    failed = True
                if failed:
                    over.wait(PAUSE_S)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(timeout=10)
