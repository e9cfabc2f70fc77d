"""Tokenizers built from GGUF metadata: the same tokens as the tokenizer whose vocabulary it is."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from headway.errors import CorruptModelError, UnsupportedModelError
from headway.tokenizer import load_tokenizer, tokenizer_from_gguf
from tests.unit.tokenizer.small import SPECIALS, TEXTS, byte_level_metadata, sentencepiece_metadata, trained_backend


def random_texts(seed: int, count: int) -> list[str]:
    rng = np.random.default_rng(seed)
    ranges = [(32, 127), (32, 127), (48, 58), (9, 14), (32, 33), (0x80, 0x800), (0x800, 0xD7FF), (0x1F300, 0x1F700)]
    texts = []
    for _ in range(count):
        picks = rng.integers(0, len(ranges), rng.integers(0, 40))
        texts.append("".join(chr(rng.integers(*ranges[pick])) for pick in picks))
    return texts


@pytest.mark.parametrize(("pre", "digits_apart"), [("smollm", True), ("starcoder", True), ("gpt-2", False)])
def test_byte_level_tokens_are_those_of_the_original(pre: str, digits_apart: bool) -> None:
    original = trained_backend(digits_apart=digits_apart)
    built = tokenizer_from_gguf(byte_level_metadata(pre=pre, digits_apart=digits_apart))
    for text in TEXTS + random_texts(1, 300) + [f"<|im_start|>user\n{TEXTS[0]}<|im_end|>"]:
        ids = built.encode(text)
        assert ids == original.encode(text).ids
        assert built.decode(ids, skip_special_tokens=False) == text


# Words of two texts, divided by bars.
WORDS = {
    "gpt-2": "don|'t| WE|'|LL| 12345|.|6|\n|\n|7|  | x|..|\n",
    "smollm": "don|'t| WE|'|LL| |1|2|3|4|5|.|6|\n\n|7|  | x|..|\n",
    "qwen2": "don|'t| WE|'LL| |1|2|3|4|5|.|6|\n\n|7|  | x|..\n",
    "llama-bpe": "don|'t| WE|'LL| |123|45|.|6|\n\n|7|  | x|..\n",
    "tekken": "don|'t| WE|'LL| |1|2|3|4|5|.|6|\n\n|7|  | x|..\n",
    "deepseek-coder": "don|'|t| WE|'|LL| |1|2|3|4|5|.|6|\n|\n|7|  | x|..|\n",
}
CASED = {"tekken": "camel|Case|HTTPServer"}


@pytest.mark.parametrize(("pre", "words"), [*WORDS.items(), *CASED.items()])
def test_words(pre: str, words: str) -> None:
    backend = tokenizer_from_gguf(byte_level_metadata(pre=pre)).backend
    text = words.replace("|", "")
    spans = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[start:end] for start, end in spans] == words.split("|")


def test_only_qwen_composes_characters() -> None:
    for pre, composed in (("qwen2", True), ("llama-bpe", False)):
        tokenizer = tokenizer_from_gguf(byte_level_metadata(pre=pre, add_bos_token=False))
        assert (tokenizer.encode("e\u0301") == tokenizer.encode("é")) is composed


@pytest.mark.parametrize(
    ("metadata", "first", "last"),
    [
        (byte_level_metadata(pre="smollm", add_bos_token=None), [], []),
        (byte_level_metadata(pre="smollm", add_bos_token=True), [1], []),
        (byte_level_metadata(pre="llama-bpe", add_bos_token=None), [1], []),
        (byte_level_metadata(pre="llama-bpe", add_bos_token=False), [], []),
        (byte_level_metadata(pre="llama-bpe", add_bos_token=None, bos_token_id=None), [], []),
        (sentencepiece_metadata(), [1], []),
        (sentencepiece_metadata(add_bos_token=False), [], []),
        (byte_level_metadata(pre="qwen2", add_eos_token=True), [], [0]),
    ],
)
def test_first_and_last_token(metadata: dict[str, Any], first: list[int], last: list[int]) -> None:
    tokenizer = load_tokenizer(metadata)
    plain = tokenizer.encode("the fox", add_special_tokens=False)
    assert tokenizer.encode("the fox") == [*first, *plain, *last]
    assert tokenizer.encode("") == first + last


def test_special_and_user_defined_tokens() -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata(pre="smollm"))
    assert tokenizer.special_tokens["bos_token"] == SPECIALS[1]
    tool_call, with_space = tokenizer.vocab_size - 2, tokenizer.vocab_size - 1
    ids = tokenizer.encode("<|im_start|>a<tool_call>héllo wörld<|im_end|>")
    assert ids[0] == 1
    assert ids[2:] == [tool_call, with_space, 2]
    assert tokenizer.decode(ids).startswith("a<tool_call>")
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith(SPECIALS[1])


def test_end_tokens_are_all_that_are_declared_and_those_known_by_name() -> None:
    assert tokenizer_from_gguf(byte_level_metadata(pre="smollm")).eos_token_ids == (0, 2)
    assert tokenizer_from_gguf(byte_level_metadata(pre="smollm", eos_token_id=2)).eos_token_ids == (2, 0)
    assert tokenizer_from_gguf(byte_level_metadata(pre="smollm", eot_token_id=7)).eos_token_ids == (0, 7, 2)
    declared = {
        "eos_token_id": 9,
        "eot_token_id": 10,
        "eom_token_id": 11,
        "eos_token_ids": [9, 12],
        "eog_token_ids": (13, 14),
        "fim_pad_token_id": 15,
        "fim_rep_token_id": 16,
        "fim_sep_token_id": 17,
    }
    found = tokenizer_from_gguf(byte_level_metadata(pre="smollm", **declared)).eos_token_ids
    assert found == (9, 10, 11, 12, 13, 14, 15, 16, 17, 0, 2)
    plain = byte_level_metadata(pre="smollm")
    plain["tokenizer.ggml.token_type"] = [1] * len(plain["tokenizer.ggml.tokens"])
    assert tokenizer_from_gguf(plain).eos_token_ids == (0,)


def sentencepiece_by_hand(text: str, metadata: dict[str, Any]) -> list[int]:
    """Join the pair that makes the best-scored piece, leftmost first, until none is left; then bytes for the rest."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: i for i, token in enumerate(tokens) if metadata["tokenizer.ggml.token_type"][i] == 1}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ids]
        if not pairs:
            break
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    found: list[int] = []
    for part in parts:
        found += [ids[part]] if part in ids else [tokens.index(f"<0x{byte:02X}>") for byte in part.encode()]
    return found


