"""Chooses the served model's tool format at the start, and logs the choice with its reason."""

from __future__ import annotations

import logging
import re

from headway.structured.conversation import renders_tools
from headway.structured.tool_call_formats import TOOL_FORMATS, USUAL_TOOL_FORMAT, ToolFormat, shown_tool_format

logger = logging.getLogger(__name__)
AUTO = "auto"
_WRITES_CALLS = re.compile(r"\btool_calls\b")


def choose_tool_format(chat_template: str | None, wanted: str) -> ToolFormat:
    """Return the format that the operator named or, with `auto`, the one that the chat template uses."""
    if wanted != AUTO:
        logger.info("tool format '%s', as --tool-format says", wanted)
        return TOOL_FORMATS[wanted]
    shown = shown_tool_format(chat_template)
    if shown is not None:
        logger.info("tool format '%s', found in the chat template", shown.name)
        return shown
    template = chat_template or ""
    if renders_tools(template) or _WRITES_CALLS.search(template):
        logger.warning(
            "tool format '%s' is a guess: the chat template has tools, but shows no form of calls that is known here. "
            "Calls in another form are answered as text, and with tool_choice 'required' the model is held to this "
            "one. --tool-format names another: %s",
            USUAL_TOOL_FORMAT,
            ", ".join(TOOL_FORMATS),
        )
    else:
        logger.info(
            "tool format '%s': the model has no chat template with tools, so the system message describes them",
            USUAL_TOOL_FORMAT,
        )
    return TOOL_FORMATS[USUAL_TOOL_FORMAT]
