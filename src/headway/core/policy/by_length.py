"""Policies that let short answers go first: by a predicted length, or by the tokens generated so far.

A request that holds its seat for a second delays all after it by a second. So the order with the shortest first has the
least mean waiting time, if the predictions are right. Long requests wait longer; the guard against starvation limits
how much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

from headway.core.policy.base import SchedulingPolicy
from headway.core.queue import GroupedQueue, WaitingQueue
from headway.core.request import Request

CLEAR_CASE = 6.0
"""A waiting request displaces a running one whose rest is this many times longer than its own (srpt)."""
RECOMPUTED_TOKENS_PER_STEP = 32.0
"""This many tokens to recompute count as one generated token, since they delay the whole batch (srpt)."""
CLASSES_PER_DOUBLING = 2
"""How many length classes there are per power of two: two lengths of a class differ by less than 42% (hrrn)."""
FIRST_QUANTUM = 32
"""How many tokens a request generates on the top level (mlfq)."""
NUM_LEVELS = 6
PROMPT_TOKENS_PER_STEP = 256
"""This many prompt tokens count as one generated token (mlfq)."""


class SjfPolicy(SchedulingPolicy):
    """Shortest job first: the shortest predicted answer goes first, the longest predicted rest is preempted.

    Waiting requests do not displace running ones.
    """

    name = "sjf"
    summary = "the shortest predicted answer first"

    def key(self, request: Request) -> float:
        """Return the predicted length of the whole answer."""
        return predicted_tokens(request)

    def rank(self, request: Request) -> float:
        """Return the policy's key."""
        return self.key(request)

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Return the request with the longest predicted rest, the latest among equals."""
        rests = list(map(predicted_rest, running))
        longest = max(rests)
        candidates = [request for request, rest in zip(running, rests) if rest == longest]
        return max(candidates, key=attrgetter("arrival_index"))


class LtrPolicy(SjfPolicy):
    """Learning to rank: requests go in the order of a learned score, which is passed as the request's prediction.

    A scheduler needs no lengths, only which of two requests is shorter, and a ranker learns that best. The order is
    that of sjf. Without a learned predictor this policy is refused at start.
    """

    name = "ltr"
    summary = "in the order of a learned ranking of answer lengths"


class SrptPolicy(SjfPolicy):
    """Shortest remaining processing time: as sjf, but by the predicted rest; a short request may displace a long one.

    A displaced request loses its seat, not its tokens, but these may have to be computed again. So the waiting request
    must have a much shorter rest.
    """

    name = "srpt"
    summary = "the shortest predicted rest first, and a much shorter one displaces a running one"

    def key(self, request: Request) -> float:
        """Return the predicted rest. It does not change while a request waits."""
        return predicted_rest(request)

    def choose_displaced(self, request: Request, running: Sequence[Request]) -> Request | None:
        """Return the request with the longest rest, if that is long enough for displacing it to pay."""
        victim = self.choose_victim(running)
        cost = self.view.num_tokens_to_recompute(victim) / RECOMPUTED_TOKENS_PER_STEP
        return victim if predicted_rest(victim) > CLEAR_CASE * (predicted_rest(request) + cost) else None


class HrrnPolicy(SchedulingPolicy):
    """Highest response ratio next: (wait + service) / service, where the service is a step per predicted token.

    The ratio of a short request grows fast and that of a long one slowly, but all grow. So the order is between sjf and
    fcfs, and no request starves. Ratios change all the time, at a different speed for each length. So requests are kept
    in classes of about the same predicted length: in a class the earliest arrival always has the highest ratio.
    """

    name = "hrrn"
    summary = "the highest ratio of time in the system to predicted service time first"
    can_starve = False

    def create_queue(self, front_size: int) -> WaitingQueue:
        """Create a queue with a group for each class of lengths."""
        return GroupedQueue(self._length_class, self.key)

    def key(self, request: Request) -> float:
        """Return the negated ratio, since the smallest key goes first. The queue allows that it changes."""
        service_s: float = self.view.step_s * 2.0 ** (self._length_class(request) / CLASSES_PER_DOUBLING)
        return -(self.view.now_s - request.arrival_s + service_s) / service_s

    def _length_class(self, request: Request) -> int:
        return round(CLASSES_PER_DOUBLING * math.log2(max(predicted_tokens(request), 1.0)))


class MlfqPolicy(SchedulingPolicy):
    """Multi-level feedback queue: requests that have received little service go first. It needs no predictions.

    A request begins on the top level, or lower if its prompt is long, and moves down as it generates: after 32 tokens
    on the first level, and after twice as many on each further one. Requests of a higher level displace running ones of
    a lower level. So a short answer finishes early, although it was not known to be short.
    """

    name = "mlfq"
    summary = "the request that has generated least first, in levels; a higher level displaces a running one of a lower"

    def key(self, request: Request) -> int:
        """Return the level. It does not change while a request waits."""
        return level(request)

    rank = key

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Return the latest request of the lowest level."""
        attained = list(map(attained_service, running))
        least = _least_on_level(_level_after(max(attained)))
        lowest = [request for request, one in zip(running, attained) if one >= least]
        return max(lowest, key=attrgetter("arrival_index"))

    def choose_displaced(self, request: Request, running: Sequence[Request]) -> Request | None:
        """Return a running request of a lower level than the waiting one, if there is any. Usually there is none, so
        this must be found out quickly."""
        least = _least_on_level(level(request) + 1) if level(request) < NUM_LEVELS - 1 else math.inf
        lower = [
            one
            for one in running
            if one.num_tokens - one.num_prompt_tokens + one.num_prompt_tokens // PROMPT_TOKENS_PER_STEP >= least
        ]
        return self.choose_victim(lower) if lower else None


def predicted_tokens(request: Request) -> float:
    """Return how many tokens a request is expected to generate in all; without a prediction, as many as it may."""
    if request.options.predicted_tokens is None:
        return float(request.max_total_tokens - request.num_prompt_tokens)
    return request.options.predicted_tokens


def predicted_rest(request: Request) -> float:
    """Return how many of the predicted tokens are left; at least one, however wrong the prediction was. Pending tokens
    count as generated, so that the rest does not change when they arrive while a request waits. This is called for
    every running request, so it must be quick."""
    predicted = request.options.predicted_tokens
    num_prompt_tokens = request.num_prompt_tokens
    if predicted is None:
        predicted = float(request.max_total_tokens - num_prompt_tokens)
    rest = predicted - (request.num_tokens - num_prompt_tokens)
    return rest if rest > 1.0 else 1.0


def level(request: Request) -> int:
    """Return the level of a request in mlfq; 0 is the top."""
    return _level_after(attained_service(request))


def attained_service(request: Request) -> int:
    """Return the service that a request has received, in generated tokens; pending ones count too."""
    num_prompt_tokens = request.num_prompt_tokens
    return request.num_tokens - num_prompt_tokens + num_prompt_tokens // PROMPT_TOKENS_PER_STEP


def _level_after(attained: int) -> int:
    return min((attained // FIRST_QUANTUM + 1).bit_length() - 1, NUM_LEVELS - 1)


def _least_on_level(number: int) -> int:
    return FIRST_QUANTUM * ((1 << number) - 1)
