"""What is printed and drawn of a load: the block that people know, pages, comparisons, sweeps."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway_lab.bench.bench_compare_command import (
    Comparison,
    compare,
    compare_page,
    few_requests_note,
    joined,
    read_result,
)
from headway_lab.bench.bench_sweep_command import (
    SweepPoint,
    auto_rates,
    parse_knob,
    parse_rates,
    settings_of,
    sweep_page,
    sweep_table,
)
from headway_lab.bench.datasets import CustomDataset, Draw
from headway_lab.bench.online_metrics import OnlineMetrics
from headway_lab.bench.serving_report import online_page, serving_block
from headway_lab.bench.slo_targets import Targets
from headway_lab.bench.timelines import BatchSample, RequestTimeline

TIMELINES = [
    RequestTimeline(0.0, 100, 3, [0.5, 0.75, 1.0]),
    RequestTimeline(1.0, 50, 2, [1.25, 1.75]),
    RequestTimeline(1.0, 10, 2, [1.25]),
]
METRICS = OnlineMetrics.of(TIMELINES, 4.0, targets=Targets(ttft_s=0.3))

BLOCK = """\
============ Serving Benchmark Result ============
Successful requests:                     2
Failed requests:                         1
Maximum request concurrency:             8
Request rate configured (RPS):           2.50
Benchmark duration (s):                  4.00
Total input tokens:                      150
Total generated tokens:                  5
Request throughput (req/s):              0.50
Request goodput (req/s):                 0.25
Requests that met the SLO (%):           33.3
Output token throughput (tok/s):         1.25
Peak output token throughput (tok/s):    3.00
Peak concurrent requests:                2
Total token throughput (tok/s):          38.75
---------------Time to First Token----------------
Mean TTFT (ms):                          375.00
Median TTFT (ms):                        375.00
P99 TTFT (ms):                           497.50 *
P99/P50 TTFT:                            1.33
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          375.00
Median TPOT (ms):                        375.00
P99 TPOT (ms):                           497.50 *
P99/P50 TPOT:                            1.33
---------------Inter-token Latency----------------
Mean ITL (ms):                           333.33
Median ITL (ms):                         250.00
P99 ITL (ms):                            495.00 *
P99/P50 ITL:                             1.98
----------------End-to-end Latency----------------
Mean E2EL (ms):                          875.00
Median E2EL (ms):                        875.00
P99 E2EL (ms):                           997.50 *
P99/P50 E2EL:                            1.14
==================================================
* P99 of 2 requests, fewer than 100: one or two of them decide it, and another run may give another."""


def test_the_block_that_people_know() -> None:
    assert serving_block(METRICS, rate=2.5, max_concurrency=8, percents=[99]) == BLOCK
    plain = serving_block(OnlineMetrics.of(TIMELINES, 4.0, percents=[99.9]), shown=["itl"], percents=[99.9])
    assert "P99.9 ITL (ms):                          499.50" in plain
    assert all(word not in plain for word in ("TTFT", "goodput", "RPS", "concurrency")), "nobody asked for them"


@pytest.mark.parametrize(
    ("num_requests", "marked"), [(9, ["90", "95", "99"]), (19, ["95", "99"]), (99, ["99"]), (100, [])]
)
def test_percentiles_of_too_few_requests_are_marked_and_stay_numbers_in_the_result(
    num_requests: int, marked: list[str]
) -> None:
    lines = [RequestTimeline(0.01 * n, 10, 2, [0.01 * n + 0.1, 0.01 * n + 0.2]) for n in range(num_requests)]
    metrics = OnlineMetrics.of(lines, 3.0)
    block = serving_block(metrics, shown=["ttft"]).splitlines()
    assert [line[1:3] for line in block if line.startswith("P") and line.endswith("*")] == marked
    assert bool(metrics.thin_note) == (num_requests < 100) == block[-1].startswith("* P99 of")
    assert all(isinstance(metrics.as_json()[f"p{percent}_ttft_ms"], float) for percent in (90, 95, 99))
    page = online_page("A run", metrics=metrics, timelines=lines).render()
    assert (f"P99 of {num_requests} requests" in page) == (num_requests < 100)


def test_keys() -> None:
    result = METRICS.as_json()
    for latency in ("ttft", "tpot", "itl", "e2el"):
        for statistic in ("mean", "median", "std", "p50", "p90", "p95", "p99", "max"):
            assert f"{statistic}_{latency}_ms" in result
    assert result["goodput_share"] == pytest.approx(1 / 3)
    assert (result["max_concurrent_requests"], result["max_output_tokens_per_s"]) == (2, 3.0)
    assert OnlineMetrics.of(TIMELINES, 4.0, percents=[99.9]).as_json()["p99.9_itl_ms"] == pytest.approx(499.5)
    assert OnlineMetrics.of(TIMELINES, 4.0).as_json()["request_goodput"] is None


def test_a_page_of_a_run() -> None:
    samples = [BatchSample(0.0, 1, 0, 0.25), BatchSample(1.0, 2, 1, math.nan)]
    page = online_page("My run", metrics=METRICS, timelines=TIMELINES, samples=samples, notes=["<b>note</b>"]).render()
    for words in ("My run", "&lt;b&gt;note", "between tokens (ITL)", "in the queue", "blocks in use (%)", "33.3%"):
        assert words in page
    targets = {"app": Targets(ttft_s=0.3, tpot_s=0.05), "": Targets(e2e_s=2.0)}
    page = online_page("A run", metrics=METRICS, timelines=TIMELINES, targets=targets).render()
    assert page.count("TTFT target app: 300") == 2  # over the distribution, and over time
    assert page.count("TPOT target app: 50") == 1 and page.count("E2E target: 2,000") == 1
    bare = online_page("Nothing", metrics=OnlineMetrics.of([], 1.0), timelines=[]).render()
    assert "does not tell about its batch" in bare and "in the queue" not in bare


def test_a_comparison_has_one_chart_of_ratios(tmp_path: Path) -> None:
    paths = [
        write(tmp_path, "a", completed=20, output_throughput=100, p99_ttft_ms=50.0, median_ttft_ms=10.0),
        write(tmp_path, "b", completed=200, output_throughput=150, p99_ttft_ms=75.0, median_ttft_ms=10.05),
    ]
    results = [read_result(path) for path in paths]
    page = compare_page(["a", "b"], compare(results), (["", "a", "b"], [])).render()
    assert page.count("<svg") == 1
    for told in ("output_throughput: 1.5\nbetter", "p99_ttft_ms: 1.5\nworse", "median_ttft_ms: 1.005\nsame"):
        assert told in page
    assert few_requests_note(["a", "b"], results).endswith("a (20).")
    assert few_requests_note(["b"], results[1:]) == ""


def write(folder: Path, name: str, **numbers: object) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(numbers))
    return path


def test_a_comparison_knows_which_way_is_better(tmp_path: Path) -> None:
    first = write(tmp_path, "a", output_throughput=100, p99_itl_ms=50.0, duration=10, failed=0, model="x", tpot_x=1)
    second = write(tmp_path, "b", output_throughput=150, p99_itl_ms=75.0, duration=8, failed=0, p90_ttft_ms=3, tpot_x=2)
    rows = {row.key: row for row in compare([read_result(first), read_result(second)])}
    assert list(rows) == ["duration", "failed", "output_throughput", "p99_itl_ms"]
    ways = [rows[key].higher_is_better for key in ("output_throughput", "p99_itl_ms", "duration")]
    assert ways == [True, False, None]
    assert rows["output_throughput"].ratios == [1.5] and rows["failed"].ratios == [None]
    assert [row.best for row in rows.values()] == [None] * 4  # of single runs the spread is not known


def test_a_difference_is_one_beyond_the_spread_of_the_runs() -> None:
    assert Comparison("p99_itl_ms", [[100.0, 101.0, 99.0], [110.0, 111.0, 109.0]], False).best == 0
    assert Comparison("p99_itl_ms", [[100.0, 130.0, 70.0], [110.0, 80.0, 140.0]], False).best is None
    assert Comparison("output_throughput", [[100.0, 101.0, 99.0], [120.0]], True).best == 1
    assert Comparison("p99_itl_ms", [[100.0, 100.0], [100.9, 100.9]], False).best is None  # about equal is equal
    assert Comparison("p99_itl_ms", [[100.0, 100.0], [102.0, 102.0], []], False).best == 0
    assert Comparison("p99_itl_ms", [[100.0, 101.0], [150.0, 150.0], [100.0, 101.0]], False).best is None


def test_equal_servers_give_no_star_nearly_always() -> None:
    rng = random.Random(0)

    def runs() -> list[float]:
        return [rng.gauss(100.0, 20.0) for _ in range(3)]

    num_marked = sum(Comparison("p99_itl_ms", [runs(), runs()], False).best is not None for _ in range(1000))
    assert num_marked <= 20  # 1% of the keys by design


def test_a_result_of_several_runs(tmp_path: Path) -> None:
    several = read_result(write(tmp_path, "a", p99_itl_ms=2.0, runs=[{"p99_itl_ms": 1.0}, {"p99_itl_ms": 3.0}]))
    (row,) = compare([several, read_result(write(tmp_path, "b1", p99_itl_ms=5.0))])
    assert (row.values, row.spreads) == ([2.0, 5.0], [pytest.approx(2**0.5), None])
    both = joined([read_result(write(tmp_path, f"b{number}", p99_itl_ms=float(number))) for number in (1, 2)])
    assert (both.name, both.of("p99_itl_ms")) == ("b", [1.0, 2.0])
    for content, reason in (("{", "is not JSON"), ("[1]", "no numbers"), ('{"a": "b"}', "no numbers")):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(ConfigError, match=reason):
            read_result(tmp_path / "x.json")


def test_rates() -> None:
    assert parse_rates("1,2.5,inf") == [1.0, 2.5, math.inf]
    assert parse_rates("auto") is None
    assert auto_rates(8.123456) == [2.03, 4.06, 5.69, 6.5, 7.31, 8.12, 8.94]
    for text in ("", "0", "1,x", "-2"):
        with pytest.raises(ConfigError, match="--rates must be"):
            parse_rates(text)


def test_knobs() -> None:
    assert parse_knob("--max-num-seqs=16,64") == ("max_num_seqs", ["16", "64"])
    with pytest.raises(ConfigError, match="Did you mean 'max_num_seqs'"):
        parse_knob("max_seqs=1")
    with pytest.raises(ConfigError, match="prefix_caching is now enable_prefix_caching"):
        parse_knob("prefix_caching=on,off")
    with pytest.raises(ConfigError, match="OPTION=VALUE,VALUE"):
        parse_knob("max_num_seqs=1,,2")
    assert settings_of({}) == [{}]
    grid = settings_of({"a": [1, 2], "b": ["x", "y"]})
    assert [tuple(setting.values()) for setting in grid] == [(1, "x"), (1, "y"), (2, "x"), (2, "y")]


def test_a_sweep_of_rates_and_of_settings() -> None:
    points = [SweepPoint({}, rate, METRICS) for rate in (1.0, 2.0)]
    titles, rows = sweep_table(points)
    assert "setting" not in titles and [row[0] for row in rows] == ["1", "2"]
    page = sweep_page("Rates", points, targets={"": Targets(ttft_s=0.3)}).render()
    for told in ("request rate (requests/s)", "offered = served", "* P99 of 2 requests", "TTFT target: 300"):
        assert told in page
    assert rows[0].count("497.5*") == 1
    for alone in (points[0], SweepPoint({}, math.inf, METRICS)):
        assert "offered = served" not in sweep_page("S", [alone]).render()
    points = [SweepPoint({"max_num_seqs": number}, math.inf, METRICS) for number in (4, 8)]
    titles, rows = sweep_table(points)
    assert titles[0] == "setting" and rows[1][:2] == ["max_num_seqs=8", "inf"]
    assert "max_num_seqs=8" in sweep_page("Settings", points).render()
    assert points[0].as_json()["request_rate"] == "inf"


def test_prompts_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "Hi"}, {"prompt": [1, 2], "output_tokens": 7}, {"conversations": [{"value": "Yo"}, {}]}]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    work = CustomDataset(path, 256).draw(Draw(None, math.inf))
    assert [(request.prompt, request.num_output_tokens) for request in work] == [("Hi", 256), ([1, 2], 7), ("Yo", 256)]
    assert len(CustomDataset(path, 256).draw(Draw(2, math.inf))) == 2
    for bad in ("{", "[]", '{"prompt": ""}', '{"prompt": [1, "a"]}', '{"prompt": "a", "output_tokens": 0}'):
        path.write_text('{"prompt": "fine"}\n' + bad)
        with pytest.raises(ConfigError, match="Line 2 of .*prompts.jsonl' is not a JSON object"):
            CustomDataset(path, 256).draw(Draw(None, math.inf))
