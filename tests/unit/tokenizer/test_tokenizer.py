"""The Tokenizer class: single tokens, bytes of tokens, bad words."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from headway.errors import InvalidRequestError
from headway.tokenizer import Tokenizer, spell_bad_words, tokenizer_from_gguf
from headway.tokenizer.tokenizer import INFILL_TOKENS, InfillTokens
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
    spelt = spell_bad_words(["fox", " lazy", "fox"], BYTE_LEVEL)
    assert spelt == [BYTE_LEVEL.encode(word) for word in ["fox", " fox", "lazy", " lazy"]]


@pytest.mark.parametrize("text", ["half \ud83d", 5, None, ["a"], ("a", "b")])
def test_what_is_no_text_is_refused(text: Any) -> None:
    with pytest.raises(InvalidRequestError, match="string of whole characters"):
        BYTE_LEVEL.encode(text)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte level", "sentencepiece"])
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_the_ids_are_those_that_the_backend_gives_for_a_single_text(
    tokenizer: Tokenizer, add_special_tokens: bool
) -> None:
    for text in (*TEXTS, "", " ", "<|im_end|>", "".join(TEXTS) * 20, "x" * 5000):
        expected = tokenizer.backend.encode(text, add_special_tokens=add_special_tokens).ids
        assert tokenizer.encode(text, add_special_tokens=add_special_tokens) == expected
        assert tokenizer.decode(expected) == tokenizer.backend.decode(expected)


def test_other_threads_run_while_a_long_text_is_encoded_and_decoded() -> None:
    text = "".join(TEXTS) * 2000
    ids = BYTE_LEVEL.encode(text)
    for work in (lambda: BYTE_LEVEL.encode(text), lambda: BYTE_LEVEL.decode(ids * 4)):
        thread = threading.Thread(target=work)
        thread.start()
        num_turns = 0
        while thread.is_alive():
            time.sleep(0.001)
            num_turns += 1
        assert num_turns > 15, "with the interpreter lock held there is no turn but the last"


@pytest.mark.parametrize("names", INFILL_TOKENS)
def test_the_middle_is_asked_for_with_the_tokens_that_the_vocabulary_has(names: InfillTokens) -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata(pre="gpt-2"))
    assert tokenizer.encode_infill("a", "b") is None
    backend = tokenizer_from_gguf(byte_level_metadata(pre="gpt-2")).backend
    backend.add_special_tokens([name for name in names if name is not None])
    tokenizer = Tokenizer(backend)
    first, second, last = map(backend.token_to_id, names[:3])
    infill = tokenizer.encode_infill("the quick", " fox")
    assert infill is not None
    assert infill.token_ids == [first, *tokenizer.encode("the quick"), second, *tokenizer.encode(" fox"), last]
    assert infill.end_token_id == (None if names.end is None else backend.token_to_id(names.end))


def test_what_follows_the_middle_begins_without_a_space() -> None:
    """Where texts begin with a space of the tokenizer's own, and with a first token."""
    given = tokenizer_from_gguf(sentencepiece_metadata())
    given.backend.add_special_tokens(["\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"])
    tokenizer = Tokenizer(given.backend, bos_token_id=1)
    first, second, last = (given.backend.token_to_id(f"\u2581<{name}>") for name in ("PRE", "SUF", "MID"))
    infill = tokenizer.encode_infill("the quick", "and then")
    assert infill is not None
    before = tokenizer.encode("the quick", add_special_tokens=False)
    suffix = infill.token_ids[len(before) + 3 : -1]
    assert infill.token_ids == [1, first, *before, second, *suffix, last]
    assert "".join(map(tokenizer.token_text, suffix)) == "and then"
    bare = tokenizer.encode_infill("the quick", "and then", add_special_tokens=False)
    assert bare is not None and bare.token_ids == infill.token_ids[1:]
