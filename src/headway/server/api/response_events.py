"""Writes answers of /v1/responses, as one response at the end or as OpenAI's numbered events."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from headway.server.api.api_errors import ApiError
from headway.server.api.content_blocks import Block, BlockChange, Closed, ContentBlocks, Grown, Opened
from headway.server.api.generation import Generation
from headway.server.api.logprobs import LogprobForm, chat_logprobs
from headway.server.api.prompts import PromptMaker
from headway.server.api.response_models import ChatLogprob
from headway.server.api.response_tools import custom_input, sent_tools
from headway.server.api.responses_api import ResponsesRequest
from headway.wire.messages import Delta, PositionLogprobs

ItemStatus = Literal["in_progress", "completed", "incomplete"]
_encode = msgspec.json.Encoder().encode


# ---- records --------------------------------------------------------------------------------------------------------


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """Text of the answer."""

    text: str
    logprobs: list[ChatLogprob]
    annotations: list[None] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """Thoughts."""

    text: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    """Thoughts, where a summary is asked for."""

    text: str


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """An item of the answer: text."""

    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """An item of the answer: a call."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    """The namespace that the client declared the function in."""


class OutputCustomCall(msgspec.Struct, tag_field="type", tag="custom_tool_call"):
    """An item of the answer: a call of a tool that takes text."""

    id: str
    call_id: str
    name: str
    input: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class OutputReasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    """An item of the answer: thoughts."""

    id: str
    summary: list[SummaryText]
    content: list[ReasoningText]
    status: ItemStatus
    encrypted_content: None = None


OutputItem = OutputMessage | OutputCall | OutputCustomCall | OutputReasoning


class InputTokensDetails(msgspec.Struct):
    """Where the prompt's tokens came from. OpenAI has a price for writing to its cache; here there is none."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """What the answer's tokens are."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Tokens of the request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class InputTokenCount(msgspec.Struct):
    """How many tokens a prompt has."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class IncompleteDetails(msgspec.Struct):
    """Why an answer ends early."""

    reason: Literal["max_output_tokens"]


class ResponseFailure(msgspec.Struct):
    """Why there is no answer."""

    code: str
    message: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """The answer, with what was asked."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[Any]
    top_logprobs: int
    top_p: float
    user: str | None
    background: Literal[False] = False
    previous_response_id: None = None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"


# ---- both ways to answer --------------------------------------------------------------------------------------------


