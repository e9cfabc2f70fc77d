"""What runs a step: one small protocol, several implementations."""

from headway.executor.base import Executor

__all__ = ["Executor"]
