"""The ladder of step sizes, and how steps run where there is nothing to capture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from headway.runner.graphed_runner import StepGraphs, StepShape, decode_rungs, rung_above, sample_rungs, token_rungs

LADDERS = [decode_rungs, token_rungs, sample_rungs]


@pytest.mark.parametrize("ladder", LADDERS)
@pytest.mark.parametrize("most", [1, 2, 3, 16, 31, 32, 33, 64, 100, 256, 257, 300, 500, 1024, 1100, 8192])
def test_every_size_up_to_the_limit_has_a_rung_and_a_larger_one_has_none(
    ladder: Callable[[int], list[int]], most: int
) -> None:
    rungs = ladder(most)
    assert rungs == sorted(set(rungs))
    assert rungs[0] >= 1 and rungs[-1] == most
    for size in range(min(most, 300) + 1):
        assert rung_above(rungs, size) == next(rung for rung in rungs if rung >= size)
    assert rung_above(rungs, most + 1) is None
    assert rung_above([], 1) is None


def test_padding_stays_small() -> None:
    decode, tokens = decode_rungs(512), token_rungs(8192)
    assert all((rung_above(decode, size) or 0) <= max(2 * size, size + 7) for size in range(1, 65))
    assert all((rung_above(decode, size) or 0) <= 1.25 * size for size in range(64, 513))
    assert all((rung_above(tokens, size) or 0) <= 1.25 * size for size in range(1024, 8193))


def test_without_a_gpu_every_step_runs_as_the_first_one_does() -> None:
    ran: list[StepShape] = []
    graphs = StepGraphs(torch.device("cpu"))
    small, large = StepShape(1, 1, False), StepShape(32, 16, True)
    for shape in (small, small, large, small):
        graphs.run(shape, ran.append)
    assert ran == [small, small, large, small]
    assert not graphs.num_prepared


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_shape_runs_once_is_captured_and_is_then_replayed() -> None:
    value = torch.zeros(1, device="cuda")
    num_calls = 0

    def step(shape: StepShape) -> None:
        nonlocal num_calls
        num_calls += 1
        value.add_(shape.num_tokens)

    graphs = StepGraphs(torch.device("cuda"))
    for _ in range(5):
        graphs.run(StepShape(3, 3, False), step)
    assert value.item() == 15
    assert num_calls == 2 == graphs.num_prepared
