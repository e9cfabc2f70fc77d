"""The command as a whole: help, unknown names, exit codes, errors as one line, and a fast start."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from typing import NoReturn

import pytest

from headway import __version__
from headway.cli import generate, main
from headway.console import loading
from headway.console.commands import Command, Commands
from headway.errors import ModelNotFoundError

HEAVY = ("torch", "numpy", "rich", "tokenizers", "gguf", "jinja2", "starlette", "uvicorn", "prometheus_client")


def run(*arguments: str) -> int:
    """The exit code, whether it was returned or argparse left through `SystemExit`."""
    try:
        return main.main(arguments)
    except SystemExit as left:
        return int(left.code or 0)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("help",)])
def test_overview_lists_every_command(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 0
    out = capsys.readouterr().out
    for name, command in main.commands().items():
        assert name in out
        assert command.summary in out


@pytest.mark.parametrize("name", main.commands())
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(name, "--help") == 0
    assert f"usage: headway {name}" in capsys.readouterr().out


ENGINE_COMMANDS = (
    ("generate",), ("chat",), ("serve",), ("demo",), ("calibrate",), ("sim",), ("sim-check",), ("tune",), ("claims",),
    ("bench", "latency"), ("bench", "throughput"), ("bench", "sweep"), ("bench", "capacity"),
)  # fmt: skip


@pytest.mark.parametrize("command", ENGINE_COMMANDS)
def test_help_has_the_commands_own_options_and_help_all_those_of_the_engine(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*command, "--help") == 0
    own = capsys.readouterr().out
    assert run(*command, "--help-all") == 0
    everything = capsys.readouterr().out
    assert "--help-all" in own and "options of the engine" in " ".join(own.split())
    assert "--max-chunk-tokens" not in own and "--max-chunk-tokens" in everything
    assert len(everything) > len(own)


@pytest.mark.parametrize("command", [("kv",), ("workload",), ("bench", "serve"), ("train-predictor",)])
def test_commands_without_an_engine_have_one_help(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command, "--help") == 0
    assert "--help-all" not in capsys.readouterr().out
    assert run(*command, "--help-all") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tune", "--predict-lengths", "oracle"), "'--predict-lengths' is now --length-predictor."),
        (
            ("serve", "--prefix-caching", "off"),
            "'--prefix-caching' is now --enable-prefix-caching or --no-enable-prefix-caching.",
        ),
        (("generate", "--overlap=on"), "'--overlap' is now --async-scheduling or --no-async-scheduling."),
        (
            ("chat", "--cuda-graphs", "off"),
            "'--cuda-graphs' is now --enforce-eager or --no-enforce-eager, and --cuda-graph-capture start|lazy.",
        ),
        (("sim", "--prefix-caching", "on"), "is now --enable-prefix-caching"),
        (
            ("serve", "--access-log", "off"),
            "'--access-log' takes no value, and not 'off': it is --access-log or --no-access-log.",
        ),
        (("serve", "--cache-salt-by-key", "auto"), "it is --cache-salt-by-key or --no-cache-salt-by-key."),
        (("serve", "--refuse-late=on"), "it is --refuse-late or --no-refuse-late."),
        (("generate", "--enable-prefix-caching", "false"), "takes no value, and not 'false'"),
        (("generat",), "unknown command 'generat'. Did you mean 'generate'?"),
        (("gen",), "unknown command 'gen'. Did you mean 'generate'?"),
        (("nosuch",), "unknown command 'nosuch'. The commands are: generate, chat"),
        (("--verison",), "unknown option '--verison'."),
        (("generate", "--blok-size", "3"), "unknown option '--blok-size'. Did you mean '--block-size'?"),
        (("generate", "--temprature=0"), "unknown option '--temprature'. Did you mean '--temperature'?"),
        (("chat", "--logprobs", "3"), "unknown option '--logprobs'."),
        (("demo", "--max-seqs", "3"), "unknown option '--max-seqs'. Did you mean '--max-num-seqs'?"),
        (("version", "now"), "unexpected argument 'now'."),
        (("generate", "--block-size", "many"), "'many' is not a whole number"),
        (("generate", "--kv-cache-memory", "2 gigs"), "'2 gigs' is not a number of bytes"),
        (("generate", "--dtype", "float8"), "invalid choice: 'float8'"),
        (("generate", "--logit-bias", "x"), "'x' is not ID=BIAS"),
        (("generate", "--logit-bias", "1=nan"), "'1=nan' is not ID=BIAS"),
        (("generate", "--temperature", "nan"), "'nan' is not a number"),
        (("sim", "--replicas", "9" * 5000), "is too large"),
        (("generate", "--block"), "unknown option '--block'"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_names_the_nearest(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("headway: error: ")


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a model fails the test."""

    def load(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(loading, "load_engine", load)


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "hi", "--block-size", "0"), "block_size must be between 1 and 256, not 0."),
        (("generate", "hi", "--temperature", "-1"), "temperature must be"),
        (("generate", "hi", "--logprobs", "2"), "add --json"),
        (("generate", "hi", "--kv-cache-memory", "1GiB", "--num-kv-blocks", "9"), "give one of them"),
        (("generate", "   "), "The prompt is empty"),
        (("generate", "--prompt-file", "/no/such/file"), "Cannot read the prompt file '/no/such/file'"),
        (("chat", "--top-p", "0"), "top_p must be"),
        (("demo", "--pace", "-1"), "--pace must be from 0 to 60 seconds"),
        (("generate", "hi", "--profile", "/no/such/x.json"), "there is no folder '/no/such'"),
        (("bench", "latency", "--output-json", "/no/such/x.json"), "there is no folder '/no/such'"),
        (("bench", "latency", "--output-json", "/"), "it is a folder"),
        (("bench", "latency", "--profile", "/no/such/x.json"), "there is no folder '/no/such'"),
        (("bench", "latency", "--input-len", "90", "--max-model-len", "100"), "a request of 218 tokens"),
        (("bench", "throughput", "--scenario", "online", "--trace", "/no/such.csv"), "Cannot read the trace"),
        (("bench", "sweep", "--rates", "1,x"), "--rates must be"),
        (("bench", "sweep", "--knob", "max_num_seqs=4,0"), "max_num_seqs must be at least 1"),
        (("bench", "sweep", "--dataset-name", "custom", "--dataset-path", "/no/such"), "Cannot read the prompts"),
        (("bench", "sweep", "--num-prompts", "3", "--min-requests", "2"), "--num-prompts says how many"),
        (("bench", "sweep", "--rates", "inf", "--burstiness", "2"), "--burstiness is about requests that come at"),
        (("bench", "capacity", "--workload", "/no/such.toml"), "the file cannot be read"),
        (("bench", "capacity", "--set", "a=1"), "--set is for the dataset 'workload'"),
        (("bench", "capacity", "--goodput", "ttft:x"), "--goodput takes"),
        (("calibrate", "--output", "/no/such/x.json"), "there is no folder '/no/such'"),
        (("sim-check", "--workload", "/no/such.toml"), "the file cannot be read"),
        (("claims", "--quick", "--calibration", "/no/such"), "Cannot read the calibration"),
        (("claims", "--quick", "--max-num-seqs", "0"), "max_num_seqs must be at least 1"),
        (("tune", "--calibration", "x", "--workload", "y", "--dtype", "float32"), "--dtype is for the engine that"),
        (("workload", "x.toml", "--html", "/no/such/x.html"), "there is no folder '/no/such'"),
        (("kv", "--html", "/no/such/x.html"), "there is no folder '/no/such'"),
    ],
)
def test_bad_values_are_one_line_before_a_model_is_loaded(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("headway: error: ") and message in error and error.count("\n") == 1


def _fail(*_: object) -> NoReturn:
    raise ModelNotFoundError("no model\nin two lines")


def test_errors_lose_their_traceback_and_their_line_breaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "run", _fail)
    assert run("generate", "hi") == 1
    assert capsys.readouterr().err == "headway: error: no model in two lines\n"