class _ResponseWriter:
    """What whole and streamed answers share: the response object, and the translation of blocks into items."""

    def __init__(self, generation: Generation, request: ResponsesRequest, model: str, prompts: PromptMaker) -> None:
        self._generation = generation
        self._request = request
        self._model = model
        self._logprob_form = LogprobForm.of(generation.job, prompts)
        self._suffix = generation.id.rpartition("-")[2]
        self._blocks = ContentBlocks(generation.job.answer.parser())
        self._renamed = {tool.flat_name: tool for tool in sent_tools(request.tools) if tool.namespace or tool.is_custom}

    @property
    def _is_cut_off(self) -> bool:
        return self._blocks.finish_reason == "length"

    def _response(
        self, status: Literal["in_progress", "failed"] | None = None, *, error: ResponseFailure | None = None
    ) -> ResponseObject:
        """Return the response as it is now. Without `status`, it has ended."""
        request, params = self._request, self._generation.job.params
        is_over, is_cut_off = status is None, status is None and self._is_cut_off
        reasoning = request.reasoning
        return ResponseObject(
            id=f"resp_{self._suffix}",
            created_at=self._generation.created,
            completed_at=int(time.time()) if is_over and not is_cut_off else None,
            status=status or ("incomplete" if is_cut_off else "completed"),
            error=error,
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut_off else None,
            model=self._model,
            output=[] if status == "in_progress" else self._output(has_ended=status is None),
            usage=self._usage() if is_over else None,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            max_tool_calls=request.max_tool_calls,
            metadata=request.metadata or {},
            parallel_tool_calls=request.parallel_tool_calls is not False,
            prompt_cache_key=request.prompt_cache_key,
            reasoning={
                "effort": reasoning.effort if reasoning else None,
                "summary": reasoning.summary or reasoning.generate_summary if reasoning else None,
            },
            safety_identifier=request.safety_identifier,
            temperature=params.temperature,
            text={"format": (request.text and request.text.format) or {"type": "text"}},
            tool_choice="auto" if request.tool_choice is None else request.tool_choice,
            tools=request.tools or [],
            top_logprobs=request.top_logprobs or 0,
            top_p=params.top_p,
            user=request.user,
        )

    def _usage(self) -> ResponseUsage:
        usage = self._generation.usage
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(self._blocks.num_reasoning_tokens),
            total_tokens=usage.total_tokens,
        )

    def _output(self, *, has_ended: bool) -> list[OutputItem]:
        return [self._item_at_end(block, has_ended=has_ended) for block in self._blocks.blocks]

    def _item_at_end(self, block: Block, *, has_ended: bool = True) -> OutputItem:
        """Return a closed block as an item. Only the last item of a truncated or failed answer is incomplete."""
        is_cut = (self._is_cut_off or not has_ended) and block is self._blocks.blocks[-1]
        return self._item(block, "incomplete" if is_cut else "completed")

    def _item(self, block: Block, status: ItemStatus) -> OutputItem:
        item_id, is_empty = self._item_id(block), not block.parts
        if block.kind == "text":
            return OutputMessage(item_id, status, [] if is_empty else [self._part(block)])
        if block.kind == "call":
            return self._call(block, status)
        if self._request.wants_summary:
            return OutputReasoning(item_id, [] if is_empty else [SummaryText(block.text)], [], status)
        return OutputReasoning(item_id, [], [] if is_empty else [ReasoningText(block.text)], status)

    def _call(self, block: Block, status: ItemStatus) -> OutputCall | OutputCustomCall:
        """Return a call under the name that the client gave to the tool."""
        item_id, call_id = self._item_id(block), f"call_{self._suffix}{block.index:02d}"
        sent = self._renamed.get(block.name)
        if sent is None:
            return OutputCall(item_id, call_id, block.name, block.text, status)
        namespace = sent.namespace or msgspec.UNSET
        if sent.is_custom:
            return OutputCustomCall(item_id, call_id, sent.tool.name, custom_input(block.text), namespace)
        return OutputCall(item_id, call_id, sent.tool.name, block.text, status, namespace)

    def _is_custom(self, block: Block) -> bool:
        return block.name in self._renamed and self._renamed[block.name].is_custom

    def _part(self, block: Block) -> OutputText:
        return OutputText(block.text, self._logprobs(block.logprobs))

    def _logprobs(self, positions: list[PositionLogprobs]) -> list[ChatLogprob]:
        return chat_logprobs(positions, self._logprob_form).content

    def _item_id(self, block: Block) -> str:
        prefix = {"text": "msg", "call": "fc", "reasoning": "rs"}[block.kind]
        if self._is_custom(block):
            prefix = "ctc"
        return f"{prefix}_{self._suffix}{block.index:02d}"


class WholeResponse(_ResponseWriter):
    """Collects the answer into one response."""

    async def collect(self) -> ResponseObject:
        """Wait for the output to end, and return the response."""
        async with self._generation:
            async for deltas in self._generation:
                for delta in deltas:
                    self._blocks.take(delta)
        self._blocks.finish()
        return self._response()


