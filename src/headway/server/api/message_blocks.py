"""Records of the content blocks that a turn in `/v1/messages` may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from headway.server.api.record_fields import ApiRecord

_Neutral = dict[str, tuple[Any, ...]]


class CacheControl(ApiRecord, kw_only=True):
    """Asks to keep the prompt up to this point in the cache."""

    UNUSED: ClassVar[frozenset[str]] = frozenset({"scope"})

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"
    scope: str | None = None
    """Who may share the cached prefix. It is ignored: API keys and cache salts decide that here."""


class Block(ApiRecord, kw_only=True):
    """Fields that all blocks share."""

    cache_control: CacheControl | None = None


class TextBlock(Block, kw_only=True):
    """A block of text."""

    NEUTRAL: ClassVar[_Neutral] = {"citations": (None, [])}

    type: Literal["text"]
    text: str
    citations: Any = None


class ThinkingBlock(Block, kw_only=True):
    """The model's reasoning. This server does not sign reasoning, so any signature is accepted."""

    UNUSED: ClassVar[frozenset[str]] = frozenset({"signature"})

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Block, kw_only=True):
    """Encrypted reasoning that only Anthropic can read. It is left out of the prompt."""

    UNUSED: ClassVar[frozenset[str]] = frozenset({"data"})

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Block, kw_only=True):
    """A call that the model made earlier."""

    NEUTRAL: ClassVar[_Neutral] = {"caller": (None, {"type": "direct"}), "toolset_name": (None,)}

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None
    toolset_name: Any = None


class ToolResultBlock(Block, kw_only=True):
    """The result of a tool call."""

    NEUTRAL: ClassVar[_Neutral] = {"toolset_name": (None,)}

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Any] | None = None
    is_error: bool | None = None
    toolset_name: Any = None


AssistantBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock
UserBlock = TextBlock | ToolResultBlock
TEXT: Mapping[str, type[TextBlock]] = {"text": TextBlock}
OF_USER: Mapping[str, type[UserBlock]] = {"text": TextBlock, "tool_result": ToolResultBlock}
OF_ASSISTANT: Mapping[str, type[AssistantBlock]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
    "tool_use": ToolUseBlock,
}
