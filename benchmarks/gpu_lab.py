"""Measures on a GPU, in one call, what the lab's pages still lack there: a part for each question, one after the other.

    python benchmarks/gpu_lab.py --list
    python benchmarks/gpu_lab.py --data-dir DATA --output results                        # about 20 minutes on an H200
    python benchmarks/gpu_lab.py --data-dir DATA --output results --minutes 9            # what fits, in this order
    python benchmarks/gpu_lab.py --data-dir DATA --output results --parts padding formats

DATA has azure_conv_first2000.csv. Each part is a command of its own, which is printed; one that fails does not stop the
others. The claims' rows are put beside the kept ones: copy results/claims.json and claims.md to docs/results/h200, then
`make docs`. Calibrations go to src/headway_lab/sim/machines. `pip install '.[nvml]'` adds NVML's number.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "docs" / "results" / "h200" / "claims.json"
HEADWAY = (sys.executable, "-m", "headway")
SHAPE = ("--model", "llama31-8b", "--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "8192")
PROMISES = ("--slo", "p99_ttft_ms=1000", "--slo", "p99_itl_ms=50", "--price-per-hour", "3.5")
RATE = 20.0
PATIENCE = 3.0
"""A part that takes so many times its expected time is ended."""


@dataclass(frozen=True)
class Places:
    """Where the data is, and where results go."""

    data: str
    output: Path

    @property
    def azure(self) -> list[str]:
        return ["--workload", str(ROOT / "workloads" / "azure.toml"), "--data-dir", self.data]


@dataclass(frozen=True)
class Part:
    """One question, and the command that answers it."""

    what: str
    seconds: float
    """How long it is expected to take on an H200, the loading of the model included."""
    command: Callable[[Places], Sequence[str]]


def utilisation(model: str) -> Callable[[Places], Sequence[str]]:
    script = str(ROOT / "benchmarks" / "utilisation.py")
    return lambda places: [
        *(sys.executable, script, "--model", model),
        *("--output-json", str(places.output / f"utilisation-{model}.json")),
    ]


def claim(name: str) -> Callable[[Places], Sequence[str]]:
    return lambda places: [
        *(*HEADWAY, "claims", name, "--on", "engine", "--model", "llama31-8b"),
        *("--data-dir", places.data, "--output", str(places.output)),
    ]


def cheapest(places: Places) -> Sequence[str]:
    return [
        *(*HEADWAY, "tune", "--calibration", "h200-llama31-8b", *SHAPE, *places.azure, "--requests", "400", *PROMISES),
        *("--objective", "cost", "--trials", "12", "--verify", "1"),
        *("--output-json", str(places.output / "tune-cost.json")),
    ]


def size(places: Places) -> Sequence[str]:
    return [
        *(*HEADWAY, "size", "--machine", "h200-llama31-8b", *places.azure, "--rate", f"{RATE:g}", *PROMISES),
        *("--requests", "1000", "--json"),
    ]


def sized(places: Places) -> Sequence[str]:
    """The answer of `headway size` on the engine, beside its prediction."""
    answer = json.loads(subprocess.run(size(places), capture_output=True, text=True, check=True).stdout)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in answer["options"].items()]
    rate = answer["rate"] / answer["replicas"]
    return [
        *(*HEADWAY, "sim-check", "--calibration", "h200-llama31-8b", *SHAPE, *places.azure, "--requests", "1000"),
        *("--rate", f"{rate:g}", *options, "--output-json", str(places.output / "size.json")),
    ]


def formats(places: Places) -> Sequence[str]:
    return [
        *(*HEADWAY, "sim-check", *SHAPE, "--seconds", "20", "--requests", "300", "--load", "0.8", "--check-capacity"),
        *("--workload", str(ROOT / "workloads" / "chat_lognormal.toml")),
        *("--variant", "bf16", "--variant", "fp8 quantization=fp8", "--variant", "int4 quantization=int4"),
        *("--variant", "guesses speculation=ngram spec_synthetic_acceptance=2.5"),
        *("--save-calibration", str(places.output / "h200-llama31-8b-{variant}.json")),
        *("--markdown", str(places.output / "formats.md")),
    ]


PARTS = {
    "utilisation": Part("bandwidth and MFU beside a profile's, and NVML's number: 0.6B", 45, utilisation("qwen3-0.6b")),
    "utilisation-8b": Part("the same: 8B", 75, utilisation("llama31-8b")),
    "paging-cost": Part("attention on scattered blocks of 1 to 256", 60, claim("paging-cost")),
    "long-prompt": Part("a prompt of 32k tokens beside others", 80, claim("long-prompt")),
    "weight-formats": Part("bf16, FP8 and INT4 at 1, 64 and 256 requests", 80, claim("weight-formats")),
    "speculation": Part("guesses at 1 to 256 requests", 70, claim("speculation")),
    "cost": Part("the cheapest options for azure_conv, and these on the engine", 150, cheapest),
    "size": Part(f"the options for azure_conv at {RATE:g}/s, and these on the engine", 120, sized),
    "padding": Part("rectangular and sealed batches beside continuous ones", 290, claim("padding")),
    "formats": Part("calibrations of bf16, FP8, INT4 and guesses, and their errors", 400, formats),
}


def run_part(name: str, places: Places) -> tuple[float, str]:
    """Seconds, and how it ended."""
    part, started = PARTS[name], time.perf_counter()
    try:
        command = part.command(places)
        print(f"\n== {name}: {part.what}\n$ {' '.join(command)}", flush=True)
        code = subprocess.run(command, timeout=PATIENCE * part.seconds, check=False).returncode
        ended = "done" if code == 0 else f"failed with exit code {code}"
    except subprocess.TimeoutExpired:
        ended = "ended: took too long"
    except (subprocess.CalledProcessError, KeyError, ValueError) as error:
        ended = f"failed: {error}"
    return time.perf_counter() - started, ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show the parts and their times, and end")
    parser.add_argument("--data-dir", metavar="DIR", help="has azure_conv_first2000.csv")
    parser.add_argument("--output", type=Path, metavar="DIR")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no part that would take longer")
    options = parser.parse_args()
    if options.list:
        for name, part in PARTS.items():
            print(f"{name:<16}{part.seconds:>5.0f} s  {part.what}")
        return 0
    if options.data_dir is None or options.output is None:
        parser.error("--data-dir and --output are needed")
    options.output.mkdir(parents=True, exist_ok=True)
    if not (options.output / KEPT.name).exists():
        shutil.copy(KEPT, options.output)
    places, until = Places(options.data_dir, options.output), time.perf_counter() + 60 * options.minutes
    found = {}
    for name in options.parts:
        fits = time.perf_counter() + PARTS[name].seconds <= until
        found[name] = run_part(name, places) if fits else (0.0, "left out: no time")
    print()
    for name, (seconds, ended) in found.items():
        print(f"{name:<16}{seconds:>5.0f} s  {ended}")
    return int(any(ended != "done" for _, ended in found.values()))


if __name__ == "__main__":
    sys.exit(main())
