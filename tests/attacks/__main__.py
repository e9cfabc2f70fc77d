"""Attack a server while ordinary clients use it, and say what these felt of it.

    python -m tests.attacks                              a server of its own, with an engine that has no model
    python -m tests.attacks --with-model                 the embedded model, and the cases that need one
    python -m tests.attacks --only prompt --only beams   cases whose names have one of these words
    python -m tests.attacks --with-model -- MODEL …      a server with these arguments
    python -m tests.attacks --sigterm                    a server for each round; SIGTERM comes in the middle of a case

First 20 clients ask without any attack; then each case runs beside them. Exit code 1: an attacked server broke one of
the bounds, which are options, or gave an answer that no client should get. Times are of a machine that does nothing
else; its load is printed with them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.attacks.bystanders import Bystanders, Phase, bystanders, percentile
from tests.attacks.cases import CASES, Case, Target
from tests.integration.attack_observer import memory_bytes
from tests.integration.server_process import ServerProcess
from tests.integration.under_attack import attacked_server

LOOK_S = 0.1
STOP_LIMIT_S = 14.0
"""How much later than --drain-timeout-s a server must be gone: clients may read their answers for 10 s, and the parent
ends a front end 4 s after that."""


@dataclass
class Row:
    """What one case did."""

    name: str
    took_s: float
    statuses: str
    slowest: str
    felt: Phase
    peak_bytes: int
    """Memory of all the server's processes, beyond what they had before the case."""
    broken: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{'BROKEN' if self.broken else 'ok':<7}{self.name:<44.44} {self.took_s:6.1f} s  {self.statuses:<28.28} "
            f"{self.slowest:<34.34} {_health(self.felt):>14} {1e3 * percentile(self.felt.ordinary_s, 0.99):8.0f} "
            f"{self.peak_bytes / 2**20:+7.0f}"
        )


HEADLINE = (
    f"{'':<7}{'case':<44} {'took':>8}  {'answers':<28} {'slowest':<34} {'/health ms':>14} {'others':>8} {'MiB':>7}\n"
    f"{'':<7}{'':<44} {'':>8}  {'':<28} {'':<34} {'P50/P99/max':>14} {'P99 ms':>8} {'peak':>7}"
)


def _health(felt: Phase) -> str:
    return "/".join(f"{1e3 * percentile(felt.health_s, share):.0f}" for share in (0.5, 0.99, 1.0))


def tree(pid: int) -> list[int]:
    """A process and all that descends from it."""
    found = [pid]
    for each in found:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += [child for task in Path(f"/proc/{each}/task").iterdir() for child in _started_by(task)]
    return found


def _started_by(task: Path) -> list[int]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return [int(child) for child in (task / "children").read_text().split()]
    return []


def memory_of(server: ServerProcess) -> int:
    """Of all its processes."""
    return sum(map(memory_bytes, tree(server.process.pid)))


async def attacked(case: Case, target: Target, server: ServerProcess) -> int:
    """Run a case. Returns the most memory that the server had meanwhile, beyond what it had before."""
    before = peak = memory_of(server)
    async with target.client:
        attack = asyncio.ensure_future(case.attack(target))
        while not attack.done():
            await asyncio.wait([attack], timeout=LOOK_S)
            peak = max(peak, memory_of(server))
        await attack
    return peak - before


def run_case(
    case: Case, server: ServerProcess, watched: Bystanders, options: argparse.Namespace, undisturbed: Phase
) -> Row:
    """Run a case beside the others, and compare what they felt with the bounds."""
    target = Target(server.url)
    watched.phase()
    begun_s = time.monotonic()
    peak = asyncio.run(attacked(case, target, server))
    time.sleep(max(0.0, options.least_s - (time.monotonic() - begun_s)))  # enough answers to speak of percentiles
    row = Row(
        case.name,
        time.monotonic() - begun_s,
        ", ".join(f"{number}×{status}" for status, number in target.statuses.most_common()),
        f"{target.slowest_s:.1f} s {target.slowest}" if target.slowest_s else "",
        watched.phase(),
        peak,
        list(target.wrong),
    )
    p99_s, longest_s = percentile(row.felt.health_s, 0.99), percentile(row.felt.health_s, 1.0)
    ordinary_s, usual_s = (percentile(phase.ordinary_s, 0.99) for phase in (row.felt, undisturbed))
    for bad, why in (
        (row.felt.failures, f"others failed: {row.felt.failures[:3]}"),
        (1e3 * p99_s > options.health_p99_ms, f"/health P99 {1e3 * p99_s:.0f} ms"),
        (1e3 * longest_s > options.health_max_ms, f"/health took {1e3 * longest_s:.0f} ms"),
        (ordinary_s > options.slowdown * usual_s, f"others' P99 is {ordinary_s / usual_s:.1f} × the usual one"),
        (peak > options.memory_mb * 2**20, f"memory grew by {peak / 2**20:.0f} MiB"),
        (target.slowest_s > options.answer_s, f"an answer took {target.slowest_s:.0f} s"),
    ):
        if bad:
            row.broken.append(why)
    return row


def chosen(options: argparse.Namespace) -> list[Case]:
    """The cases that are wanted and possible."""
    return [
        case
        for case in CASES
        if (options.with_model or not case.needs_model)
        and (not options.only or any(word in case.name for word in options.only))
    ]


