"""One option, three ways to give it: the same value, in a known order, and printed so that it can be given again."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from headway.cli.main import main
from headway.console.flags import FlagSpec
from headway.errors import ConfigError
from headway.server.server_config import ServerConfig
from tests.unit.console.settling import SPECS, Sample, sample, settled

PRINTED = [spec for spec in SPECS if not spec.is_secret]


def names(spec: FlagSpec) -> str:
    return spec.name


def written(folder: Path, text: str) -> Path:
    file = folder / "headway.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_engine_and_server_share_one_namespace() -> None:
    every = [name for spec in SPECS for name in (spec.name, *spec.aliases)]
    assert len(every) == len(set(every))


@pytest.mark.parametrize("spec", SPECS, ids=names)
def test_flag_variable_and_key_give_the_same_value(spec: FlagSpec, tmp_path: Path) -> None:
    one: Sample = sample(spec)
    by_flag = settled(*one.flags).settings[spec.name]
    assert by_flag.value != spec.default and by_flag.sources == (spec.flag,)
    variable = f"HEADWAY_{spec.name.upper()}"
    by_variable = settled(environment={variable: one.variable}).settings[spec.name]
    for key in {spec.name, spec.name.replace("_", "-"), *spec.aliases}:
        by_file = settled(file=written(tmp_path, f"{key} = {one.toml}\n")).settings[spec.name]
        assert by_file.sources == (str(tmp_path / "headway.toml"),)
        assert by_file.value == by_variable.value == by_flag.value
    assert by_variable.sources == (f"${variable}",)


def test_every_option_travels_through_a_printed_file(tmp_path: Path) -> None:
    flags = [text for spec in PRINTED for text in sample(spec).flags]
    before = settled(*flags)
    after = settled(file=written(tmp_path, before.toml()))
    assert after.given() == {"api_key": (), **before.given()}


def test_printed_defaults_are_the_defaults(tmp_path: Path) -> None:
    printed = settled().toml()
    again = settled(file=written(tmp_path, printed))
    assert ServerConfig(**again.given({spec.name for spec in SPECS if spec.section == "server"})) == ServerConfig()
    assert all(line.endswith("# default") for line in printed.splitlines()[1:])
    for spec in SPECS:  # what has no line is none, which a file could not say otherwise
        assert (spec.name in tomllib.loads(printed)) == (spec.default is not None), spec.name


ODD_TEXTS = ('say "hi"\\', "two\nlines\t\x7f\x01", "\u2028\U0001f600", "'''", "# no comment", "")


@pytest.mark.parametrize("text", ODD_TEXTS, ids=repr)
def test_odd_texts_are_quoted(text: str, tmp_path: Path) -> None:
    before = settled("--tokenizer", text, "--cors-origin", text, environment={"HEADWAY_HOST": text or "x"})
    after = settled(file=written(tmp_path, before.toml()))
    assert after.settings["tokenizer"].value == text and after.settings["cors_origin"].value == (text,)
    assert after.settings["host"].value == (text or "x")


def test_flag_then_variable_then_file_then_default(tmp_path: Path) -> None:
    file = written(tmp_path, "port = 3\nmax_num_seqs = 3\nseed = 3\n")
    environment = {"HEADWAY_PORT": "2", "HEADWAY_MAX_NUM_SEQS": "2", "HEADWAY_SKIP_WINDOW": ""}
    found = settled("--port", "1", environment=environment, file=file)
    assert found.given() == {"port": 1, "max_num_seqs": 2, "seed": 3}
    lines = [" ".join(line.split()) for line in found.toml().splitlines()]
    for line in (
        "port = 1 # --port",
        "max_num_seqs = 2 # $HEADWAY_MAX_NUM_SEQS",
        f"seed = 3 # {file}",
        "skip_window = 8 # default",
        "# max_model_len: none # default",
    ):
        assert line in lines


def test_the_environment_may_name_the_file_and_a_flag_another(tmp_path: Path) -> None:
    file = written(tmp_path, "port = 3\n")
    assert settled(environment={"HEADWAY_CONFIG": str(file)}).given() == {"port": 3}
    other = tmp_path / "other.toml"
    other.write_text("seed = 3\n")
    assert settled(environment={"HEADWAY_CONFIG": str(file)}, file=other).given() == {"seed": 3}


def test_a_model_without_its_flag_comes_before_variable_and_file(tmp_path: Path) -> None:
    file = written(tmp_path, 'model = "c"\n')
    found = settled(environment={"HEADWAY_MODEL": "b"}, file=file, model="a")
    assert found.given() == {"model": "a"} and found.settings["model"].sources == ("MODEL",)
    assert settled(environment={"HEADWAY_MODEL": "b"}, file=file).given() == {"model": "b"}
    with pytest.raises(ConfigError, match="two models"):
        settled("--model", "b", model="a")


def test_keys_count_from_wherever_they_come_and_are_never_printed(tmp_path: Path) -> None:
    file = written(tmp_path, 'api_key = ["in-file-1", "in-file-2", "same"]\n')
    environment = {"HEADWAY_API_KEY": "in,environment"}
    found = settled("--api-key", "in-flag", "--api-key", "same", environment=environment, file=file)
    assert found.given()["api_key"] == ("in-flag", "same", "in,environment", "in-file-1", "in-file-2")
    [line] = [line for line in found.toml().splitlines() if "api_key:" in line]
    assert "5 given" in line and line.startswith("#") and "--api-key, $HEADWAY_API_KEY" in line
    assert not any(key in found.toml() for key in found.given()["api_key"] if key != "same")


@pytest.mark.parametrize("url", ["http://me:hush@example.org/v1", "https://:hush@example.org"])
def test_a_password_in_a_url_is_not_printed(url: str) -> None:
    found = settled("--otlp-traces-endpoint", url)
    assert "hush" not in found.toml() and tomllib.loads(found.toml()).get("otlp_traces_endpoint") is None


def test_a_name_that_is_no_utf8_is_not_printed() -> None:
    found = settled("--model", "caf\udce9")
    found.toml().encode()
    assert "model: given; not shown" in found.toml()


@pytest.mark.parametrize(
    ("content", "environment", "message"),
    [
        ("port = 70000", {}, "port must be a whole number from 0 to 65535, not 70000. (port comes from FILE)"),
        ("", {"HEADWAY_QUEUE_TTL_S": "-1"}, "not -1.0. (queue_ttl_s comes from $HEADWAY_QUEUE_TTL_S)"),
        ('ssl_certfile = "x"', {}, "TLS needs both ssl_certfile and ssl_keyfile. (ssl_certfile comes from FILE)"),
        ("replicas = 3", {"HEADWAY_MIN_REPLICAS": "4"}, "(replicas comes from FILE; min_replicas comes from $HEADWAY"),
    ],
)
def test_bounds_are_those_of_the_flags_and_errors_say_who_gave_the_value(
    content: str, environment: dict[str, str], message: str, tmp_path: Path
) -> None:
    file = written(tmp_path, content)
    found = settled(environment=environment, file=file)
    with pytest.raises(ConfigError) as caught, found.naming_sources():
        ServerConfig(**found.given({spec.name for spec in SPECS if spec.section == "server"}))
    assert message.replace("FILE", str(file)) in str(caught.value)


def test_errors_of_the_engines_options_say_it_too_and_flags_need_no_hint() -> None:
    with pytest.raises(ConfigError, match=r"\(max_num_seqs comes from \$HEADWAY_MAX_NUM_SEQS\)$"):
        settled(environment={"HEADWAY_MAX_NUM_SEQS": "0"}).engine_config()
    with pytest.raises(ConfigError, match=r"^max_num_seqs must be at least 1, not 0\.$"):
        settled("--max-num-seqs", "0").engine_config()


# ---- commands --------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file for a server, in the working directory; and a variable."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWAY_SEED", "5")
    return written(tmp_path, 'model = "llama-3.1-8b"\nport = 9000\napi-key = "hush"\nload_format = "dummy"\n')


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "plan"])
def test_one_file_serves_every_command_that_reads_files(
    command: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--config", file.name, "--print-config"]) == 0
    printed = capsys.readouterr()
    found = tomllib.loads(printed.out)
    assert found["model"] == "llama-3.1-8b" and "hush" not in printed.out + printed.err
    assert found.get("port") == (9000 if command == "serve" else None)
    assert found.get("seed") == (None if command == "plan" else 5)
    assert '"llama-3.1-8b"' in printed.out and "# headway.toml" in printed.out


def test_a_positional_model_is_printed_as_such(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "plan"):
        assert main([command, "qwen3-0.6b", "--config", file.name, "--print-config"]) == 0
        [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("model =")]
        assert line.split() == ["model", "=", '"qwen3-0.6b"', "#", "MODEL"]


def test_what_is_wrong_ends_a_command_before_anything_is_printed(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("prot = 9000\n")
    assert main(["serve", "--config", file.name, "--print-config"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "headway: error: headway.toml: unknown option 'prot'. Did you mean 'port'?\n"


def test_commands_that_measure_read_no_variables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADWAY_MAX_NUM_SEQS", "none of a number")
    assert main(["generate", "hello"]) == 2
    assert "$HEADWAY_MAX_NUM_SEQS" in capsys.readouterr().err
    assert main(["sim", "--calibration", "/no/such", "--workload", "/no/such"]) == 2
    assert "HEADWAY" not in capsys.readouterr().err
