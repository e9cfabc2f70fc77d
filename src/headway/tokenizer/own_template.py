"""The operator's own chat template, in place of the model's: read, and tried on a conversation before anything runs."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

from headway.errors import ConfigError, HeadwayError
from headway.text_files import read_small_text
from headway.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_JINJA = re.compile(r"\{[{%#]|\n")
"""What a template has and the name of a file does not."""
_QUESTION = {"role": "user", "content": "Which river is the longest?"}
_CONVERSATION = (
    _QUESTION,
    {"role": "assistant", "content": "The Nile."},
    {"role": "user", "content": "And the widest?"},
)


def use_chat_template(tokenizer: Tokenizer | None, given: str | None) -> None:
    """Let the tokenizer use a template that is given as a file or as its text. Raises `ConfigError` if it makes no
    prompt of a question."""
    if given is None:
        return
    if tokenizer is None:
        raise ConfigError("chat_template is for text, and this model has no tokenizer.")
    where = "chat_template" if _JINJA.search(given) else f"chat_template '{given}'"
    try:
        tokenizer.replace_chat_templates(given if _JINJA.search(given) else read_small_text(given))
        prompt = _render(tokenizer, [_QUESTION])
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if _QUESTION["content"] not in prompt:
        raise ConfigError(f"{where}: the prompt that it makes of a question does not contain the question.")
    try:
        _render(tokenizer, _CONVERSATION)
    except ConfigError as error:
        logger.warning("%s answers a question, but fails on a longer conversation: %s", where, error)


def _render(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> str:
    try:
        return tokenizer.apply_chat_template(messages)
    except HeadwayError as error:  # made for clients: the cause says more
        cause = error.__cause__
        number = getattr(cause, "lineno", None)
        line = "" if number is None else f" (line {number})"
        raise ConfigError(f"{error if cause is None else f'{type(cause).__name__}: {cause}'}{line}") from error
