"""Tokenizers from Hugging Face folders: what each of the files around tokenizer.json contributes.

Token ids and texts are those of transformers 5, whichever file names a token.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

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

    def load(self, files: Mapping[str, Any] | None = None) -> Tokenizer:
        for name, content in (files or {}).items():
            self.write(name, content)
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


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{not json", "[1]", "", "[" * 100_000], ids=lambda content: content[:9])
def test_damaged_files_are_named(folder: Folder, name: str, content: str) -> None:
    with pytest.raises(CorruptModelError, match=name):
        folder.write(name, content).load()


# -------------------------------------------------------------------------------------------------- as transformers
BOS, EOS = "<|im_start|>", "<|im_end|>"
MIXED = ("the fox <tool> a <img>\u00a0<TOOL>", f"{BOS}[PAD]fox</tool>{EOS} <|endoftext|>")


@functools.cache
def saved(around: str = "", *, tool: str = "") -> str:
    """A tokenizer.json that puts tokens around a text, and knows "<tool>" as a special or ordinary added token."""
    backend = trained_backend(digits_apart=True)
    if tool:
        backend.add_tokens([AddedToken("<tool>", special=tool == "special")])
    if around:
        backend.post_processor = TemplateProcessing(
            single=around, pair=f"{around} $B", special_tokens=[(BOS, 1), (EOS, 2)]
        )
    text: str = backend.to_str()
    return text


SIZE = 574
NAMED = {"bos_token": BOS, "eos_token": EOS}
TOOL = {"content": "<tool>", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
Files = dict[str, Any]


def config(**changes: Any) -> Files:
    return {"tokenizer_config.json": NAMED | changes}


def around(text: str, **changes: Any) -> Files:
    return {"tokenizer.json": saved(text), **config(**changes)}


def by_id(number: int = SIZE, **changes: Any) -> Files:
    return config(added_tokens_decoder={str(number): TOOL | changes})


def mapped(**names: Any) -> Files:
    return {"special_tokens_map.json": names}


def added(ids: dict[str, int]) -> Files:
    return {"added_tokens.json": ids}


KNOWN_AS_ORDINARY = {"tokenizer.json": saved(tool="ordinary")}
FILES: dict[str, Files] = {
    **{
        f"{place}, {keys}": around(place, **keys)
        for place in ("", f"{BOS} $A", f"$A {EOS}", f"{BOS} $A {EOS}")
        for keys in (
            {},
            {"add_bos_token": False},
            {"add_bos_token": None},
            {"add_bos_token": True},
            {"add_eos_token": False},
            {"add_eos_token": True},
            {"add_bos_token": True, "add_eos_token": True},
            {"add_bos_token": False, "add_eos_token": False, "tokenizer_class": "LlamaTokenizer"},
            {"add_bos_token": True, "tokenizer_class": "PreTrainedTokenizerFast"},
        )
    },
    "no bos token": around(f"{BOS} $A", bos_token=None, add_bos_token=True),
    "by id": by_id(special=True),
    "by id, ordinary": by_id(special=False),
    "by id, lstrip": by_id(special=True, lstrip=True),
    "by id, normalized": by_id(normalized=True),
    "by id, out of order": config(
        added_tokens_decoder={str(SIZE + 1): {"content": "<img>"}, str(SIZE): {"content": "<tool>"}}
    ),
    "by id, with a gap": by_id(SIZE + 5),
    "by id, and the end token": config(
        eos_token="</tool>", added_tokens_decoder={str(SIZE): {"content": "</tool>", "special": False}}
    ),
    "by id, a word of the vocabulary": by_id(72, content="fox", special=True),
    "by id, known as ordinary": by_id(special=True) | KNOWN_AS_ORDINARY,
    "by id, so the map is not read": by_id() | mapped(pad_token="[PAD]") | added({"<img>": SIZE + 1}),
    "added_tokens.json": config() | added({"<tool>": SIZE, "<img>": SIZE + 1}),
    "added_tokens.json, special": config(extra_special_tokens=["<tool>"]) | added({"<img>": SIZE + 1, "<tool>": SIZE}),
    "added_tokens.json, with a name": config(pad_token="[PAD]") | added({"[PAD]": SIZE}),
    "added_tokens.json, known already": config() | added({EOS: 2}),
    "extra, a list": config(extra_special_tokens=["<tool>", "<img>"]),
    "extra, names": config(extra_special_tokens={"tool_token": "<tool>", "img_token": "<img>"}),
    "extra, former name": config(additional_special_tokens=["<tool>", BOS]),
    "extra, typed": config(extra_special_tokens=[{"__type": "AddedToken", **TOOL, "rstrip": True}]),
    "extra, typed as special": config(extra_special_tokens=[{"__type": "AddedToken", **TOOL, "special": True}]),
    "extra, known as ordinary": config(extra_special_tokens=["<tool>"]) | KNOWN_AS_ORDINARY,
    "extra, a word of the vocabulary": config(extra_special_tokens=["fox"]),
    "names, after the others": config(
        pad_token="[PAD]", extra_special_tokens=["<img>"], added_tokens_decoder={str(SIZE): TOOL}
    ),
    "a name of the model": config(image_token="<img>", extra_special_tokens=["<tool>"]),
    "names of the model": config(model_specific_special_tokens={"image_token": "<img>"}),
    "a name, typed": config(pad_token={"__type": "AddedToken", **TOOL, "content": "[PAD]", "normalized": True}),
    "the map goes before": config(pad_token="<tool>") | mapped(pad_token="[PAD]"),
    "the map, an object": config() | mapped(pad_token=TOOL | {"content": "[PAD]"}),
    "the map, former name": config() | mapped(additional_special_tokens=["<tool>"]),
    "the map, both": config(extra_special_tokens=["<img>"]) | mapped(extra_special_tokens=["<tool>", "<img>"]),
    "the map, its former name second": config(additional_special_tokens=["<img>"])
    | mapped(additional_special_tokens=["<tool>"]),
    "split": config(split_special_tokens=True, extra_special_tokens=["<tool>"]),
    "clean-up": config(clean_up_tokenization_spaces=True),
}


@pytest.mark.parametrize("name", FILES)
def test_as_transformers(name: str, folder: Folder) -> None:
    tokenizer = folder.load(FILES[name])
    reference = transformers.AutoTokenizer.from_pretrained(folder.path)
    for text in MIXED:
        ids = reference(text)["input_ids"]
        assert tokenizer.encode(text) == ids
        for skips in (True, False):
            expected = reference.decode(ids, skip_special_tokens=skips)
            assert tokenizer.decode(ids, skip_special_tokens=skips) == expected
    assert tokenizer.bos_token_id == reference.bos_token_id
    named = {key: text for key, text in reference.special_tokens_map.items() if isinstance(text, str)}
    assert tokenizer.special_tokens == named


def test_a_token_that_the_model_has_no_place_for_is_left_out(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    files = config(pad_token="[PAD]", extra_special_tokens=["<tool>"]) | {"config.json": {"vocab_size": SIZE + 1}}
    tokenizer = folder.load(files)
    assert tokenizer.encode("[PAD]") == [SIZE]
    assert len(tokenizer.encode("<tool>")) > 1
    assert "no place for <tool>; left out" in caplog.text


def test_what_is_not_used_is_said_once_for_a_file(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    files = {
        "tokenizer_config.json": NAMED | {"prefix_rules": [1], "zeta": 3, "legacy": True, "unused": None},
        "special_tokens_map.json": {"pad_token": "[PAD]", "pads": ["x"]},
        "generation_config.json": {"suppress_tokens": [4], "temperature": 0.6, "guidance_scale": None, "mystery": 1},
    }
    with caplog.at_level(logging.WARNING):
        folder.load(files)
    assert [record.getMessage().removeprefix(f"{folder.path}/") for record in caplog.records] == [
        "tokenizer_config.json has keys that are not used: prefix_rules, zeta",
        "special_tokens_map.json has keys that are not used: pads",
        "generation_config.json has keys that are not used: mystery, suppress_tokens",
    ]


def test_another_id_than_the_declared_one_is_said(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    folder.load(FILES["by id, with a gap"])
    assert f"<tool> is {SIZE}, not {SIZE + 5}" in caplog.text
