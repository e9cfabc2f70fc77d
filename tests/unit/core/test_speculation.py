"""Guesses from a request's own tokens, and which of them are verified."""

from __future__ import annotations

import random
from collections import deque

import pytest

from headway.config import CacheConfig, SchedulerConfig
from headway.core import KVCacheManager, Request, Scheduler
from headway.core.create import create_scheduler
from headway.core.policy.fair import GENERATED_WEIGHT, FairPolicy
from headway.core.proposers import MAX_MATCH, MIN_MATCH, Draft, NgramProposer
from headway.core.scheduler_output import ModelRunnerOutput, SampledTokens, SchedulerOutput
from headway.core.tuning import SPECULATION
from headway.errors import ConfigError
from headway_lab.sim.simulate import simulate
from tests.unit.no_model import nominal_plan

FREE, COSTLY = 1e-6, 1.0


def request(tokens: list[int], *, num_prompt: int | None = None, max_tokens: int = 100) -> Request:
    num_prompt = len(tokens) if num_prompt is None else num_prompt
    made = Request("r", tokens[:num_prompt], max_tokens=max_tokens)
    for token in tokens[num_prompt:]:
        made.append_output_token(token)
    return made


def looked_up(tokens: list[int], max_tokens: int) -> Draft | None:
    """The definition, by trying everything."""
    size = len(tokens)
    for length in range(min(MAX_MATCH, size - 1), MIN_MATCH - 1, -1):
        for end in range(size - 2, length - 2, -1):
            if tokens[end - length + 1 : end + 1] == tokens[size - length :]:
                found = tokens[end + 1 :]
                while len(found) < max_tokens:
                    found.append(found[len(found) - (size - end - 1)])
                return Draft(tuple(found[:max_tokens]), length)
    return None


def test_guesses_are_those_of_a_search_by_hand() -> None:
    rng = random.Random(3)
    num_found = 0
    for _ in range(400):
        tokens = [rng.randrange(rng.choice([2, 4, 9])) for _ in range(rng.randrange(1, 60))]
        max_tokens = rng.randrange(1, 9)
        expected = looked_up(tokens, max_tokens)
        assert (
            NgramProposer().propose(request(tokens, num_prompt=rng.randrange(len(tokens)) + 1), max_tokens) == expected
        )
        num_found += expected is not None
    assert 200 < num_found < 400


def test_tokens_that_come_later_are_looked_up_too() -> None:
    proposer, made = NgramProposer(), request([1, 2, 3, 9])
    assert proposer.propose(made, 2) is None
    made.append_output_token(1)
    assert proposer.propose(made, 2) is None
    made.append_output_token(2)
    assert proposer.propose(made, 2) == Draft((3, 9), 2)
    assert proposer.propose(request([5, 6, 5, 6]), 5) == Draft((5, 6, 5, 6, 5), 2)


class Machine:
    """A scheduler whose steps take what they cost: so much, and so much for each token. `is_ahead`: two steps
    are in flight, and guesses are made here."""

    def __init__(
        self,
        token_s: float,
        *,
        num_requests: int = 1,
        is_right: float = 1.0,
        is_ahead: bool = False,
        max_tokens: int = 900,
        **options: object,
    ) -> None:
        config = SchedulerConfig(speculation="ngram", **options).resolve("cpu")  # type: ignore[arg-type]
        self.scheduler = Scheduler(config, KVCacheManager(num_blocks=4000, block_size=16))
        assert self.scheduler.speculation is not None
        self.speculation = self.scheduler.speculation
        self._token_s, self._is_right = token_s, is_right
        if is_ahead:
            self.speculation.go_ahead()
        self._in_flight: deque[SchedulerOutput] = deque()
        self._num_tokens: dict[str, int] = {}
        self.num_steps = self.num_tokens = 0
        self.seconds = 0.0
        for number in range(num_requests):
            self.scheduler.add_request(Request(f"r{number}", [1, 2, 3, 4] * 8, max_tokens=max_tokens))

    def step(self) -> SchedulerOutput:
        while len(self._in_flight) < 1 + self.speculation.is_ahead:
            output = self.scheduler.schedule()
            if output.is_empty:
                break
            self._in_flight.append(output)
        output = self._in_flight.popleft()
        duration_s = 1.0 + self._token_s * output.num_scheduled_tokens
        sampled = {}
        for share in output.scheduled:
            if share.samples:
                first = self._num_tokens.get(share.request_id, share.num_computed_tokens + share.num_tokens)
                token_ids = [self._token(share.request_id, first)]
                for place, draft in enumerate(share.drafts):
                    if token_ids[-1] != (draft if draft >= 0 else (first + place) % 4 + 1):
                        break
                    token_ids.append(self._token(share.request_id, first + len(token_ids)))
                sampled[share.request_id] = SampledTokens(tuple(token_ids))
                self.num_tokens += len(token_ids)
                self._num_tokens[share.request_id] = first + len(token_ids)
        self.scheduler.update(output, ModelRunnerOutput(sampled, {}), duration_s=duration_s)
        self.num_steps += 1
        self.seconds += duration_s
        return output

    def _token(self, request_id: str, position: int) -> int:
        """The prompt goes on, but for some tokens that have never been."""
        goes_on = random.Random(f"{request_id} {position}").random() < self._is_right
        return position % 4 + 1 if goes_on else 1000 + position

    def steps(self, count: int) -> list[SchedulerOutput]:
        return [self.step() for _ in range(count)]


