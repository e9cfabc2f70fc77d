"""Tries a wheel as a new user would: an empty environment elsewhere, `pip install`, `headway serve`, one answer.

    python release/build_wheels.py --output dist --platforms linux-x86_64
    python release/try_wheel.py dist/headway-*-manylinux*_x86_64.whl                  # with pip
    python release/try_wheel.py dist/headway-*.tar.gz --installer uv                  # uv venv, uv pip install: no pip

It downloads PyTorch and the embedded model, prints how long each step took, and fails if a step fails, if the answer is
empty, or if all steps but the downloads take longer than `--limit-s`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

DOWNLOADS = "downloads"
LIGHTGBM = "from headway.predict.predictors import import_lightgbm; import_lightgbm()"
EXTRAS = {
    "otel": (("headway", "serve", "--otlp-traces-endpoint", "http://127.0.0.1:1"), 2, "opentelemetry-sdk>="),
    "predict": (("python", "-c", LIGHTGBM), 1, "lightgbm>="),
    "ray": (("headway", "serve", "--ray"), 2, "ray>="),
}
"""For each extra, a command that needs it, its exit code, and a requirement that the error has to name."""


class FailedError(Exception):
    """A step did not do what it should."""


@dataclass
class Steps:
    """The steps that were done, and how long each took. The processor time says how busy the machine was meanwhile."""

    times_s: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        print(f"{title} …", flush=True)
        started_s, used_s = time.monotonic(), _processor_s()
        yield
        self.times_s[title] = time.monotonic() - started_s
        print(f"{title}: {self.times_s[title]:.1f} s, {_processor_s() - used_s:.1f} s of a processor", flush=True)

    def beside_downloads_s(self) -> float:
        return sum(seconds for title, seconds in self.times_s.items() if DOWNLOADS not in title)


def _processor_s() -> float:
    """The processor time of all commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True)
