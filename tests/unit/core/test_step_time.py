"""What is learned of step times, and what follows for the size of chunks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from headway.core.step_time import DecodePace, StepTimeModel
from headway.core.tuning import STEP_TIME

LARGE_GPU = (5.6e-3, 24e-6)
SMALL_MODEL = (1.0e-3, 1.4e-6)
CPU = (20e-3, 1.5e-3)


def device(base_s: float, per_token_s: float) -> Callable[[int], float]:
    return lambda num_tokens: base_s + per_token_s * num_tokens


def ideal(base_s: float, per_token_s: float, target_s: float, max_tokens: int) -> int:
    return max(STEP_TIME.free_tokens, min(max_tokens, int((target_s - base_s) / per_token_s)))


def test_before_anything_is_known_there_is_an_answer() -> None:
    assert StepTimeModel(max_tokens=8192).chunk_tokens(0.02) == 512
    assert StepTimeModel(max_tokens=100).chunk_tokens(0.02) == 100


@pytest.mark.parametrize("parameters", [LARGE_GPU, SMALL_MODEL, CPU], ids=["large gpu", "small model", "cpu"])
@pytest.mark.parametrize("first", [0, 200, 8000], ids=lambda tokens: f"first {tokens}")
def test_a_few_steps_of_any_kind_are_enough(parameters: tuple[float, float], first: int) -> None:
    target_s = parameters[0] + 300 * parameters[1]
    seconds, model = device(*parameters), StepTimeModel(max_tokens=1024)
    model.observe(first, seconds(first))
    for _ in range(20):  # what it answers is what runs next, with a step without prompts now and then
        tokens = model.chunk_tokens(target_s)
        model.observe(tokens, seconds(tokens))
        model.observe(0, seconds(0))
    assert model.chunk_tokens(target_s) == pytest.approx(ideal(*parameters, target_s, 1024), rel=0.1)


def test_one_step_without_prompts_already_tells_the_order_of_magnitude() -> None:
    seconds, model = device(*LARGE_GPU), StepTimeModel(max_tokens=8192)
    model.observe(0, seconds(0))
    assert 0.5 < model.chunk_tokens(0.02) / ideal(*LARGE_GPU, 0.02, 8192) < 2


@pytest.mark.parametrize("kind", [0, 500])
def test_a_first_step_that_compiles_kernels_is_soon_forgotten(kind: int) -> None:
    seconds, model = device(*LARGE_GPU), StepTimeModel(max_tokens=8192)
    model.observe(kind, 3.0)
    for _ in range(4):
        model.observe(0, seconds(0))
        tokens = model.chunk_tokens(0.02)
        model.observe(tokens, seconds(tokens))
    assert model.chunk_tokens(0.02) == pytest.approx(ideal(*LARGE_GPU, 0.02, 8192), rel=0.25)


def test_a_hiccup_changes_little_and_a_lasting_change_is_followed() -> None:
    seconds, model = device(*LARGE_GPU), StepTimeModel(max_tokens=8192)
    rng = random.Random(0)

    def run(times: int, factor: float) -> None:
        for _ in range(times):
            tokens = model.chunk_tokens(0.02)
            model.observe(tokens, factor * seconds(tokens) * rng.uniform(0.97, 1.03))
            model.observe(0, factor * seconds(0) * rng.uniform(0.97, 1.03))

    run(20, factor=1.0)
    before = model.chunk_tokens(0.02)
    model.observe(before, 1.0)
    model.observe(0, 1.0)
    assert 0.4 * before < model.chunk_tokens(0.02) <= before
    run(20, factor=1.0)
    assert model.chunk_tokens(0.02) == pytest.approx(before, rel=0.15)
    run(60, factor=1.8)
    assert model.chunk_tokens(0.02) == pytest.approx((0.02 / 1.8 - LARGE_GPU[0]) / LARGE_GPU[1], rel=0.15)


def test_the_answer_stays_between_a_floor_and_the_budget() -> None:
    model = StepTimeModel(max_tokens=1000)
    model.observe(0, 0.1)
    assert model.chunk_tokens(0.02) == STEP_TIME.free_tokens
    model = StepTimeModel(max_tokens=1000)
    model.observe(0, 1e-5)
    model.observe(500, 1e-5)
    assert model.chunk_tokens(0.02) == 1000
    assert StepTimeModel(max_tokens=16).chunk_tokens(0.02) == 16


def paced() -> tuple[DecodePace, int]:
    """A pace that knows its device, and how many tokens fit into the target."""
    pace = DecodePace(target_s=0.02, max_tokens=8192)
    for tokens in (0, 600, 0, 600):
        pace.observe(num_chunk_tokens=tokens, num_decodes=10, duration_s=device(*LARGE_GPU)(tokens))
    return pace, in_tiles(pace.step_time.chunk_tokens(0.02))


def in_tiles(num_tokens: int, num_decodes: int = 10) -> int:
    """What is left of a large chunk so that the step is a whole number of tiles."""
    return (num_tokens + num_decodes) // STEP_TIME.tile_tokens * STEP_TIME.tile_tokens - num_decodes


def test_without_decodes_time_is_no_limit() -> None:
    pace, _ = paced()
    assert pace.chunk_tokens(target_s=0.02, num_decodes=0, num_backlog_tokens=10**6) == 8192


def test_without_a_target_a_step_is_as_long_as_it_gains() -> None:
    free = DecodePace(target_s=0.0, max_tokens=8192)
    assert free.chunk_tokens(target_s=0.0, num_decodes=10, num_backlog_tokens=10**6) == 8192, "nothing is known"
    for tokens in (600, 0, 600, 0):
        free.observe(num_chunk_tokens=tokens, num_decodes=10, duration_s=device(*LARGE_GPU)(tokens))
    for num_backlog_tokens in (10**4, 10**6):
        num_tokens = free.chunk_tokens(target_s=0.0, num_decodes=10, num_backlog_tokens=num_backlog_tokens)
        assert num_tokens == pytest.approx(
            ideal(*LARGE_GPU, STEP_TIME.gaining_steps * LARGE_GPU[0], 8192), abs=STEP_TIME.tile_tokens, rel=0.05
        )
    limited = free.chunk_tokens(target_s=0.0, num_decodes=10, num_backlog_tokens=10**6, limit_s=0.02)
    assert limited == in_tiles(free.step_time.chunk_tokens(0.02))


def backlog_tokens(times_target: float) -> int:
    """A backlog of which one step's share takes so many times the target."""
    return int(times_target * 0.02 / STEP_TIME.backlog_share / LARGE_GPU[1])


