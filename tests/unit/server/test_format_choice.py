"""What the operator is told of the tool format."""

from __future__ import annotations

import logging

import pytest

from headway.server.api.format_choice import choose_tool_format

KNOWN = "{% for t in tools %}<tool_call>{% endfor %}"
UNKNOWN = "{% for t in tools %}<|call|>{% endfor %}"
CALLS_ONLY = "{% for c in message['tool_calls'] %}<|call|>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "wanted", "chosen", "level", "words"),
    [
        (UNKNOWN, "mistral", "mistral", logging.INFO, "as --tool-format says"),
        (KNOWN, "auto", "hermes", logging.INFO, "found in the chat template"),
        (UNKNOWN, "auto", "hermes", logging.WARNING, "--tool-format names another"),
        (CALLS_ONLY, "auto", "hermes", logging.WARNING, "is a guess"),
        ("{{ messages }}", "auto", "hermes", logging.INFO, "no chat template with tools"),
        (None, "auto", "hermes", logging.INFO, "no chat template with tools"),
    ],
)
def test_the_choice_and_its_reason_are_one_line_of_the_log(
    template: str | None, wanted: str, chosen: str, level: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="headway.server.api.format_choice"):
        assert choose_tool_format(template, wanted).name == chosen
    (record,) = caplog.records
    assert (record.levelno, f"'{chosen}'" in record.getMessage(), words in record.getMessage()) == (level, True, True)
