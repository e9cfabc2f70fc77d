"""Tokenizers from Hugging Face folders: what each of the files around tokenizer.json contributes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headway.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError
from headway.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_folder
from tests.unit.tokenizer.small import TEXTS, trained_backend

MESSAGES = [{"role": "user", "content": "hi"}]


class Folder:
    """A model folder to put files into."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "tokenizer.json").write_text(trained_backend(digits_apart=True).to_str())

    def write(self, name: str, content: Any) -> Folder:
        file = self.path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return self

    def load(self) -> Tokenizer:
        return tokenizer_from_folder(self.path)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_tokenizer_json_alone_is_enough(folder: Folder) -> None:
    tokenizer = load_tokenizer(str(folder.path))
    original = trained_backend(digits_apart=True)
    for text in TEXTS:
        assert tokenizer.encode(text) == original.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_ids == ()
    assert tokenizer.bos_token_id is None
    assert tokenizer.chat_template is None
    assert tokenizer.vocab_size == original.get_vocab_size()


def test_truncation_and_padding_in_the_file_are_switched_off(folder: Folder) -> None:
    backend = trained_backend(digits_apart=True)
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    folder.write("tokenizer.json", backend.to_str())
    assert folder.load().encode(TEXTS[0]) == trained_backend(digits_apart=True).encode(TEXTS[0]).ids


def test_end_tokens(folder: Folder) -> None:
    folder.write("config.json", {"eos_token_id": 9})
    assert folder.load().eos_token_ids == (9,)
    folder.write("special_tokens_map.json", {"eos_token": "<|im_end|>"})
    assert folder.load().eos_token_ids == (2,)
    folder.write("generation_config.json", {"eos_token_id": [0, 2, 5]})
    assert folder.load().eos_token_ids == (0, 2, 5)
    folder.write("generation_config.json", {"eos_token_id": 0})
    assert folder.load().eos_token_ids == (0, 2)


def test_named_tokens_are_special_and_reach_templates(folder: Folder) -> None:
    folder.write(
        "tokenizer_config.json",
        {"bos_token": "<|im_start|>", "pad_token": "fox", "chat_template": "{{ bos_token }}|{{ pad_token }}"},
    )
    tokenizer = folder.load()
    assert tokenizer.bos_token_id == 1
    assert tokenizer.apply_chat_template(MESSAGES) == "<|im_start|>|fox"


def test_chat_template_as_named_list(folder: Folder) -> None:
    templates = [
        {"name": "rag", "template": "R"},
        {"name": "default", "template": "D"},
        {"name": "tool_use", "template": "T"},
    ]
    folder.write("tokenizer_config.json", {"chat_template": templates})
    tokenizer = folder.load()
    assert tokenizer.apply_chat_template(MESSAGES) == "D"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{"name": "f"}]) == "T"
    folder.write("tokenizer_config.json", {"chat_template": templates[:1]})
    assert folder.load().apply_chat_template(MESSAGES) == "R"


def test_chat_template_files(folder: Folder) -> None:
    folder.write("tokenizer_config.json", {"chat_template": "from the configuration"})
    folder.write("chat_template.jinja", "from the file").write("additional_chat_templates/tool_use.jinja", "tools")
    tokenizer = folder.load()
    assert tokenizer.apply_chat_template(MESSAGES) == "from the file"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{}]) == "tools"


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        tokenizer_from_folder(tmp_path / "nowhere")
    with pytest.raises(UnsupportedModelError, match="no tokenizer.json"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(UnsupportedModelError, match="tokenizer.model.*not supported"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("chat_template.jinja", b'{{ "\xff" }}', "chat_template.jinja is not UTF-8: invalid start byte at byte 4"),
        ("additional_chat_templates/rag.jinja", b"\xff", "rag.jinja is not UTF-8"),
        ("tokenizer_config.json", b'{"chat_template": [{"template": "a"}]}', "tokenizer_config.json: 'chat_template'"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}', "without the text of its 'name' or"),
        ("tokenizer_config.json", b'{"chat_template": ["text"]}', "'chat_template' has an entry without"),
        ("tokenizer_config.json", b'{"chat_template": {"default": 3}}', "'chat_template' has an entry without"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "'chat_template' has an entry without"),
    ],
)
def test_a_damaged_template_is_said_where_one_is_needed(
    folder: Folder, name: str, content: bytes, message: str
) -> None:
    file = folder.path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    tokenizer = folder.load()
    assert tokenizer.decode(tokenizer.encode("fox")) == "fox"
    with pytest.raises(CorruptModelError, match=message):
        tokenizer.apply_chat_template(MESSAGES)
    with pytest.raises(CorruptModelError, match=message):
        assert tokenizer.chat_template


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", {"bos_token": {"contents": "x"}}, "'bos_token' has"),
        ("tokenizer_config.json", {"bos_token": {"content": 5}}, "'bos_token' has"),
        ("tokenizer_config.json", {"bos_token": ["<x>"]}, "'bos_token' has ['<x>'], which is not a token"),
        ("tokenizer_config.json", {"eos_token": 2}, "'eos_token' has 2, which is not a token"),
        ("tokenizer_config.json", '{"pad_token": "\\ud800"}', "'pad_token' has"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"9": {"content": "\\ud800"}}}', "is not a token"),
        ("added_tokens.json", '{"\\ud800": 574}', "added_tokens.json has"),
        ("generation_config.json", {"eos_token_id": "2"}, "'eos_token_id' is '2', which is not a token id"),
        ("generation_config.json", {"eos_token_id": [2, [3]]}, "'eos_token_id' is [2, [3]]"),
        ("config.json", {"eos_token_id": {"a": 1}}, "config.json: 'eos_token_id' is {'a': 1}"),
        ("tokenizer_config.json", {"extra_special_tokens": "<x>"}, "'extra_special_tokens' is a str, not tokens"),
        ("tokenizer_config.json", {"extra_special_tokens": [7]}, "'extra_special_tokens' has 7, which is not a token"),
        ("tokenizer_config.json", {"extra_special_tokens": {"a": None}}, "'a' has None, which is not a token"),
        ("tokenizer_config.json", {"model_specific_special_tokens": ["<x>"]}, "is a list, not tokens"),
        ("tokenizer_config.json", {"added_tokens_decoder": ["<x>"]}, "'added_tokens_decoder' is a list"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "<x>"}}}, "at 'x', which is not an id"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 5000: {"content": "<x>"}}}, "which is not an id"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": {}}}, "is not a token"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": "<x>"}}, "at '9', which is not an id and a token"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": {"content": "<x>", "lstrip": "no"}}}, "not a token"),
        ("added_tokens.json", {"<x>": "574"}, "added_tokens.json gives '<x>' the id '574', which is not one"),
        ("added_tokens.json", {"<x>": -1}, "the id -1, which is not one"),
        ("special_tokens_map.json", {"pad_token": {"content": ["a"]}}, "'pad_token' has"),
    ],
)
def test_damaged_tokens_are_named(folder: Folder, name: str, content: Any, message: str) -> None:
    with pytest.raises(CorruptModelError, match=re.escape(message)):
        folder.write(name, content).load()


def test_a_file_that_is_nested_too_deeply(folder: Folder) -> None:
    with pytest.raises(CorruptModelError, match="generation_config.json is not valid JSON"):
        folder.write("generation_config.json", "[" * 100_000).load()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{not json", "[1]", ""])
def test_damaged_files_are_named(folder: Folder, name: str, content: str) -> None:
    with pytest.raises(CorruptModelError, match=name):
        folder.write(name, content).load()
