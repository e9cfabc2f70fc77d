"""Clients of a server whose engine processes are killed or stopped all the time: does each get the answer that it would
have got from a server that is left alone, token for token?

    python benchmarks/chaos.py --replicas 2 --clients 64 --minutes 10 --every 10
    python benchmarks/chaos.py --ray --minutes 3
    python benchmarks/chaos.py --dtype bfloat16 --every 0

The embedded model in float32, or with --dtype. Every request is first answered without trouble; then clients ask again
and again, at random, while every few seconds a random engine process gets SIGKILL or SIGSTOP. At the end nothing may be
left running.

With --ray the replicas are on a Ray cluster of as many nodes, all on this machine; after a third of the time one node
is removed, after two thirds another is added.

In bfloat16 a logit depends on the batch that it is computed in, so answers differ from the first time without any
trouble, too: compare with --every 0, which leaves the server alone.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 16},
        "people": {"type": "integer"},
        "old": {"type": "boolean"},
    },
    "required": ["city", "people", "old"],
    "additionalProperties": False,
}
TOPICS = ("Paris", "the sea", "a clock", "winter", "bread", "a river", "music", "the moon")


def requests() -> list[dict[str, Any]]:
    """One of each kind about each topic."""
    made = []
    for number, topic in enumerate(TOPICS):
        prompt = f"Write a few sentences about {topic}.\n"
        common = {"prompt": prompt, "max_tokens": 64 + 16 * (number % 4), "return_token_ids": True, "stream": True}
        made += [
            {**common, "temperature": 0},
            {**common, "temperature": 0.8, "seed": number},
            {**common, "temperature": 0.9, "seed": number, "n": 2, "max_tokens": 48},
            {**common, "temperature": 0.7, "seed": number, "response_format": json_format(), "max_tokens": 64},
        ]
    return made


def json_format() -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "facts", "schema": SCHEMA}}


async def answer(client: httpx.AsyncClient, body: dict[str, Any]) -> list[tuple[str, list[int], str | None]]:
    """Text, tokens and end of each choice; raises if the stream is not whole."""
    choices: list[tuple[str, list[int], str | None]] = [("", [], None)] * body.get("n", 1)
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread())[:200]!r}")
        async for line in response.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            for new in event["choices"]:
                text, tokens, reason = choices[new["index"]]
                if reason is not None:
                    raise RuntimeError("something followed an end")
                tokens = tokens + list(new.get("token_ids") or ())
                choices[new["index"]] = (text + new["text"], tokens, new["finish_reason"])
    if any(reason is None for _, _, reason in choices):
        raise RuntimeError("the stream ended before the answer did")
    return choices


def num_same(tokens: list[int], wanted: list[int]) -> int:
    """How many they begin with in common."""
    return next((i for i, (one, other) in enumerate(zip(tokens, wanted, strict=False)) if one != other), len(wanted))


@contextlib.contextmanager
def server(options: argparse.Namespace, address: str | None) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "headway",
        "serve",
        "--port",
        str(port),
        "--no-access-log",
        "--dtype",
        options.dtype,
    ]
    command += ["--replicas", str(options.replicas), "--engine-hang-timeout-s", "3", "--kv-cache-memory", "512MiB"]
    if address is not None:
        command += ["--ray", "--address", address]
    with open(options.log, "wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


class Nodes:
    """A Ray cluster on this machine."""

    def __init__(self, num_nodes: int) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        self._others = [self._cluster.add_node(num_cpus=1) for _ in range(num_nodes - 1)]

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def remove(self) -> None:
        self._cluster.remove_node(self._others.pop(), allow_graceful=False)

    def add(self) -> None:
        self._others.append(self._cluster.add_node(num_cpus=1))

    def close(self) -> None:
        self._cluster.shutdown()


def engine_pids(process: subprocess.Popen[bytes]) -> list[int]:
    """Those that the server's front end has started, and the engines that several servers could share."""
    front_end = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0]
    children = Path(f"/proc/{front_end}/task/{front_end}/children").read_text().split()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if b"engine_process" in command and (folder.name in children or b"--listen-fd" in command):
                found.append(int(folder.name))
    return found


async def run(options: argparse.Namespace, url: str, process: subprocess.Popen[bytes], nodes: Nodes | None) -> int:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        for _ in range(600):
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get("/health")).status_code == 200:
                    break
            await asyncio.sleep(0.2)
        bodies = requests()
        expected = await asyncio.gather(*(answer(client, body) for body in bodies))
        print(f"{len(bodies)} different requests, {sum(len(own[1]) for each in expected for own in each):,} tokens")
        rng, counts = random.Random(options.seed), collections.Counter[str]()
        until_s = time.monotonic() + 60 * options.minutes

        async def ask(number: int) -> None:
            own = random.Random(f"{options.seed}/{number}")
            while time.monotonic() < until_s:
                which = own.randrange(len(bodies))
                try:
                    got = await answer(client, bodies[which])
                except (RuntimeError, httpx.HTTPError) as error:
                    counts["failed"] += 1
                    print(f"failed: {error!r}"[:300], flush=True)
                else:
                    counts["same" if got == expected[which] else "different"] += 1
                    for (_, tokens, _), (_, wanted, _) in zip(got, expected[which], strict=True):
                        counts["tokens"] += len(wanted)
                        counts["tokens before a difference"] += num_same(tokens, wanted)
                    if got != expected[which] and options.dtype == "float32":
                        print(f"different: {bodies[which]}\n  {expected[which]}\n  {got}"[:1500], flush=True)

        async def kill() -> None:
            while options.every and time.monotonic() < until_s:
                await asyncio.sleep(options.every)
                if pids := engine_pids(process):
                    kind = rng.choice([signal.SIGKILL, signal.SIGSTOP])
                    os.kill(rng.choice(pids), kind)
                    counts[kind.name] += 1
                    print(f"{until_s - time.monotonic():6.0f} s left: {dict(counts)}", flush=True)

        async def change_nodes(nodes: Nodes) -> None:
            for change in (nodes.remove, nodes.add):
                await asyncio.sleep(20 * options.minutes)
                change()  # in the main thread: Ray sets a signal handler
                counts[f"node: {change.__name__}"] += 1

        troubles = [asyncio.create_task(kill())]
        if nodes is not None:
            troubles.append(asyncio.create_task(change_nodes(nodes)))
        await asyncio.gather(*(ask(number) for number in range(options.clients)))
        for trouble in troubles:
            trouble.cancel()
        await asyncio.sleep(15)
        metrics = (await client.get("/metrics")).text.splitlines()
        wanted = ("num_requests_running", "kv_blocks_live", "requests_resumed_total", "engine_restarts_total")
        left = {name: line.split()[-1] for name in wanted for line in metrics if line.startswith(f"headway:{name}{{")}
        asked = f"{options.replicas} replicas, {options.clients} clients, {options.minutes:g} minutes"
        print(f"{asked}: {dict(counts)}; {left}")
        is_clean = float(left["num_requests_running"]) == float(left["kv_blocks_live"]) == 0
        return 0 if is_clean and counts["same"] and not counts["different"] + counts["failed"] else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--every", type=float, default=10, help="seconds between two kills; 0: none")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--ray", action="store_true", help="replicas on the nodes of a cluster")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", default=os.devnull, help="where the server's log goes")
    options = parser.parse_args()
    nodes = Nodes(options.replicas) if options.ray else None
    try:
        with server(options, None if nodes is None else nodes.address) as (url, process):
            status = asyncio.run(run(options, url, process, nodes))
    finally:
        if nodes is not None:
            nodes.close()
    sys.exit(status)


if __name__ == "__main__":
    main()