def test_debug_mode_keeps_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_DEBUG", "1")
    monkeypatch.setattr(generate, "run", _fail)
    with pytest.raises(ModelNotFoundError):
        main.main(["generate", "hi"])


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "run", interrupt)
    assert run("generate", "hi") == 130


def test_nothing_heavy_is_imported_before_the_arguments_are_good() -> None:
    code = (
        "import sys\n"
        "from headway.cli.main import main\n"
        "for arguments in ([], ['options'], ['serve', '--help-all'],"
        " *([name, '--help'] for name in ('generate', 'chat', 'demo'))):\n"
        "    try: main(arguments)\n"
        "    except SystemExit: pass\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version_alone_imports_next_to_nothing(flag: str) -> None:
    """So it is printed in a tenth of a second: neither parsers nor other packages' commands are looked for."""
    code = f"import sys; from headway.cli.main import main; main([{flag!r}]); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"headway {__version__}\n"
    needless = {*HEAVY, "argparse", "asyncio", "importlib.metadata", "socket", "headway.config", "headway_lab"}
    assert not needless & set(done.stderr.split())


def test_output_that_nobody_reads_is_no_crash() -> None:
    command = f"{sys.executable} -m headway options | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout == "Model\n"
    assert done.stderr == ""


class Point:
    """An entry point of another package."""

    dist = None
    value = "other:COMMANDS"

    def __init__(self, loaded: Commands | None) -> None:
        self._loaded = loaded

    def __lt__(self, other: Point) -> bool:
        return False

    def load(self) -> Commands:
        if self._loaded is None:
            raise ImportError("no such module")
        return self._loaded


def test_other_packages_add_commands_and_take_none_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = {
        "new": Command("new", "Something new."),
        "serve": Command("other", "Not ours."),
        "version": Command("x", ""),
    }
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Point(ours), Point(None)])
    found = main.commands.__wrapped__()
    assert found["new"] == ours["new"] and found["serve"] == main.OWN["serve"] and list(found)[-1] == "version"
    assert "commands of other:COMMANDS cannot be loaded: no such module" in capsys.readouterr().err
