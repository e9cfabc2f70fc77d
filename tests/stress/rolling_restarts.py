"""Rolling restarts of two real servers behind a proxy while clients ask on: no request fails, no token is different.

    python -m tests.stress.rolling_restarts --minutes 10 --restarts 5

A rolling restart ends each server with SIGTERM and starts it again when it is gone; the other one serves meanwhile.
Exit status 1 if anything failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence

import httpx

from headway.server.server_config import ServerConfig
from tests.integration.prompts import PROMPTS
from tests.integration.server_process import running_server
from tests.stress.small_proxy import SmallProxy
from tests.stress.steady_clients import Expected, ask, load

NUM_TOKENS = 48
LAME_DUCK_S = ServerConfig.lame_duck_s


class RestartedServer:
    """A `headway serve` that keeps its port over restarts."""

    def __init__(self, arguments: Sequence[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self._arguments = ("--port", str(self.port), "--lame-duck-s", str(LAME_DUCK_S), *arguments)
        self._running = contextlib.ExitStack()

    async def start(self) -> None:
        """Returns when it is ready."""
        self.server = await asyncio.to_thread(self._running.enter_context, running_server(*self._arguments))

    async def stop(self) -> float:
        """SIGTERM; how long it took to end. Raises if it ended in another way than it should."""
        signalled_s = time.monotonic()
        status = await asyncio.to_thread(self.server.terminate)
        if status != 0:
            raise RuntimeError(f"{self.port} ended with status {status}:\n" + "\n".join(self.server.log))
        return time.monotonic() - signalled_s

    def close(self) -> None:
        """If it is still there."""
        self._running.close()


@contextlib.asynccontextmanager
async def two_servers(arguments: Sequence[str]) -> AsyncIterator[list[RestartedServer]]:
    servers = [RestartedServer(arguments) for _ in range(2)]
    try:
        await asyncio.gather(*(server.start() for server in servers))
        yield servers
    finally:
        for server in servers:
            server.close()


async def undisturbed(url: str) -> Expected:
    """What each prompt gets when nothing else runs."""
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as http:
        return {prompt: await ask(http, prompt, NUM_TOKENS, stream=False) for prompt in PROMPTS}


async def roll(servers: Sequence[RestartedServer], proxy: SmallProxy, say: str) -> None:
    """Restart one server after the other, each when the proxy sends requests to the one before again."""
    for server, upstream in zip(servers, proxy.upstreams, strict=True):
        stopped_s = await server.stop()
        await server.start()
        while not upstream.is_ready:
            await asyncio.sleep(0.05)
        print(f"{say}: port {server.port} ended after {stopped_s:.1f} s and is back", flush=True)


async def run(arguments: argparse.Namespace) -> bool:
    async with two_servers(arguments.server_options) as servers:
        expected = await undisturbed(servers[0].server.url)
        async with SmallProxy([server.port for server in servers]) as proxy:
            begun_s, is_over = time.monotonic(), False
            url, num_clients, seed = f"http://127.0.0.1:{proxy.port}", arguments.clients, arguments.seed
            loading = asyncio.create_task(
                load(url, expected, num_clients=num_clients, is_over=lambda: is_over, seed=seed)
            )
            try:
                for number in range(arguments.restarts):
                    at_s = 60.0 * arguments.minutes * (number + 0.5) / max(arguments.restarts, 1)
                    await asyncio.sleep(max(at_s - (time.monotonic() - begun_s), 0.0))
                    await roll(servers, proxy, f"restart {number + 1} of {arguments.restarts}")
                await asyncio.sleep(max(60.0 * arguments.minutes - (time.monotonic() - begun_s), 0.0))
            finally:
                is_over = True
                report = await loading
            shares = [f"{one.num_requests} on {one.port} ({one.num_reused} kept)" for one in proxy.upstreams]
            print(f"{report} in {time.monotonic() - begun_s:.0f} s; {', '.join(shares)}")
            for line in (*report.failures[:20], *report.differences[:20], *proxy.failures[:20]):
                print(f"  {line}")
    return report.is_good and not proxy.failures


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress.rolling_restarts", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long clients ask; restarts may take longer")
    parser.add_argument("--restarts", type=int, default=5, help="rolling restarts, each of both servers")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("server_options", nargs="*", help="options of headway serve, behind --")
    return 0 if asyncio.run(run(parser.parse_args(argv))) else 1


if __name__ == "__main__":
    sys.exit(main())
