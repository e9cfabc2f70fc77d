"""A scheduler that is driven call by call, with the memory of a runner behind it.

The memory computes every plan, so a block that is shared, copied or found again must hold exactly the tokens that it is
taken for. Subclasses look at what happens before and after each call.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from headway.core import (
    DiskIndex,
    HostTier,
    KVCacheManager,
    ModelRunnerOutput,
    PrefixCache,
    Request,
    RequestStatus,
    RequestUpdate,
    SampledTokens,
    SchedulerOutput,
    check_invariants,
)
from headway.core.create import scheduler_of
from headway.errors import RequestTooLargeError
from headway.settings import SchedulerSettings
from tests.property.slot_memory import SlotMemory

STOP_TOKEN = 9


@dataclass(frozen=True)
class Setting:
    """One engine."""

    config: SchedulerSettings
    num_blocks: int
    block_size: int
    prefix_caching: bool = False
    num_host_slots: int = 0
    num_disk_blocks: int = 0
    restore_block_s: float = 0.0
    reserve_tokens: int = 0


@dataclass(frozen=True)
class Flight:
    """A step whose result has not been told."""

    output: SchedulerOutput
    requests: tuple[Request, ...]
    """One for each of `output.scheduled`: by then their ids may be those of others."""
    tokens: Mapping[str, int]
    """What it samples."""

    @property
    def names(self) -> list[str]:
        return [share.request_id for share in self.output.scheduled]


@dataclass(frozen=True)
class Result:
    """What is told of a flight: tokens, and which requests failed."""

    flight: Flight
    tokens: Mapping[str, int]
    failing: Collection[str]
    duration_s: float


def _host_tier(setting: Setting) -> HostTier | None:
    if not setting.num_host_slots:
        return None
    disk = DiskIndex(setting.num_disk_blocks) if setting.num_disk_blocks else None
    return HostTier(setting.num_host_slots, disk=disk)


class DrivenScheduler:
    """`events` counts what really happened, for tests that want to see it happen."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        kv_cache = KVCacheManager(
            num_blocks=setting.num_blocks,
            block_size=setting.block_size,
            prefix_cache=PrefixCache() if setting.prefix_caching else None,
            host_tier=_host_tier(setting),
            restore_block_s=setting.restore_block_s,
            reserve_tokens=setting.reserve_tokens,
        )
        self.scheduler = scheduler_of(setting.config, kv_cache)
        self.memory = SlotMemory(setting.num_blocks, setting.block_size)
        self.in_flight: deque[Flight] = deque()
        self.is_broken = False
        """Whether the last step could not be submitted: its result must be told before the next one is planned."""
        self.requests: dict[str, Request] = {}
        """By id, the last one that had it."""
        self.trace: list[tuple[tuple[str, int], ...]] = []
        self.events: Counter[str] = Counter()
        self._left_batch: set[str] = set()  # requests that have ended in it and the runner has not been told of
        self._preempted: list[str] = []  # likewise, that were preempted

    @property
    def live(self) -> list[str]:
        return list(self.scheduler.requests)

    def counts(self) -> Mapping[str, int]:
        return self.events

    # ---- calls ----------------------------------------------------------------------------------------------------

    def add(self, request: Request, *, now_s: float | None = None) -> bool:
        """Returns whether it was accepted."""
        try:
            self.scheduler.add_request(request, now_s=now_s)
        except RequestTooLargeError:
            self.events["refused"] += 1
            return False
        name = request.request_id
        self.events["id used again in flight"] += any(name in flight.names for flight in self.in_flight)
        self.requests[name] = request
        return True

    def abort(self, name: str) -> None:
        if name in self.scheduler.kv_cache.holdings:
            self._left_batch.add(name)
        self.scheduler.finish_request(name, RequestStatus.FINISHED_ABORTED)
        self.on_aborted(name)
        self.check()

    def launch(self, draw_token: Callable[[], int], now_s: float = 0.0, *, breaks: bool = False) -> bool:
        """Plan a step and run it, unless it `breaks`; its tokens are drawn now and told later. Returns whether there
        was one."""
        assert not self.is_broken
        self.on_planning(now_s)
        running = {one.request_id: one.num_preemptions for one in self.scheduler.live.running}
        output = self.scheduler.schedule(now_s=now_s)
        preempted = [name for name, count in running.items() if self.requests[name].num_preemptions > count]
        self.events["preempted"] += len(preempted)
        self._preempted += preempted
        self.on_planned(output)
        if output.is_empty:
            assert not output.preempted_request_ids and not output.finished_request_ids and not output.moves.has_copies
            self.check()
            return False
        assert sorted(output.finished_request_ids) == sorted(self._left_batch), "the runner forgets other requests"
        assert sorted(output.preempted_request_ids) == sorted(self._preempted), "the runner forgets other requests"
        self._left_batch, self._preempted = set(), []
        requests = tuple(self.scheduler.requests[share.request_id] for share in output.scheduled)
        tokens = {share.request_id: draw_token() for share in output.scheduled if share.samples}
        self.is_broken = breaks
        if breaks:
            self.memory.drop(output)
        else:
            self.memory.run(output, tokens)
        self.in_flight.append(Flight(output, requests, tokens))
        self.trace.append(tuple((share.request_id, share.num_tokens) for share in output.scheduled))
        self.check()
        return True

    def land(
        self, *, duration_s: float = 0.0, failed: Collection[str] = (), forgotten: Collection[str] = ()
    ) -> list[Request]:
        """Tell the result of the oldest step. `failed` got an error, `forgotten` got nothing. Returns who ended."""
        flight = self.in_flight.popleft()
        is_broken, self.is_broken = self.is_broken and not self.in_flight, self.is_broken and bool(self.in_flight)
        failing = {name for name in flight.names if is_broken or name in failed}
        self.events["broken"] += is_broken
        tokens = {n: token for n, token in flight.tokens.items() if n not in failing and n not in forgotten}
        for name in [*failing, *(flight.tokens.keys() - tokens.keys())]:
            self.memory.fail(flight.output.step_id, name)
        sampled = {name: SampledTokens((token,)) for name, token in tokens.items()}
        sampled |= {name: SampledTokens((), error="boom") for name in failing}
        result = Result(flight, tokens, failing, duration_s)
        self._count(result)
        updates = self._end(
            lambda: self.scheduler.update(flight.output, ModelRunnerOutput(sampled, {}), duration_s=duration_s)
        )
        self.on_landed(result, updates)
        self.check()
        return self._ended(updates)

    def release(self) -> list[Request]:
        """Nothing could be planned: perhaps because all of a sealed batch are done. Returns who ended."""
        updates = self._end(self.scheduler.take_ends)
        self.on_released(updates)
        self.check()
        return self._ended(updates)

    def _end(self, call: Callable[[], list[RequestUpdate]]) -> list[RequestUpdate]:
        """A call that may end requests."""
        in_batch = {*self.scheduler.kv_cache.holdings}
        updates = call()
        self._left_batch |= {one.request_id for one in updates if one.finish_status is not None} & in_batch
        return updates

    def _ended(self, updates: list[RequestUpdate]) -> list[Request]:
        return [self.requests[update.request_id] for update in updates if update.finish_status is not None]

    def _count(self, result: Result) -> None:
        sampling = [one for one in result.flight.requests if one.request_id in result.flight.tokens]
        self.events["dropped"] += sum(one.status.is_finished for one in sampling)
        self.events["late for a preempted one"] += sum(one.status is RequestStatus.PREEMPTED for one in sampling)
        self.events["failed"] += len(result.failing)

    # ---- what subclasses look at ----------------------------------------------------------------------------------

    def check(self) -> None:
        """After each call."""
        check_invariants(self.scheduler)

    def on_aborted(self, name: str) -> None: ...

    def on_planning(self, now_s: float) -> None: ...

    def on_planned(self, output: SchedulerOutput) -> None: ...

    def on_landed(self, result: Result, updates: list[RequestUpdate]) -> None: ...

    def on_released(self, updates: list[RequestUpdate]) -> None: ...
