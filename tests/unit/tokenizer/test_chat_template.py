"""Chat templates: what they see, what they may do, and how their complaints and bad messages reach the user."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import transformers

from headway.errors import InvalidRequestError, UnsupportedModelError
from headway.tokenizer import Tokenizer
from tests.unit.tokenizer.small import trained_backend

CHATML = (
    "{% for message in messages %}\n"
    "    {% if loop.first and message['role'] != 'system' %}\n"
    "{{ '<|im_start|>system\\nDefault<|im_end|>\\n' }}\n"
    "    {% endif %}\n"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
USER = {"role": "user", "content": "hi"}


def render(template: str, messages: Any = None, **extra: Any) -> str:
    tokenizer = Tokenizer(trained_backend(digits_apart=True), chat_templates={"default": template})
    return tokenizer.apply_chat_template([USER] if messages is None else messages, **extra)


def test_a_whole_conversation() -> None:
    """Block lines leave no blank lines behind (trim_blocks and lstrip_blocks), as templates are written for."""
    expected = "<|im_start|>system\nDefault<|im_end|>\n\n<|im_start|>user\nhi<|im_end|>\n\n"
    assert render(CHATML, add_generation_prompt=False) == expected
    assert render(CHATML) == expected + "<|im_start|>assistant\n"
    system = {"role": "system", "content": "S"}
    assert render(CHATML, [system, USER]).startswith("<|im_start|>system\nS<|im_end|>")


CALLING = {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}
PARTS = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}


@pytest.mark.parametrize(
    ("template", "message", "text"),
    [
        ("{{ messages[0].content }}", PARTS, "one\ntwo"),
        ("{{ messages[0].name }} {{ missing is defined }}", {**USER, "name": "Ann"}, "Ann False"),
        ("{{ messages[0].tool_calls | length }}{{ messages[0].content | trim }}", CALLING, "1"),
        ("{{ {'é': [1, '<']} | tojson }}", USER, '{"é": [1, "<"]}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", USER, '{\n  "a": 1\n}'),
        ("{{ strftime_now('%Y') }}", USER, str(datetime.datetime.now().year)),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", USER, "01"),
        ("a{% generation %}{{ messages[0].content }}{% endgeneration %}b", USER, "ahib"),
    ],
)
def test_what_templates_are_given(template: str, message: dict[str, Any], text: str) -> None:
    before = repr(message)
    assert render(template, [message]) == text
    assert repr(message) == before
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[5].content.strip() }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_complaints_and_forbidden_acts_are_bad_requests(template: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(template)
    assert caught.value.param == "messages"
    if "raise_exception" in template:
        assert "roles must alternate" in str(caught.value)


def test_a_template_that_does_not_parse_is_the_models_fault() -> None:
    with pytest.raises(UnsupportedModelError, match="line 2"):
        render("fine\n{% if %}")


def test_without_a_template() -> None:
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        Tokenizer(trained_backend(digits_apart=True)).apply_chat_template([USER])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "empty"),
        ("hi", "list of messages"),
        ({"role": "user", "content": "x"}, "list of messages"),
        (None, "list of messages"),
        (["hi"], r"messages\[0\] must be a mapping"),
        ([USER, {"content": "x"}], r"messages\[1\] needs a role"),
        ([{"role": "", "content": "x"}], "role"),
        ([{"role": 3, "content": "x"}], "role"),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": None}], "content"),
        ([{"role": "user", "content": 5}], "content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "image_url"),
        ([{"role": "user", "content": [{"type": "text"}]}], "text"),
        ([{"role": "user", "content": ["x"]}], "str"),
    ],
)
def test_bad_messages_say_which_and_why(messages: Any, message: str) -> None:
    tokenizer = Tokenizer(trained_backend(digits_apart=True), chat_templates={"default": CHATML})
    with pytest.raises(InvalidRequestError, match=message) as caught:
        tokenizer.apply_chat_template(messages)
    assert caught.value.param == "messages"


def test_what_is_not_given_is_none_as_in_transformers() -> None:
    """Templates tell "none" and "undefined" apart: with either test, no tools must be no tools."""
    templates = [
        "{% if tools is not none %}tools{% endif %}{% if documents is not none %}documents{% endif %}{{ tools }}",
        "{{ tools is defined }} {{ documents is defined }} {{ documents }} {{ add_generation_prompt }}",
        "{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}|{{ nothing is defined }}",
        "{% if not tools %}none{% endif %}{% set tools = tools or [] %}{{ tools | length }}",
    ]
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    for template in templates:
        ours = Tokenizer(trained_backend(digits_apart=True), chat_templates={"default": template}, special_tokens=named)
        theirs = transformers.PreTrainedTokenizerFast(
            tokenizer_object=trained_backend(digits_apart=True), chat_template=template, **named
        )
        for options in ({}, {"tools": [{"name": "f"}]}, {"documents": [{"title": "t", "text": "x"}]}):
            expected = theirs.apply_chat_template([USER], tokenize=False, add_generation_prompt=True, **options)
            assert ours.apply_chat_template([USER], **options) == expected, (template, options)
