"""What guesses add to a step, how often they are right, and simulations that look guesses up in known answers."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from headway.config import CacheConfig, SchedulerConfig
from headway.core.step_work import StepWork
from headway.errors import ConfigError
from headway_lab.bench.online_metrics import OnlineMetrics
from headway_lab.sim import simulate
from headway_lab.sim.drafting import DraftedStep, Drafting, Drafts, acceptance_of
from headway_lab.sim.sim_accuracy import Check, error_rows
from headway_lab.sim.sim_report import calibration_facts
from headway_lab.sim.sim_variants import Variant, errors_table, file_of, parse_variants
from headway_lab.sim.simulate import Simulation
from headway_lab.workload.bench_requests import BenchRequest
from tests.lab.sim.machines import calibration


def steps_of(pass_s: float, token_s: float) -> list[DraftedStep]:
    """Steps of 10 ms, 0.1 ms for each row, and what guesses add; a few are much too slow."""
    rng = random.Random(0)
    steps = []
    for place in range(300):
        longest, num_requests = rng.randint(0, 8), rng.randint(1, 30)
        num_tokens = longest * rng.randint(1, num_requests)
        num_rows, num_chunks = num_requests + num_tokens, place % 2
        num_new = num_rows + 500 * num_chunks
        seconds = 0.01 + 1e-4 * num_new + pass_s * longest + (0.5 if num_chunks else 1.0) * token_s * num_tokens
        work = StepWork(num_new, num_rows, num_rows, 0, num_chunks)
        drafts = Drafts(longest, num_tokens, bool(num_chunks))
        steps.append(DraftedStep(work, seconds * (10 if place % 40 == 0 else 1), drafts))
    return steps


@pytest.mark.parametrize(
    ("pass_s", "token_s", "has_model"), [(2e-3, 3e-5, True), (0.0, -6e-5, False), (0.0, 0.0, True)]
)
def test_the_fit_finds_what_guesses_cost_beside_rows(pass_s: float, token_s: float, has_model: bool) -> None:
    steps = steps_of(pass_s, token_s)
    found = Drafting.fit(steps, has_model=has_model)
    assert found.pass_s == pytest.approx(pass_s, rel=0.05, abs=2e-5)
    assert found.token_s == pytest.approx(token_s, rel=0.1, abs=2e-6)
    assert found.chunked_token_s == pytest.approx(0.5 * token_s, rel=0.1, abs=2e-6)
    few = [step for step in steps if not step.drafts.num_tokens] + [step for step in steps if step.drafts.num_tokens][
        :7
    ]
    assert Drafting.fit(few, has_model=has_model) == Drafting()


def test_a_fit_without_a_draft_model_gives_passes_no_time() -> None:
    assert Drafting.fit(steps_of(2e-3, 0.0), has_model=False).pass_s == 0.0


@pytest.mark.parametrize("chance", [0.0, 0.35, 0.8, 1.0])
@pytest.mark.parametrize("lengths", [(1,), (8,), (1, 2, 8)])
def test_the_acceptance_is_that_of_each_token_whatever_the_lengths_of_guesses(
    chance: float, lengths: tuple[int, ...]
) -> None:
    rng = random.Random(1)
    num_right = num_wrong = 0
    for place in range(6000):
        longest, right = lengths[place % len(lengths)], 0
        while right < longest and rng.random() < chance:
            right += 1
        num_right += right
        num_wrong += right < longest
    assert acceptance_of(num_right, num_wrong) == pytest.approx(chance, abs=0.02)
    assert acceptance_of(0, 0) == 0.0


def test_what_guesses_cost_is_among_the_facts_of_a_machine() -> None:
    assert "guesses" not in calibration_facts(calibration())
    found = calibration(drafting=Drafting(0.8, 1.1e-3, -2e-5))
    assert calibration_facts(found)["guesses"] == (
        "80% right, 1.10 ms for a pass of the draft model, −0.020 ms for each beside its row, +0.000 beside chunks"
    )


@pytest.mark.parametrize("wrong", [{"pass_s": -1.0}, {"token_s": float("inf")}, {"acceptance": 1.5}])
def test_a_file_with_impossible_guesses_is_refused(wrong: dict[str, Any]) -> None:
    assert Drafting.from_json(Drafting(0.5, 1e-3, -1e-4, 1e-5).as_json()) == Drafting(0.5, 1e-3, -1e-4, 1e-5)
    with pytest.raises(ValueError):
        Drafting.from_json(wrong)


def simulated(answers: list[list[int]] | None, speculation: str = "ngram", **machine: Any) -> Simulation:
    work = [BenchRequest([place, 1, 2, 3, place], len(answer)) for place, answer in enumerate(ANSWERS)]
    found = calibration()
    scheduler = SchedulerConfig(**{**found.scheduler, "speculation": speculation}).resolve("cpu")
    cache = CacheConfig(**found.cache).resolve("cpu")
    return simulate(work, dataclasses.replace(found.machine(), **machine), scheduler, cache, answers=answers)


REPEATING = [7, 8, 9, 10] * 12
DIFFERENT = list(range(100, 148))
ANSWERS = [REPEATING, REPEATING]


def test_guesses_are_looked_up_in_known_answers() -> None:
    off = simulated(None, "off")
    repeating, different = simulated(ANSWERS), simulated([DIFFERENT, DIFFERENT])
    for done in (off, repeating, different):
        assert all(len(line.token_times_s) == 48 for line in done.timelines), "no token is lost or made up"
    assert repeating.num_steps < 0.6 * off.num_steps
    assert different.num_steps == off.num_steps, "what never occurred before is not guessed"


def test_a_simulation_without_text_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="no text to guess"):
        simulated(None)
    with pytest.raises(ConfigError, match="no text to guess"):
        simulated(None, "draft")
    with pytest.raises(ConfigError, match="one after the other"):
        simulated(ANSWERS, overlap=True)


def test_a_draft_model_takes_its_passes() -> None:
    right = simulated(None, "draft", drafting=Drafting(acceptance=0.95))
    slow = simulated(None, "draft", drafting=Drafting(acceptance=0.95, pass_s=0.004))
    off = simulated(None, "off")
    assert right.duration_s < slow.duration_s and right.num_steps < off.num_steps
    assert all(len(line.token_times_s) == 48 for done in (right, slow) for line in done.timelines)


def test_variants_are_read_as_flags_are() -> None:
    assert parse_variants([]) == [Variant()]
    found = parse_variants(["plain", "small max-num-seqs=4 --speculation=ngram spec_synthetic_acceptance=2.5"])
    assert found[0] == Variant("plain")
    assert found[1].options == {"max_num_seqs": 4, "speculation": "ngram", "spec_synthetic_acceptance": 2.5}
    assert file_of("c-{variant}.json", found[1], num_variants=2) == "c-small.json"
    assert file_of("c.json", Variant(), num_variants=1) == "c.json"
    assert file_of(None, found[0], num_variants=2) is None


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        ([""], "begin with a name"),
        (["quantization=fp8"], "begin with a name"),
        (["fp8 quantization"], "not OPTION=VALUE"),
        (["fp8 quantisation=fp8"], "quantization"),
        (["small max_num_seqs=many"], "max_num_seqs"),
        (["one", "one"], "a name of its own"),
    ],
)
def test_a_wrong_variant_is_refused(texts: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_variants(texts)


def test_variants_do_not_write_over_each_other() -> None:
    with pytest.raises(ConfigError, match="variant"):
        file_of("c.json", Variant("fp8"), num_variants=2)


def test_one_table_has_the_errors_of_all_checks() -> None:
    off = simulated(None, "off")
    slow = simulated(None, "off", host=dataclasses.replace(calibration().host, before_s=0.01))
    sides = [OnlineMetrics.of(done.timelines, done.duration_s) for done in (off, slow)]
    checks = [Check(name, 2, None, None, 1.0, error_rows(*pair), (), *pair) for name, pair in
              (("same", (sides[0], sides[0])), ("slow", (sides[0], sides[1])))]  # fmt: skip
    titles, rows = errors_table(checks)
    assert all(len(row) == len(titles) for row in rows)
    assert rows[0][0] == "same, 2, all at once" and rows[0][-1] == "7 of 7" and "!" not in "".join(rows[0])
    assert rows[1][-1] != "7 of 7" and "!" in "".join(rows[1])
    checks = [dataclasses.replace(one, rows=error_rows(one.measured, one.simulated, one.measured)) for one in checks]
    assert errors_table(checks, at_measured_speed=True)[1][1][-1] == "7 of 7", "what is left without errors of steps"
