"""A front end that is written down beforehand, for the engine's loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from headway.engine.llm_engine import LLMEngine
from headway.engine_process.engine_loop import EngineLoop
from headway.sampling_params import SamplingParams
from headway.wire.channel import ChannelClosedError
from headway.wire.engine_stats import EngineStats
from headway.wire.frames import pack
from headway.wire.messages import (
    AddRequest,
    Delta,
    StepBatch,
    ToEngine,
    UnreadableRequest,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from tests.unit.engine_process.small_engine import create_engine


class ScriptedChannel:
    """Hands out one entry of the script per look: messages, or what to do. At its end the front end is gone."""

    def __init__(self, *script: list[Any] | Callable[[], None]) -> None:
        self.sent: list[Any] = []
        self.waits: list[float] = []
        self._script = iter(script)

    def receive(self, *, timeout_s: float) -> list[Any]:
        self.waits.append(timeout_s)
        entry = next(self._script, None)
        if entry is None:
            raise ChannelClosedError
        if callable(entry):
            entry()
            return []
        return entry

    def send(self, message: Any) -> None:
        self.sent.append(decode_from_engine(pack(message)[4:]))

    def wake(self) -> None:
        """It does not sleep."""

    @property
    def batches(self) -> list[StepBatch]:
        return [message for message in self.sent if isinstance(message, StepBatch)]

    def deltas(self, request_id: str) -> list[Delta]:
        return [delta for batch in self.batches for delta in batch.deltas if delta.request_id == request_id]


def add(request_id: str, prompt: list[int] | None = None, **params: Any) -> AddRequest:
    return AddRequest(request_id, prompt or [5, 6], SamplingParams(**{"max_tokens": 4, **params}))


def add_raw(request_id: Any, prompt: Any, params: Any, options: Any = None) -> ToEngine | UnreadableRequest:
    """What the channel makes of such a request, however wrong its records are."""
    return decode_to_engine(encode(["AddRequest", request_id, prompt, params, options or {}]))


def run(
    *script: Any,
    engine: LLMEngine | None = None,
    now: Callable[[], float] = lambda: 0.0,  # a busy machine takes no time
    counted: EngineStats | None = None,
    **options: Any,
) -> ScriptedChannel:
    """Run a loop to the end of the script; whatever happened, nothing may be left in the engine but what is live."""
    engine = engine or create_engine(options)
    channel = ScriptedChannel(*script)
    with contextlib.suppress(ChannelClosedError):
        EngineLoop(engine, channel, now=now, counted=counted).run()
    engine.check_invariants()
    return channel
