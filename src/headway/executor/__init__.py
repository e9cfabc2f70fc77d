"""What runs a step: one small protocol, several implementations."""

from headway.executor.base import Executor, PendingStep

__all__ = ["Executor", "PendingStep"]
