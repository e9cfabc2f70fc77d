"""Guesses from a request's own tokens, and which of them are verified."""

from __future__ import annotations

import random

import pytest

from headway.config import CacheConfig, EngineConfig, SchedulerConfig
from headway.core import KVCacheManager, Request, Scheduler
from headway.core.scheduler_output import ModelRunnerOutput, SampledTokens, SchedulerOutput
from headway.core.speculation import MAX_MATCH, MIN_MATCH, NgramDraft, NgramProposer
from headway.errors import ConfigError
from headway.lab.sim.simulate import simulate

FREE, COSTLY = 1e-6, 1.0


def request(tokens: list[int], *, num_prompt: int | None = None, max_tokens: int = 100) -> Request:
    num_prompt = len(tokens) if num_prompt is None else num_prompt
    made = Request("r", tokens[:num_prompt], max_tokens=max_tokens)
    for token in tokens[num_prompt:]:
        made.append_output_token(token)
    return made


def looked_up(tokens: list[int], max_tokens: int) -> NgramDraft | None:
    """The definition, by trying everything."""
    size = len(tokens)
    for length in range(min(MAX_MATCH, size - 1), MIN_MATCH - 1, -1):
        for end in range(size - 2, length - 2, -1):
            if tokens[end - length + 1 : end + 1] == tokens[size - length :]:
                found = tokens[end + 1 :]
                while len(found) < max_tokens:
                    found.append(found[len(found) - (size - end - 1)])
                return NgramDraft(tuple(found[:max_tokens]), length)
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
    assert proposer.propose(made, 2) == NgramDraft((3, 9), 2)
    assert proposer.propose(request([5, 6, 5, 6]), 5) == NgramDraft((5, 6, 5, 6, 5), 2)


class Machine:
    """A scheduler whose steps take what they cost: so much, and so much for each token."""

    def __init__(self, token_s: float, *, num_requests: int = 1, is_right: float = 1.0, **options: object) -> None:
        config = SchedulerConfig(speculation="ngram", **options).resolve("cpu")  # type: ignore[arg-type]
        self.scheduler = Scheduler(config, KVCacheManager(num_blocks=4000, block_size=16))
        assert self.scheduler.speculation is not None
        self.speculation = self.scheduler.speculation
        self._token_s, self._is_right, self._rng = token_s, is_right, random.Random(5)
        self.num_steps = self.num_tokens = 0
        self.seconds = 0.0
        for number in range(num_requests):
            self.scheduler.add_request(Request(f"r{number}", [1, 2, 3, 4] * 8, max_tokens=900))

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        duration_s = 1.0 + self._token_s * output.num_scheduled_tokens
        sampled = {}
        for share in output.scheduled:
            if share.samples:
                right = 0
                while right < len(share.drafts) and self._rng.random() < self._is_right:
                    right += 1
                sampled[share.request_id] = SampledTokens((*share.drafts[:right], self._next(share.request_id)))
                self.num_tokens += right + 1
        self.scheduler.update(output, ModelRunnerOutput(sampled, {}), duration_s=duration_s)
        self.num_steps += 1
        self.seconds += duration_s
        return output

    def _next(self, request_id: str) -> int:
        found = self.scheduler.requests[request_id]
        return found.num_known_tokens % 4 + 1

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
    assert machine.speculation.accepted_at[0] >= machine.speculation.accepted_at[5] >= 50


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


def test_short_ends_and_small_steps_limit_drafts() -> None:
    machine = Machine(FREE, max_num_seqs=4, max_num_batched_tokens=6, num_requests=4, is_right=1.0)
    for output in machine.steps(60):
        assert output.num_scheduled_tokens <= 6
    last = Machine(FREE)
    while last.scheduler.has_unfinished_requests:
        last.step()
    assert last.num_tokens == 900


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ConfigError, match="for the CPU so far"):
        SchedulerConfig(speculation="ngram").resolve("cuda")
    assert SchedulerConfig(speculation="auto").resolve("cuda").speculation == "off"
    assert SchedulerConfig(speculation="auto").resolve("cpu").speculation == "ngram"
    with pytest.raises(ConfigError, match="async_scheduling"):
        EngineConfig.from_options(speculation="ngram", async_scheduling=True)
    with pytest.raises(ConfigError, match="max_draft_tokens"):
        SchedulerConfig(max_draft_tokens=0)
    with pytest.raises(ConfigError, match="no text to guess"):
        simulate([], None, SchedulerConfig(speculation="ngram").resolve("cpu"), CacheConfig().resolve("cpu"))  # type: ignore[arg-type]
