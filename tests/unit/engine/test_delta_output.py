"""Deltas: put together they are the cumulative output, and none of them says anything twice."""

from __future__ import annotations

from collections import defaultdict

import pytest

from headway.sampling_params import SamplingParams
from tests.unit.engine.test_llm_engine import Executor, make_engine
from tests.unit.no_model import all_outputs
from tests.unit.rpc.small_engine import create_engine


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=40),
        SamplingParams(max_tokens=40, stop=["ijk"]),
        SamplingParams(max_tokens=40, stop=["ijk"], include_stop_str_in_output=True),
        SamplingParams(max_tokens=6, stop=["h never comes"]),
        SamplingParams(max_tokens=40, n=3),
        SamplingParams(max_tokens=9, detokenize=False),
    ],
    ids=["plain", "stop", "stop kept", "text held back at the end", "n", "tokens only"],
)
def test_deltas_add_up_to_the_whole(params: SamplingParams) -> None:
    whole_engine, delta_engine = create_engine({}), create_engine({})
    whole_engine.add_request("a", [5, 6], params, stream=False)
    (whole,) = all_outputs(whole_engine)
    delta_engine.add_request("a", [5, 6], params, stream="delta")
    texts: dict[int, str] = defaultdict(str)
    token_ids: dict[int, list[int]] = defaultdict(list)
    ends = {}
    outputs = all_outputs(delta_engine)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for output in outputs:
        for new in output.outputs:
            assert new.index not in ends, "a completion that has ended has no news"
            texts[new.index] += new.text
            token_ids[new.index] += new.token_ids
            if new.finished:
                ends[new.index] = (new.finish_reason, new.stop_reason)
    for completion in whole.outputs:
        assert texts[completion.index] == completion.text
        assert token_ids[completion.index] == completion.token_ids
        assert ends[completion.index] == (completion.finish_reason, completion.stop_reason)


def test_prompt_logprobs_come_once_with_the_first_delta() -> None:
    engine = make_engine(overlap=False, executor_class=Executor)
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=3, prompt_logprobs=0), stream="delta")
    first, *others = all_outputs(engine)
    assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == 3
    assert [output.prompt_logprobs for output in others] == [None, None]


def test_an_aborted_delta_stream_returns_what_was_new() -> None:
    engine = create_engine({})
    engine.add_request("a", [5], SamplingParams(max_tokens=40, stop=["bcz"]), stream="delta")
    told = "".join(output.outputs[0].text for output in (engine.step().outputs + engine.step().outputs))
    last = engine.abort("a")
    assert told == "" and last is not None
    assert (last.outputs[0].text, last.outputs[0].token_ids, last.outputs[0].finish_reason) == ("bc", [], "abort")
