"""Asks NVML once a second how busy a GPU is, where its library is installed (`pip install nvidia-ml-py`).

NVML's "utilisation" is the share of time in which any kernel ran, however little of the GPU it used. It is shown beside
the shares that steps are counted to reach, which is what it is often taken for.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from headway.core.utilisation import UtilisationStats

logger = logging.getLogger(__name__)


class NvmlPolling:
    """A thread that adds NVML's numbers to the statistics of an engine."""

    def __init__(self, library: Any, handle: Any, stats: UtilisationStats, *, poll_s: float = 1.0) -> None:
        self._library = library
        self._handle = handle
        self._stats = stats
        self._poll_s = poll_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="nvml", daemon=True)
        self._thread.start()

    @classmethod
    def of_device(cls, device_name: str, stats: UtilisationStats) -> NvmlPolling | None:
        """Start to ask for a device; `None` if it is no GPU, or if there is no library."""
        if not device_name.startswith("cuda"):
            return None
        import torch

        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(torch.device(device_name)).uuid)
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        except Exception as error:  # no library, no driver that it knows, a part of a GPU: it is left out
            logger.debug("NVML is not asked: %s", error)
            return None
        return cls(pynvml, handle, stats)

    def stop(self) -> None:
        """Ask no more."""
        self._is_over.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._is_over.wait(self._poll_s):
            try:
                percent = self._library.nvmlDeviceGetUtilizationRates(self._handle).gpu
            except Exception as error:
                logger.debug("NVML is not asked any more: %s", error)
                return
            self._stats.nvml_busy_s += self._poll_s * percent / 100.0
            self._stats.nvml_s += self._poll_s
