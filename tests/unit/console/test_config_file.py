"""Configuration files: what they may say, and what is refused, whatever the file is."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from headway.console.config_file import read_config_file
from headway.errors import ConfigError
from tests.unit.console.settling import SPECS

ROOT = Path(__file__).parents[3]


def read(folder: Path, content: str | bytes) -> dict[str, object]:
    file = folder / "headway.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_config_file(str(file), SPECS)


def test_values_arrive_with_their_types(tmp_path: Path) -> None:
    assert read(
        tmp_path,
        """
        max-num-seqs = 8             # a comment
        gpu_memory_utilization = 1   # a whole number is a number
        kv_cache_memory = "2GiB"
        host_cache_memory = 1_000
        served_model_name = ["a", "b"]
        cors_origin = "*"
        enforce_eager = true
        request-log = false
        """,
    ) == {
        "max_num_seqs": 8,
        "gpu_memory_utilization": 1,
        "kv_cache_memory": 2**31,
        "host_cache_memory": 1000,
        "served_model_name": ("a", "b"),
        "cors_origin": ("*",),
        "enforce_eager": True,
        "access_log": False,
    }
    assert read(tmp_path, "") == {}
    assert read(tmp_path, b"\xef\xbb\xbfport = 1\r\n") == {"port": 1}, "as editors on Windows write it"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max_num_seq = 8", "unknown option 'max_num_seq'. Did you mean 'max_num_seqs'?"),
        ("temperature = 1.0", "unknown option 'temperature'."),
        ("config = 'x'", "unknown option 'config'."),
        ("prefix_caching = 'off'", "the option 'prefix_caching' is now enable_prefix_caching."),
        ('port = "8000"', "port must be a whole number, not '8000'."),
        ("port = 8000.0", "port must be a whole number, not 8000.0."),
        ("port = true", "port must be a whole number, not True."),
        ("port = 1979-05-27", "port must be a whole number, not datetime.date(1979, 5, 27)."),
        ("enforce_eager = 1", "enforce_eager must be True or False, not 1."),
        ('enforce_eager = "true"', "enforce_eager must be True or False, not 'true'."),
        ('dtype = "bfloat15"', "dtype must be one of auto, float32, bfloat16, float16; not 'bfloat15'. Did you mean"),
        ('kv_cache_memory = "2 gigs"', "kv_cache_memory: '2 gigs' is not a number of bytes."),
        ("served_model_name = ['a', 5]", "served_model_name must be a list of texts, not ['a', 5]."),
        ("queue_ttl_s = nan", "queue_ttl_s must be a finite number, not nan."),
        ("queue_ttl_s = -inf", "queue_ttl_s must be a finite number, not -inf."),
        ("short_prompt_share = inf", "short_prompt_share must be a finite number, not inf."),
        ("port = 1\nport = 2", "it is not valid TOML: Cannot overwrite a value (at "),
        ("access_log = true\nrequest_log = true", "'access_log' and 'request_log' are the same option; give one"),
        ("max-num-seqs = 1\nmax_num_seqs = 1", "'max-num-seqs' and 'max_num_seqs' are the same option; give one"),
        ("[server]\nport = 1", "there are no tables, and [server] is one: all options stand at the top."),
        ("model.name = 'x'", "model must be text or None, not {'name': 'x'}."),
        ("port: 8000", "it is not valid TOML: "),
        ("port = " + "9" * 5000, "it is not valid TOML: "),
        ("seed = " + "[" * 20_000, "it is nested too deeply."),
        ("a." * 30_000 + "a = 1", "it is nested too deeply."),
        ("seed = {" + "'a' . " * 9_000 + "a = 1}", "it is nested too deeply."),
        ("a" * 60_000, "it is not valid TOML: "),
        ("x" * 100 + " = 1", "unknown option '" + "x" * 76 + "...."),
        (f"port = '{'x' * 1000}'", "port must be a whole number, not '" + "x" * 76 + "...."),
        (b"\x7fELF\x02\x01\x01\x00\xf0\x9f", "the file cannot be read: it is not UTF-8 text (byte 8)."),
        (b"port = 1\x00", "it is not valid TOML: "),
        ("#" * 2**16 + "\n", "the file cannot be read: it has more than 65,536 bytes."),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_named_with_the_file(content: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, content)
    assert str(caught.value).startswith(f"{tmp_path / 'headway.toml'}: {message}")
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


def test_keys_are_in_no_error(tmp_path: Path) -> None:
    for content in ('api_key = ["hush", 5]', "api_key = {hush = 1}", 'api_key = "hush\n', "api_key = 'hush' hush"):
        with pytest.raises(ConfigError) as caught:
            read(tmp_path, content)
        assert "hush" not in str(caught.value)


@pytest.mark.parametrize("size", [2**16 + 1, 2**30], ids=["a byte too many", "a gigabyte"])
def test_no_more_is_read_than_a_file_may_have(size: int, tmp_path: Path) -> None:
    file = tmp_path / "large.toml"
    file.touch()
    os.truncate(file, size)
    with pytest.raises(ConfigError, match="it has more than 65,536 bytes"):
        read_config_file(str(file), SPECS)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "it is a folder"),
        ("nothing.toml", "No such file or directory"),
        ("/dev/zero", "it has more than 65,536 bytes"),
        ("a\x00b", "null byte"),
        ("x" * 5000, "name too long"),
    ],
    ids=["folder", "missing", "device", "nul", "long"],
)
def test_what_is_no_file_of_options(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config_file(str(tmp_path / name), SPECS)


def test_yaml_is_refused_with_a_hint(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("model: x\nport: 8000\n")
    with pytest.raises(ConfigError, match=r"it is not valid TOML: .*TOML, not YAML"):
        read_config_file(str(file), SPECS)


def test_the_files_that_are_shown_are_good(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"^```toml\n(.*?)^```", page, re.S | re.M)
    uncommented = re.sub(r"^# (?=\w+ =)", "", shown, flags=re.M)
    assert read(tmp_path, uncommented)["drain_timeout_s"] == 30