class ResponseEvents(_ResponseWriter):
    """Writes the answer as events, each with its name and number."""

    def __init__(self, generation: Generation, request: ResponsesRequest, model: str, prompts: PromptMaker) -> None:
        super().__init__(generation, request, model, prompts)
        self._num_events = 0

    def begin(self) -> bytes:
        """Return the first events, with a response that has no output yet."""
        response = self._response("in_progress")
        return self._event("created", {"response": response}) + self._event("in_progress", {"response": response})

    def write(self, deltas: list[Delta]) -> bytes:
        """Return all events for these deltas."""
        return b"".join(self._told(change) for delta in deltas for change in self._blocks.take(delta))

    def end(self) -> bytes:
        """Return the last events."""
        rest = b"".join(map(self._told, self._blocks.finish()))
        response, metrics = self._response(), self._generation.metrics
        fields: dict[str, Any] = (
            {"response": response} if metrics is None else {"response": response, "metrics": metrics}
        )
        return rest + self._event(response.status, fields)

    def fail(self, failure: ApiError) -> bytes:
        """Return the last events of a stream that failed."""
        fields = {"code": failure.code, "message": str(failure), "param": failure.param}
        error = ResponseFailure("rate_limit_exceeded" if failure.status == 429 else "server_error", str(failure))
        response = self._response("failed", error=error)
        return self._numbered("error", fields) + self._event("failed", {"response": response})

    def _told(self, change: BlockChange) -> bytes:
        block = change.block
        place = {"item_id": self._item_id(block), "output_index": block.index}
        match change:
            case Opened():
                return self._opened(block, place)
            case Grown(_, text, logprobs):
                return self._grown(block, text, logprobs, place)
            case Closed():
                return self._closed(block, place)

    def _opened(self, block: Block, place: dict[str, Any]) -> bytes:
        item = self._item(Block(block.kind, block.index, block.name), "in_progress")  # `block` may have text by now
        data = self._event("output_item.added", {"output_index": block.index, "item": item})
        if block.kind == "text":
            return data + self._event("content_part.added", place | {"content_index": 0, "part": OutputText("", [])})
        if block.kind == "call":
            return data
        if self._request.wants_summary:
            part = {"summary_index": 0, "part": SummaryText("")}
            return data + self._event("reasoning_summary_part.added", place | part)
        return data + self._event("content_part.added", place | {"content_index": 0, "part": ReasoningText("")})

    def _grown(self, block: Block, text: str, logprobs: list[PositionLogprobs], place: dict[str, Any]) -> bytes:
        if block.kind == "text":
            more = {"content_index": 0, "delta": text, "logprobs": self._logprobs(logprobs)}
            return self._event("output_text.delta", place | more)
        if self._is_custom(block):
            return b""  # its text is inside JSON and is sent when that is complete
        if block.kind == "call":
            return self._event("function_call_arguments.delta", place | {"delta": text})
        if self._request.wants_summary:
            return self._event("reasoning_summary_text.delta", place | {"summary_index": 0, "delta": text})
        return self._event("reasoning_text.delta", place | {"content_index": 0, "delta": text})

    def _closed(self, block: Block, place: dict[str, Any]) -> bytes:
        text = block.text
        if block.kind == "text":
            part = self._part(block)
            done = {"content_index": 0, "text": text, "logprobs": part.logprobs}
            data = self._event("output_text.done", place | done)
            data += self._event("content_part.done", place | {"content_index": 0, "part": part})
        elif self._is_custom(block):
            written = custom_input(text)
            data = self._event("custom_tool_call_input.delta", place | {"delta": written})
            data += self._event("custom_tool_call_input.done", place | {"input": written})
        elif block.kind == "call":
            name = self._renamed[block.name].tool.name if block.name in self._renamed else block.name
            data = self._event("function_call_arguments.done", place | {"name": name, "arguments": text})
        elif self._request.wants_summary:
            data = self._event("reasoning_summary_text.done", place | {"summary_index": 0, "text": text})
            data += self._event("reasoning_summary_part.done", place | {"summary_index": 0, "part": SummaryText(text)})
        else:
            data = self._event("reasoning_text.done", place | {"content_index": 0, "text": text})
            data += self._event("content_part.done", place | {"content_index": 0, "part": ReasoningText(text)})
        item = self._item_at_end(block)
        return data + self._event("output_item.done", {"output_index": block.index, "item": item})

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        return self._numbered(f"response.{name}", fields)

    def _numbered(self, kind: str, fields: dict[str, Any]) -> bytes:
        fields = {"type": kind, "sequence_number": self._num_events} | fields
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + _encode(fields) + b"\n\n"
