"""An engine with the surface of `LLMEngine`, the real scheduler and no model: answers are counted words.

Token ids are characters, so texts can be followed by eye: the prompt "ab" is the tokens [97, 98], and the n-th output
token of a request is the n-th character of its answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from headway.config import EngineConfig
from headway.core import KVCacheManager, PrefixCache, Request, RequestStatus
from headway.core.create import scheduler_of
from headway.engine.engine_core import EngineCore
from headway.engine.step_report import EngineStep
from headway.errors import InvalidRequestError, RequestTooLargeError
from headway.executor.fake import FakeExecutor
from headway.outputs import CompletionOutput, RequestOutput
from headway.sampling_params import SamplingParams

EOS = 0


class FakeTokenizer:
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"


class FakeEngine:
    """`answer` maps a prompt's text to what the model says to it."""

    def __init__(self, config: EngineConfig, answer: Callable[[str], str], *, max_model_len: int = 4096) -> None:
        self.config = config = config.resolve("cpu")
        self.tokenizer = FakeTokenizer()
        self.preparer = SimpleNamespace(chat_token_ids=self._chat_token_ids)
        self.plan = SimpleNamespace(max_model_len=max_model_len)
        self.prompts: list[str] = []
        self._answer = answer
        self._answers: dict[str, str] = {}
        self._outputs: dict[str, RequestOutput] = {}
        self._params: dict[str, SamplingParams] = {}
        kv_cache = KVCacheManager(
            num_blocks=config.cache.num_kv_blocks or 1024,
            block_size=config.cache.block_size,
            prefix_cache=PrefixCache() if config.cache.enable_prefix_caching else None,
        )
        clock = itertools.count()
        scheduler = scheduler_of(config.scheduler, kv_cache)
        self.core = EngineCore(scheduler, FakeExecutor(self._next_token), now=lambda: next(clock) / 1000)

    def add_request(self, request_id: str, prompt: str | Sequence[int], params: SamplingParams) -> None:
        token_ids = tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        if not token_ids:
            raise InvalidRequestError("The prompt is empty.", param="prompt")
        if len(token_ids) >= self.plan.max_model_len:
            raise RequestTooLargeError(f"The prompt has {len(token_ids)} tokens.")
        text = "".join(map(chr, token_ids))
        self.prompts.append(text)
        self._answers[request_id] = self._answer(text)
        self._params[request_id] = params
        self._outputs[request_id] = self._output(request_id, list(token_ids), "", None)
        room = self.plan.max_model_len - len(token_ids)
        max_tokens = min(params.max_tokens or room, room)
        request = Request(request_id, token_ids, max_tokens=max_tokens, stop_token_ids=frozenset({EOS}))
        self.core.add_request(request)

    def _chat_token_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.tokenizer.encode(self.tokenizer.apply_chat_template(messages))

    def step(self) -> EngineStep:
        step = self.core.step()
        changed = []
        for update in step.updates:
            before = self._outputs[update.request_id]
            text = before.outputs[0].text + "".join(map(chr, (t for t in update.new_token_ids if t != EOS)))
            reason = None if update.finish_status is None else ("stop" if EOS in update.new_token_ids else "length")
            output = self._output(update.request_id, before.prompt_token_ids, text, reason)
            self._outputs[update.request_id] = output
            changed.append(output)
        return EngineStep(changed, errors={}, progress={}, begun=[], report=step.report)

    def abort(self, request_id: str) -> bool:
        self.core.finish_request(request_id, RequestStatus.FINISHED_ABORTED)
        return True

    def has_unfinished_requests(self) -> bool:
        return self.core.has_unfinished_requests

    def check_invariants(self) -> None:
        self.core.check_invariants()

    def _next_token(self, request_id: str, num_tokens: int) -> int:
        position = num_tokens - len(self._outputs[request_id].prompt_token_ids)
        answer = self._answers[request_id]
        return ord(answer[position]) if position < len(answer) else EOS

    def _output(self, request_id: str, prompt_token_ids: list[int], text: str, reason: Any) -> RequestOutput:
        completion = CompletionOutput(0, text, [ord(c) for c in text], finish_reason=reason)
        return RequestOutput(request_id, None, prompt_token_ids, None, [completion], finished=reason is not None)
