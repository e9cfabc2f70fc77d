"""The two examples of docs/adding_an_option.md, made in a copy of the source: two files are edited, and the new option
works at every edge."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.documented_edits import ROOT, copied, documented_edits, make_edits

USE_OPTION = """
import pytest

from headway.core.request_options import RequestOptions
from headway.engine.llm_engine import LLMEngine
from headway.errors import InvalidRequestError
from headway.llm import LLM
from headway.wire.messages import AddRequest, decode_to_engine, encode
from headway.sampling_params import SamplingParams
from tests.unit.server.fake_engine import FakeServer
from tests.unit.engine_process.scripted_channel import run
from tests.unit.engine_process.small_engine import create_engine

PARAMS = SamplingParams(max_tokens=2)
SLO = {"scheduling_policy": "slo", "max_num_seqs": 1, "starvation_ms": 0.0}

# LLM: one value each, and the policy goes by it
engine = create_engine(dict(SLO))
LLMEngine.from_config = classmethod(lambda cls, config, *, progress: engine)
llm, step, ended = LLM(), engine.step, []

def noted():
    stepped = step()
    ended.extend(output.request_id for output in stepped.outputs)
    return stepped

engine.step = noted
llm.generate([[5, 6], [7, 8], [9]], PARAMS, deadline_s=[None, 100.0, 50.0])
assert ended == ["2", "1", "0"], ended
for wrong in ({"deadline_s": -1}, {"dedline_s": 1}):
    with pytest.raises(InvalidRequestError, match="deadline_s"):
        llm.generate([5, 6], PARAMS, **wrong)
llm.shutdown()

# the engine's loop, over the wire
asked = [
    decode_to_engine(encode(AddRequest(name, [5, 6], PARAMS, RequestOptions(deadline_s=deadline_s))))
    for name, deadline_s in (("a", None), ("b", 100.0), ("c", 50.0))
]
channel = run(asked, *[[]] * 8, engine=create_engine(dict(SLO)))
assert [d.request_id for batch in channel.batches for d in batch.deltas if d.is_last] == ["c", "b", "a"]

# HTTP
server = FakeServer()
assert server.complete(deadline_s=0.5).status_code == server.chat(deadline_s=0.5).status_code == 200
assert [request.options.deadline_s for request in server.engine.requests] == [0.5, 0.5]
refused = server.complete(deadline_s=-1)
assert (refused.status_code, refused.json()["error"]["param"]) == (400, "deadline_s"), refused.text

# classes of a server and of a workload
from headway_lab.workload.workload import read_classes
from headway.server.admission.service_classes import parse_service_classes

assert parse_service_classes({"classes": {"a": {"deadline_s": 2}}}).default.options.deadline_s == 2
assert read_classes([{"deadline_s": 3.0}])[0].options.deadline_s == 3.0
"""

USE_SAMPLING = """
import torch

from headway.console.flags import sampling_flags
from tests.unit.runner.sampling_bench import ALL_KERNELS, sample_once
from tests.unit.runner.sampling_reference import Request

# HTTP and the wire
server = FakeServer()
assert server.complete(banned_token_ids=[3, 5], temperature=0).status_code == 200
refused = server.complete(banned_token_ids=[10**6])
assert (refused.status_code, refused.json()["error"]["param"]) == (400, "banned_token_ids"), refused.text
sent = decode_to_engine(encode(server.engine.requests[0]))
assert sent.params.banned_token_ids == (3, 5)
assert "banned_token_ids" in [flag.name for flag in sampling_flags()]

# the sampler: compiled for the CPU, in numpy, and the GPU's kernels
fields = {"temperature": 0.0}
requests = [Request({**fields, "banned_token_ids": [3, 5]}), Request(fields)]
logits = torch.tensor([[0.0, 1, 2, 9, 3, 8, 4, 5]] * 2)
for kernels in ALL_KERNELS:
    assert sample_once(kernels, logits, requests).token_ids == [7, 3], kernels
with pytest.raises(InvalidRequestError) as caught:  # it would be ignored
    SamplingParams(use_beam_search=True, n=2, banned_token_ids=[3])
assert caught.value.param == "banned_token_ids"
"""


def test_the_documented_edits_are_all_that_it_takes(tmp_path: Path) -> None:
    copied(tmp_path, "src")
    for edits in documented_edits("adding_an_option.md"):
        assert len(make_edits(edits, tmp_path)) == 2
    environment = os.environ | {"PYTHONPATH": f"{tmp_path / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", USE_OPTION + USE_SAMPLING]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
