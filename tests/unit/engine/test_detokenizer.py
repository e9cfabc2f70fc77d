"""Streaming text: equal to decoding everything at once, never half a character, never part of a stop string."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from headway.engine.detokenizer import MAX_PENDING_TOKENS, IncrementalDetokenizer, StopChecker
from headway.tokenizer import Tokenizer, tokenizer_from_gguf
from tests.unit.tokenizer.small import TEXTS, byte_level_metadata, sentencepiece_metadata

BYTE_LEVEL = tokenizer_from_gguf(byte_level_metadata(pre="smollm"))
SENTENCEPIECE = tokenizer_from_gguf(sentencepiece_metadata())


def _windowed(tokenizer: Tokenizer) -> Tokenizer:
    twin = Tokenizer(Backend.from_str(tokenizer.backend.to_str()))
    twin.has_token_bytes = False
    return twin


WINDOWED = _windowed(BYTE_LEVEL)
WINDOWED_SENTENCEPIECE = _windowed(SENTENCEPIECE)
ALL = [BYTE_LEVEL, SENTENCEPIECE, WINDOWED, WINDOWED_SENTENCEPIECE]
NAMES = ["byte level", "sentencepiece", "windowed byte level", "windowed sentencepiece"]


def stream(
    tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], skip: bool = True, seed: int = 0
) -> list[str]:
    """The pieces that come out when the output arrives in random chunks of one to three tokens."""
    rng = random.Random(seed)
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    pieces, place = [], 0
    while place < len(output):
        size = rng.randint(1, 3)
        pieces.append(detokenizer.append(output[place : place + size]))
        place += size
        assert detokenizer.text == "".join(pieces)
    pieces.append(detokenizer.finish())
    assert detokenizer.text == "".join(pieces)
    return pieces


@pytest.mark.parametrize("tokenizer", ALL, ids=NAMES)
def test_text_arrives_with_its_token(tokenizer: Tokenizer) -> None:
    """No token that ends a character waits for the next one."""
    text = "the fox jumps over the dog"
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    for token in tokenizer.encode(text, add_special_tokens=False):
        assert detokenizer.append([token]) != ""
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("tokenizer", ALL, ids=NAMES)
@pytest.mark.parametrize("skip", [True, False])
def test_the_prompt_is_context(tokenizer: Tokenizer, skip: bool) -> None:
    """A space between prompt and output is kept, also where decoding the output alone would drop it."""
    prompt = tokenizer.encode("the quick")
    output = tokenizer.encode("the quick the fox", add_special_tokens=False)[len(prompt) - len(tokenizer.encode("")) :]
    whole = tokenizer.decode([*prompt, *output], skip_special_tokens=skip)
    text = "".join(stream(tokenizer, prompt, output, skip))
    assert whole == tokenizer.decode(prompt, skip_special_tokens=skip) + text
    assert text == " the fox"


def test_a_leading_space_is_dropped_only_at_the_start_of_everything() -> None:
    the = SENTENCEPIECE.encode("the", add_special_tokens=False)
    bos = [SENTENCEPIECE.bos_token_id or 0]
    for tokenizer in (SENTENCEPIECE, WINDOWED_SENTENCEPIECE):
        assert "".join(stream(tokenizer, [], the + the)) == "the the"
        assert "".join(stream(tokenizer, bos, the)) == "the"
        assert "".join(stream(tokenizer, bos, the, skip=False)) == " the"
        assert "".join(stream(tokenizer, bos + the, the)) == " the"


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=40),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_any_tokens_give_what_decoding_gives(output: list[int], skip: bool, seed: int) -> None:
    """Also broken bytes, special tokens and ids without a token."""
    pieces = stream(BYTE_LEVEL, [], output, skip, seed)
    assert "".join(pieces) == BYTE_LEVEL.decode(output, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 2, *range(259, SENTENCEPIECE.vocab_size)]), max_size=30),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_any_pieces_and_special_tokens_give_what_decoding_gives(output: list[int], skip: bool, seed: int) -> None:
    for tokenizer in (SENTENCEPIECE, WINDOWED_SENTENCEPIECE):
        pieces = stream(tokenizer, [], output, skip, seed)
        assert "".join(pieces) == tokenizer.decode(output, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30) | st.sampled_from(TEXTS), st.integers(0, 10**6))
def test_any_text_survives(text: str, seed: int) -> None:
    for tokenizer in ALL:
        output = tokenizer.encode(text, add_special_tokens=False)
        expected = tokenizer.decode(output)
        pieces = stream(tokenizer, [], output, seed=seed)
        assert "".join(pieces) == expected
        if "\ufffd" not in expected:
            assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, SENTENCEPIECE.vocab_size + 3), max_size=80))
def test_broken_bytes_of_any_kind_never_raise(output: list[int]) -> None:
    for tokenizer in (SENTENCEPIECE, WINDOWED, WINDOWED_SENTENCEPIECE):
        stream(tokenizer, [], [token % tokenizer.vocab_size for token in output])


def test_an_unfinished_character_shows_at_the_end_only() -> None:
    first_byte = BYTE_LEVEL.encode("👩")[:1]
    for tokenizer in (BYTE_LEVEL, WINDOWED):
        detokenizer = IncrementalDetokenizer(tokenizer, [])
        assert detokenizer.append(BYTE_LEVEL.encode("the")) == "the"
        assert detokenizer.append(first_byte) == ""
        assert detokenizer.finish() == "\ufffd"
        assert detokenizer.text == "the\ufffd"


def test_a_character_begun_in_the_prompt_is_completed() -> None:
    tokens = [BYTE_LEVEL.backend.token_to_id(piece) for piece in "ðŁĳ©"]  # the four bytes of one emoji
    assert BYTE_LEVEL.decode(tokens) == "👩"
    for tokenizer in (BYTE_LEVEL, WINDOWED):
        assert "".join(stream(tokenizer, [*BYTE_LEVEL.encode("the"), *tokens[:2]], tokens[2:])) == "👩"


def test_the_cost_of_a_token_does_not_grow() -> None:
    """An endless run of broken bytes must not make the window longer and longer."""

    class Counting(Tokenizer):
        longest = 0

        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            Counting.longest = max(Counting.longest, len(ids))
            return super().decode(ids, skip_special_tokens=skip_special_tokens)

    tokenizer = Counting(Backend.from_str(BYTE_LEVEL.backend.to_str()))
    tokenizer.has_token_bytes = False
    detokenizer = IncrementalDetokenizer(tokenizer, list(range(10, 500)))
    broken = BYTE_LEVEL.encode("👩")[0]
    for _ in range(500):
        detokenizer.append([broken])
    assert Counting.longest <= 2 * MAX_PENDING_TOKENS
    assert len(detokenizer.text) > 400


def test_other_decoders_use_the_window() -> None:
    backend = Backend(models.WordLevel({"un": 0, "##believ": 1, "##able": 2, "yes": 3}, unk_token="un"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend)
    assert not tokenizer.has_token_bytes
    assert stream(tokenizer, [3], [0, 1, 2, 3], seed=4) != []
    assert "".join(stream(tokenizer, [3], [0, 1, 2, 3])) == " unbelievable yes"


# -------------------------------------------------------------------------------------------------------- stop strings


def cut_by_hand(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """Read character by character; stop when the text read so far ends with a stop string, the longest such."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


