"""Where something was measured."""

from __future__ import annotations

from typing import Literal

Where = Literal["engine", "simulator", "scheduler"]
"""On the real engine; with the real scheduler and a cost model for the device; the scheduler alone, without a model."""
