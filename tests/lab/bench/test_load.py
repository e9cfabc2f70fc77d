"""A load on a server whose every answer is written down: what is counted, timed, waited for and complained about."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from headway.core.request_options import RequestOptions
from headway.core.utilisation import UNKNOWN
from headway.errors import ConfigError
from headway_lab.bench.datasets import Draw
from headway_lab.bench.load_target import Judging, Outcome
from headway_lab.bench.served import ServedRequest
from headway_lab.bench.served_utilisation import ServerCounters
from headway_lab.bench.server_target import ServerOptions, ServerTarget
from tests.lab.bench.sse_server import DONE, METRICS, Answer, SSEServer, event, steady, text_event, usage_event

pytestmark = pytest.mark.flaky(reruns=2)  # times on a machine that does other things

SLACK_S = 0.15
"""What a busy machine may add to a time."""


def load(server: SSEServer, work: list[ServedRequest], judging: Judging | None = None, **options: Any) -> Outcome:
    return ServerTarget(ServerOptions(server.url, **options), judging).run(work)


def request(num_out: int = 3, **fields: Any) -> ServedRequest:
    return ServedRequest([7, 8, 9, 10, 11], num_out, **fields)


def test_counts_and_times() -> None:
    with SSEServer(lambda body: steady(body, first_s=0.1, gap_s=0.04)) as server:
        outcome = load(server, [request(4), request(2)])
    metrics = outcome.metrics
    assert (metrics.num_completed, metrics.num_lost) == (2, 0)
    assert (metrics.num_input_tokens, metrics.num_output_tokens) == (10, 6)
    for timeline, num_gaps in zip(outcome.timelines, (3, 1), strict=True):
        assert 0.1 <= timeline.ttft_s < 0.1 + SLACK_S
        assert len(timeline.itls_s) == num_gaps
        assert all(0.02 <= gap < 0.04 + SLACK_S for gap in timeline.itls_s)
        assert timeline.tpot_s is not None and 0.03 <= timeline.tpot_s < 0.04 + SLACK_S
        assert 0.1 + 0.03 * num_gaps <= timeline.e2e_s < 0.1 + 0.04 * num_gaps + SLACK_S
    assert metrics.peak_in_flight == 2


def test_what_is_sent() -> None:
    work = [ServedRequest([1, 2], 3, options=RequestOptions(priority=2, ttft_target_s=0.5, tenant="ann"))]
    with SSEServer(steady) as server:
        load(server, work, ignore_eos=True, temperature=0.5, extra_body={"top_k": 1}, api_key="secret")
    assert server.bodies == [
        {
            "model": "m",
            "prompt": [1, 2],
            "max_tokens": 3,
            "temperature": 0.5,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "priority": 2,
            "user": "ann",
            "ttft_target_ms": 500.0,
            "top_k": 1,
        }
    ]
    assert all("authorization: Bearer secret" in head for head in server.headers)
    for url in ("127.0.0.1:8000", "ftp://x", "http://:80", "http://x:port"):
        with pytest.raises(ConfigError, match="must be one such as"):
            ServerTarget(ServerOptions(url))


def test_nothing_is_said_to_a_server_that_would_refuse_it() -> None:
    work = [ServedRequest([1, 2], 3, options=RequestOptions(priority=2, ttft_target_s=50.0))]
    work.append(request(2, options=RequestOptions(ttft_target_s=0.01)))
    with SSEServer(lambda body: steady(body, first_s=0.1)) as server:
        outcome = load(server, work, is_plain=True)
    assert server.bodies[0].keys() == {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
    assert outcome.metrics.num_good == 1  # what was promised is judged all the same


LAST = (0.1, text_event("", "stop") + DONE)
WHOLE = b"".join([text_event("a"), text_event("b", "stop"), DONE])


@pytest.mark.parametrize(
    ("pieces", "told", "num_events", "end_s"),
    [
        (
            [(0.05, text_event("a b c d e")), (0, text_event("f", "length")), (0, usage_event(9, 6) + DONE)],
            (9, 6),
            2,
            0.05,
        ),
        ([(0, text_event("a")), (0, text_event("b", "stop") + DONE)], (5, 2), 2, 0),
        ([(0.05, text_event("", "length") + usage_event(5, 1) + DONE)], (5, 1), 1, 0.05),
        ([(0, text_event("a")), (0, text_event("b")), LAST], (5, 2), 2, 0.1),
        ([(0, WHOLE)], (5, 2), 2, 0),
    ],
    ids=["several tokens in an event", "no usage", "no text", "a last event without a token", "no length of the body"],
)
def test_tokens_of_streams(pieces: Any, told: tuple[int, int], num_events: int, end_s: float) -> None:
    is_chunked = pieces[0][1] is not WHOLE
    with SSEServer(lambda body: Answer(pieces, is_chunked=is_chunked, drop=not is_chunked)) as server:
        outcome = load(server, [request(9)])
    (timeline,) = outcome.timelines
    assert not outcome.errors and timeline.e2e_s >= end_s
    assert (timeline.num_prompt_tokens, timeline.num_output_tokens) == told
    assert len(timeline.token_times_s) == num_events
    if told == (9, 6):
        assert timeline.tpot_s == pytest.approx(sum(timeline.itls_s) / 5)
    assert outcome.num_short == 1


def test_chat_is_text_from_the_servers_own_tokenizer() -> None:
    def script(body: dict[str, Any]) -> Answer:
        assert body["messages"] == [{"role": "user", "content": "1 2 3"}]
        deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "Hm"}, {"content": "Hi"}]
        events = [event({"choices": [{"delta": delta, "finish_reason": None}]}) for delta in deltas]
        last = event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        return Answer([(0, piece) for piece in (*events, last, usage_event(12, 2), DONE)])

    class Ids:
        def draw(self, wanted: Draw) -> list[ServedRequest]:
            return [ServedRequest([1, 2, 3], 2)]

    with SSEServer(script) as server:
        target = ServerTarget(ServerOptions(server.url, kind="chat", endpoint="/v1/chat/completions"))
        outcome = target.run(target.draw(Ids(), Draw(1, math.inf)))
    assert outcome.errors == []
    assert len(outcome.timelines[0].token_times_s) == 2
    assert (outcome.metrics.num_input_tokens, outcome.metrics.num_output_tokens) == (12, 2)


def test_every_failure_is_told() -> None:
    answers = {
        1: Answer([(0, b'{"error": {"message": "too  many\\nrequests"}}')], status=429),
        2: Answer([(0, text_event("a"))], drop=True),
        3: Answer([(0, text_event("a")), (0, event({"error": {"message": "out of memory"}})), (0, DONE)]),
        4: Answer([(0, text_event("a"))]),
        5: Answer([(0, b"data: {no json\n\n")]),
        6: Answer([(0, DONE)]),
        7: Answer([(30.0, DONE)]),
        9: Answer([(0, b"data: [1, 2]\n\n")]),
        8: Answer([(0, b"<html>Bad gateway</html>")], status=502),
    }
    with SSEServer(lambda body: answers.get(body["max_tokens"]) or steady(body)) as server:
        outcome = load(server, [request(number) for number in range(1, 11)], timeout_s=1.0)
    assert outcome.errors == [
        "HTTP 429: too many requests",
        "the server closed the connection in the middle of the answer",
        "out of memory",
        "the stream ended without a reason",
        "the stream has an event that is not of OpenAI's form",
        "the answer has no event with a choice",
        "no answer within 1 s",
        "HTTP 502: <html>Bad gateway</html>",
        "the stream has an event that is not of OpenAI's form",
    ]
    assert (outcome.metrics.num_completed, outcome.metrics.num_lost) == (1, 9)
    assert outcome.metrics.num_output_tokens == 10


def test_never_more_at_once_than_allowed() -> None:
    with SSEServer(lambda body: steady(body, first_s=0.05)) as server:
        outcome = load(server, [request(2) for _ in range(12)], max_concurrency=3)
    assert server.most_at_once == 3
    assert outcome.metrics.num_completed == 12
    # The wait for a seat is not the server's, and does not count.
    assert max(timeline.ttft_s for timeline in outcome.timelines) < 0.05 + SLACK_S
    assert outcome.metrics.peak_in_flight <= 3
    assert server.num_connections <= 5  # they are used again


def test_requests_go_out_when_they_are_due() -> None:
    due_s = [0.0, 0.1, 0.15, 0.4]
    with SSEServer(lambda body: steady(body, first_s=0.5)) as server:
        outcome = load(server, [request(1, arrival_s=at_s) for at_s in due_s])
    gaps = [at_s - server.arrivals_s[0] for at_s in server.arrivals_s]
    assert gaps == pytest.approx(due_s, abs=SLACK_S / 2)
    assert gaps == sorted(gaps)
    assert [timeline.arrival_s for timeline in outcome.timelines] == due_s
    assert outcome.late_s < SLACK_S


def test_a_turn_follows_the_end_of_the_one_before() -> None:
    """Even if that one has failed."""

    def script(body: dict[str, Any]) -> Answer:
        return Answer(status=500) if body["max_tokens"] == 7 else steady(body, first_s=0.1)

    with SSEServer(script) as server:
        work = [request(1), request(1, after=0, think_s=0.2), request(1, arrival_s=0.05), request(1, after=2)]
        outcome = load(server, [*work, request(7), request(1, after=4)])
    first, second, third, fourth, failed, behind_it = outcome.timelines
    assert behind_it.is_complete and not failed.is_complete
    assert first.end_s is not None and third.end_s is not None
    assert second.arrival_s == pytest.approx(first.end_s + 0.2, abs=SLACK_S / 4)
    assert fourth.arrival_s == pytest.approx(third.end_s, abs=SLACK_S / 4)
    assert 0.1 <= second.ttft_s < 0.1 + SLACK_S


def test_a_warm_up_is_not_counted_and_says_something_else() -> None:
    with SSEServer(steady) as server:
        outcome = load(server, [request(2)], num_warmups=3)
    assert len(server.bodies) == 4 and len(outcome.timelines) == 1
    assert all(len(body["prompt"]) == 5 for body in server.bodies)
    assert [body["prompt"] for body in server.bodies].count([7, 8, 9, 10, 11]) == 1
    with (
        SSEServer(lambda body: Answer([(0, b'{"error": "no such model"}')], status=404)) as server,
        pytest.raises(ConfigError, match="refuses the warm-up: HTTP 404: no such model"),
    ):
        load(server, [request()], num_warmups=1)


def test_what_the_server_tells_meanwhile() -> None:
    with SSEServer(lambda body: steady(body, first_s=0.3), metrics=METRICS) as server:
        samples = load(server, [request()], sample_every_s=0.05).samples
    assert 3 <= len(samples) <= 8
    assert {(s.num_running, s.num_waiting, s.kv_used) for s in samples} == {(3, 2, 0.25)}
    with SSEServer(lambda body: steady(body, first_s=0.1)) as server:
        assert load(server, [request()], sample_every_s=0.02).samples == []
    assert sum("/metrics" in head for head in server.headers) == 1, "one that tells nothing is asked once"


def test_it_keeps_up_with_many_events() -> None:
    """5,000 events a second must not fill a core; counted by the time of this thread, whatever others do meanwhile."""
    with SSEServer(steady) as server:
        target = ServerTarget(ServerOptions(server.url))
        before_s = time.thread_time()
        outcome = target.run([request(500) for _ in range(20)])
        used_s = time.thread_time() - before_s
    assert outcome.metrics.num_output_tokens == 10_000
    assert 10_000 / used_s > 5_000


def test_shares_of_a_server_are_those_of_the_load() -> None:
    counters = ServerCounters()
    assert counters.utilisation == UNKNOWN
    for busy_s, read_s, padding in ((10, 1, 0), (15, 2, 5), (20, 9, 10)):
        counters.read(
            f"""# HELP headway:device_busy_seconds_total Time in which steps ran on the device.
headway:device_busy_seconds_total{{model_name="m"}} {busy_s}
headway:estimated_read_seconds_total{{model_name="m"}} {read_s}
headway:estimated_ceiling_seconds_total{{model_name="m"}} {read_s}
headway:step_tokens_total{{model_name="m"}} {3 * padding}
headway:step_padding_tokens_total{{model_name="m"}} {padding}
headway:num_requests_running{{model_name="m"}} 3
"""
        )
    counters.read("vllm:num_requests_running 3")
    assert counters.utilisation.as_json() == {
        "bandwidth": 0.8,
        "compute": 0.0,
        "ceiling": 0.8,
        "useful": 0.75,
        "host": 0.0,
    }