def feed(text: str, stops: Sequence[str], include: bool, sizes: Sequence[int]) -> tuple[str, str | None, list[str]]:
    checker = StopChecker(stops, include_in_output=include)
    pieces, place = [], 0
    for size in [*sizes, len(text)]:
        pieces.append(checker.append(text[place : place + size]))
        place += size
        if checker.matched:
            break
    pieces.append(checker.finish())
    return "".join(pieces), checker.matched, pieces


@settings(max_examples=1500, deadline=None)
@given(
    st.text("ab ", max_size=30),
    st.lists(st.text("ab ", min_size=1, max_size=5), max_size=4),
    st.booleans(),
    st.lists(st.integers(0, 4), max_size=20),
)
def test_stop_strings_are_found_wherever_the_text_is_cut(
    text: str, stops: list[str], include: bool, sizes: list[int]
) -> None:
    out, matched, pieces = feed(text, stops, include, sizes)
    assert (out, matched) == cut_by_hand(text, stops, include)
    final = out
    shown = ""
    for piece in pieces:
        shown += piece
        assert final.startswith(shown)


def test_held_back_text_is_released_as_soon_as_it_is_clear() -> None:
    checker = StopChecker(["<end>", "STOP"])
    assert checker.append("a<e") == "a"
    assert checker.append("n") == ""
    assert checker.append("x") == "<enx"
    assert checker.append("S") == ""
    assert checker.append("TOP and more") == ""
    assert checker.matched == "STOP"
    assert checker.append("ignored") == ""
    assert checker.finish() == ""


def test_with_the_stop_string_included_nothing_is_held_back() -> None:
    checker = StopChecker(["<end>"], include_in_output=True)
    assert checker.append("x<en") == "x<en"
    assert checker.append("d> more") == "d>"
    assert checker.matched == "<end>"


def test_text_that_is_not_searched_neither_matches_nor_begins_a_match() -> None:
    for include in (False, True):
        checker = StopChecker(["ab"], include_in_output=include)
        assert checker.append("ab a", search=False) == "ab a"
        assert checker.append("b") == "b"
        assert checker.append("ab") == ("ab" if include else "")
        assert checker.matched == "ab"
