"""Replaying work on a virtual clock: what `headway_lab.bench.replay` does, in seconds instead of hours.

A replica is the real loop, scheduler and cache on a simulated device, with its own clock. The busy replica whose clock
is earliest steps next. A request is routed when the clocks of all busy replicas have reached its arrival, so a router
never sees the future.

With roles, some replicas only compute prompts. A prompt is a request for one token there. Then the request comes to the
replica that was chosen for it. The scheduler of this replica has the blocks fetched and admits the request when they
have arrived: they are copied in, and the rest is computed.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headway.config import CacheConfig
from headway.core import Request, RequestStatus, RequestUpdate, Scheduler, SchedulerOutput
from headway.core.kv.cache_report import CacheReport
from headway.core.token_time import TokenTimeStats
from headway.core.utilisation import UtilisationStats
from headway.engine.engine_core import CoreStep
from headway.errors import ConfigError
from headway.front.roles import Roles
from headway.front.router import Router, expected_tokens
from headway.settings import CacheSettings, SchedulerSettings
from headway_lab.bench.replay import Agenda
from headway_lab.bench.timelines import BatchSample, RequestTimeline, SampleLog, sample_of
from headway_lab.sim.calibration import Machine
from headway_lab.sim.prefill_replicas import PrefillReplicas, Transfer
from headway_lab.sim.replica import Replica, Variation
from headway_lab.sim.setup import check_guesses
from headway_lab.workload.bench_requests import BenchRequest

if TYPE_CHECKING:
    from headway.progress import Meter


MOST_REPLICAS = 256
"""Each replica has its own scheduler and block pool, which take some megabytes and a part of a second to make."""


@dataclass
class Simulation:
    timelines: list[RequestTimeline]
    duration_s: float = 0.0
    num_steps: int = 0
    busy_s: float = 0.0
    """Busy seconds of all devices together."""
    token_time: TokenTimeStats = field(default_factory=TokenTimeStats)
    waste: list[float] = field(default_factory=list)
    """Before each step with a request in the batch: the share of the reserved KV memory that holds nothing."""
    num_running: list[int] = field(default_factory=list)
    """At the same times, how many requests were in the batch."""
    most_waiting: int = 0
    """The most requests on one replica that found no room in a step after it was planned."""
    samples: Sequence[BatchSample] = ()
    """The batches after steps, all replicas together; thinned."""
    num_routed: list[int] = field(default_factory=list)
    """How many requests each replica got."""
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    """How many of the tokens looked up in prefix caches were found, without blocks that were sent for."""
    num_prefill: int = 0
    """The number of replicas that only compute prompts; they are the last of all replicas."""
    num_elsewhere: int = 0
    """The number of prompts that these replicas computed."""
    transfers: Sequence[Transfer] = ()
    """One for each of these prompts that had missing blocks; several if it begins with all of another prompt."""
    utilisation: UtilisationStats | None = None
    """What steps took from their devices, all replicas together, if the machine's costs are known."""
    hidden_s: float = 0.0
    """The seconds of transfers during which the receiving replica computed."""

    @property
    def hidden_share(self) -> float:
        """`hidden_s` as a share of the time of all transfers; 0 if there were none."""
        travelled_s = sum(transfer.to_s - transfer.from_s for transfer in self.transfers)
        return self.hidden_s / travelled_s if travelled_s else 0.0


