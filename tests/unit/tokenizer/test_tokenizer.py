"""The Tokenizer class: single tokens, bytes of tokens, bad words."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from headway.errors import InvalidRequestError
from headway.sampling_params import SamplingParams
from headway.tokenizer import Tokenizer, resolve_bad_words, tokenizer_from_gguf
from tests.unit.tokenizer.small import TEXTS, byte_level_metadata, sentencepiece_metadata

BYTE_LEVEL = tokenizer_from_gguf(byte_level_metadata(pre="smollm"))
SENTENCEPIECE = tokenizer_from_gguf(sentencepiece_metadata())


def metaspace_tokenizer() -> Tokenizer:
    """A kind whose tokens are not known as bytes."""
    backend = Backend(models.WordLevel({"<unk>": 0, "▁the": 1, "▁fox": 2, "es": 3, "▁": 4}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte level", "sentencepiece"])
def test_bytes_of_tokens_make_up_the_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.has_token_bytes
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(tokenizer.token_bytes(token) for token in ids).decode()
        assert joined.removeprefix(" " if tokenizer.drops_leading_space else "") == tokenizer.decode(ids) == text


def test_every_single_token_has_the_text_that_decoding_gives() -> None:
    for token in range(BYTE_LEVEL.vocab_size):
        assert BYTE_LEVEL.token_text(token) == BYTE_LEVEL.decode([token], skip_special_tokens=False)
    for token in range(SENTENCEPIECE.vocab_size):
        text = SENTENCEPIECE.token_text(token)
        assert text.removeprefix(" ") == SENTENCEPIECE.decode([token], skip_special_tokens=False)


def test_a_token_keeps_its_leading_space() -> None:
    assert SENTENCEPIECE.token_text(SENTENCEPIECE.encode("the", add_special_tokens=False)[0]) == " the"
    assert BYTE_LEVEL.token_text(BYTE_LEVEL.encode(" the")[0]) == " the"
    assert metaspace_tokenizer().token_text(2) == " fox"
    assert metaspace_tokenizer().token_text(3) == "es"


def test_ids_without_a_token_have_no_text() -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE, metaspace_tokenizer()):
        assert tokenizer.token_text(tokenizer.vocab_size + 5) == ""
        assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


def test_special_tokens_have_no_bytes_when_skipped() -> None:
    assert BYTE_LEVEL.token_bytes(2) == b"<|im_end|>"
    assert BYTE_LEVEL.token_bytes(2, skip_special_tokens=True) == b""
    assert BYTE_LEVEL.token_bytes(2) == b"<|im_end|>"


def test_vocab_size_counts_up_to_the_last_added_token() -> None:
    tokenizer = metaspace_tokenizer()
    assert tokenizer.vocab_size == 5
    tokenizer.backend.add_special_tokens(["<end>"])
    assert Tokenizer(tokenizer.backend).vocab_size == 6


def test_bad_words_are_banned_with_and_without_a_leading_space() -> None:
    params = resolve_bad_words(SamplingParams(bad_words=["fox", " lazy"]), BYTE_LEVEL)
    spellings = ["fox", " fox", "lazy", " lazy"]
    assert params.bad_word_token_ids == tuple(tuple(BYTE_LEVEL.encode(word)) for word in spellings)
    assert len(set(params.bad_word_token_ids)) == 4
    assert resolve_bad_words(params, SENTENCEPIECE) is params


@pytest.mark.parametrize("text", ["half \ud83d", 5, None, ["a"], ("a", "b")])
def test_what_is_no_text_is_refused(text: Any) -> None:
    with pytest.raises(InvalidRequestError, match="string of whole characters"):
        BYTE_LEVEL.encode(text)


def test_without_bad_words_nothing_changes() -> None:
    params = SamplingParams()
    assert resolve_bad_words(params, BYTE_LEVEL) is params
