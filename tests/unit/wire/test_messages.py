"""Messages survive the journey, frames come out whole however they are cut, and nonsense is recognised."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from headway.core.request_options import RequestOptions
from headway.sampling_params import SamplingParams
from headway.wire import messages as m
from headway.wire.frames import MAX_FRAME_BYTES, BrokenFrameError, FrameReader, pack
from tests.unit.engine_stats import engine_stats

LOGPROBS = [[m.TokenLogprob(5, -0.5, 1, "a"), m.TokenLogprob(6, float("-inf"), None, None)]]
STATS = engine_stats(num_running=3, duration_s=0.25, kind="mixed")
SPELT = SamplingParams(
    n=2, best_of=3, bad_words=["no"], stop_token_ids=[3], top_k=5, min_p=0.5, max_tokens=None, logprobs=0
).with_bad_word_token_ids([[1, 2], [3]])
TO_ENGINE = [
    m.Start({"model": None, "block_size": 16}, counted=STATS),
    m.AddRequest(
        "a",
        [1, 2, 3],
        SamplingParams(seed=2**64 - 1, logit_bias={7: -1.5}, stop=["é", "\x00"]),
        RequestOptions(priority=-3),
    ),
    m.AddRequest("b", [1], None, RequestOptions(cache_salt="é", cache_ttl_s=0.5)),
    m.AddRequest("c", [1], SPELT, RequestOptions(tenant="é", ttft_target_s=0.5, tpot_target_s=0.05)),
    m.AbortRequests(["a", "b"]),
    m.Watch(True),
    m.Shutdown(1.5),
]
FROM_ENGINE = [
    m.EngineReady("model", 1, 2, 3, 4, 5, 6, "cpu", "float32"),
    m.StartUpFailed("no"),
    m.StepBatch(
        [
            m.Delta("a", 1, "text", [1, 2], LOGPROBS, prompt_logprobs=[None, *LOGPROBS]),
            m.Delta("b", finish_reason="stop", stop_reason="##", is_last=True, timings=m.RequestTimings(0.5)),
            m.Delta("c", finish_reason="stop", stop_reason=17, error="no", error_status=400, error_param="n"),
        ],
        STATS,
        ["a", "d"],
    ),
    m.StepSnapshot(
        step_id=1,
        step_s=0.5,
        kind="prefill",
        num_running=1,
        num_waiting=2,
        num_blocks=3,
        num_used_blocks=4,
        num_used_slots=5,
        rows=[m.SnapshotRow("a", 1, 2, 3, 4, 5, True, 2)],
        waiting=[m.WaitingRow("b", 6)],
        preempted=["c"],
        finished=["d"],
        blocks=m.BlockMap(["a"], [m.BlockRun(0, 2), m.BlockRun(None, 1)]),
    ),
    m.BlockSnapshot(m.BlockMap([], [m.BlockRun(m.CACHED, 2), m.BlockRun(m.SHARED, 1)])),
    m.Heartbeat(),
]


@pytest.mark.parametrize("message", [*TO_ENGINE, *FROM_ENGINE], ids=lambda message: type(message).__name__)
def test_there_and_back(message: Any) -> None:
    decode = m.decode_to_engine if message in TO_ENGINE else m.decode_from_engine
    assert decode(m.encode(message)) == message


@pytest.mark.parametrize("nonsense", [b"", b"\xc1", b"\x91\xa5Other", b"\x92\xa5Watch\x07", m.encode(m.Heartbeat())])
def test_what_is_no_message_is_recognised(nonsense: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        m.decode_to_engine(nonsense)


def test_frames_come_out_whole_however_they_are_cut() -> None:
    chance = random.Random(1)
    stream = b"".join(pack(message) for message in FROM_ENGINE * 20)
    reader, found, place = FrameReader(), [], 0
    while place < len(stream):
        size = chance.choice([1, 2, 3, 5, 100, 1000])
        found += [m.decode_from_engine(payload) for payload in reader.feed(stream[place : place + size])]
        place += size
    assert found == FROM_ENGINE * 20


def test_a_frame_too_long_is_refused_before_it_has_come() -> None:
    with pytest.raises(BrokenFrameError):
        FrameReader().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
