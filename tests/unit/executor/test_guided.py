"""Steps with guided requests around an executor: when they run forward, when they sample, and what goes wrong."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from headway.core import Request, RequestStatus, SchedulerOutput
from headway.core.scheduler_output import NewRequest, ScheduledRequest
from headway.executor.fake import FakeExecutor, FakeStep
from headway.executor.guided import GuidedExecutor
from headway.sampling_params import SamplingParams
from headway.structured.guides import GuidedShare, GuidedStep, GuideEnd, Guides, TokenMasks

EVERYTHING = np.full(1, 0xFFFFFFFF, dtype=np.uint32)


class Executor(FakeExecutor):
    def __init__(self, events: list[str], max_in_flight: int) -> None:
        super().__init__(lambda name, count: 7, max_in_flight=max_in_flight)
        self._events = events

    def submit(self, output: SchedulerOutput) -> Step:
        self._events.append(f"submit {output.step_id}")
        return self._begin(output)

    def forward(self, output: SchedulerOutput) -> Step:
        self._events.append(f"forward {output.step_id}")
        return self._begin(output)

    def _begin(self, output: SchedulerOutput) -> Step:
        super().submit(output)
        self._in_flight[-1] = step = Step(self, output, self._events)
        return step


class Step(FakeStep):
    def __init__(self, executor: Executor, output: SchedulerOutput, events: list[str]) -> None:
        super().__init__(executor, output)
        self._events, self._name = events, output.step_id

    def sample(self, masks: TokenMasks) -> FakeStep:
        self._events.append(f"sample {self._name}")
        return super().sample(masks)


class Scripted(Guides):
    """Guides that allow everything, and end requests when told to."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(None, 32)
        self.ends: tuple[GuideEnd, ...] = ()
        self.fails_with: Exception | None = None
        self._events = events

    def begin(self, step: Any) -> Future[GuidedStep]:
        self._events.append("masks")
        names = tuple(share.guide.request.request_id for share in step)
        found: Future[GuidedStep] = Future()
        if self.fails_with is not None:
            found.set_exception(self.fails_with)
        else:
            masks = TokenMasks(names, (1,) * len(names), np.stack([EVERYTHING] * len(names)))
            found.set_result(GuidedStep(masks, self.ends))
        return found


class World:
    """A request, whose tokens are known one step late."""

    def __init__(self, *, max_in_flight: int = 2) -> None:
        self.events: list[str] = []
        self.guides = Scripted(self.events)
        self.executor = GuidedExecutor(Executor(self.events, max_in_flight), self.guides)
        self.request = Request("r", [1, 2], max_tokens=20, sampling_params=SamplingParams(allowed_token_ids=[7]))

    def plan(self, step_id: int) -> SchedulerOutput:
        own = self.request
        new = (NewRequest("r", own.prompt_token_ids, (), own.sampling_params),) if step_id == 0 else ()
        num_tokens = own.num_remaining_tokens
        share = ScheduledRequest("r", num_tokens, own.num_computed_tokens, (), True)
        own.advance(num_tokens, 1)
        return SchedulerOutput(step_id, new, (share,), (), (), num_tokens)


def test_an_engine_without_guided_requests_runs_its_steps_as_they_are() -> None:
    world = World()
    world.executor.submit(world.plan(0)).result()
    assert world.events == ["submit 0"]


def test_a_step_samples_when_the_result_before_it_is_known_and_before_the_next_is_submitted() -> None:
    world = World()
    world.guides.add(world.request)
    first = world.executor.submit(world.plan(0))
    assert world.events == ["masks", "forward 0"], "nothing is pending: masks are computed beside forward"
    second = world.executor.submit(world.plan(1))
    assert world.events[2:] == ["sample 0", "forward 1"], "its masks depend on the first one's token"
    (token_id,) = first.result().sampled["r"].token_ids
    world.request.append_output_token(token_id)
    world.executor.results_taken()
    assert world.events[4:] == ["masks"], "computed while the engine makes outputs"
    world.executor.submit(world.plan(2))
    assert world.events[5:] == ["sample 1", "forward 2"]
    assert second.result().sampled["r"].token_ids == (7,)


def test_a_result_that_is_asked_for_needs_no_other_call() -> None:
    world = World(max_in_flight=1)
    world.guides.add(world.request)
    assert world.executor.submit(world.plan(0)).result().sampled["r"].token_ids == (7,)
    assert world.events == ["masks", "forward 0", "sample 0"]


def test_no_step_is_behind_one_that_waits_for_masks() -> None:
    assert World(max_in_flight=3).executor.max_in_flight == 2


def test_guides_end_requests_with_the_result() -> None:
    world = World()
    world.guides.add(world.request)
    world.guides.ends = (GuideEnd("r", "the grammar broke"), GuideEnd("s", None))
    result = world.executor.submit(world.plan(0)).result()
    assert result.sampled["r"].error == "the grammar broke"
    assert result.stopped == {"s"}


def test_masks_that_fail_fail_their_step_and_no_other() -> None:
    world = World()
    world.guides.add(world.request)
    world.guides.fails_with = RuntimeError("no masks")
    first = world.executor.submit(world.plan(0))
    world.guides.fails_with = None
    world.executor.submit(world.plan(1))
    with pytest.raises(RuntimeError, match="no masks"):
        first.result()


def test_a_guide_leaves_with_its_request() -> None:
    world = World()
    world.guides.add(world.request)
    share = GuidedShare(world.guides.live["r"], ())
    world.request.move_to(RequestStatus.FINISHED_ABORTED)
    world.executor.results_taken()
    assert not world.guides.live
    real = Guides(None, 32)
    assert real.begin([share]).result().masks.request_ids == (), "a step in flight has nothing to choose for it"
    real.close()