def num_drafts(outputs: list[SchedulerOutput]) -> int:
    return sum(len(share.drafts) for output in outputs for share in output.scheduled)


def test_where_tokens_cost_nothing_and_guesses_are_right_all_are_verified() -> None:
    machine = Machine(FREE, max_draft_tokens=6)
    machine.steps(10)
    outputs = machine.steps(50)
    assert num_drafts(outputs) == 6 * 50
    assert machine.speculation.stats.num_accepted_tokens == machine.speculation.stats.num_draft_tokens
    assert machine.speculation.stats.num_accepted_at[0] >= machine.speculation.stats.num_accepted_at[5] >= 50


@pytest.mark.parametrize("num_requests", [1, 30])
def test_guesses_that_are_wrong_are_hardly_ever_tried_again(num_requests: int) -> None:
    machine = Machine(0.3, num_requests=num_requests, is_right=0.0)
    machine.steps(30)
    assert num_drafts(machine.steps(400)) <= 0.02 * 400 * num_requests


def test_where_each_token_takes_its_time_nothing_is_guessed() -> None:
    """Even if every second guess is right: a token of the step costs nearly all that a step of its own would."""
    machine = Machine(COSTLY, num_requests=40, is_right=0.5)
    machine.steps(60)
    assert num_drafts(machine.steps(100)) <= 0.02 * 40 * 100


