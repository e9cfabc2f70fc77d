"""`Workload`: when requests come × how long they are × what they are made of × which class, and the drawing of it all.

A workload is a description. Drawn with a seed it becomes requests, the same ones wherever it is drawn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headway.core.request_options import DEFAULT_OPTIONS, OPTION_NAMES, RequestOptions
from headway.errors import ConfigError, InvalidRequestError
from headway_lab.workload.arrivals import Arrivals, AtOnce, check_rate, check_times
from headway_lab.workload.bench_requests import HIGHEST_TOKEN_ID, BenchRequest
from headway_lab.workload.content import Content, Draft, Drawing, Lengths, RandomContent
from headway_lab.workload.input_files import MOST, OptionsTable, is_number
from headway_lab.workload.lengths import Limits

if TYPE_CHECKING:
    from headway.tokenizer import Tokenizer


# How long answers get is drawn with the work; what is predicted of it depends on the engine.
_OPTIONS = tuple(name for name in OPTION_NAMES if name not in ("predicted_tokens", "blocks_at"))

DEFAULT_NUM_REQUESTS = 1_000
"""The number of requests if neither the workload nor a file gives one."""

MOST_REQUESTS = 10_000_000


@dataclass(frozen=True)
class RequestClass:
    """A class of requests. A request is drawn from it with a probability in proportion to its weight."""

    weight: float = 1.0
    options: RequestOptions = DEFAULT_OPTIONS


def draw_options(classes: Sequence[RequestClass], rng: random.Random) -> RequestOptions:
    """Draw the options of one request."""
    if not classes:
        return DEFAULT_OPTIONS
    return rng.choices(classes, [one.weight for one in classes])[0].options


def read_classes(tables: object) -> tuple[RequestClass, ...]:
    """Read the list `[[classes]]`."""
    if not isinstance(tables, list) or not tables:
        OptionsTable({}, "classes: ").fail("a list of tables is expected: [[classes]]")
    return tuple(_read(OptionsTable(table, f"classes[{number}]: ")) for number, table in enumerate(tables))


def _read(table: OptionsTable) -> RequestClass:
    table.only("weight", *_OPTIONS)
    for key in _OPTIONS:
        value = table.raw(key)
        if isinstance(value, int | float) and not (is_number(value) and abs(value) <= MOST):
            table.fail(f"{key} must be a number between -{MOST:,} and {MOST:,}")
    try:
        options = RequestOptions(**{key: table.raw(key) for key in _OPTIONS if key in table})
    except InvalidRequestError as error:
        table.fail(str(error))
    return RequestClass(table.number("weight", 1.0), options)


def _think_times(drafts: Sequence[Draft]) -> list[float]:
    """For each request, how long users think before it, summed from the first turn of its conversation on."""
    times: list[float] = []
    for draft in drafts:
        times.append(0.0 if draft.after is None else times[draft.after] + draft.think_s)
    return times


@dataclass(frozen=True)
class Workload:
    name: str
    lengths: Lengths
    summary: str = ""
    num_requests: int | None = None
    """None: as many as the file has, or `DEFAULT_NUM_REQUESTS`."""
    arrivals: Arrivals = field(default_factory=AtOnce)
    content: Content = field(default_factory=RandomContent)
    limits: Limits = field(default_factory=Limits)
    classes: tuple[RequestClass, ...] = ()

    def draw(
        self,
        *,
        vocab_size: int,
        seed: int = 0,
        tokenizer: Tokenizer | None = None,
        num_requests: int | None = None,
        rate: float | None = None,
    ) -> list[BenchRequest]:
        """The requests, in order of arrival; the turns of a conversation stand together.

        `rate` overrides the workload's own, in requests/s: gaps are drawn or stretched to it. Infinite: all at once.
        A file that has too few requests begins again.
        """
        count = self._count(num_requests)
        drawing = Drawing(seed, vocab_size, self.lengths, self.limits, tokenizer)
        drafts = self.content.draw(drawing, count)
        starts = [number for number, draft in enumerate(drafts) if draft.after is None]
        times = self._times(drawing, len(starts), check_rate(rate), len(drafts) / len(starts))
        check_times(times)
        check_times(_think_times(drafts))
        return self._requests(drawing, drafts, times)

    def check_data(self) -> None:
        """Draw a request, so that `ConfigError` tells of a bad data file before a model is loaded. Texts need the
        model's tokenizer, and are checked when they are drawn."""
        if not self.needs_tokenizer:
            self.draw(vocab_size=HIGHEST_TOKEN_ID + 1, num_requests=1)

    @property
    def needs_tokenizer(self) -> bool:
        """Whether drawing it needs the tokenizer of a model."""
        return self.content.has_text

    def _count(self, num_requests: int | None) -> int:
        count = num_requests if num_requests is not None else self.num_requests
        if count is None:
            count = self.content.num_available(self.lengths.trace) or DEFAULT_NUM_REQUESTS
        if not 1 <= count <= MOST_REQUESTS:
            bound = "at least one request" if count < 1 else f"at most {MOST_REQUESTS:,} requests"
            raise ConfigError(f"A workload has {bound}, not {count:,}.")
        return count

    def _times(self, drawing: Drawing, count: int, rate: float | None, per_arrival: float) -> list[float]:
        if rate == math.inf:
            return [0.0] * count
        return self.arrivals.times(count, drawing.rng("arrivals"), rate=rate, per_arrival=per_arrival)

    def _requests(self, drawing: Drawing, drafts: list[Draft], times: list[float]) -> list[BenchRequest]:
        """The requests of these drafts. A conversation's turns arrive with its first one at the earliest, and are of
        its class."""
        rng = drawing.rng("classes")
        due = iter(times)
        requests = []
        for draft in drafts:
            if draft.after is None:
                arrival_s, options = next(due), draw_options(self.classes, rng)
            requests.append(
                BenchRequest(
                    draft.prompt_token_ids,
                    draft.num_output_tokens,
                    arrival_s=arrival_s,
                    options=options,
                    after=draft.after,
                    think_s=draft.think_s,
                )
            )
        return requests