@pytest.mark.parametrize("times_target", [0.0, 0.5, 0.95])
def test_a_small_backlog_changes_nothing(times_target: float) -> None:
    pace, in_time = paced()
    assert pace.chunk_tokens(target_s=0.02, num_decodes=10, num_backlog_tokens=backlog_tokens(times_target)) == in_time


@pytest.mark.parametrize("times_target", [1.2, 1.5, 1.9])
def test_in_a_flood_steps_take_their_share_of_it(times_target: float) -> None:
    pace, _ = paced()
    num_tokens = pace.chunk_tokens(target_s=0.02, num_decodes=10, num_backlog_tokens=backlog_tokens(times_target))
    wanted_s = times_target * 0.02
    assert device(*LARGE_GPU)(num_tokens) < 1.05 * wanted_s
    assert device(*LARGE_GPU)(num_tokens + STEP_TIME.tile_tokens) > 0.95 * wanted_s


@pytest.mark.parametrize(
    ("base_s", "limit_s"), [(0.003, STEP_TIME.gaining_steps * 0.003), (0.012, STEP_TIME.stretch * 0.02)]
)
def test_the_largest_flood_makes_no_step_longer_than_gains_or_than_a_few_targets(base_s: float, limit_s: float) -> None:
    pace = DecodePace(target_s=0.02, max_tokens=8192)
    for tokens in (0, 600, 0, 600):
        pace.observe(num_chunk_tokens=tokens, num_decodes=10, duration_s=device(base_s, LARGE_GPU[1])(tokens))
    num_tokens = pace.chunk_tokens(target_s=0.02, num_decodes=10, num_backlog_tokens=10**7)
    assert num_tokens == pytest.approx(ideal(base_s, LARGE_GPU[1], limit_s, 8192), abs=STEP_TIME.tile_tokens, rel=0.05)


