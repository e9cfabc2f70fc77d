"""The masks of single requests: a grammar beside a list, and one that goes on from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headway.core import Request
from headway.sampling_params import SamplingParams, StructuredOutputsParams
from headway.structured.compiling import GrammarCompiler
from headway.structured.grammars import grammar_of
from headway.structured.guides import GuidedShare, GuidedStep, Guides
from tests.unit.structured.matching import allowed_by, embedded_tokenizer


@pytest.fixture(scope="module")
def guides() -> Iterator[Guides]:
    made = Guides(GrammarCompiler(embedded_tokenizer(), 0), embedded_tokenizer().vocab_size)
    made.prepare()
    yield made
    made.close()


def next_step(guides: Guides, *token_ids: int, **fields: Any) -> GuidedStep:
    """Of a request that answers yes or no, after these tokens."""
    structured = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(max_tokens=40, structured_outputs=structured, **fields)
    params = params.with_grammar(grammar_of(structured))
    request = Request("r", [1], max_tokens=40, sampling_params=params)
    request.resume(token_ids)
    guides.add(request)
    return guides.begin([GuidedShare(guides.live["r"], ())]).result()


def allowed(guides: Guides, *token_ids: int, **fields: Any) -> set[int]:
    """What it may say."""
    return set(allowed_by(next_step(guides, *token_ids, **fields).masks.bits[0]).tolist())


def test_a_list_of_tokens_and_a_grammar_both_hold(guides: Guides) -> None:
    by_grammar = allowed(guides)
    listed = [*sorted(by_grammar)[:2], next(token for token in range(99) if token not in by_grammar)]
    assert allowed(guides, allowed_token_ids=listed) == set(listed[:2])


def test_an_answer_from_elsewhere_goes_on_where_it_was(guides: Guides) -> None:
    tokenizer = embedded_tokenizer()
    start = tokenizer.encode("y", add_special_tokens=False)
    found = {tokenizer.decode([token]) for token in allowed(guides, *start)}
    assert found
    assert all("es".startswith(text) for text in found)


@pytest.mark.parametrize(
    ("fields", "ends"),
    [({}, False), ({"ignore_eos": True}, True), ({"min_tokens": 30}, True), ({"min_tokens": 1}, False)],
    ids=str,
)
def test_a_grammar_at_its_end_ends_a_request_whose_end_token_is_barred(
    guides: Guides, fields: dict[str, Any], ends: bool
) -> None:
    step = next_step(guides, *embedded_tokenizer().encode("yes", add_special_tokens=False), **fields)
    assert [end.request_id for end in step.ends] == ["r"] * ends
