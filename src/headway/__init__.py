"""Headway: an LLM serving engine with continuous batching."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.config import EngineConfig
from headway.errors import EngineUnavailableError, HeadwayError, InvalidRequestError, RequestFailedError
from headway.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, Logprob, RequestOutput
from headway.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from headway.async_llm import AsyncLLM
    from headway.core.request_options import RequestOptions
    from headway.engine.llm_engine import LLMEngine
    from headway.llm import LLM

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


def __getattr__(name: str) -> Any:
    """`LLM` and `LLMEngine` bring torch with them, `AsyncLLM` the tokenizer: imported only when asked for."""
    if name == "AsyncLLM":
        from headway.async_llm import AsyncLLM

        return AsyncLLM
    if name == "LLM":
        from headway.llm import LLM

        return LLM
    if name == "RequestOptions":
        from headway.core.request_options import RequestOptions

        return RequestOptions
    if name == "LLMEngine":
        from headway.engine.llm_engine import LLMEngine

        return LLMEngine
    raise AttributeError(f"module 'headway' has no attribute '{name}'")