class Environment:
    """An empty environment, and a folder beside it in which commands run."""

    folder: Path
    variables: Mapping[str, str]

    @property
    def python(self) -> str:
        return self.program("python")

    @property
    def headway(self) -> str:
        return self.program("headway")

    def program(self, name: str) -> str:
        return str(self.folder / "venv" / "bin" / name)

    def run(self, *command: str, code: int = 0) -> str:
        """Run a command and return what it printed. Raises `FailedError` unless it ends with `code`."""
        done = subprocess.run(
            command, cwd=self.folder, env=self.variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode != code:
            raise FailedError(f"'{' '.join(command)}' exited with {done.returncode}, not {code}:\n{done.stdout}")
        return done.stdout


def install(environment: Environment, distribution: Path, installer: str, steps: Steps) -> None:
    """Make the environment and install the wheel or source distribution into it."""
    if installer == "uv":
        with steps.step("uv venv"):
            environment.run("uv", "venv", "--python", sys.executable, str(environment.folder / "venv"))
        with steps.step(f"uv pip install, with {DOWNLOADS}"):
            environment.run("uv", "pip", "install", "--python", environment.python, str(distribution))
        return
    with steps.step("python -m venv"):
        environment.run(sys.executable, "-m", "venv", str(environment.folder / "venv"))
    wheels = str(environment.folder / "wheels")
    with steps.step(f"pip {DOWNLOADS}"):
        environment.run(environment.python, "-m", "pip", "wheel", "--wheel-dir", wheels, str(distribution))
    with steps.step("pip install"):
        pip = (environment.python, "-m", "pip", "install", "--no-index", "--find-links", wheels)
        environment.run(*pip, "headway")


def try_commands(environment: Environment, steps: Steps) -> None:
    """Run what needs no model: the version, a simulation by names, the errors that name an extra."""
    with steps.step("headway --version, 10 times"):
        times_s = []
        for _ in range(10):
            started_s = time.monotonic()
            shown = environment.run(environment.headway, "--version")
            times_s.append(time.monotonic() - started_s)
    print(f"  {shown.strip()}; median {statistics.median(times_s):.3f} s, least {min(times_s):.3f} s")
    with steps.step("headway sim, by names"):
        names = ("--calibration", "h200-llama31-8b", "--workload", "chat_lognormal")
        environment.run(environment.headway, "sim", *names, "--requests", "50", "--rate", "20")
    with steps.step("headway completion bash"):
        environment.run(environment.headway, "completion", "bash")
    with steps.step("errors that name an extra"):
        for extra, ((program, *arguments), code, requirement) in EXTRAS.items():
            shown = environment.run(environment.program(program), *arguments, code=code)
            if requirement not in shown or "install" not in shown:
                raise FailedError(f"the error about [{extra}] does not say what to install: {shown}")


def serve(environment: Environment, steps: Steps) -> None:
    """Start `headway serve`, ask one question, and stop it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = (environment.headway, "serve", "--port", str(port))
    started_s, used_s = time.monotonic(), _processor_s()
    server = subprocess.Popen(
        command, cwd=environment.folder, env=environment.variables, stderr=subprocess.PIPE, text=True
    )
    lines: list[tuple[float, str]] = []
    reader = threading.Thread(target=_read_lines, args=(server, lines), daemon=True)
    reader.start()
    try:
        with steps.step(f"headway serve until it answers, its {DOWNLOADS} too"):
            answer = _ask(f"http://127.0.0.1:{port}", server)
        ready_s = time.monotonic() - started_s
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(timeout=60)
        reader.join(timeout=10)
    for at_s, line in lines:
        print(f"  {at_s - started_s:6.1f} s  {line.rstrip()}")
    print(f"  the answer: {answer!r}")
    if code != 0 or not answer.strip():
        raise FailedError(f"the server ended with {code}, the answer was {answer!r}")
    download_s = _between(lines, "Downloading the embedded model", "Downloading the model: done")
    steps.times_s["headway serve: first answer beside the model"] = ready_s - download_s
    print(f"first answer after {ready_s:.1f} s, {download_s:.1f} s of which are the model's download")
    print(f"processor time of the server: {_processor_s() - used_s:.1f} s")


def _read_lines(server: subprocess.Popen[str], lines: list[tuple[float, str]]) -> None:
    assert server.stderr is not None
    for line in server.stderr:
        lines.append((time.monotonic(), line))


def _ask(url: str, server: subprocess.Popen[str]) -> str:
    body = {"messages": [{"role": "user", "content": "Name three rivers."}], "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    while server.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                return str(json.load(answer)["choices"][0]["message"]["content"])
        except (ConnectionError, urllib.error.URLError):
            time.sleep(0.05)  # the server does not listen yet
    raise FailedError(f"the server ended with {server.returncode}")


def _between(lines: Sequence[tuple[float, str]], first: str, last: str) -> float:
    """The seconds between the lines that begin so; 0 if one is missing."""
    begun = next((at_s for at_s, line in lines if line.startswith(first)), 0.0)
    ended = next((at_s for at_s, line in lines if line.startswith(last)), begun)
    return ended - begun


def clean_variables(folder: Path) -> dict[str, str]:
    """This process's environment without anything of Headway's or of the repository's, and with an empty cache."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY_", "PYTHON", "VIRTUAL"))}
    return {**kept, "HEADWAY_CACHE_DIR": str(folder / "cache")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("distribution", type=Path, help="A wheel or a source distribution of Headway.")
    parser.add_argument("--installer", choices=("pip", "uv"), default="pip", help="(default: %(default)s)")
    parser.add_argument(
        "--limit-s", type=float, default=90.0, metavar="S", help="For all but the downloads. (default: %(default)g)"
    )
    arguments = parser.parse_args()
    steps = Steps()
    with tempfile.TemporaryDirectory(prefix="headway-wheel-") as name:
        environment = Environment(Path(name), clean_variables(Path(name)))
        try:
            install(environment, arguments.distribution.resolve(), arguments.installer, steps)
            try_commands(environment, steps)
            serve(environment, steps)
        except FailedError as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
    total_s = steps.beside_downloads_s()
    print(f"\nbeside the downloads: {total_s:.1f} s (limit {arguments.limit_s:g} s)")
    return 0 if total_s <= arguments.limit_s else 1


if __name__ == "__main__":
    sys.exit(main())
