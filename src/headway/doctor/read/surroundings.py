"""Folders, network, and the environment of the process."""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import headway
from headway.cache_dir import cache_dir, private_folder, why_not_writable
from headway.console.flags import FlagSpec
from headway.console.option_variables import read_variables, unknown_variables
from headway.doctor.facts import Folder, Network, Settings
from headway.errors import ConfigError
from headway.server.http.http_server import bind
from headway.server.server_config import ServerConfig

_PROXIES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
_VARIABLES = (
    "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "GOMP_CPU_AFFINITY", "HF_HUB_OFFLINE", "KMP_AFFINITY",
    "OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_WAIT_POLICY", "TRANSFORMERS_OFFLINE", "TRITON_INTERPRET",
)  # fmt: skip


def read_folders() -> tuple[Folder, ...]:
    """The folders in which kernels and models are kept."""
    from huggingface_hub import constants

    own = cache_dir()
    return (
        _folder("kernels and the embedded model", own, "HEADWAY_CACHE_DIR", is_private=True),
        _folder("models of the hub", Path(constants.HF_HUB_CACHE), "HF_HOME", is_private=False),
    )


def _folder(purpose: str, path: Path, variable: str, *, is_private: bool) -> Folder:
    try:
        problem = why_not_writable(private_folder(path) if is_private else path)
    except OSError as error:
        problem = error
    free, is_noexec = None, False
    if path.exists():
        free = shutil.disk_usage(path).free
        is_noexec = is_private and bool(os.statvfs(path).f_flag & getattr(os, "ST_NOEXEC", 0))
    reason = "" if problem is None else problem.strerror or str(problem)
    return Folder(purpose=purpose, path=str(path), variable=variable, problem=reason, free=free, is_noexec=is_noexec)


def read_network(environment: Mapping[str, str], *, host: str, port: int) -> Network:
    """The port, which is listened on for a moment, and proxies."""
    problem = ""
    try:
        bind(ServerConfig(host=host, port=port)).close()
    except ConfigError as error:
        problem = str(error.__cause__ or error)
    return Network(
        host=host,
        port=port,
        port_problem=problem,
        proxies={name: _without_password(environment[name]) for name in _PROXIES if environment.get(name)},
        no_proxy=environment.get("NO_PROXY") or environment.get("no_proxy", ""),
    )


def _without_password(address: str) -> str:
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def read_settings(environment: Mapping[str, str], options: Sequence[FlagSpec]) -> Settings:
    """The environment of this process. `options` are those that variables can set."""
    problem = ""
    try:
        read_variables(options, environment)
    except ConfigError as error:
        problem = str(error)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = Path(headway.__file__).parent.glob("*.py")
    return Settings(
        variables={name: environment[name] for name in _VARIABLES if name in environment},
        unknown=unknown_variables(options, environment),
        problem=problem,
        open_files=(_limit(soft), _limit(hard)),
        clock_s=time.time(),
        built_s=max(file.stat().st_mtime for file in files),
    )


def _limit(value: int) -> int:
    return -1 if value == resource.RLIM_INFINITY else value