@pytest.mark.parametrize("is_right", [0.0, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("token_s", [FREE, 0.05, 0.5, 5.0])
@pytest.mark.parametrize("num_requests", [1, 12])
def test_it_is_never_much_slower_than_without(num_requests: int, token_s: float, is_right: float) -> None:
    machine = Machine(token_s, num_requests=num_requests, is_right=is_right)
    machine.steps(40)
    machine.num_tokens, machine.seconds = 0, 0.0
    machine.steps(150)
    without = num_requests / (1.0 + token_s * num_requests)
    assert machine.num_tokens / machine.seconds >= 0.97 * without


@pytest.mark.parametrize("is_right", [0.0, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("token_s", [FREE, 0.01, 0.1])
@pytest.mark.parametrize("num_requests", [1, 12, 50])
def test_where_the_device_guesses_it_is_not_slower_either(num_requests: int, token_s: float, is_right: float) -> None:
    machine = Machine(token_s, num_requests=num_requests, is_right=is_right, is_ahead=True, max_tokens=9000)
    machine.steps(100)
    machine.num_tokens, machine.seconds = 0, 0.0
    machine.steps(300)
    without = num_requests / (1.0 + token_s * num_requests)
    assert machine.num_tokens / machine.seconds >= 0.98 * without
    if is_right == 0.95 and token_s * num_requests < 0.5:
        assert machine.num_tokens / machine.seconds >= 1.5 * without


def test_steps_that_take_no_time_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock may be too coarse."""
    machine = Machine(FREE)
    update = machine.scheduler.update

    def at_once(output: SchedulerOutput, result: ModelRunnerOutput, *, duration_s: float) -> object:
        return update(output, result, duration_s=0.0)

    monkeypatch.setattr(machine.scheduler, "update", at_once)
    assert num_drafts(machine.steps(20)) == 0


def test_a_step_with_as_many_requests_as_lines_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(FREE, num_requests=8, max_num_seqs=8, max_num_batched_tokens=8, is_ahead=True)
    monkeypatch.setattr(machine.speculation, "_guess", lambda *_: pytest.fail("asked"))
    machine.steps(40)


def test_synthetic_acceptance_brings_as_many_tokens_as_wanted() -> None:
    settings = SchedulerConfig(speculation="ngram", spec_synthetic_acceptance=2.5, max_draft_tokens=4).resolve("cpu")
    chance = settings.synthetic_chance
    assert chance is not None
    assert sum(chance**place for place in range(5)) == pytest.approx(2.5)
    one = SchedulerConfig(speculation="ngram", spec_synthetic_acceptance=1.0).resolve("cpu").synthetic_chance
    assert one == pytest.approx(0.0)


def test_short_ends_and_small_steps_limit_drafts() -> None:
    machine = Machine(FREE, max_num_seqs=4, max_num_batched_tokens=6, num_requests=4, is_right=1.0)
    for output in machine.steps(60):
        assert output.num_scheduled_tokens <= 6
    last = Machine(FREE)
    while last.scheduler.has_unfinished_requests:
        last.step()
    assert last.num_tokens == 900


def test_what_does_not_go_together_is_refused() -> None:
    assert SchedulerConfig(speculation="auto").resolve("cuda").speculation == "ngram"
    with pytest.raises(ConfigError, match="at most 64"):
        SchedulerConfig(max_draft_tokens=65)
    assert SchedulerConfig(speculation="auto").resolve("cpu").speculation == "ngram"
    with pytest.raises(ConfigError, match="speculation is off"):
        SchedulerConfig(spec_synthetic_acceptance=2.0)
    with pytest.raises(ConfigError, match="from 1 to 1"):
        SchedulerConfig(speculation="ngram", spec_synthetic_acceptance=12.0)
    with pytest.raises(ConfigError, match="max_draft_tokens"):
        SchedulerConfig(max_draft_tokens=0)
    with pytest.raises(ConfigError, match="has no text to guess"):
        simulate([], None, SchedulerConfig(speculation="ngram").resolve("cpu"), CacheConfig().resolve("cpu"))  # type: ignore[arg-type]


def test_a_tenant_pays_for_its_tokens_not_for_guesses() -> None:
    paid = []
    for is_right in (0.6, 0.8):
        machine = Machine(FREE, num_requests=3, is_right=is_right, scheduling_policy="fair", max_tokens=200)
        tokens = machine.speculation.stats
        while machine.num_tokens < 300:
            machine.step()
        policy = machine.scheduler.policy
        assert isinstance(policy, FairPolicy)
        computed = sum(request.num_tokens - 1 for request in machine.scheduler.requests.values())
        prompts = sum(request.num_prompt_tokens for request in machine.scheduler.requests.values())
        paid.append(policy.served_to("") - prompts - GENERATED_WEIGHT * (computed - prompts))
        assert tokens.num_draft_tokens > tokens.num_accepted_tokens
    assert paid == [0.0, 0.0]


def test_a_scheduler_takes_over_what_another_has_learned() -> None:
    def fresh(most: int = 2048) -> Scheduler:
        config = SchedulerConfig(max_num_batched_tokens=most, max_num_seqs=8, speculation="ngram").resolve("cpu")
        return create_scheduler(
            config, CacheConfig().resolve("cpu"), nominal_plan(num_blocks=64, block_size=16, max_model_len=512)
        )

    def left_s(scheduler: Scheduler) -> float | None:
        """What a step of 100 ms with a chunk would take without its four guesses."""
        assert scheduler.speculation is not None
        return scheduler.speculation.observe_step(0.1, num_drafts=4, num_decodes=1, num_chunk_tokens=10)

    taught = fresh()
    assert taught.speculation is not None
    for num_drafts, seconds in ((0, 0.010), (4, 0.030)) * SPECULATION.steps_to_trust:
        taught.speculation.observe_step(seconds, num_drafts=num_drafts, num_decodes=1, num_chunk_tokens=0)
    for num_tokens, seconds in ((0, 0.010), (1024, 0.112)):
        taught.pace.step_time.observe(num_tokens, seconds)
    learned, small = fresh(), fresh(most=64)
    assert learned.pace.step_time.chunk_tokens(0.02) == 512, "nothing is known yet"
    for scheduler in (learned, small):
        scheduler.learn_from(taught)
        assert left_s(scheduler) == left_s(taught) != left_s(fresh())
    assert learned.pace.step_time.chunk_tokens(0.02) == taught.pace.step_time.chunk_tokens(0.02) < 200
    assert small.pace.step_time.chunk_tokens(10.0) == 64, "limits stay"
    taught.pace.step_time.observe(1024, 0.001)
    assert learned.pace.step_time.chunk_tokens(0.02) < 200, "and both learn on for themselves"
