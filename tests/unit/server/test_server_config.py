"""The server's options: ranges, flags, environment, and the page that lists them."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from headway.cli import serve
from headway.config import ModelConfig
from headway.errors import ConfigError, ModelNotFoundError
from headway.loader.chosen_model import load_model_tokenizer
from headway.server import serving
from headway.server.server_config import ServerConfig
from headway.server.serving import model_name, run_server
from tests.unit.console.settling import settled


def parse(*arguments: str) -> ServerConfig:
    return serve.server_config(settled(*arguments, environment=os.environ))


def test_local_by_default() -> None:
    assert ServerConfig().host == "127.0.0.1"
    assert ServerConfig().is_local
    assert not ServerConfig(host="0.0.0.0").is_local
    assert ServerConfig(host="0.0.0.0").url == "http://127.0.0.1:8000"
    assert ServerConfig(host="::").url == ServerConfig(host="::1").url == "http://[::1]:8000"


def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_API_KEY", raising=False)
    config = parse(
        "--port", "9", "--api-key", "a", "--api-key", "b", "--max-body-bytes", "1MiB", "--queue-ttl-s", "2.5",
        "--served-model-name", "x", "y", "--served-model-name", "z", "--no-access-log",
    )  # fmt: skip
    assert config == ServerConfig(
        port=9,
        api_key=("a", "b"),
        max_body_bytes=2**20,
        queue_ttl_s=2.5,
        served_model_name=("x", "y", "z"),
        access_log=False,
    )
    assert parse() == ServerConfig()
    assert not parse("--no-request-log").access_log
    limits = parse("--max-waiting-per-tenant", "5", "--max-running-per-tenant", "0", "--price-per-hour", "2.5")
    assert (limits.max_waiting_per_tenant, limits.max_running_per_tenant, limits.price_per_hour) == (5, 0, 2.5)
    assert parse("--roles", "prefill=1,decode=2").roles == "prefill=1,decode=2"
    assert ServerConfig(roles="prefill=1,decode=2", replicas=3).scaling is None


def test_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_API_KEY", "secret")
    assert parse().api_key == ("secret",)
    assert parse("--api-key", "a").api_key == ("a", "secret")


def test_keys_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_API_KEY", "from the environment")
    file = tmp_path / "keys"
    file.write_text("# of the team\none\n\n  two \n")
    config = parse("--api-key-file", str(file), "--api-key", "flag")
    assert config.api_key == ("flag", "from the environment", "one", "two")
    assert config.with_port(9).api_key == config.api_key
    assert config.keeps_keys_apart
    for text in ("", "# one\n"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="has no key in it"):
            ServerConfig(api_key_file=str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        ServerConfig(api_key_file=str(tmp_path / "nothing"))


def test_keys_that_others_can_read_are_warned_of(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one")
    file.chmod(0o600)
    assert serve.key_warnings(settled()) == serve.key_warnings(settled("--api-key-file", str(file))) == []
    (line,) = serve.key_warnings(settled("--api-key", "one"))
    assert "list of processes" in line and "--api-key-file or $HEADWAY_API_KEY" in line
    file.chmod(0o644)
    (line,) = serve.key_warnings(settled("--api-key-file", str(file)))
    assert "can read the keys" in line and "chmod 600" in line
    options = tmp_path / "headway.toml"
    options.write_text("port = 1")
    assert serve.key_warnings(settled(file=options)) == [], "it has no key"
    options.write_text("api_key = 'one'")
    (line,) = serve.key_warnings(settled(file=options))
    assert f"can read the keys in '{options}'" in line


WRONG_TYPES = [{"host": 5}, {"port": "8000"}, {"api_key": "secret"}, {"queue_ttl_s": "5"}, {"served_model_name": [1]}]
WRONG_VALUES: list[dict[str, Any]] = [
    *({"port": 65536}, {"port": -1}, {"port": True}, {"api_key": ("",)}, {"served_model_name": (" ",)}),
    *({"max_queue_requests": 0}, {"max_body_bytes": 5}, {"queue_ttl_s": -1.0}, {"queue_ttl_s": float("nan")}),
    *({"receive_timeout_s": 0.0}, {"ssl_certfile": "x"}, {"ssl_keyfile": "x"}, {"access_log": "maybe"}),
    *({"max_waiting_per_tenant": -1}, {"max_running_per_tenant": -1}),
    *({"refuse_late": "maybe"}, {"cache_salt_by_key": "maybe"}, {"cache_salt_by_key": True}),
    {"cache_salt_by_key": "yes", "api_key": ("a",)},
    *({"cors_origin": ("https://a.example/",)}, {"cors_origin": ("a.example",)}, {"allowed_host": ("a.example:8000",)}),
    *({"allowed_host": ("http://a.example",)}, {"otlp_traces_endpoint": "localhost:4318"}),
]
ROLES, TWO = "prefill=P,decode=D", {"roles": "prefill=1,decode=1"}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        *((options, f"^{next(iter(options))} must be") for options in WRONG_TYPES),
        *(({"roles": roles}, ROLES) for roles in ("prefill=1", "prefill=2,decode=0", "prefill=1,draw=1", "")),
        (TWO | {"replicas": 3}, "are 2 replicas"),
        (TWO | {"replicas": 2, "max_replicas": 4}, "max_replicas"),
        (TWO | {"min_replicas": 1}, "max_replicas"),
        *((options, ".") for options in WRONG_VALUES),
    ],
)
def test_wrong_options(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ServerConfig(**options)


def test_engines_log_from_the_level_of_the_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def refuse(*_: object, log_level: str, **__: object) -> NoReturn:
        asked.append(log_level)
        raise ConfigError("no engine here")

    monkeypatch.setattr(serving, "Deployment", refuse)
    with pytest.raises(ConfigError, match="no engine here"):
        serving.run_server(ServerConfig(port=0, log_level="error"), {}, lambda line: None)
    assert asked == ["ERROR"]
    with pytest.raises(ConfigError, match="^log_level must be one of debug, info"):
        ServerConfig(log_level="ERROR")


def test_two_models_are_one_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    from headway.cli.main import main

    assert main(["serve", "a", "--model", "b"]) == 2
    assert "two models" in capsys.readouterr().err


def test_model_names_are_no_paths(tmp_path: Path) -> None:
    (tmp_path / "some-model").mkdir()
    (tmp_path / "file.gguf").touch()
    assert model_name(str(tmp_path / "some-model")) == "some-model"
    assert model_name(str(tmp_path / "file.gguf")) == "file"
    assert model_name("org/name") == "org/name"
    assert model_name(None) == "SmolLM2-135M-Instruct"


def test_a_shape_without_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load_model_tokenizer(ModelConfig(model=str(tmp_path), load_format="dummy")) is None
    assert load_model_tokenizer(ModelConfig(model="llama-3.1-8b", load_format="dummy")) is None
    with pytest.raises(ConfigError):
        load_model_tokenizer(ModelConfig(tokenizer=str(tmp_path / "nothing")))


def test_a_model_that_is_nowhere() -> None:
    with pytest.raises(ModelNotFoundError, match="no file or folder"):
        load_model_tokenizer(ModelConfig(model="/no/such/model.gguf"))


def test_the_embedded_tokenizer() -> None:
    tokenizer = load_model_tokenizer(ModelConfig())
    assert tokenizer is not None and tokenizer.chat_template


def test_events_that_cannot_be_published_are_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServerConfig(port=0, kv_events_config='{"endpoint": "tcp://127.0.0.1:*"}')
    with pytest.raises(ConfigError, match="enable_prefix_caching is False"):
        run_server(config, {"enable_prefix_caching": False}, lambda line: None)
    monkeypatch.delitem(sys.modules, "headway.front.kv_event_publisher", raising=False)
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ['pyzmq>=25; extra == "gateway"'])
    with pytest.raises(ConfigError, match="'zmq' is missing.*install .?pyzmq"):
        run_server(config, {}, lambda line: None)
    with pytest.raises(ConfigError, match="no field 'endpoints'"):
        parse("--kv-events-config", '{"endpoints": "tcp://*:5557"}')
    for off in ('{"enable_kv_cache_events": false}', '{"publisher": "null"}'):
        assert parse("--kv-events-config", off).published_events is None
