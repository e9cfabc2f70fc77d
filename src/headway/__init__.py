"""Headway: an LLM serving engine with continuous batching."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.async_llm import AsyncLLM
    from headway.config import EngineConfig
    from headway.core.request_options import RequestOptions
    from headway.engine.llm_engine import LLMEngine
    from headway.errors import EngineUnavailableError, HeadwayError, InvalidRequestError, RequestFailedError
    from headway.llm import LLM
    from headway.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, Logprob, RequestOutput
    from headway.sampling_params import BeamSearchParams, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EngineConfig",
    "EngineUnavailableError",
    "HeadwayError",
    "InvalidRequestError",
    "LLMEngine",
    "Logprob",
    "RequestFailedError",
    "RequestOptions",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_HOMES = {
    "AsyncLLM": "async_llm",
    "BeamSearchOutput": "outputs",
    "BeamSearchParams": "sampling_params",
    "BeamSearchSequence": "outputs",
    "CompletionOutput": "outputs",
    "EngineConfig": "config",
    "EngineUnavailableError": "errors",
    "HeadwayError": "errors",
    "InvalidRequestError": "errors",
    "LLM": "llm",
    "LLMEngine": "engine.llm_engine",
    "Logprob": "outputs",
    "RequestFailedError": "errors",
    "RequestOptions": "core.request_options",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
}


def __getattr__(name: str) -> Any:
    """Each name is imported when it is first asked for: `LLM` brings torch with it, and the parent of `headway serve`
    needs none of them."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'headway' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"headway.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | set(__all__))
