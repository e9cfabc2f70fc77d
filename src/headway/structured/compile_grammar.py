"""Compiles one grammar synchronously within llguidance's own limits, and words the error if it is refused."""

from __future__ import annotations

import logging

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from headway.errors import InvalidRequestError
from headway.structured.compiler_errors import plain_reason

logger = logging.getLogger(__name__)

TRIAL_S = 0.4
"""The processor time that a trial compilation of a grammar may take. The engine takes as long again."""
LIMITS = LLParserLimits(max_items_in_row=6_000, initial_lexer_fuel=1_000_000, max_grammar_size=200_000)
"""An object needs four items in a row for each optional property."""
TOO_COMPLEX = "it takes too long or too much memory to compile; make it smaller"
REFUSAL = "structured_outputs cannot be used: "
"""The beginning of error messages about a request's grammar."""
_SHOWN_ERROR_CHARS = 400


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile in the calling thread. Raises `InvalidRequestError` if llguidance refuses the grammar."""
    try:
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise refused(matcher.get_error())
        matcher.compute_bitmask()  # fails, where it does, at the start: most of a grammar's lexer is made here
        if matcher.is_error():
            raise refused(matcher.get_error())
    except InvalidRequestError:
        raise
    except BaseException as error:  # a panic in llguidance is no `Exception`
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        logger.error("a grammar of %d characters broke the compiler: %s", len(grammar), error)
        raise refused("it breaks the grammar compiler") from None
    if matcher.is_stopped() and not matcher.is_accepting():
        raise refused("no text can match it")
    return matcher


def refused(reason: str) -> InvalidRequestError:
    """The error of a grammar that cannot be used, from what llguidance says."""
    text = plain_reason(reason)
    shown = text if len(text) <= _SHOWN_ERROR_CHARS else text[: _SHOWN_ERROR_CHARS - 3] + "..."
    return InvalidRequestError(REFUSAL + shown, param="structured_outputs")
