"""What runs a step: one small protocol, several implementations."""

from headway.executor.base import Executor, PendingStep, UnsampledStep

__all__ = ["Executor", "PendingStep", "UnsampledStep"]
