"""A request of the brute-force model, and its share of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.property.brute_force_cache import Prefix


@dataclass(eq=False)
class Entry:
    name: str
    prompt: tuple[int, ...]
    limit: int
    salt: str = ""
    ttl: float = 0.0
    reads: bool = True
    priority: int = 0
    tenant: str = ""
    predicted: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    is_beam: bool = False
    is_fork: bool = False
    order: int = -1
    """How many came before it, or before the beam that it is a fork of."""
    number: int = -1
    """How many came before it."""
    arrived: float = 0.0
    output: list[int] = field(default_factory=list)
    pending: int = 0
    computed: int = 0
    reserved: int = 0
    skips: int = 0
    passes: int = 0
    """How many that came later have entered before it, since it waits."""
    stay: int = 0
    """How often it has entered the batch."""
    entered_as: Any = None
    """The policy's rank when it did."""
    came_with: int = 0
    """Tokens that it had then."""
    landed: int = 0
    """Tokens that steps of this stay have computed, and their results have come, as far as that was noted."""
    preemptions: int = 0
    lift_at: float | None = None
    """When the guard lifts it, if it is still waiting then."""
    shared: list[Prefix] = field(default_factory=list)
    """Its first blocks, as far as they are cached."""
    tail: Prefix | None = None
    """What is cached of its last block, if that is not full."""

    @property
    def known(self) -> tuple[int, ...]:
        return (*self.prompt, *self.output)

    @property
    def tokens(self) -> int:
        return len(self.prompt) + len(self.output) + self.pending

    @property
    def length_class(self) -> int:
        """From each power of two to before the next; forks are a class of their own."""
        return -1 if self.is_fork else int(len(self.prompt) + (self.predicted or 0)).bit_length()

    @property
    def remaining(self) -> int:
        return min(self.tokens, self.limit - 1) - self.computed


@dataclass(frozen=True)
class Share:
    entry: Entry
    stay: int
    start: int
    end: int
    samples: bool


@dataclass
class Step:
    tokens: dict[str, int] = field(default_factory=dict)
    shares: list[Share] = field(default_factory=list)
    limit: int = 0
    for_prompts: int = 0
    """What decodes leave of it."""
    longest_short: int = 0
    """A prompt with more tokens to compute is long."""
    with_long: int = 0
    """What prompts may have of it if one of them is long."""
    passed: list[str] = field(default_factory=list)
    """Who was computed before a long prompt that came first."""
    admitted: list[tuple[str, int]] = field(default_factory=list)
    """(name, tokens that were found in the cache)"""
    preempted: list[str] = field(default_factory=list)
    num_displaced: int = 0
    """Of those, for others."""
    had_no_time: bool = False
    """Whether somebody could have entered, if the step had more tokens left."""
    has_limit: bool = False
    """Whether the policy says how long it may take."""
    host_slots: set[int] = field(default_factory=set)
    """Where it copies what leaves the device."""

    @property
    def sampling(self) -> list[Entry]:
        return [share.entry for share in self.shares if share.samples]

    @property
    def newcomers(self) -> set[str]:
        return {name for name, _ in self.admitted}
