"""Guesses change no token: greedy and sampled, with everything that a request can ask for, in every kind of step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headway import LLM
from tests.integration.every_kind import answers

VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "a cache that is too small": {"num_kv_blocks": 40, "block_size": 16, "max_model_len": 320},
    "chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 16},
    "static, blocks of 1, no prefix cache": {"batching": "static", "block_size": 1, "enable_prefix_caching": False},
    "a draft model": {"speculation": "draft"},
}


@pytest.fixture(params=VARIANTS)
def llm(request: pytest.FixtureRequest, cut: str) -> Iterator[LLM]:
    options = {"speculation": "ngram", **VARIANTS[request.param]}
    if options["speculation"] == "draft":
        options["draft_model"] = cut
    llm = LLM(cut, dtype="float32", **options)
    yield llm
    llm.shutdown()


def test_the_same_tokens_as_without(llm: LLM, plain_answers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    speculation = llm.engine.core.scheduler.speculation
    assert speculation is not None
    # Whatever it costs: as many as possible.
    monkeypatch.setattr(
        speculation, "_num_worth", lambda levels, *, most, **_: min(sum(x.num_guesses for x in levels), most)
    )
    found = answers(llm)
    assert found == plain_answers
    assert speculation.stats.num_accepted_tokens > 100
    if llm.engine.config.scheduler.speculation == "ngram":
        assert speculation.stats.num_draft_tokens - speculation.stats.num_accepted_tokens > 50
    llm.engine.check_invariants()