def attack_all(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    with attacked_server(*options.server, with_model=options.with_model) as server:
        with bystanders(
            server.url, front_end_pid=server.front_end_pid if options.take_off_waiting else None
        ) as watched:
            time.sleep(options.warm_up_s)
            watched.phase()
            time.sleep(options.undisturbed_s)
            undisturbed, before = watched.phase(), memory_of(server)
            print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; undisturbed: {_summary(undisturbed)}")
            print(HEADLINE, flush=True)
            num_broken = 0
            for case in chosen(options):
                row = run_case(case, server, watched, options, undisturbed)
                print(row, *(f"       ! {why[:300]}" for why in row.broken), sep="\n", flush=True)
                num_broken += bool(row.broken)
        time.sleep(options.rest_s)
        left = (memory_of(server) - before) / 2**20
        print(f"load {os.getloadavg()[0]:.1f}; after {options.rest_s:g} s of rest: {left:+.0f} MiB", end="")
        if left > options.memory_back_mb:
            print(", which is too much", end="")
            num_broken += 1
        if num_stalls := server.gauges()["event_loop_stalls_total"]:
            print(f"; the event loop stood still {num_stalls:.0f} times", end="")
            num_broken += 1
        if num_traces := sum("Traceback" in line for line in server.log):
            print(f"; {num_traces} tracebacks in the log", end="")
            num_broken += 1
        print(f"; {num_broken} broken")
        if num_broken:
            print(*server.log[4:], sep="\n")
    return 1 if num_broken else 0


def _summary(felt: Phase) -> str:
    p50, p99 = (1e3 * percentile(felt.ordinary_s, share) for share in (0.5, 0.99))
    return f"{len(felt.ordinary_s)} ordinary requests, P50 {p50:.0f} ms, P99 {p99:.0f} ms; /health {_health(felt)} ms"


def terminate_all(options: argparse.Namespace) -> int:
    """SIGTERM at a random moment of a random case, again and again. Returns the exit code."""
    rng, num_broken = random.Random(options.seed), 0
    cases = chosen(options)
    drain = ("--drain-timeout-s", str(options.drain_timeout_s))
    for number in range(options.sigterm):
        case, after_s = rng.choice(cases), rng.uniform(0.2, 5.0)
        with attacked_server(*drain, *options.server, with_model=options.with_model) as server:
            target, pids = Target(server.url), tree(server.process.pid)
            with bystanders(server.url):
                took_s = asyncio.run(terminated(case, target, server, pids, after_s))
            left = [pid for pid in pids if memory_bytes(pid)]
        limit_s = options.drain_timeout_s + STOP_LIMIT_S
        is_broken = took_s > limit_s or bool(left)
        num_broken += is_broken
        print(
            f"{'BROKEN' if is_broken else 'ok':<7}round {number + 1}: SIGTERM {after_s:.1f} s into '{case.name}': gone "
            f"after {took_s:.1f} s (limit {limit_s:g} s), exit code {server.process.returncode}"
            + (f", left behind: {left}" if left else ""),
            flush=True,
        )
    return 1 if num_broken else 0


async def terminated(case: Case, target: Target, server: ServerProcess, pids: list[int], after_s: float) -> float:
    """Returns how long the server took to end. `pids` gets those of helpers that it has started meanwhile."""
    async with target.client:
        attack = asyncio.ensure_future(case.attack(target))
        await asyncio.wait([attack], timeout=after_s)
        pids += [pid for pid in tree(server.process.pid) if pid not in pids]
        signalled_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        while server.process.poll() is None and time.monotonic() - signalled_s < 120:
            await asyncio.sleep(LOOK_S)
        took_s = time.monotonic() - signalled_s
        attack.cancel()
        await asyncio.gather(attack, return_exceptions=True)
    return took_s


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__.partition("\n")[0])
    add = made.add_argument
    add("--with-model", action="store_true", help="the embedded model, and the cases that need a model")
    add("--only", action="append", metavar="WORD", help="cases whose names have this; several are possible")
    add("--list", action="store_true", help="print the cases' names")
    add("--sigterm", type=int, nargs="?", const=5, default=0, metavar="ROUNDS", help="SIGTERM in the middle of a case")
    add("--drain-timeout-s", type=float, default=2.0, help="of the servers that get SIGTERM")
    add("--seed", type=int, default=1)
    add("--health-p99-ms", type=float, default=100.0)
    add("--health-max-ms", type=float, default=1000.0)
    add("--slowdown", type=float, default=2.0, help="P99 of ordinary requests, as a multiple of the undisturbed one")
    add("--memory-mb", type=float, default=300.0, help="most that all processes together may grow by in a case")
    add("--memory-back-mb", type=float, default=300.0, help="most that they may have more in the end")
    add("--answer-s", type=float, default=30.0, help="most that an attacker's own request may take")
    add("--take-off-waiting", action="store_true", help="of the front end, for a processor")
    add("--warm-up-s", type=float, default=5.0)
    add("--undisturbed-s", type=float, default=15.0)
    add("--least-s", type=float, default=3.0, help="how long each case is looked at, at least")
    add("--rest-s", type=float, default=10.0)
    add("server", nargs="*", help="arguments of headway serve, behind --")
    return made


def main() -> int:
    """Returns the exit code."""
    options = parser().parse_args()
    if options.list:
        print(*(case.name for case in chosen(options)), sep="\n")
        return 0
    return terminate_all(options) if options.sigterm else attack_all(options)


if __name__ == "__main__":
    sys.exit(main())
