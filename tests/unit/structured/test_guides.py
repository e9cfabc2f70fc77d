"""Guides of many requests: whichever lexer a request uses, it may choose what its grammar allows."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from headway.core import Request, RequestStatus
from headway.sampling_params import SamplingParams, StructuredOutputsParams
from headway.structured import compiling, guides
from headway.structured.compiling import GrammarCompiler
from headway.structured.grammars import grammar_of
from headway.structured.guides import GuidedShare, GuidedStep, Guides
from tests.unit.structured.matching import allowed_by, embedded_tokenizer

LISTS = {
    "type": "array",
    "items": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]},
    "minItems": 90,
}
NAMES = {"type": "array", "items": {"type": "string"}, "minItems": 90}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guides]:
    monkeypatch.setattr(guides.os, "cpu_count", lambda: 4)
    made = Guides(GrammarCompiler(embedded_tokenizer(), 0), embedded_tokenizer().vocab_size)
    made.prepare()
    yield made
    made.close()


def params(schema: dict[str, object]) -> SamplingParams:
    structured = StructuredOutputsParams(json=schema)
    return SamplingParams(max_tokens=200, structured_outputs=structured).with_grammar(grammar_of(structured))


def request(name: str, schema: dict[str, object]) -> Request:
    return Request(name, [1], max_tokens=200, sampling_params=params(schema))


class Walk:
    """Requests that choose at random what they may, each beside a matcher that only it uses."""

    def __init__(self, made: Guides) -> None:
        self.made = made
        self._random = random.Random(1)
        self._alone = GrammarCompiler(embedded_tokenizer(), 0)
        self._own = {}

    def add(self, name: str, schema: dict[str, object]) -> None:
        asked = request(name, schema)
        self.made.add(asked)
        assert asked.sampling_params is not None and asked.sampling_params.grammar is not None
        self._own[name] = compiling.compile_grammar(self._alone.prepare(), asked.sampling_params.grammar)

    def begin(self, drafts: dict[str, list[int]]) -> GuidedStep:
        shares = [GuidedShare(self.made.live[name], own) for name, own in drafts.items()]
        return self.made.begin(shares).result(timeout=60)

    def end(self, name: str) -> None:
        self.made.live[name].request.move_to(RequestStatus.FINISHED_ABORTED)
        self.made.forget_finished()

    def step(self) -> GuidedStep:
        names = list(self.made.live)
        found = self.begin({name: [] for name in names})
        assert found.masks.request_ids == tuple(names) and not found.ends
        assert found.masks.num_lines == (1,) * len(names)
        for name, bits in zip(names, found.masks.bits, strict=True):
            own = self._own[name]
            assert bits.tobytes() == own.compute_bitmask()[: bits.nbytes]
            token_id = self._random.choice(allowed_by(bits).tolist())
            assert own.consume_token(token_id)
            self.made.live[name].request.append_output_token(token_id)
        return found

    def steps(self, number: int) -> None:
        """So many, with time for new lexers in between."""
        for _ in range(number):
            self.step()
            until_s = time.monotonic() + 30
            while any(guide.compiled is not None and guide.compiled.is_growing for guide in self.made.live.values()):
                assert time.monotonic() < until_s
                time.sleep(0.01)

    def users(self) -> list[int]:
        """How many requests use each lexer."""
        return sorted(Counter(id(guide.start) for guide in self.made.live.values()).values())


def test_many_requests_of_one_grammar_share_several_lexers(made: Guides) -> None:
    walk = Walk(made)
    for number in range(14):
        walk.add(f"list {number}", LISTS)
    walk.add("other", NAMES)
    assert walk.users() == [1, 14]
    walk.steps(6)
    assert walk.users() == [1, 2, 4, 4, 4]
    for number in range(12):  # those that leave do not leave one lexer to all others
        walk.end(f"list {number}")
        walk.add(f"new {number}", LISTS)
        walk.step()
    assert max(walk.users()) <= guides.USERS_OF_A_LEXER
    assert len(made.live["list 13"].compiled.starts) == 4  # type: ignore[union-attr]


def test_few_requests_and_large_grammars_keep_one(made: Guides, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = Walk(made)
    for number in range(guides.USERS_OF_A_LEXER):
        walk.add(f"name {number}", NAMES)
    walk.steps(3)
    assert walk.users() == [guides.USERS_OF_A_LEXER]
    monkeypatch.setattr(compiling, "MEMORY_OF_ONE", 1000)
    for number in range(10):
        walk.add(f"late {number}", NAMES)
    walk.steps(3)
    assert walk.users() == [guides.USERS_OF_A_LEXER + 10]


def test_long_answers_are_moved_a_few_at_a_time(made: Guides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guides, "MOVED_TOKENS", 2)
    walk = Walk(made)
    for number in range(6):
        walk.add(f"list {number}", LISTS)
    walk.steps(1)  # asks for another lexer
    walk.step()
    assert walk.users() == [2, 4]  # one token each
    for number in range(6, 12):
        walk.add(f"list {number}", LISTS)
    walk.steps(3)
    assert sum(walk.users()) == 12


def test_masks_behind_guesses(made: Guides) -> None:
    """A guided request has a mask for each place, up to a guess that does not fit; and nothing is consumed."""
    walk, tokenizer = Walk(made), embedded_tokenizer()
    for name in ("fits", "does not", "none"):
        walk.add(name, NAMES)
    right = tokenizer.encode('["Jo", "Al', add_special_tokens=False)
    wrong = [*right[:2], tokenizer.encode("\n", add_special_tokens=False)[0], *right[2:]]  # not in a string
    for _ in range(2):  # the same again: nothing was consumed
        drafts = {"fits": right, "does not": wrong, "none": []}
        found = walk.begin(drafts)
        assert found.masks.num_lines == (len(right) + 1, len(wrong) + 1, 1) and not found.ends
        first = 0
        for name, count in zip(found.masks.request_ids, found.masks.num_lines, strict=True):
            own = walk._own[name].deep_copy()
            for line, token_id in zip(range(first, first + count), [*drafts[name], -1], strict=True):
                bits = found.masks.bits[line]
                assert bits.tobytes() == own.compute_bitmask()[: bits.nbytes]
                if token_id < 0 or not own.consume_token(token_id):
                    break
            first += count
        assert made.num_fitting("fits", right) == len(right)
        assert made.num_fitting("does not", wrong) == 2


def test_what_a_grammar_leaves_no_choice_about(made: Guides) -> None:
    tokenizer = embedded_tokenizer()
    asked = request("one", {"enum": ["a very long constant", "another"]})
    made.add(asked)
    start = tokenizer.encode('"a v', add_special_tokens=False)
    assert '"a'.startswith(tokenizer.decode(list(made.forced("one"))))
    for token_id in start:
        asked.append_output_token(token_id)
    assert tokenizer.decode([*start, *made.forced("one")]).startswith('"a very long')
    assert made.forced("nobody") == () and made.num_fitting("nobody", [1, 2]) == 2
