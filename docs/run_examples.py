"""Run every shell and Python example of README.md and docs/*.md, word for word, and print how long each took.

    .venv/bin/python docs/run_examples.py                  # all that need neither a GPU nor other people's files
    .venv/bin/python docs/run_examples.py --only simulator --timeout 300
    .venv/bin/python docs/run_examples.py --list           # what would run, and why the others do not

Examples run in a scratch folder with the repository's workloads, benchmarks and docs in it. Those that talk to a server
at http://127.0.0.1:8000 find one; those that start one are run until it is healthy, and it serves the rest of their
page. What is not run stands in `SKIPPED` with its reason. The exit code is 1 if an example fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PORT = 8000

SKIPPED = (
    (r"^make |^python3? -m venv", "a make target (--make runs it)"),
    (r"^headway .*path/to/", "a placeholder for the reader's own model"),
    (r"--model (llama31-8b|qwen3-0.6b)|compute-sanitizer|PYTORCH_NO_CUDA", "needs a GPU"),
    (r"h200\.json|--data-dir|trace\.csv|draw_trace\.py", "needs a GPU's files, or data that is not shipped"),
    (r"^\. \.venv|^pip install", "sets up the reader's environment"),
    (r"githubusercontent", "fetches data"),
    (r"^(ARGS=\S+ (\S+ )*)?(docker|helm|kubectl) ", "needs a container engine or a cluster"),
    (r"Qwen/", "fetches a model of the Hugging Face hub"),
    (r"127\.0\.0\.1:8080", "needs another server"),
    (r"--scheduling-policy spf|class SPF|PolicyView|spf", "part of the policy that the reader writes on that page"),
    (r"after-1\.json", "needs results of the reader's own runs"),
    (r"lengths\.model|train-predictor", "needs a predictor trained on the reader's traffic"),
    (r"\.\.\.|^llm\.|^client\.", "a fragment, with names from the text around it"),
)
"""(pattern, why): looked for in the example."""

SERVED = re.compile(r"127\.0\.0\.1:8000|--port 8000|OpenAI\(|^headway (kv|bench serve)")
SERVES = re.compile(r"^(\w+=\S+ )?(headway serve\b(?!.*--print-config).*)", re.DOTALL)
ENDLESS = re.compile(r"--watch")
STDIN = {"headway chat": "Name a river.\n"}
FILES = {
    "questions.txt": "Name three rivers.\nName two cities.\n",
    "prompts.jsonl": '{"prompt": "The capital of France is", "output_tokens": 8}\n{"prompt": "Rain is"}\n',
}
"""Files that a reader would have."""
TRAFFIC = """
from headway import LLM, SamplingParams
LLM(traffic_log="traffic.jsonl").generate(["The capital of France is", "Rain is"], SamplingParams(max_tokens=8))
"""


@dataclass(frozen=True)
class Example:
    """One command, or one program."""

    file: str
    line: int
    kind: str
    """sh or python"""
    text: str

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def title(self) -> str:
        first = (
            " ".join(self.text.replace("\\\n", " ").split()) if self.kind == "sh" else self.text.strip().split("\n")[0]
        )
        return first if len(first) <= 90 else first[:89] + "…"

    def why_not(self, with_make: bool) -> str | None:
        """Why it is not run; `None` if it is."""
        for pattern, reason in SKIPPED:
            if re.search(pattern, self.text, re.M) and not (with_make and reason.startswith("a make target")):
                return reason
        return None


def examples() -> list[Example]:
    """In the order of the pages."""
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        content = path.read_text(encoding="utf-8")
        for block in re.finditer(r"^```(sh|python)\n(.*?)^```", content, re.S | re.M):
            line = content.count("\n", 0, block.start()) + 2
            name = str(path.relative_to(ROOT))
            if block[1] == "python":
                found.append(Example(name, line, "python", block[2]))
            else:
                found += [Example(name, line + offset, "sh", text) for offset, text in commands(block[2])]
    return found


def commands(block: str) -> list[tuple[int, str]]:
    """(line, text) of each command: lines that end in a backslash or inside of quotes go on."""
    found: list[tuple[int, str]] = []
    pending: list[str] = []
    for number, line in enumerate(block.splitlines()):
        if not pending and (not line.strip() or line.lstrip().startswith("#")):
            continue
        pending.append(line)
        text = "\n".join(pending)
        if not line.endswith("\\") and _is_whole(text):
            found.append((number - len(pending) + 1, text))
            pending = []
    return found


def _is_whole(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


class Server:
    """The one that examples expect at its usual address: the one that their page has started, or else a plain one,
    started when the first of them comes."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder, self._environment = folder, environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: str = "headway serve") -> None:
        if self._process is None:
            self._process = serve(command, self._folder, self._environment, PORT)

    def stop(self) -> None:
        if self._process is not None:
            end(self._process)
            self._process = None


