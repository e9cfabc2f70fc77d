"""Policies that let short answers go first: by a predicted length, or by what has been generated so far.

A request that holds its seat for a second delays all behind it by a second, so short ones first is the order with the
least mean wait, as far as the predictions are right. Long ones pay; the guard against starvation limits how much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

from headway.core.policy.base import SchedulingPolicy
from headway.core.queue import GroupedQueue, WaitingQueue
from headway.core.request import Request

CLEAR_CASE = 6.0
"""How many times longer the rest of a request must be than that of a waiting one to be displaced by it (srpt)."""
RECOMPUTED_TOKENS_PER_STEP = 32.0
"""This many tokens that have to be computed again count as one that is generated: they delay the whole batch (srpt)."""
CLASSES_PER_DOUBLING = 2
"""Two lengths of a class differ by less than 42% (hrrn)."""
FIRST_QUANTUM = 32
"""Generated tokens on the top level (mlfq)."""
NUM_LEVELS = 6
PROMPT_TOKENS_PER_STEP = 256
"""This many prompt tokens count as one that is generated (mlfq)."""


class SjfPolicy(SchedulingPolicy):
    """Shortest job first: the fewest predicted tokens go first, the longest predicted rest is preempted.

    Waiting requests do not displace running ones.
    """

    name = "sjf"
    summary = "the shortest predicted answer first"

    def key(self, request: Request) -> float:
        """Predicted length of the whole answer."""
        return predicted_tokens(request)

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """The longest rest; among equals the latest."""
        rests = list(map(predicted_rest, running))
        longest = max(rests)
        candidates = [request for request, rest in zip(running, rests) if rest == longest]
        return max(candidates, key=attrgetter("arrival_index"))


class LtrPolicy(SjfPolicy):
    """Learning to rank: in the order of a learned score, which is the request's prediction.

    A scheduler needs no lengths, only which request is shorter, and that is what a ranker learns best. The order is
    that of sjf; without a learned predictor this policy is refused at start.
    """

    name = "ltr"
    summary = "in the order of a learned ranking of answer lengths"


class SrptPolicy(SjfPolicy):
    """Shortest remaining processing time: as sjf, but by what is left, and a short request may displace a long one.

    A displaced request loses its seat, not its tokens; what was computed for it may have to be computed again. So it
    takes a clear case: the waiting request must have much less to go.
    """

    name = "srpt"
    summary = "the shortest predicted rest first, and a much shorter one displaces a running one"

    def key(self, request: Request) -> float:
        """Predicted rest. It does not change while a request waits."""
        return predicted_rest(request)

    def choose_displaced(self, request: Request, running: Sequence[Request]) -> Request | None:
        """The longest rest, if that is so much longer that it pays."""
        victim = self.choose_victim(running)
        cost = self.view.num_tokens_to_recompute(victim) / RECOMPUTED_TOKENS_PER_STEP
        return victim if predicted_rest(victim) > CLEAR_CASE * (predicted_rest(request) + cost) else None


class HrrnPolicy(SchedulingPolicy):
    """Highest response ratio next: (wait + service) / service, with the service predicted, a step for each token.

    A short request gains urgency fast, a long one slowly, but all gain: the order is between sjf and fcfs, and no
    request starves. Ratios change all the time, and differently for each length, so requests are kept in classes of
    about the same predicted length: in a class the earliest arrival always has the highest ratio.
    """

    name = "hrrn"
    summary = "the highest ratio of time in the system to predicted service time first"
    can_starve = False

    def create_queue(self, front_size: int) -> WaitingQueue:
        """A group for each class of lengths."""
        return GroupedQueue(self._length_class, self.key)

    def key(self, request: Request) -> float:
        """The ratio, negative since smaller goes first. It changes while a request waits, which the queue allows."""
        service_s: float = self.view.step_s * 2.0 ** (self._length_class(request) / CLASSES_PER_DOUBLING)
        return -(self.view.now_s - request.arrival_s + service_s) / service_s

    def _length_class(self, request: Request) -> int:
        return round(CLASSES_PER_DOUBLING * math.log2(max(predicted_tokens(request), 1.0)))


class MlfqPolicy(SchedulingPolicy):
    """Multi-level feedback queue: without any prediction, requests that have had little go first.

    A request begins on the top level, or lower if its prompt is long, and sinks as it generates: 32 tokens on the first
    level, twice as many on each after it. Requests of a higher level displace running ones of a lower level, so a short
    answer is through before a long one gets far, although it was not known which is which.
    """

    name = "mlfq"
    summary = "the request that has generated least first, in levels; a higher level displaces a running one of a lower"

    def key(self, request: Request) -> int:
        """The level. It does not change while a request waits."""
        return level(request)

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Of the lowest level, the latest."""
        attained = list(map(attained_service, running))
        least = _least_on_level(_level_after(max(attained)))
        lowest = [request for request, one in zip(running, attained) if one >= least]
        return max(lowest, key=attrgetter("arrival_index"))

    def choose_displaced(self, request: Request, running: Sequence[Request]) -> Request | None:
        """One of a lower level, if there is any: most are not, and finding that out must be quick."""
        least = _least_on_level(level(request) + 1) if level(request) < NUM_LEVELS - 1 else math.inf
        lower = [
            one
            for one in running
            if one.num_tokens - one.num_prompt_tokens + one.num_prompt_tokens // PROMPT_TOKENS_PER_STEP >= least
        ]
        return self.choose_victim(lower) if lower else None


def predicted_tokens(request: Request) -> float:
    """How many tokens a request is going to generate in all; without a prediction, as many as it may."""
    if request.options.predicted_tokens is None:
        return float(request.max_total_tokens - request.num_prompt_tokens)
    return request.options.predicted_tokens


def predicted_rest(request: Request) -> float:
    """How many are left; at least one, however wrong the prediction was. Pending tokens count as generated, so that
    nothing changes when they come while a request waits. Asked of every running request, so it must be quick."""
    predicted = request.options.predicted_tokens
    num_prompt_tokens = request.num_prompt_tokens
    if predicted is None:
        predicted = float(request.max_total_tokens - num_prompt_tokens)
    rest = predicted - (request.num_tokens - num_prompt_tokens)
    return rest if rest > 1.0 else 1.0


def level(request: Request) -> int:
    """The level of mlfq; 0 is the top."""
    return _level_after(attained_service(request))


def attained_service(request: Request) -> int:
    """What a request has had, in generated tokens; pending ones count, as in `predicted_rest`."""
    num_prompt_tokens = request.num_prompt_tokens
    return request.num_tokens - num_prompt_tokens + num_prompt_tokens // PROMPT_TOKENS_PER_STEP


def _level_after(attained: int) -> int:
    return min((attained // FIRST_QUANTUM + 1).bit_length() - 1, NUM_LEVELS - 1)


def _least_on_level(number: int) -> int:
    return FIRST_QUANTUM * ((1 << number) - 1)
