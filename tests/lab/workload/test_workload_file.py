"""Workload files: what they may say, what is refused and how, and the examples."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import operator
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from headway.errors import ConfigError
from headway_lab.workload import (
    load_workload,
    parse_overrides,
    shipped_workloads,
    statistics_of,
    workload_from_options,
)

EXAMPLES = list(shipped_workloads().values())
DOCUMENTATION = (Path(__file__).parents[3] / "docs" / "workloads.md").read_text(encoding="utf-8")
NEEDS_DATA = {"azure", "mooncake", "mtbench101", "sarathi"}
GOOD: dict[str, Any] = {"input": 5, "output": 5}
NUMBERS: dict[str, Any] = {
    "requests": 5,
    "arrivals": {"kind": "gamma", "rate": 1.0, "cv": 1.0},
    "input": {"kind": "lognormal", "median": 20, "sigma": 1.0, "cap": 100},
    "output": {"kind": "zipf", "exponent": 1.5, "low": 1, "high": 9},
    "limits": {"min_input": 1, "max_input": 50, "max_total": 60},
    "content": {"kind": "shared_prefix", "prefixes": 2, "prefix_tokens": 4, "weights": [1, 2]},
    "classes": [{"weight": 1, "ttft_target_s": 1.0, "priority": 1}],
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_can_be_read_and_drawn(path: Path) -> None:
    assert f"| `{path.stem}`" in DOCUMENTATION
    workload = load_workload(path)
    assert workload.name == path.stem and workload.summary
    if path.stem in NEEDS_DATA:
        with pytest.raises(ConfigError, match="data file .* is needed .* --data-dir DIR"):
            workload.draw(vocab_size=100)
    else:
        found = statistics_of(workload.draw(vocab_size=1000, num_requests=50))
        assert found.num_requests == 50
        assert found.input.max + found.output.max < 8192


@pytest.mark.parametrize("text", re.findall(r"```toml\n(.*?)```", DOCUMENTATION, re.DOTALL))
def test_every_piece_of_the_documentation_is_a_workload(text: str) -> None:
    options = tomllib.loads(text)
    workload = workload_from_options(options)
    if "file = " in text:
        with pytest.raises(ConfigError, match="is needed and is not in"):
            workload.draw(vocab_size=100)
    else:
        assert len(workload.draw(vocab_size=100, num_requests=20)) == 20


def test_the_papers_workloads_are_theirs() -> None:
    folder = EXAMPLES[0].parent
    anyscale = statistics_of(load_workload(folder / "anyscale.toml").draw(vocab_size=9, num_requests=4000))
    assert anyscale.input.mean == 512 and anyscale.output.mean == pytest.approx(128, rel=0.05)
    assert anyscale.output.max <= 1536 and anyscale.duration_s == 0
    orca = statistics_of(load_workload(folder / "orca.toml").draw(vocab_size=9, num_requests=4000))
    assert orca.input.mean == pytest.approx(272, rel=0.03) and orca.output.mean == pytest.approx(64.5, rel=0.03)
    assert orca.input.max <= 512 and orca.output.max <= 128 and orca.gap_cv == pytest.approx(1, abs=0.06)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inptu": 5, "output": 5}, "there is no 'inptu' here. Did you mean 'input'?"),
        ({"output": 5}, "'input' is needed"),
        ({"input": 5}, "'output' is needed"),
        ({**GOOD, "requests": 0}, "requests must be a whole number of at least 1, not 0"),
        ({**GOOD, "requests": True}, "requests must be a whole number"),
        ({**GOOD, "content": {"kind": "randm"}}, "content: kind must be one of random, prompts"),
        ({**GOOD, "content": {"kind": "random", "file": "x"}}, "content: there is no 'file' here. The keys are: kind."),
        ({**GOOD, "content": {"kind": "blocks"}}, "has prompts of its own length"),
        ({"output": 5, "content": {"kind": "blocks"}}, "needs a table [trace]"),
        ({**GOOD, "content": {"kind": "prompts", "file": "x"}}, "has prompts of its own length"),
        ({"content": {"kind": "prompts", "file": "x"}}, "'output' is needed"),
        ({"output": 5, "content": {"kind": "prompts"}}, "content: 'file' is needed"),
        ({**GOOD, "content": {"kind": "conversations"}}, "either a number of 'turns' or a 'file'"),
        ({**GOOD, "content": {"kind": "conversations", "turns": 0}}, "content: turns: value must be"),
        ({**GOOD, "content": {"kind": "conversations", "turns": 2, "order": "file"}}, "'order' goes with a 'file'"),
        ({**GOOD, "content": {"kind": "shared_prefix", "prefixes": 2}}, "'prefix_tokens' is needed"),
        ({**GOOD, "content": {**NUMBERS["content"], "weights": [1]}}, "weights must be a list of 2 numbers"),
        ({**GOOD, "limits": {"max_in": 5}}, "Did you mean 'max_input'?"),
        ({**GOOD, "limits": {"min_input": 9, "max_input": 5}}, "max_input must not be below min_input"),
        ({**GOOD, "classes": {}}, "classes: a list of tables is expected"),
        ({**GOOD, "classes": [{"weigth": 1}]}, "classes[0]: there is no 'weigth' here. Did you mean 'weight'?"),
        ({**GOOD, "classes": [{}, {"priority": 1.5}]}, "classes[1]: priority must be a whole number"),
        ({**GOOD, "trace": {"fiel": "x"}}, "trace: there is no 'fiel' here. Did you mean 'file'?"),
        ({**GOOD, "trace": "x.csv"}, "trace: a table is expected"),
    ],
)
def test_what_is_refused_and_why(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        workload_from_options(options)
    assert message in str(caught.value)


def test_errors_of_a_file_name_it(tmp_path: Path) -> None:
    file = tmp_path / "load.toml"
    for text, message in (("input = ", "not valid TOML"), ("input = 1", "'output' is needed")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message) as caught:
            load_workload(file)
        assert str(file) in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_workload(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="there is no data directory"):
        load_workload(file, data_dir=tmp_path / "none")
    with pytest.raises(ConfigError, match="at least one request, not 0"):
        workload_from_options(GOOD).draw(vocab_size=9, num_requests=0)


def test_files_are_looked_for_beside_the_workload_and_then_in_the_data_directory(tmp_path: Path) -> None:
    workloads, data = tmp_path / "workloads", tmp_path / "data"
    workloads.mkdir()
    data.mkdir()
    file = workloads / "load.toml"
    file.write_text('output = 1\narrivals = { kind = "at_once" }\n[trace]\nfile = "rows.csv"\n')
    (data / "rows.csv").write_text("input_tokens\n3\n")
    workload = load_workload(file, data_dir=data)
    assert workload.draw(vocab_size=9)[0].num_prompt_tokens == 3
    (workloads / "rows.csv").write_text("input_tokens\n4\n")
    assert workload.draw(vocab_size=9)[0].num_prompt_tokens == 4
    absolute = load_workload(file, trace={"file": str(data / "rows.csv")})
    assert absolute.draw(vocab_size=9)[0].num_prompt_tokens == 3


def test_overrides() -> None:
    given = parse_overrides(["limits.max_input=20", "limits.max_output = 5", "trace.file=a b.csv", "requests=7"])
    assert given == {"limits": {"max_input": 20, "max_output": 5}, "trace": {"file": "a b.csv"}, "requests": 7}
    assert parse_overrides(['input={ kind = "fixed", value = 3 }']) == {"input": {"kind": "fixed", "value": 3}}
    orca = next(path for path in EXAMPLES if path.stem == "orca")
    work = load_workload(orca, **parse_overrides(["limits.max_input=40", "input.low=35", "requests=9"])).draw(
        vocab_size=9
    )
    assert len(work) == 9 and {request.num_prompt_tokens for request in work} <= set(range(35, 41))
    # A table of another kind replaces the file's.
    other = load_workload(orca, **parse_overrides(["output=3", "arrivals.kind=at_once"]))
    assert {(r.num_output_tokens, r.arrival_s) for r in other.draw(vocab_size=9)} == {(3, 0.0)}
    for text in ("limits", "=3"):
        with pytest.raises(ConfigError, match="is not KEY=VALUE"):
            parse_overrides([text])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "a,b\n1,2\n", "line 2: none of arrival_s, input_tokens and output_tokens is there; it has a, b"),
        ("t.csv", "arrival_s,input_tokens,output_tokens\n0,1,x\n", "line 2: 'output_tokens' must be a number"),
        ("t.csv", "arrival_s,input_tokens,output_tokens\n0,1\n", "line 2: there is no 'output_tokens'"),
        ("t.csv", "arrival_s,input_tokens\n", "has no rows"),
        ("t.csv", "arrival_s,input_tokens\n0,1\n", "has no output_tokens: give the workload a table"),
        ("t.jsonl", "{", "line 1: it is not JSON"),
        ("t.jsonl", "[]", "line 1: it is not a JSON object"),
        ("t.jsonl", '{"timestamp": 1}', "line 1: there is no 'hash_ids'"),
        ("t.jsonl", '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [-1]}', "hash_ids must be"),
        ("t.jsonl", '{"timestamp": 0, "input_length": 1, "hash_ids": [1]}', "there is no 'output_length'"),
        ("t.csv", "input_tokens\n99999999999999999999\n", "'input_tokens' must be a number of at most 16,777,216"),
        ("t.csv", "arrival_s\nnan\n", "'arrival_s' must be a number of at least 0, not 'nan'"),
        ("t.csv", "arrival_s,input_tokens,output_tokens\n0,1,1\n1e11,1,1\n", "(31 years)"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,1\n", "TIMESTAMP must be a date and a time such as"),
        ("t.csv", "ContextTokens,GeneratedTokens\n1,1\n", "line 2: there is no 'TIMESTAMP'"),
        ("t.csv", "arrival_s,input_tokens,output_tokens\n0,1,1\n", "no block ids"),
        ("t.csv", "\xff\xfe\x00", "it is not UTF-8 text"),
    ],
)
def test_a_bad_trace(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text, encoding="latin-1")
    content = {"content": {"kind": "blocks"}} if message == "no block ids" else {}
    workload = workload_from_options({"trace": {"file": name}, **content}, base=tmp_path)
    with pytest.raises(ConfigError) as caught:
        workload.draw(vocab_size=9)
    assert message in str(caught.value)


HOSTILE = (math.nan, math.inf, -math.inf, -1, 0, 1e-308, 1e-20, 1e4, 1e9, 1e308, 10**20, 10**400)
OTHERS = (
    {"input": {"kind": "exponential", "mean": 5, "cap": 9}, "output": {"kind": "uniform", "low": 1, "high": 3}},
    {"input": {"kind": "lognormal", "mean": 5, "sigma": 1.0}, "arrivals": {"kind": "poisson", "rate": 2.0}},
    {"content": {"kind": "shared_prefix", "prefixes": 2, "prefix_tokens": 4, "zipf": 1.0}},
    {
        "content": {
            "kind": "conversations",
            "turns": {"kind": "uniform", "low": 1, "high": 3},
            "think_s": {"kind": "lognormal", "median": 5, "sigma": 1.0, "cap": 60},
            "system_tokens": 3,
        }
    },
)


def places(options: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a number stands in a workload."""
    if isinstance(options, dict | list):
        pairs = options.items() if isinstance(options, dict) else enumerate(options)
        return [place for key, value in pairs for place in places(value, (*above, key))]
    return [above] if isinstance(options, int | float) else []


@pytest.mark.parametrize("number", HOSTILE, ids=lambda number: f"{number:.0e}" if number != 10**400 else "10**400")
def test_no_number_of_a_workload_ends_in_anything_but_work_or_an_error_in_words(number: float) -> None:
    """Wherever it stands: it is refused where it is read, or what is drawn can be computed with."""
    for options in ({**NUMBERS, **others} for others in ({}, *OTHERS)):
        for place in places(options):
            tried = copy.deepcopy(options)
            table = functools.reduce(operator.getitem, place[:-1], tried)
            table[place[-1]] = number  # type: ignore[index]
            with contextlib.suppress(ConfigError):
                work = workload_from_options(tried).draw(vocab_size=9, num_requests=6)
                assert json.dumps(statistics_of(work).as_json(), allow_nan=False), place
                assert all(0 <= one.arrival_s <= 1e9 and one.num_output_tokens <= 2**24 for one in work), place