def test_sentencepiece_tokens_are_those_found_by_hand() -> None:
    metadata = sentencepiece_metadata()
    tokenizer = tokenizer_from_gguf(metadata)
    for text in TEXTS + random_texts(2, 300):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == sentencepiece_by_hand(text, metadata)
        assert tokenizer.decode(ids) == text


def test_sentencepiece_without_a_space_prefix() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(add_space_prefix=False))
    ids = tokenizer.encode(" the", add_special_tokens=False)
    assert len(ids) == 1
    assert tokenizer.decode(ids) == " the"
    assert not tokenizer.drops_leading_space


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        ({"tokens": None}, CorruptModelError, "tokens"),
        ({"merges": None}, CorruptModelError, "merges"),
        ({"token_type": [1, 2]}, CorruptModelError, "2 token types"),
        ({"eos_token_id": 99999}, CorruptModelError, "eos_token_id is 99999"),
        ({"eog_token_ids": [1, 99999]}, CorruptModelError, "eog_token_ids"),
        ({"merges": ["nothing here"]}, CorruptModelError, "do not fit"),
        ({"merges": ["alone"]}, CorruptModelError, "do not fit"),
        *(({"model": kind}, UnsupportedModelError, repr(kind)) for kind in ("bert", "t5", None)),
        *(({"pre": pre}, UnsupportedModelError, rf"{pre!r}.*llama-bpe") for pre in ("qwen35", "default", None, 7)),
    ],
)
def test_damaged_and_unknown_metadata_is_refused(
    overrides: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tokenizer_from_gguf(byte_level_metadata(**{"pre": "smollm", **overrides}))


def test_missing_scores_are_refused() -> None:
    with pytest.raises(CorruptModelError, match="scores"):
        tokenizer_from_gguf(sentencepiece_metadata(scores=None))