def test_the_budget_limits_the_largest_flood_too() -> None:
    pace = DecodePace(target_s=0.02, max_tokens=600)
    for tokens in (0, 600, 0, 600):
        pace.observe(num_chunk_tokens=tokens, num_decodes=10, duration_s=device(*LARGE_GPU)(tokens))
    assert pace.chunk_tokens(target_s=0.02, num_decodes=10, num_backlog_tokens=10**7) == in_tiles(600)


def test_before_anything_is_known_a_flood_changes_nothing() -> None:
    pace = DecodePace(target_s=0.02, max_tokens=8192)
    assert pace.chunk_tokens(target_s=0.02, num_decodes=10, num_backlog_tokens=10**7) == in_tiles(512)


def test_steps_shrink_back_as_the_backlog_melts() -> None:
    pace, in_time = paced()
    backlog, sizes = backlog_tokens(8.0), []
    while backlog > 0:
        sizes.append(pace.chunk_tokens(target_s=0.02, num_decodes=10, num_backlog_tokens=backlog))
        pace.observe(num_chunk_tokens=sizes[-1], num_decodes=10, duration_s=device(*LARGE_GPU)(sizes[-1]))
        backlog -= sizes[-1]
    assert sizes[0] > 1.5 * in_time
    assert sizes[-1] == in_time
    assert all(later <= 1.05 * earlier for earlier, later in itertools.pairwise(sizes))


def most_in_time(pace: DecodePace) -> int:
    """The largest backlog that is not worth being late for."""
    return STEP_TIME.backlog_steps * pace.step_time.chunk_tokens(pace.target_s)


def test_a_backlog_may_make_a_step_longer_but_only_for_one_token_in_so_many() -> None:
    pace, in_time = paced()
    num_late = num_steps = 0
    for _ in range(5000):
        num_steps += 1
        num_late += (
            pace.chunk_tokens(target_s=0.02, num_decodes=10, num_backlog_tokens=most_in_time(pace) + 1) > in_time
        )
    assert num_late == pytest.approx(num_steps / STEP_TIME.tokens_per_late_one, abs=1)


def test_how_long_the_longer_step_is() -> None:
    pace, in_time = paced()
    for _ in range(STEP_TIME.tokens_per_late_one + 1):
        assert pace.chunk_tokens(target_s=0.02, num_decodes=10, num_backlog_tokens=most_in_time(pace)) == in_time
    longer = pace.chunk_tokens(target_s=0.02, num_decodes=10, num_backlog_tokens=most_in_time(pace) + 1)
    limit_s = min(STEP_TIME.stretch * 0.02, STEP_TIME.gaining_steps * LARGE_GPU[0])
    assert longer == pytest.approx(ideal(*LARGE_GPU, limit_s, 8192), abs=STEP_TIME.tile_tokens, rel=0.05)
    again = pace.chunk_tokens(target_s=0.02, num_decodes=10, num_backlog_tokens=most_in_time(pace) + 1)
    assert again == in_time, "the allowance is used up"


def test_an_allowance_never_makes_a_step_shorter_than_the_flood_would() -> None:
    pace, in_time = paced()
    for _ in range(STEP_TIME.tokens_per_late_one):
        pace.chunk_tokens(target_s=0.02, num_decodes=10, num_backlog_tokens=in_time)
    with_allowance, without = (
        pace.chunk_tokens(target_s=0.02, num_decodes=10, num_backlog_tokens=backlog_tokens(1.5 * STEP_TIME.stretch))
        for _ in range(2)
    )
    assert with_allowance == without


@pytest.mark.parametrize("num_decodes", [1, 3, 37, 130, 256])
@pytest.mark.parametrize("target_ms", [6, 7, 8, 10, 15, 20, 40])
def test_a_step_ends_with_a_tile_and_loses_less_than_a_quarter(num_decodes: int, target_ms: int) -> None:
    pace, _ = paced()
    target_s = target_ms / 1e3
    fits = pace.step_time.chunk_tokens(target_s)
    num_tokens = pace.chunk_tokens(target_s=target_s, num_decodes=num_decodes, num_backlog_tokens=0)
    assert STEP_TIME.free_tokens <= num_tokens <= fits
    if num_tokens > STEP_TIME.free_tokens:
        assert num_tokens + num_decodes > 0.75 * (fits + num_decodes)
        tile = STEP_TIME.tile_tokens if fits + num_decodes >= 4 * STEP_TIME.tile_tokens else 8
        assert (num_tokens + num_decodes) % tile == 0