def simulate(
    work: Sequence[BenchRequest],
    machine: Machine,
    scheduler: SchedulerSettings,
    cache: CacheSettings | None = None,
    *,
    num_replicas: int = 1,
    router: str = "round-robin",
    roles: Roles | None = None,
    seed: int | None = 0,
    speed: Callable[[float], float] | None = None,
    answers: Sequence[Sequence[int]] | None = None,
    learned: Scheduler | None = None,
    forecasts: bool = False,
    progress: Meter | None = None,
) -> Simulation:
    """Replay the work from its first arrival to the end of its last request.

    `roles` are those of the replicas; without any, all do both. `seed` draws the spread of steps around their means;
    with `None`, every step takes what the cost model says. `speed`: the factor by which steps are longer at some time.
    `answers`: the tokens of each request's answer, in which guesses are looked up. `learned`: replicas begin with what
    this scheduler knows of steps and guesses. `forecasts`: note when the first token of each request was expected.
    """
    if num_replicas > MOST_REPLICAS:
        raise ConfigError(f"A simulation has at most {MOST_REPLICAS} replicas, not {num_replicas:,}.")
    check_guesses(machine, scheduler, answers)
    texts = None if answers is None else {str(place): answer for place, answer in enumerate(answers)}
    cache = cache or CacheConfig().resolve("cpu")  # nothing of it that counts here depends on the device
    variations = [Variation(None if seed is None else f"{seed}/{place}", speed) for place in range(num_replicas)]
    make = functools.partial(
        Replica, scheduler=scheduler, cache=cache, answers=texts, learned=learned, forecasts=forecasts
    )
    if roles is None:
        replicas = [make(machine, variation=each) for each in variations]
        return _Cluster(work, replicas, router, progress, max_num_seqs=scheduler.max_num_seqs).run()
    _check_roles(roles, machine, cache, num_replicas)
    decoding = dataclasses.replace(machine, num_host_slots=max(machine.num_host_slots, _num_staged(machine)))
    prefill = [make(machine, variation=each) for each in variations[roles.num_decode :]]
    apart = PrefillReplicas(prefill, roles.num_decode, router, machine, scheduler)
    replicas = [
        make(decoding, variation=each, arrivals=functools.partial(apart.fetch, place))
        for place, each in enumerate(variations[: roles.num_decode])
    ]
    apart.others = replicas
    return _Cluster(work, replicas, router, progress, max_num_seqs=scheduler.max_num_seqs, prefill=apart).run()


_STAGED_SHARE = 4


