"""Whatever makes the engine slower than it could be here is said, in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headway.cache_dir import why_not_writable
from headway.worker import formats
from headway.worker.formats import choose_device, keep_compiled_kernels
from tests.unit.worker.test_formats import chosen

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_said_yet() -> Iterator[None]:
    formats._warn_once.cache_clear()
    yield
    formats._warn_once.cache_clear()


def said(caplog: pytest.LogCaptureFixture) -> str:
    """The one warning there is."""
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "\n" not in record.getMessage()
    return record.getMessage()


def test_a_format_without_cpu_kernels(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        chosen("cpu", "float32", dtype="bfloat16")
    assert "several times as slow: they know no bfloat16" in said(caplog)


def test_what_is_fast_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for dtype in ("auto", "float32"):
        chosen("cpu", "bfloat16", dtype=dtype)
    assert not caplog.records


def test_cuda_without_triton(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chosen("cuda", "bfloat16")
    assert "there is no package triton" in said(caplog)


def test_slow_attention_on_cuda(caplog: pytest.LogCaptureFixture) -> None:
    chosen("cuda", "bfloat16", attention_backend="torch_padded")
    assert "attention_backend 'torch_padded' is a slow reference on CUDA" in said(caplog)


def test_a_gpu_that_torch_does_not_see(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(formats, "_NVIDIA_DRIVER", str(tmp_path / "version"))
    assert choose_device("auto") == CPU
    assert not caplog.records
    (tmp_path / "version").write_text("550")
    assert choose_device("auto") == CPU == choose_device("cpu")
    assert "torch sees no CUDA device" in said(caplog)


@pytest.mark.parametrize("variable", ["TRITON_CACHE_DIR", "TRITON_HOME", "HOME"])
def test_an_unwritable_triton_cache(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that what is set below is undone
    monkeypatch.setenv(variable, str(tmp_path))
    keep_compiled_kernels()
    assert not caplog.records
    folder = os.environ["TRITON_CACHE_DIR"]
    assert Path(folder).name == f"headway-{os.geteuid()}", "nobody else can put a kernel there"
    keep_compiled_kernels()
    assert os.environ["TRITON_CACHE_DIR"] == folder
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.setenv(variable, str(tmp_path / "file" / "below"))
    keep_compiled_kernels()
    assert why_not_writable(Path(os.environ["TRITON_CACHE_DIR"])) is None
    assert "the GPU kernels are compiled for this run alone" in said(caplog)


def test_commands_show_it() -> None:
    """Nothing has to be switched on to see it."""
    code = "from headway import native; native.is_available()"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HEADWAY_NATIVE_ISA": "mmx"},
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = run.stderr.splitlines()
    assert "about 5 times as slow: unknown HEADWAY_NATIVE_ISA 'mmx'" in line
