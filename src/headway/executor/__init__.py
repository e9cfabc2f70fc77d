"""What runs a step: one small protocol, several implementations."""

from headway.executor.base import Executor, FinishedStep, PendingStep

__all__ = ["Executor", "FinishedStep", "PendingStep"]
