"""One small schedule per mode: of batching, of computing prompts, of giving out memory. The same requests for each mode
of a kind, so that two schedules can be compared line by line.

A change here is a change of what the engine does: look, then accept it.
"""

from __future__ import annotations

from headway.core import Request
from tests.unit.core.driver import make_scheduler, request, schedule_text


def batched(mode: str) -> str:
    arrivals = {
        0: [request("a", 3, 2), request("b", 3, 5)],
        1: [request("c", 3, 3), request("big", 9, 2)],
        2: [request("d", 3, 2)],
        9: [request("e", 3, 1)],
    }
    return schedule_text(make_scheduler(batching=mode, max_num_seqs=2), arrivals, step_s=0.02)


def prefilled(mode: str) -> str:
    arrivals = {
        0: [request("a", 3, 5)],
        1: [request("long", 10, 3)],
        2: [request("b", 3, 2), request("c", 3, 2)],
    }
    return schedule_text(make_scheduler(prefill_mode=mode, max_num_batched_tokens=8), arrivals)


def three_alike() -> dict[int, list[Request]]:
    return {0: [request("a", 3, 3), request("b", 3, 3), request("c", 3, 3)]}


def test_continuous() -> None:
    """c takes a's seat in the very next step, big and d those of b and c."""
    assert batched("continuous") == CONTINUOUS


def test_static() -> None:
    """Nobody takes a's seat before b is done: batches of two, in order of arrival."""
    assert batched("static") == STATIC


def test_dynamic() -> None:
    """As static, but c and d are alike and pass big; and e waits 50 ms for others that do not come."""
    assert batched("dynamic") == DYNAMIC


def test_chunked() -> None:
    """The long prompt is cut to what a, which generates in every step, leaves of eight tokens."""
    assert prefilled("chunked") == CHUNKED


def test_prefill_first() -> None:
    """a stands still while there are prompts; long is cut only because no step could hold it."""
    assert prefilled("prefill-first") == PREFILL_FIRST


def test_decode_first() -> None:
    """Prompts wait until a has its last token, then until long, b and c have theirs."""
    assert prefilled("decode-first") == DECODE_FIRST


def test_paged() -> None:
    """Six blocks of four tokens are enough for three requests of six tokens at most."""
    assert schedule_text(make_scheduler(num_blocks=6), three_alike()) == PAGED


def test_contiguous_max() -> None:
    """The same with room for twelve tokens each, used or not: only two of them fit."""
    assert schedule_text(make_scheduler(num_blocks=6, reserve_tokens=12), three_alike()) == CONTIGUOUS_MAX


CONTINUOUS = """\
  0 a:3* b:3*
  1 a:1* b:1*
  2 b:1* c:3*
  3 b:1* c:1*
  4 b:1* c:1*
  5 big:9* d:3*
  6 big:1* d:1*
  7
  8
  9 e:3*
"""

STATIC = """\
  0 a:3* b:3*
  1 a:1* b:1*
  2 b:1*
  3 b:1*
  4 b:1*
  5 c:3* big:9*
  6 c:1* big:1*
  7 c:1*
  8 d:3*
  9 d:1*
 10 e:3*
"""

DYNAMIC = """\
  0 a:3* b:3*
  1 a:1* b:1*
  2 b:1*
  3 b:1*
  4 b:1*
  5 c:3* d:3*
  6 c:1* d:1*
  7 c:1*
  8 big:9*
  9 big:1*
 10
 11
 12 e:3*
"""

CHUNKED = """\
  0 a:3*
  1 a:1* long:7
  2 a:1* long:3* b:3* c:1
  3 a:1* long:1* b:1* c:2*
  4 a:1* long:1* c:1*
"""

PREFILL_FIRST = """\
  0 a:3*
  1 long:8
  2 long:2* b:3* c:3*
  3 a:1* long:1* b:1* c:1*
  4 a:1* long:1*
  5 a:1*
  6 a:1*
"""

DECODE_FIRST = """\
  0 a:3*
  1 a:1*
  2 a:1*
  3 a:1*
  4 a:1*
  5 long:8
  6 long:2* b:3* c:3*
  7 long:1* b:1* c:1*
  8 long:1*
"""

PAGED = """\
  0 a:3* b:3* c:3*
  1 a:1* b:1* c:1*
  2 a:1* b:1* c:1*
"""

CONTIGUOUS_MAX = """\
  0 a:3* b:3*
  1 a:1* b:1*
  2 a:1* b:1*
  3 c:3*
  4 c:1*
  5 c:1*
"""
