"""Keeps the measured ceilings of this machine's devices in the cache folder, so that only the first start measures.

    DIR/headway-1000/ceilings.json      {"NVIDIA H200, 132 units, bfloat16 …": {"bandwidth_bytes_s": …, …}, …}

What the numbers depend on is part of a name: the device, its number of processing units or threads, and the format in
which the model multiplies. Without a file that can be read or written the ceilings are measured at each start. Remove
the file to have them measured again, for example after a start on a busy machine.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch

from headway.cache_dir import cache_dir, opened_private, private_folder
from headway.worker.ceilings import Ceilings, measure_ceilings

logger = logging.getLogger(__name__)

FILE_NAME = "ceilings.json"


def known_ceilings(device_name: str, dtype_name: str) -> Ceilings | None:
    """The ceilings of a device, measured if they are not kept yet; `None` where its memory has no room for that."""
    name = f"{_device_words(device_name)}, {dtype_name}"
    kept = _kept()
    try:
        return Ceilings(**kept[name])
    except (KeyError, TypeError):
        pass
    try:
        ceilings = measure_ceilings(device_name, dtype_name)
    except torch.OutOfMemoryError:
        logger.warning("%s has no room to measure its bandwidth and rate, so no shares of them are shown", device_name)
        return None
    logger.info("%s: %s", device_name, ceilings)
    _keep(kept | {name: dataclasses.asdict(ceilings)})
    return ceilings


def _device_words(device_name: str) -> str:
    device = torch.device(device_name)
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return f"{found.name}, {found.multi_processor_count} units, torch {torch.__version__}"
    return f"{_cpu_model()}, {platform.node()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def _kept() -> dict[str, Any]:
    try:
        with opened_private(private_folder(cache_dir()) / FILE_NAME) as file, os.fdopen(os.dup(file)) as text:
            kept = json.loads(text.read(2**20))  # a few hundred bytes, unless it is not ours
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _keep(document: dict[str, Any]) -> None:
    """Replace the file as a whole. Two processes at once may lose one's measurement, which is then made again."""
    try:
        folder = private_folder(cache_dir())
        with tempfile.TemporaryDirectory(prefix="ceilings-", dir=folder) as scratch:
            file = Path(scratch) / FILE_NAME
            file.write_text(json.dumps(document, indent=1))
            file.chmod(0o600)
            file.replace(folder / FILE_NAME)
    except OSError as error:
        logger.debug("the measured ceilings are not kept: %s", error)
