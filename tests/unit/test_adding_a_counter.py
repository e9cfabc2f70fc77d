"""The example of docs/adding_a_counter.md, made in a copy of the source: one file is edited, and the number is in
`/metrics`, for all replicas together, and in the live page's data."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.documented_edits import ROOT, copied, documented_edits, make_edits

USE_COUNTER = """
from headway.sampling_params import SamplingParams
from headway.wire.engine_stats import summed
from tests.unit.engine_process.scripted_channel import run
from tests.unit.engine_process.small_engine import create_engine
from headway.wire.messages import AddRequest
from tests.unit.server.fake_engine import FakeServer

params = SamplingParams(max_tokens=1)
asked = [[AddRequest(str(place), [5, 6, place], params)] for place in range(3)]
channel = run(asked[0], *[[]] * 4, asked[1], *[[]] * 4, asked[2], *[[]] * 4, engine=create_engine({}))
stats = channel.batches[-1].stats
assert stats.prefix_cache.num_copied_tails == stats.as_dict()["num_copied_tails"] == 2
server = FakeServer()
server.engine.stats = summed([stats, stats])
text = server.call("GET", "/metrics").text
[line] = [line for line in text.splitlines() if line.startswith("headway:prefix_cache_copied_tails_total")]
assert line.endswith(" 4.0"), line
assert "# HELP headway:prefix_cache_copied_tails_total Requests that began with a copy of a tail." in text
"""


def test_the_documented_edits_add_a_counter(tmp_path: Path) -> None:
    copied(tmp_path, "src")
    [edits] = documented_edits("adding_a_counter.md")
    assert len(make_edits(edits, tmp_path)) == 1
    environment = os.environ | {"PYTHONPATH": f"{tmp_path / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", USE_COUNTER]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
