"""What prompts are made of: joint rows, prefixes, block ids, real texts, conversations."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headway.core.request_options import RequestOptions
from headway.errors import ConfigError
from headway_lab.workload import BenchRequest, statistics_of, workload_from_options
from headway_lab.workload.workload_report import reusable_share
from tests.lab.workload.word_tokenizer import FIRST_TOKEN, word_tokenizer


def draw(options: dict[str, Any], base: Path | None = None, **more: Any) -> list[BenchRequest]:
    return workload_from_options(options, base=base).draw(**{"vocab_size": 5000, **more})


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sizes(work: list[BenchRequest]) -> list[tuple[int, int]]:
    return [(request.num_prompt_tokens, request.num_output_tokens) for request in work]


def test_random_ids_are_of_the_vocabulary_and_of_the_seed() -> None:
    options = {"input": {"kind": "uniform", "low": 5, "high": 50}, "output": 3, "requests": 100}
    work = draw(options, vocab_size=7)
    assert set(itertools.chain.from_iterable(r.prompt_token_ids for r in work)) == set(range(7))
    assert draw(options) == draw(options)
    assert draw(options) != draw(options, seed=1)
    assert draw(options, num_requests=10) == draw(options)[:10]


@pytest.mark.parametrize("order", ["file", "random"])
def test_lengths_of_a_row_stay_together(tmp_path: Path, order: str) -> None:
    rows = [f"{number},{10 * number}\n" for number in range(1, 60)]
    (tmp_path / "lengths.csv").write_text("input_tokens,output_tokens\n" + "".join(rows))
    options = {"trace": {"file": "lengths.csv", "order": order}, "arrivals": {"kind": "poisson", "rate": 1}}
    found = sizes(draw(options, tmp_path))
    assert all(num_out == 10 * num_in for num_in, num_out in found)
    assert (found == sorted(found)) == (order == "file")
    assert sorted(found) == [(number, 10 * number) for number in range(1, 60)]
    # One side may still be of another kind.
    mixed = sizes(draw({**options, "output": 7}, tmp_path))
    assert [num_in for num_in, _ in mixed] == [num_in for num_in, _ in found]
    assert {num_out for _, num_out in mixed} == {7}


def test_limits() -> None:
    base = {"input": 100, "output": 50, "requests": 3}
    assert sizes(draw({**base, "limits": {"max_input": 30, "max_output": 20}})) == [(30, 20)] * 3
    assert sizes(draw({**base, "limits": {"min_input": 120, "min_output": 60}})) == [(120, 60)] * 3
    assert sizes(draw({**base, "limits": {"max_total": 80}})) == [(30, 50)] * 3
    assert sizes(draw({**base, "limits": {"max_total": 40}})) == [(1, 39)] * 3


def test_shared_prefixes() -> None:
    content = {"kind": "shared_prefix", "prefixes": 3, "prefix_tokens": 32, "weights": [6, 3, 1]}
    work = draw({"input": 16, "output": 1, "requests": 2000, "content": content})
    assert {request.num_prompt_tokens for request in work} == {48}
    counts = sorted(Counter(tuple(request.prompt_token_ids[:32]) for request in work).values(), reverse=True)
    assert counts == pytest.approx([1200, 600, 200], rel=0.12)
    assert len({tuple(request.prompt_token_ids[32:]) for request in work}) == 2000
    assert reusable_share(work) == pytest.approx((2000 - 3) * 32 / (2000 * 48))
    zipf = {"kind": "shared_prefix", "prefixes": 2, "prefix_tokens": 32, "zipf": 1.0}
    work = draw({"input": 1, "output": 1, "requests": 3000, "content": zipf})
    counts = sorted(Counter(tuple(request.prompt_token_ids[:32]) for request in work).values(), reverse=True)
    assert counts == pytest.approx([2000, 1000], rel=0.1)


def synthetic_blocks(count: int) -> list[dict[str, Any]]:
    """Prompts that go on from earlier ones, from a random place."""
    rng = random.Random(3)
    rows: list[dict[str, Any]] = []
    fresh = itertools.count()
    for number in range(count):
        before = rng.choice(rows)["hash_ids"] if rows and rng.random() < 0.6 else []
        ids = before[: rng.randint(0, len(before))] + [next(fresh) for _ in range(rng.randint(1, 5))]
        rows.append({"timestamp": 500 * number, "input_length": 512 * len(ids), "output_length": 64, "hash_ids": ids})
    return rows


def hit_rate(rows: list[dict[str, Any]]) -> float:
    """Leading blocks seen before, over all blocks: counted on the ids themselves."""
    seen: set[int] = set()
    hits = total = 0
    for row in rows:
        ids = row["hash_ids"]
        hits += sum(1 for _ in itertools.takewhile(seen.__contains__, ids))
        total += len(ids)
        seen.update(ids)
    return hits / total


@pytest.mark.parametrize("block_tokens", [16, 64])
def test_block_ids_share_what_the_trace_shares(tmp_path: Path, block_tokens: int) -> None:
    rows = synthetic_blocks(300)
    write_rows(tmp_path / "blocks.jsonl", rows)
    content = {"kind": "blocks", "block_tokens": block_tokens}
    options = {"trace": {"file": "blocks.jsonl"}, "content": content}
    work = draw(options, tmp_path)
    assert reusable_share(work) == pytest.approx(hit_rate(rows)) and hit_rate(rows) > 0.2
    assert [r.num_prompt_tokens for r in work] == [block_tokens * len(row["hash_ids"]) for row in rows]
    assert {request.num_output_tokens for request in work} == {64 * block_tokens // 512}
    assert [request.arrival_s for request in work] == [0.5 * number for number in range(300)]
    whole = draw({**options, "content": {**content, "scale_output": False}}, tmp_path)
    assert {request.num_output_tokens for request in whole} == {64}
    # When the trace begins again, nothing is shared with its first time.
    again = draw(options, tmp_path, num_requests=600)
    assert again[:300] == work
    assert reusable_share(again) == pytest.approx(hit_rate(rows))


def test_prompts_of_a_file(tmp_path: Path) -> None:
    asked = {"question": "how many eggs", "answer": "18 eggs a day", "n": 9}
    write_rows(tmp_path / "prompts.jsonl", [asked, {"question": "why", "answer": "because", "n": 4}])
    content = {"kind": "prompts", "file": "prompts.jsonl"}
    tokenizer = word_tokenizer()
    work = draw({"content": {**content, "answer_field": "answer"}}, tmp_path, tokenizer=tokenizer)
    assert sizes(work) == [(4, 4), (2, 1)]
    assert work[0].prompt_token_ids == tokenizer.encode("how many eggs")
    assert sizes(draw({"content": {**content, "answer_field": "n"}}, tmp_path, tokenizer=tokenizer)) == [(4, 9), (2, 4)]
    named = {**content, "field": "answer"}
    assert sizes(draw({"output": 5, "content": named}, tmp_path, tokenizer=tokenizer)) == [(5, 5), (2, 5)]
    chat = draw({"output": 5, "content": {**content, "chat": True}}, tmp_path, tokenizer=tokenizer, num_requests=3)
    assert chat[0].prompt_token_ids == tokenizer.encode("<user> how many eggs", add_special_tokens=False)
    assert chat[2].prompt_token_ids == chat[0].prompt_token_ids  # the file begins again
    cut = draw({"output": 5, "content": content, "limits": {"max_input": 2}}, tmp_path, tokenizer=tokenizer)
    assert cut[0].prompt_token_ids[0] == FIRST_TOKEN and sizes(cut) == [(2, 5), (2, 5)]
    with pytest.raises(ConfigError, match="needs the model's tokenizer"):
        draw({"output": 5, "content": content}, tmp_path)
    with pytest.raises(ConfigError, match="line 1: there is no 'text'; it has question, answer, n"):
        draw({"output": 5, "content": {**content, "field": "text"}}, tmp_path, tokenizer=tokenizer)


def check_conversations(work: list[BenchRequest]) -> None:
    """Every later turn begins with the whole turn before and an answer of its length, and has something to say."""
    for number, request in enumerate(work):
        if request.after is None:
            assert request.think_s == 0.0
            continue
        before = work[request.after]
        assert request.after == number - 1
        assert request.arrival_s == before.arrival_s
        known = before.num_prompt_tokens + before.num_output_tokens
        assert request.prompt_token_ids[: before.num_prompt_tokens] == before.prompt_token_ids
        assert request.num_prompt_tokens > known


def conversation_options(**more: Any) -> dict[str, Any]:
    return {
        "requests": 400,
        "arrivals": {"kind": "poisson", "rate": 2.0},
        "input": {"kind": "uniform", "low": 5, "high": 30},
        "output": {"kind": "uniform", "low": 5, "high": 60},
        "content": {
            "kind": "conversations",
            "turns": {"kind": "uniform", "low": 1, "high": 5},
            "think_s": 4.0,
            "system_tokens": 20,
        },
        **more,
    }


def test_conversations_extend_each_other() -> None:
    work = draw(conversation_options())
    check_conversations(work)
    starts = [request for request in work if request.after is None]
    assert len({tuple(request.prompt_token_ids[:20]) for request in work}) == 1
    assert {request.think_s for request in work if request.after is not None} == {4.0}
    assert len(work) == 400 and len(work) / len(starts) == pytest.approx(3.0, rel=0.15)
    found = statistics_of(work)
    assert found.rate == pytest.approx(2.0, rel=0.2)
    assert found.reusable_with_answers_share > found.reusable_share > 0.3
    assert found.num_turns <= 400 and 0 < found.num_conversations <= len(starts)
    work = draw(conversation_options(limits={"max_total": 150, "max_output": 40}))
    check_conversations(work)
    assert len(work) == 400 and max(num_out for _, num_out in sizes(work)) <= 40
    assert max(map(sum, sizes(work))) <= 150, "a conversation ends before it is too long"
    tiny = draw(conversation_options(limits={"max_total": 10}))
    assert len(tiny) == 400 and all(request.after is None for request in tiny)


@pytest.mark.parametrize(
    "row",
    [
        {"history": [{"user": "a b", "bot": "c d e"}, {"user": "f", "bot": "g h"}]},
        {
            "messages": [
                {"role": role, "content": text}
                for role, text in zip(
                    ("system", "user", "assistant", "user", "assistant"), ("a", "b", "c d e", "f", "g h")
                )
            ]
        },
    ],
)
def test_conversations_of_a_file(tmp_path: Path, row: dict[str, Any]) -> None:
    """With answers, and without."""
    write_rows(tmp_path / "talks.jsonl", [row, row])
    tokenizer = word_tokenizer()
    work = draw({"content": {"kind": "conversations", "file": "talks.jsonl"}}, tmp_path, tokenizer=tokenizer)
    assert sizes(work) == [(2, 3), (6, 2)] * 2
    check_conversations(work)
    assert work[1].prompt_token_ids == tokenizer.encode("a b c d e f", add_special_tokens=False)
    write_rows(tmp_path / "talks.jsonl", [{"turns": ["a b", "c"]}, {"turns": ["d"]}])
    content = {"kind": "conversations", "file": "talks.jsonl"}
    work = draw({"output": 10, "content": content}, tmp_path, tokenizer=tokenizer)
    assert sizes(work) == [(2, 10), (13, 10), (1, 10)]
    check_conversations(work)
    with pytest.raises(ConfigError, match=r"have no answers: give the workload a table \[output\]"):
        draw({"content": content}, tmp_path, tokenizer=tokenizer)


def test_classes_come_by_weight_and_whole_conversations_are_of_one() -> None:
    classes = [{"weight": 3, "priority": -1, "ttft_target_s": 0.5}, {"tenant": "batch"}]
    work = draw({"input": 1, "output": 1, "requests": 4000, "classes": classes})
    counts = Counter(request.options for request in work)
    assert counts[RequestOptions(tenant="batch")] == pytest.approx(1000, rel=0.1)
    assert counts[RequestOptions(priority=-1, ttft_target_s=0.5)] == pytest.approx(3000, rel=0.1)
    talks = draw(conversation_options(classes=classes))
    assert all(r.after is None or r.options == talks[r.after].options for r in talks)
    assert len({request.options for request in talks}) == 2