def _num_staged(machine: Machine) -> int:
    """Slots of host memory for received blocks, if none were calibrated; at least one prompt has room."""
    return max(machine.num_blocks // _STAGED_SHARE, -(-machine.max_model_len // machine.block_size))


def _check_roles(roles: Roles, machine: Machine, cache: CacheSettings, num_replicas: int) -> None:
    if roles.num_replicas != num_replicas:
        raise ConfigError(f"Roles {roles} are those of {roles.num_replicas} replicas, not of {num_replicas}.")
    if not cache.shares_prefixes:
        raise ConfigError("Blocks that come from other replicas are found in the prefix cache: leave it on with roles.")
    if not machine.bytes_per_block:
        raise ConfigError("How large a KV block is, and so how long it travels, was not measured: calibrate again.")


_News = tuple[float, int, int, Sequence[CacheReport], Sequence[RequestUpdate]]
"""(time, a number that orders equal times, the replica's place, its reports of a step)."""


class _Cluster:
    """A simulation under way."""

    def __init__(
        self,
        work: Sequence[BenchRequest],
        replicas: Sequence[Replica],
        router: str,
        progress: Meter | None,
        *,
        max_num_seqs: int,
        prefill: PrefillReplicas | None = None,
    ) -> None:
        self._work, self._progress, self._prefill = work, progress, prefill
        self._replicas = [*replicas, *(prefill.replicas if prefill is not None else ())]
        self._num_serving = len(replicas)
        self._block_size = replicas[0].core.scheduler.kv_cache.block_size
        self._router = Router(router, block_size=self._block_size, counts_uncached=prefill is not None)
        for place, replica in enumerate(replicas):
            self._router.add(place, max_num_seqs=max_num_seqs)
            if len(self._replicas) > 1 and self._router.needs_digests:
                replica.follow_cache()
        self._busy: list[tuple[float, int]] = []  # a heap of (its time, its place) of replicas with something to do
        self._news: list[_News] = []  # a heap of what the router learns, and when
        self._num_news = 0
        self._computed: list[tuple[float, int, int, Request]] = []  # a heap: when, a number, the place to go on at
        self._sent: set[str] = set()  # requests whose blocks are being fetched, not admitted yet
        self._agenda, self._log = Agenda(work), SampleLog()
        self.result = Simulation(
            [RequestTimeline(r.arrival_s, r.num_prompt_tokens, r.num_output_tokens) for r in work],
            num_routed=[0] * len(self._replicas),
            num_prefill=len(self._replicas) - len(replicas),
        )

    def run(self) -> Simulation:
        result, agenda = self.result, self._agenda
        while True:
            due_s = agenda.next_due_s
            computed_s = self._computed[0][0] if self._computed else float("inf")
            next_s = min(due_s, computed_s)
            if next_s < float("inf") and (not self._busy or next_s <= self._busy[0][0]):
                if computed_s <= due_s:
                    _, _, place, request = heapq.heappop(self._computed)
                    self._add(place, request, computed_s)
                    continue
                for index, _ in agenda.take_due(due_s):
                    self._route(index, due_s)
            elif self._busy:
                self._step(heapq.heappop(self._busy)[1])
            else:
                break
        result.duration_s = max(replica.now_s for replica in self._replicas)
        result.samples = self._log.samples
        for replica in self._replicas:
            result.num_steps += replica.executor.num_steps
            result.busy_s += replica.executor.busy_s
            result.token_time.add(replica.core.scheduler.token_time.stats)
            if replica.utilisation is not None:
                result.utilisation = result.utilisation or UtilisationStats()
                result.utilisation.add(replica.utilisation.stats)
            if (cache := replica.core.scheduler.kv_cache.prefix_cache) is not None:
                result.num_queried_tokens += cache.stats.num_queried_tokens
                result.num_hit_tokens += cache.stats.num_hit_tokens
        if self._prefill is not None:
            result.transfers = self._prefill.transfers
            result.hidden_s = sum(map(self._hidden_s, result.transfers))
        return result

    def _hidden_s(self, transfer: Transfer) -> float:
        """The seconds of this transfer during which the receiving replica computed."""
        spans = self._replicas[transfer.place].spans
        places = range(max(bisect.bisect(spans, (transfer.from_s,)) - 1, 0), len(spans))
        during = itertools.takewhile(lambda span: span[0] < transfer.to_s, map(spans.__getitem__, places))
        return sum(max(min(to_s, transfer.to_s) - max(from_s, transfer.from_s), 0.0) for from_s, to_s in during)

    def _step(self, place: int) -> None:
        """Run a step of the replica whose clock is earliest."""
        replica = self._replicas[place]
        _note_batch(self.result, replica.core.scheduler)
        step = replica.step()
        if replica.is_busy:
            heapq.heappush(self._busy, (replica.now_s, place))
        self._note_step(place, step)

    def _route(self, index: int, due_s: float) -> None:
        request = _request(str(index), self._work[index])
        place = 0 if len(self._replicas) == 1 else self._choose(request, due_s)
        self.result.timelines[index].arrival_s = due_s
        elsewhere = None if self._prefill is None else self._prefill.choose(request, self._router, place)
        if elsewhere is None:
            self._add(place, request, due_s)
        else:
            self._add(self._num_serving + elsewhere, _prompt_of(request), due_s)

    def _add(self, place: int, request: Request, at_s: float) -> None:
        self.result.num_routed[place] += 1
        replica = self._replicas[place]
        was_busy = replica.is_busy
        expected_s = replica.add(request, at_s=at_s)
        if place < self._num_serving:
            self.result.timelines[int(request.request_id)].expected_first_s = expected_s
        if not was_busy:
            heapq.heappush(self._busy, (replica.now_s, place))

    def _choose(self, request: Request, now_s: float) -> int:
        while self._news and self._news[0][0] <= now_s:
            _, _, place, reports, updates = heapq.heappop(self._news)
            self._learn(place, reports, updates)
        num_blocks = request.num_prompt_tokens // self._block_size
        max_tokens = request.max_total_tokens - request.num_prompt_tokens
        return self._router.route(
            request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            num_answer_tokens=expected_tokens(max_tokens, request.options.predicted_tokens),
            digests=lambda: request.block_digests(self._block_size, num_blocks)[:num_blocks],
        )

    def _tell(self, place: int, step: CoreStep) -> None:
        """Queue what the router learns of a step for the step's time, since replicas' clocks differ."""
        replica = self._replicas[place]
        heapq.heappush(self._news, (replica.now_s, self._num_news, place, list(replica.reports()), step.updates))
        self._num_news += 1

    def _learn(self, place: int, reports: Sequence[CacheReport], updates: Sequence[RequestUpdate]) -> None:
        router = self._router
        if self._prefill is not None and place >= self._num_serving:
            router, place = self._prefill.router, place - self._num_serving
        for report in reports:
            router.index.apply(place, report)
        for update in updates:
            if update.new_token_ids:
                router.note_tokens(update.request_id, len(update.new_token_ids))
            if update.finish_status is not None:
                router.end(update.request_id)

    def _note_step(self, place: int, step: CoreStep) -> None:
        if len(self._replicas) > 1:
            self._tell(place, step)
        replica = self._replicas[place]
        now_s, timelines = replica.now_s, self.result.timelines
        for update in step.updates:
            if update.finish_status is RequestStatus.FINISHED_ERROR:
                raise RuntimeError(f"request {update.request_id} failed: {update.error}")
            if place >= self._num_serving:
                self._go_on(place, update, now_s)
                continue
            timeline = timelines[int(update.request_id)]
            times_s, num_new = timeline.token_times_s, len(update.new_token_ids)
            if num_new == 1:
                times_s.append(now_s)
            else:
                times_s.extend([now_s] * num_new)
            if update.finish_status is None:
                continue
            self._agenda.ended(int(update.request_id), now_s)
            if self._progress is not None:
                self._progress.advance()
        self.result.most_waiting = max(self.result.most_waiting, len(replica.core.scheduler.live.waiting))
        for output in step.launched:
            for request_id in output.preempted_request_ids:
                timelines[int(request_id)].num_preemptions += 1
            if place < self._num_serving and self._sent:
                self._uncount_sent(output)
        if self._log.is_due(is_idle=not self._busy):
            self._log.add(self._sample(now_s))

    def _go_on(self, place: int, update: RequestUpdate, now_s: float) -> None:
        """A prompt has been computed: its request continues where it was routed, which asks for the blocks."""
        if self._prefill is not None and update.finish_status is not None:
            to, request = self._prefill.computed(place - self._num_serving, update.request_id)
            self.result.num_elsewhere += 1
            self._sent.add(update.request_id)
            heapq.heappush(self._computed, (now_s, self.result.num_elsewhere, to, request))

    def _uncount_sent(self, output: SchedulerOutput) -> None:
        """Take sent blocks out of the cache hits: only what was found where the prompt was computed counts."""
        for new in output.new_requests:
            if new.request_id in self._sent:
                self._sent.remove(new.request_id)
                self.result.num_queried_tokens -= len(new.prompt_token_ids)
                self.result.num_hit_tokens -= new.num_computed_tokens

    def _sample(self, at_s: float) -> BatchSample:
        """A sample of all replicas together."""
        if len(self._replicas) == 1:
            return sample_of(self._replicas[0].core.scheduler, at_s)
        each = [sample_of(replica.core.scheduler, at_s) for replica in self._replicas]
        num_running, num_waiting = sum(one.num_running for one in each), sum(one.num_waiting for one in each)
        return BatchSample(at_s, num_running, num_waiting, sum(one.kv_used for one in each) / len(each))


def _prompt_of(request: Request) -> Request:
    """The prompt alone, as a request for one token."""
    options = request.options
    if options.predicted_tokens is not None:
        options = dataclasses.replace(options, predicted_tokens=1.0)
    return Request(request.request_id, request.prompt_token_ids, max_tokens=1, options=options)


def _note_batch(result: Simulation, scheduler: Scheduler) -> None:
    if (waste := scheduler.kv_waste) is not None:
        result.waste.append(waste)
        result.num_running.append(len(scheduler.in_batch))


def _request(name: str, work: BenchRequest) -> Request:
    if work.num_choices != 1:
        raise ConfigError("The simulator has one answer for each request.")
    return Request(name, work.prompt_token_ids, max_tokens=work.num_output_tokens, options=work.options)
