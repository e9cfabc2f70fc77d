"""Token ids and texts are those of transformers 5, whichever file of the folder names a token."""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from headway.tokenizer import tokenizer_from_folder
from tests.unit.tokenizer.small import trained_backend

BOS, EOS = "<|im_start|>", "<|im_end|>"
TEXTS = ("the fox <tool> a <img>\u00a0<TOOL>", f"{BOS}[PAD]fox</tool>{EOS} <|endoftext|>")


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


CASES: dict[str, Files] = {
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
    "by id": config(added_tokens_decoder={str(SIZE): TOOL | {"special": True}}),
    "by id, ordinary": config(added_tokens_decoder={str(SIZE): TOOL | {"special": False}}),
    "by id, lstrip": config(added_tokens_decoder={str(SIZE): TOOL | {"special": True, "lstrip": True}}),
    "by id, normalized": config(added_tokens_decoder={str(SIZE): TOOL | {"normalized": True}}),
    "by id, out of order": config(
        added_tokens_decoder={str(SIZE + 1): {"content": "<img>"}, str(SIZE): {"content": "<tool>"}}
    ),
    "by id, with a gap": config(added_tokens_decoder={str(SIZE + 5): TOOL}),
    "by id, and the end token": config(
        eos_token="</tool>", added_tokens_decoder={str(SIZE): {"content": "</tool>", "special": False}}
    ),
    "by id, a word of the vocabulary": config(added_tokens_decoder={"72": {"content": "fox", "special": True}}),
    "by id, known as ordinary": {
        "tokenizer.json": saved(tool="ordinary"),
        **config(added_tokens_decoder={str(SIZE): TOOL | {"special": True}}),
    },
    "by id, so the map is not read": {
        **config(added_tokens_decoder={str(SIZE): TOOL}),
        "special_tokens_map.json": {"pad_token": "[PAD]"},
        "added_tokens.json": {"<img>": SIZE + 1},
    },
    "added_tokens.json": {**config(), "added_tokens.json": {"<tool>": SIZE, "<img>": SIZE + 1}},
    "added_tokens.json, special": {
        **config(extra_special_tokens=["<tool>"]),
        "added_tokens.json": {"<img>": SIZE + 1, "<tool>": SIZE},
    },
    "added_tokens.json, with a name": {**config(pad_token="[PAD]"), "added_tokens.json": {"[PAD]": SIZE}},
    "added_tokens.json, known already": {**config(), "added_tokens.json": {EOS: 2}},
    "extra, a list": config(extra_special_tokens=["<tool>", "<img>"]),
    "extra, names": config(extra_special_tokens={"tool_token": "<tool>", "img_token": "<img>"}),
    "extra, former name": config(additional_special_tokens=["<tool>", BOS]),
    "extra, typed": config(extra_special_tokens=[{"__type": "AddedToken", **TOOL, "rstrip": True}]),
    "extra, typed as special": config(extra_special_tokens=[{"__type": "AddedToken", **TOOL, "special": True}]),
    "extra, known as ordinary": {
        "tokenizer.json": saved(tool="ordinary"),
        **config(extra_special_tokens=["<tool>"]),
    },
    "extra, a word of the vocabulary": config(extra_special_tokens=["fox"]),
    "names, after the others": config(
        pad_token="[PAD]", extra_special_tokens=["<img>"], added_tokens_decoder={str(SIZE): TOOL}
    ),
    "a name of the model": config(image_token="<img>", extra_special_tokens=["<tool>"]),
    "names of the model": config(model_specific_special_tokens={"image_token": "<img>"}),
    "a name, typed": config(pad_token={"__type": "AddedToken", **TOOL, "content": "[PAD]", "normalized": True}),
    "the map goes before": {**config(pad_token="<tool>"), "special_tokens_map.json": {"pad_token": "[PAD]"}},
    "the map, an object": {**config(), "special_tokens_map.json": {"pad_token": TOOL | {"content": "[PAD]"}}},
    "the map, former name": {**config(), "special_tokens_map.json": {"additional_special_tokens": ["<tool>"]}},
    "the map, both": {
        **config(extra_special_tokens=["<img>"]),
        "special_tokens_map.json": {"extra_special_tokens": ["<tool>", "<img>"]},
    },
    "the map, its former name second": {
        **config(additional_special_tokens=["<img>"]),
        "special_tokens_map.json": {"additional_special_tokens": ["<tool>"]},
    },
    "split": config(split_special_tokens=True, extra_special_tokens=["<tool>"]),
    "clean-up": config(clean_up_tokenization_spaces=True),
}


def write(folder: Path, files: Files) -> Path:
    for name, content in ({"tokenizer.json": saved()} | files).items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_as_transformers(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path, CASES[name])
    reference, tokenizer = transformers.AutoTokenizer.from_pretrained(folder), tokenizer_from_folder(folder)
    for text in TEXTS:
        ids = reference(text)["input_ids"]
        assert tokenizer.encode(text) == ids
        for skips in (True, False):
            expected = reference.decode(ids, skip_special_tokens=skips)
            assert tokenizer.decode(ids, skip_special_tokens=skips) == expected
    assert tokenizer.bos_token_id == reference.bos_token_id
    named = {key: text for key, text in reference.special_tokens_map.items() if isinstance(text, str)}
    assert tokenizer.special_tokens == named


def test_a_token_that_the_model_has_no_place_for_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = config(pad_token="[PAD]", extra_special_tokens=["<tool>"]) | {"config.json": {"vocab_size": SIZE + 1}}
    tokenizer = tokenizer_from_folder(write(tmp_path, files))
    assert tokenizer.encode("[PAD]") == [SIZE]
    assert len(tokenizer.encode("<tool>")) > 1
    assert "no place for <tool>; left out" in caplog.text


def test_what_is_not_used_is_said_once_for_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = {
        "tokenizer_config.json": NAMED | {"prefix_rules": [1], "zeta": 3, "legacy": True, "unused": None},
        "special_tokens_map.json": {"pad_token": "[PAD]", "pads": ["x"]},
        "generation_config.json": {"suppress_tokens": [4], "temperature": 0.6, "guidance_scale": None, "mystery": 1},
    }
    with caplog.at_level(logging.WARNING):
        tokenizer_from_folder(write(tmp_path, files))
    assert [record.getMessage().removeprefix(f"{tmp_path}/") for record in caplog.records] == [
        "tokenizer_config.json has keys that are not used: prefix_rules, zeta",
        "special_tokens_map.json has keys that are not used: pads",
        "generation_config.json has keys that are not used: mystery, suppress_tokens",
    ]


def test_another_id_than_the_declared_one_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer_from_folder(write(tmp_path, CASES["by id, with a gap"]))
    assert f"<tool> is {SIZE}, not {SIZE + 5}" in caplog.text
