"""What a scheduling policy decides: who goes first, who gives way, how big a chunk.

A policy is one file. It reads requests and changes nothing but its own books; docs/adding_a_policy.md writes one from
scratch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from headway.core.policy.view import PolicyView
from headway.core.queue import KeyedQueue, WaitingQueue
from headway.core.request import Request
from headway.core.scheduler_output import ScheduledRequest


class SchedulingPolicy(ABC):
    """One object owns all these decisions. Only `key` has to be said, or `create_queue` where no key will do."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """A line for `--help`."""
    can_starve: ClassVar[bool] = True
    """Whether a request could wait for ever while others pass it, so that the guard is needed."""

    def __init__(self, view: PolicyView) -> None:
        self.view = view

    # ---- who goes first -------------------------------------------------------------------------------------------

    @abstractmethod
    def key(self, request: Request) -> Any:
        """Sort key, smaller goes first; ties go to the earlier arrival. Must not change while a request waits."""

    def create_queue(self, front_size: int) -> WaitingQueue:
        """The line of waiting requests. Its first `front_size` places are looked at."""
        return KeyedQueue(self.key, front_size=front_size)

    def promise_s(self, request: Request) -> float:
        """So long after its arrival the policy means to have let a request in; the guard does not lift it before."""
        return 0.0

    # ---- who gives way --------------------------------------------------------------------------------------------

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Who gives its blocks back when they run out. `running` is not empty, and in the order that requests had when
        they entered the batch."""
        return running[-1]

    def choose_displaced(self, request: Request, running: Sequence[Request]) -> Request | None:
        """Who has to leave the batch for a request that finds no place in it; `None`: it waits."""
        return None

    @property
    def displaces(self) -> bool:
        """Whether `choose_displaced` has to be asked: where a policy has its own."""
        return type(self).choose_displaced is not SchedulingPolicy.choose_displaced

    # ---- how much of a step ---------------------------------------------------------------------------------------

    def chunk_size(self, request: Request, num_offered_tokens: int, num_left_tokens: int) -> int:
        """How many of the tokens it could compute now (at least 1) a request takes: between 1 and the offer.
        `num_left_tokens`: what the step has left for it and all after it."""
        return num_offered_tokens

    @property
    def divides_steps(self) -> bool:
        """Whether the policy says itself how prompts share a step, by a `chunk_size` of its own; then short ones do not
        pass long ones beside that."""
        return type(self).chunk_size is not SchedulingPolicy.chunk_size

    def pace_s(self, default_s: float) -> float:
        """The time between tokens that prompts leave to requests that generate; `default_s` is what the options say,
        0 is no limit."""
        return default_s

    def step_limit_s(self, prompts: Sequence[Request]) -> float:
        """The longest that the next step may take for the sake of prompts, whatever waits. `prompts`: the requests in
        the batch whose prompts are not complete."""
        return math.inf

    # ---- what happens ---------------------------------------------------------------------------------------------

    def entered(self, request: Request) -> None:  # noqa: B027 - most policies need no books
        """A request has entered the batch."""

    def left(self, request: Request) -> None:  # noqa: B027
        """A request has left the batch, for whatever reason."""

    def served(self, shares: Mapping[Request, ScheduledRequest]) -> None:  # noqa: B027
        """A step has been planned, with these shares."""
