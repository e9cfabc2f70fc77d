"""llama.cpp's server: continuous batching over a fixed number of slots, driven over HTTP with token arrays.

With `--server` a llama-server binary is started (build it for this CPU: see README.md); without it, the one inside the
`xllamacpp` wheel runs in this process. That wheel is built for a generic CPU, so it understates llama.cpp.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import WorkItem, arguments, load, measure, own_peak_rss_bytes


class LlamaCpp:
    """A running server, wherever it lives."""

    name = "llama.cpp server"

    def __init__(self, address: str, *, version: str, settings: str, process: subprocess.Popen[bytes] | None) -> None:
        self.version = version
        self.settings = settings
        self._url = address + "/completion"
        self._process = process

    def run(self, items: Sequence[WorkItem]) -> list[int]:
        with ThreadPoolExecutor(max_workers=len(items)) as pool:
            return list(pool.map(self._complete, items))

    def peak_rss_bytes(self) -> int:
        if self._process is None:
            return own_peak_rss_bytes()
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        match = re.search(r"VmHWM:\s+(\d+) kB", status)
        return int(match[1]) * 1024 if match else 0

    def stop(self) -> None:
        """End the server's process; requests that wait for it fail."""
        if self._process is not None:
            self._process.kill()  # asked politely, it first finishes what its slots are doing
            self._process.wait()

    def _complete(self, item: WorkItem) -> int:
        body = {
            "prompt": item.prompt_ids,
            "n_predict": item.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        request = urllib.request.Request(
            self._url, json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=3600) as response:
            return int(json.load(response)["tokens_predicted"])


def start_binary(binary: str, model: str, *, slots: int, context: int, threads: int) -> LlamaCpp:
    """Start a llama-server process and wait until it is healthy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [binary, "-m", model, "--host", "127.0.0.1", "--port", str(port), "-np", str(slots)]
    command += ["-c", str(slots * context), "-t", str(threads), "-tb", str(threads), "-cb"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    while True:
        try:
            urllib.request.urlopen(address + "/health", timeout=5)
            break
        except (urllib.error.URLError, ConnectionError):
            if process.poll() is not None:
                raise SystemExit(f"{binary} ended with code {process.returncode}") from None
            time.sleep(0.05)
    shown = subprocess.run([binary, "--version"], capture_output=True, text=True)
    version = (re.search(r"version: (.*)", shown.stdout + shown.stderr) or ["", "unknown"])[1]
    return LlamaCpp(address, version=version, settings=f"native build, {slots} slots", process=process)


def start_wheel(model: str, *, slots: int, context: int, threads: int) -> LlamaCpp:
    """Start the server inside the xllamacpp wheel."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_parallel = slots
    params.n_ctx = slots * context
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.verbosity = -1
    server = xllamacpp.Server(params)
    peer = LlamaCpp(
        server.listening_address,
        version=f"xllamacpp {xllamacpp.__version__}",
        settings=f"wheel ({xllamacpp.get_system_info().strip(' |')}), {slots} slots",
        process=None,
    )
    peer.server = server  # type: ignore[attr-defined]  # keeps it alive as long as the peer
    return peer


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--server", metavar="BINARY", help="llama-server built for this machine")
    parser.add_argument("--slots", type=int, default=16)
    options = parser.parse_args()
    items = load(options.workload, options.limit)
    context = -(-max(len(item.prompt_ids) + item.max_tokens for item in items) // 256) * 256
    started = time.perf_counter()
    start = {"slots": options.slots, "context": context, "threads": options.threads}
    if options.server:
        peer = start_binary(options.server, options.model, **start)
    else:
        peer = start_wheel(options.model, **start)
    signal.signal(signal.SIGTERM, lambda *_: peer.stop())
    try:
        measure(peer, items, start_s=time.perf_counter() - started)
    finally:
        peer.stop()


if __name__ == "__main__":
    main()