def serve(command: str, folder: Path, environment: dict[str, str], port: int) -> subprocess.Popen[bytes]:
    """Start a server and wait until it is healthy."""
    found = SERVES.match(command)
    if found is not None:
        command = f"{found[1] or ''}exec {found[2]}"
    log = (folder / "server.log").open("ab")
    process = subprocess.Popen(
        ["bash", "-c", command], cwd=folder, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
    )
    for _ in range(240):
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}: {_tail(folder / 'server.log')}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                if answer.status == 200:
                    return process
        except OSError:
            time.sleep(0.5)
    end(process)
    raise RuntimeError("the server was not healthy within two minutes")


def end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run(example: Example, folder: Path, environment: dict[str, str], server: Server, timeout_s: float) -> str:
    """ "" if it went well, else what went wrong."""
    text = (
        example.text.split("  # ")[0].strip().removesuffix("&").strip() if SERVES.match(example.text) else example.text
    )
    if SERVES.match(example.text):
        port = re.search(r"--port (\d+)", text)
        if port is None:
            server.stop()
            server.start(text)
        else:
            end(serve(text, folder, environment, int(port[1])))
        return ""
    if SERVED.search(example.text):
        server.start()
    if example.kind == "python":
        (folder / "example.py").write_text(example.text, encoding="utf-8")
        command = [sys.executable, "example.py"]
    else:
        command = ["bash", "-c", text]
    given = next((answer for name, answer in STDIN.items() if text.startswith(name)), "")
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    is_endless = ENDLESS.search(text) is not None
    try:
        output, _ = process.communicate(given, timeout=8 if is_endless else timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT if is_endless else signal.SIGKILL)
        output, _ = process.communicate()
        if is_endless:
            return "" if process.returncode in (0, 130, -signal.SIGINT) else f"exit code {process.returncode}"
        return f"not done within {timeout_s:g} s"
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    if process.returncode or (text.startswith("curl") and '"error"' in output):  # curl ends well whatever the answer
        last = " / ".join(output.strip().splitlines()[-3:])
        return f"exit code {process.returncode}: {last}"
    return ""


def prepare(folder: Path) -> dict[str, str]:
    """Fill the scratch folder; the environment that examples run in."""
    for name in ("workloads", "benchmarks", "docs"):
        shutil.copytree(ROOT / name, folder / name)
    for name, content in FILES.items():
        (folder / name).write_text(content, encoding="utf-8")
    for page, file in (("server.md", "classes.toml"), ("configuration.md", "headway.toml")):
        shown = re.search(r"^```toml\n(.*?)^```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.S | re.M)
        if shown is not None:
            (folder / file).write_text(shown[1], encoding="utf-8")
    bin_folder = str(Path(sys.executable).parent)
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-c", TRAFFIC], cwd=folder, env=environment, check=True, capture_output=True)
    return environment


def _tail(path: Path) -> str:
    return " / ".join(path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", default="", help="Examples whose place or text has this in it.")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="For one. (default: %(default)g)")
    parser.add_argument("--make", action="store_true", help="Run make targets, too.")
    parser.add_argument("--list", action="store_true", help="Do not run anything.")
    arguments = parser.parse_args()
    chosen = [one for one in examples() if arguments.only in one.place or arguments.only in one.text]
    if arguments.list:
        for one in chosen:
            print(f"{one.place:<30} {one.why_not(arguments.make) or 'run':<60} {one.title}")
        return 0
    failed = 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended, too
    with tempfile.TemporaryDirectory(prefix="headway-examples-") as name:
        folder = Path(name)
        environment = prepare(folder)
        server = Server(folder, environment)
        try:
            for place, one in enumerate(chosen):
                if place and one.file != chosen[place - 1].file:
                    server.stop()
                failed += not _told(one, folder, environment, server, arguments)
        finally:
            server.stop()
    print(f"\n{failed} failed" if failed else "\nall of them ran")
    return 1 if failed else 0


def _told(
    one: Example, folder: Path, environment: dict[str, str], server: Server, arguments: argparse.Namespace
) -> bool:
    """Run one, print its line; whether it went well."""
    if (reason := one.why_not(arguments.make)) is not None:
        print(f"{one.place:<28}      –  not run: {reason:<58} {one.title}", flush=True)
        return True
    started = time.perf_counter()
    try:
        problem = run(one, folder, environment, server, arguments.timeout)
    except RuntimeError as error:
        problem = str(error)
    took_s = time.perf_counter() - started
    print(f"{one.place:<28} {took_s:6.1f} s {'FAILED' if problem else 'ok':<6} {one.title}", flush=True)
    if problem:
        print(f"{'':<44}{problem}", flush=True)
    return not problem


if __name__ == "__main__":
    sys.exit(main())
