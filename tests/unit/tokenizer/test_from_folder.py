"""Tokenizers from Hugging Face folders: what each of the files around tokenizer.json contributes."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize(
    ("config", "first", "last"),
    [
        ({}, [], []),
        ({"add_bos_token": True}, [1], []),
        ({"add_bos_token": True, "add_eos_token": True}, [1], [2]),
        ({"add_bos_token": False}, [], []),
        ({"add_bos_token": True, "bos_token": None}, [], []),
    ],
)
def test_tokens_around_a_text(folder: Folder, config: dict[str, Any], first: list[int], last: list[int]) -> None:
    folder.write(
        "tokenizer_config.json", {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, **config}
    )
    tokenizer = folder.load()
    plain = tokenizer.encode("fox", add_special_tokens=False)
    assert tokenizer.encode("fox") == first + plain + last


def test_add_bos_token_false_overrides_the_file(folder: Folder) -> None:
    folder.write("tokenizer_config.json", {"bos_token": "<|im_start|>", "add_bos_token": True})
    with_bos = folder.load()
    folder.write("tokenizer.json", with_bos.backend.to_str()).write("tokenizer_config.json", {})
    assert folder.load().encode("fox")[0] == 1
    folder.write("tokenizer_config.json", {"bos_token": "<|im_start|>", "add_bos_token": False})
    assert folder.load().encode("fox")[0] != 1


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


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{not json", "[1]", ""])
def test_damaged_files_are_named(folder: Folder, name: str, content: str) -> None:
    with pytest.raises(CorruptModelError, match=name):
        folder.write(name, content).load()
