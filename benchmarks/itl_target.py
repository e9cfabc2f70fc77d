"""What `target_itl_ms` does to latency, on a trace of real arrivals and lengths and a device that is a formula.

The scheduler and the engine's loop are the real ones; only the clock is virtual and a step takes

    base + per chunk token × tokens of prompts + per decode × requests that generate

of its time (the defaults are about an 8B model in bfloat16 on an H200). For each target one line: the time between two
tokens of a request (ITL) and from its arrival to its first (TTFT), in milliseconds.

    python benchmarks/itl_target.py TRACE.csv --targets 15 20 25
"""

from __future__ import annotations

import argparse
import csv
from collections import deque
from collections.abc import Sequence

from headway.config import SchedulerConfig
from headway.core import KVCacheManager, ModelRunnerOutput, Request, SampledTokens, Scheduler, SchedulerOutput
from headway.engine.engine_core import EngineCore

BLOCK_SIZE = 16
TOKEN = SampledTokens((0,))


class Device:
    """Runs steps one behind the other in virtual time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.max_in_flight = options.max_in_flight
        self.verifies_ahead = False
        self.transfers = None
        self.now_s = 0.0
        self.num_steps = 0
        self._base_s = options.base_ms / 1e3
        self._per_chunk_token_s = options.chunk_token_us / 1e6
        self._per_decode_s = options.decode_us / 1e6
        self._free_s = 0.0

    def submit(self, output: SchedulerOutput) -> DeviceStep:
        num_decodes = sum(share.num_tokens == 1 for share in output.scheduled)
        num_chunk_tokens = output.num_scheduled_tokens - num_decodes
        cost_s = self._base_s + self._per_chunk_token_s * num_chunk_tokens + self._per_decode_s * num_decodes
        self._free_s = max(self.now_s, self._free_s) + cost_s
        self.num_steps += 1
        return DeviceStep(self, output, self._free_s)

    def shutdown(self) -> None:
        """Nothing to free."""


class DeviceStep:
    """A step that ends at a known time."""

    def __init__(self, device: Device, output: SchedulerOutput, end_s: float) -> None:
        self._device, self._output, self._end_s = device, output, end_s

    def result(self) -> ModelRunnerOutput:
        self._device.now_s = max(self._device.now_s, self._end_s)
        return ModelRunnerOutput({s.request_id: TOKEN for s in self._output.scheduled if s.samples}, {})


class Replay:
    """One run of the whole trace."""

    def __init__(self, rows: Sequence[tuple[float, int, int]], target_ms: float, options: argparse.Namespace) -> None:
        config = SchedulerConfig(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            target_itl_ms=target_ms,
        ).resolve("cpu")
        kv_cache = KVCacheManager(num_blocks=options.kv_tokens // BLOCK_SIZE, block_size=BLOCK_SIZE)
        self.device = Device(options)
        self.core = EngineCore(Scheduler(config, kv_cache), self.device, now=lambda: self.device.now_s)
        self.expected = deque(sorted(rows))
        self.last_s: dict[str, float] = {}  # of each live request: its last token, or its arrival
        self.ttft_s: list[float] = []
        self.itl_s: list[float] = []
        self.num_arrived = 0

    def run(self) -> None:
        while self.expected or self.core.has_unfinished_requests:
            if not self.core.has_unfinished_requests:
                self.device.now_s = max(self.device.now_s, self.expected[0][0])
            while self.expected and self.expected[0][0] <= self.device.now_s:
                self._arrive(*self.expected.popleft())
            self._step()

    def _arrive(self, arrival_s: float, num_input: int, num_output: int) -> None:
        name = f"r{self.num_arrived}"
        self.num_arrived += 1
        self.last_s[name] = arrival_s
        self.core.add_request(Request(name, range(num_input), max_tokens=num_output))

    def _step(self) -> None:
        for update in self.core.step().updates:
            request = self.core.scheduler.requests.get(update.request_id)
            is_first = request is not None and request.num_output_tokens == 1
            gaps = self.ttft_s if is_first else self.itl_s
            gaps.append(self.device.now_s - self.last_s[update.request_id])
            self.last_s[update.request_id] = self.device.now_s


def percentile(values: list[float], percent: float) -> float:
    """In milliseconds."""
    ordered = sorted(values)
    return 1e3 * ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def read_trace(options: argparse.Namespace) -> list[tuple[float, int, int]]:
    with open(options.trace, newline="") as file:
        rows = list(csv.DictReader(file))[: options.num_requests]
    return [
        (
            float(row["arrival_s"]) / options.speedup,
            max(1, min(int(row["input_tokens"]), options.max_input)),
            max(2, min(int(row["output_tokens"]), options.max_output)),
        )
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", help="CSV with the columns arrival_s, input_tokens, output_tokens")
    parser.add_argument("--targets", type=float, nargs="+", default=[0, 15, 18, 20, 22, 24], help="ms; 0: no limit")
    parser.add_argument("--num-requests", type=int, default=1000)
    parser.add_argument("--speedup", type=float, default=2.5, help="arrival times are divided by this")
    parser.add_argument("--max-input", type=int, default=7000)
    parser.add_argument("--max-output", type=int, default=1000)
    parser.add_argument("--base-ms", type=float, default=5.6)
    parser.add_argument("--chunk-token-us", type=float, default=24.0)
    parser.add_argument("--decode-us", type=float, default=10.0)
    parser.add_argument("--max-in-flight", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--kv-tokens", type=int, default=600_000)
    options = parser.parse_args()
    rows = read_trace(options)
    print("target   ITL P50    P90    P99    max  P99/P50   TTFT P50    P90    P99    max    steps")
    for target_ms in options.targets:
        replay = Replay(rows, target_ms, options)
        replay.run()
        itl = [percentile(replay.itl_s, percent) for percent in (50, 90, 99, 100)]
        ttft = [percentile(replay.ttft_s, percent) for percent in (50, 90, 99, 100)]
        print(
            f"{target_ms or 'none':>6}  {itl[0]:8.1f} {itl[1]:6.1f} {itl[2]:6.1f} {itl[3]:6.1f} {itl[2] / itl[0]:8.2f}"
            f"  {ttft[0]:9.0f} {ttft[1]:6.0f} {ttft[2]:6.0f} {ttft[3]:6.0f} {replay.device.num_steps:8,}",
            flush=True,
        )


if __name__ == "__main__":
    main()
