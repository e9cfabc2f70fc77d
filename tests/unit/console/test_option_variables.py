"""Environment variables: what they may say, and which of them mean nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headway.console.option_variables import OTHER_VARIABLES, read_variables, unknown_variables, variable_name
from headway.errors import ConfigError
from tests.unit.console.settling import SPECS, settled

SOURCES = Path(__file__).parents[3] / "src"


def read(**variables: str) -> dict[str, object]:
    return {name: value for name, (value, _) in read_variables(SPECS, variables).items()}


def test_values_arrive_with_their_types() -> None:
    assert read(
        HEADWAY_PORT="9000",
        HEADWAY_KV_CACHE_MEMORY="2GiB",
        HEADWAY_MAX_MODEL_LEN="none",
        HEADWAY_SERVED_MODEL_NAME="a, b,",
        HEADWAY_API_KEY="one, with a comma",
        HEADWAY_REQUEST_LOG="off",
        HEADWAY_QUEUE_TTL_S="2.5",
        HEADWAY_TOKENIZER="none",
        HEADWAY_HOST="",
        PORT="1",
    ) == {
        "port": 9000,
        "kv_cache_memory": 2**31,
        "max_model_len": None,
        "served_model_name": ("a", "b"),
        "api_key": ("one, with a comma",),
        "access_log": False,
        "queue_ttl_s": 2.5,
        "tokenizer": "none",
    }


@pytest.mark.parametrize("text", ["true", "True", "on", "1"])
def test_switches(text: str) -> None:
    assert read(HEADWAY_KV_EVENTS=text) == {"kv_events": True}
    off = {"true": "false", "on": "off", "1": "0"}[text.lower()]
    assert read(HEADWAY_RESUME=off, HEADWAY_ASYNC_SCHEDULING=off) == {"resume": False, "async_scheduling": False}


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("HEADWAY_PORT", "many", "'many' is not a whole number"),
        ("HEADWAY_PORT", "9" * 5000, "is not a whole number"),
        ("HEADWAY_QUEUE_TTL_S", "nan", "'nan' is not a number"),
        ("HEADWAY_QUEUE_TTL_S", "inf", "'inf' is not a number"),
        ("HEADWAY_ENFORCE_EAGER", "maybe", "'maybe' is neither true nor false"),
        ("HEADWAY_KV_CACHE_MEMORY", "2 gigs", "'2 gigs' is not a number of bytes"),
        ("HEADWAY_DTYPE", "bfloat15", "dtype must be one of auto, float32, bfloat16, float16; not 'bfloat15'."),
    ],
)
def test_what_is_wrong_is_named_with_the_variable(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape('$' + variable)}: .*{re.escape(message)}"):
        read(**{variable: text})


def test_two_names_of_one_option() -> None:
    with pytest.raises(ConfigError, match=r"^\$HEADWAY_ACCESS_LOG and \$HEADWAY_REQUEST_LOG are the same option"):
        read(HEADWAY_ACCESS_LOG="on", HEADWAY_REQUEST_LOG="on")


LINKS = {
    "HEADWAY_PORT": "tcp://10.0.0.7:8000",
    "HEADWAY_PORT_8000_TCP": "tcp://10.0.0.7:8000",
    "HEADWAY_PORT_8000_TCP_PROTO": "tcp",
    "HEADWAY_PORT_8000_TCP_PORT": "8000",
    "HEADWAY_PORT_8000_TCP_ADDR": "10.0.0.7",
    "HEADWAY_SERVICE_HOST": "10.0.0.7",
    "HEADWAY_SERVICE_PORT": "8000",
    "HEADWAY_SERVICE_PORT_HTTP": "8000",
    "HEADWAY_METRICS_PORT": "udp://10.0.0.8:9",
    "HEADWAY_METRICS_SERVICE_HOST": "10.0.0.8",
}


def test_variables_of_kubernetes_services_are_no_options() -> None:
    assert read(**LINKS) == {} and unknown_variables(SPECS, LINKS) == {}
    assert settled("--port", "1", environment=LINKS).given() == {"port": 1}


def test_variables_without_a_meaning_are_listed_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    environment = {
        "HEADWAY_MAX_SEQS": "1",
        "HEADWAY_PREFIX_CACHING": "off",
        "HEADWAY_ZZZZZZZZZZZZ": "",
        "HEADWAY_MAX_NUM_SEQS": "1",
        "HEADWAYS": "1",
        "PATH": "x",
        **dict.fromkeys(OTHER_VARIABLES, ""),
    }
    assert unknown_variables(SPECS, environment) == {
        "HEADWAY_MAX_SEQS": (
            "The environment variable HEADWAY_MAX_SEQS has no meaning. Did you mean 'HEADWAY_MAX_NUM_SEQS'?"
        ),
        "HEADWAY_PREFIX_CACHING": (
            "The environment variable HEADWAY_PREFIX_CACHING has no meaning. It is now HEADWAY_ENABLE_PREFIX_CACHING."
        ),
        "HEADWAY_ZZZZZZZZZZZZ": "The environment variable HEADWAY_ZZZZZZZZZZZZ has no meaning.",
    }
    settled(environment=environment)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("Warning: The environment variable HEADWAY_") for line in lines)


def test_every_variable_that_the_sources_name_is_known() -> None:
    options = {variable_name(name) for spec in SPECS for name in (spec.name, *spec.aliases)}
    for file in SOURCES.rglob("*.py"):
        named = set(re.findall(r"HEADWAY_[A-Z][A-Z_]*[A-Z]\b", file.read_text(encoding="utf-8")))
        assert named <= {*options, *OTHER_VARIABLES}, file
