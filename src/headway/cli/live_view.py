"""Draws a watched batch: a live picture on a terminal, plain lines elsewhere. It only draws what `BatchWatch` collects.

header          model, step, time, speed
requests        a row each; its strip has one column per step, shared by all rows, so that a column is a batch
this step       the token budget: decode tokens first, then chunks
KV cache        one cell per block, in the colour of the request that holds it; hollow ones are kept by the prefix cache
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headway.cli.batch_watch import BatchWatch, Cell, State, Summary, WatchedRequest

if TYPE_CHECKING:
    from headway.engine.step_report import StepReport

FRAMES_PER_S = 12
PROGRESS_EVERY_STEPS = 50
NAME_WIDTH = 12
STATE_WIDTH = 10
COUNT_WIDTH = 18

CHUNK_COLOUR = "orange1"
DECODE_COLOUR = "turquoise2"
# Distinguishable on dark and light backgrounds; block owners and row labels use them in turn.
OWNER_COLOURS = (
    "deep_sky_blue1",
    "medium_purple1",
    "spring_green2",
    "hot_pink",
    "gold1",
    "dark_orange",
    "cyan1",
    "green3",
    "orchid",
    "red1",
    "dodger_blue1",
    "chartreuse2",
)
STATE_STYLES = {
    State.EXPECTED: "dim",
    State.WAITING: "yellow",
    State.PREFILL: CHUNK_COLOUR,
    State.DECODE: DECODE_COLOUR,
    State.PREEMPTED: "bold red",
    State.DONE: "dim green",
}


CHUNK, DECODE, WAITING, IDLE, PREEMPTED = "█", "▪", "·", "-", "x"
BLOCK, CACHED_BLOCK, FREE, RULE, DOT = "■", "□", "·", "─", "●"
TO_ASCII = str.maketrans({CHUNK: "#", DECODE: "+", WAITING: ".", BLOCK: "#", CACHED_BLOCK: "o", RULE: "-", DOT: "*"})

CELL_LOOKS = {
    Cell.ABSENT: (" ", ""),
    Cell.WAITING: (WAITING, "yellow"),
    Cell.CHUNK: (CHUNK, CHUNK_COLOUR),
    Cell.DECODE: (DECODE, DECODE_COLOUR),
    Cell.IDLE: (IDLE, "dim"),
    Cell.PREEMPTED: (PREEMPTED, "bold red"),
}


@dataclass(frozen=True)
class BatchPicture:
    """One frame. Fits its width and height to the console that prints it."""

    watch: BatchWatch
    title: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, 200)
        colours = {name: OWNER_COLOURS[i % len(OWNER_COLOURS)] for i, name in enumerate(self.watch.requests)}
        lines = [self._header(width)]
        lines.append(_heading("requests", "one column per step", _legend(), width=width))
        lines += [_request_line(r, colours[r.name], width) for r in self.watch.requests.values()]
        lines += self._step_lines(width)
        lines += self._block_lines(width, colours)
        lines.append(self._counters())
        for line in lines:
            line.truncate(width)
            if options.ascii_only:
                line.plain = line.plain.translate(TO_ASCII)
        yield Group(*lines)

    def _header(self, width: int) -> Text:
        left = Text.assemble((" Headway ", "bold reverse"), " ", (self.title, "bold"))
        right = Text(f"step {self.watch.num_steps} · {self.watch.elapsed_s:.1f} s ", style="bold")
        left.truncate(max(0, width - len(right) - 1), overflow="ellipsis")
        return left + Text(" " * (width - left.cell_len - right.cell_len)) + right

    def _step_lines(self, width: int) -> list[Text]:
        report = self.watch.report
        budget = self.watch.token_budget
        num_decode = sum(row.num_tokens for row in report.rows if row.is_decode) if report else 0
        chunks = [row.num_tokens for row in report.rows if not row.is_decode] if report else []
        what = f"{num_decode} decode + {sum(chunks)} chunk of {budget} tokens"
        bar = Text(" ")
        room = width - 2
        ends = [num_decode]
        for chunk in chunks:
            ends.append(ends[-1] + chunk)
        # Rounding the running totals, not the parts, keeps the bar's whole length right.
        edges = [round(end * room / budget) for end in ends]
        bar.append(CHUNK * edges[0], style=DECODE_COLOUR)
        for index, (start, end) in enumerate(itertools.pairwise(edges)):
            bar.append(CHUNK * (end - start), style=CHUNK_COLOUR if index % 2 == 0 else "orange3")
        bar.append(FREE * (room - edges[-1]), style="dim")
        return [_heading("this step", what, width=width), bar]

    def _block_lines(self, width: int, colours: dict[str, str]) -> list[Text]:
        report = self.watch.report
        if report is None:
            return []
        owners, cached = self.watch.block_owners, self.watch.cached_blocks
        what = (
            f"{len(owners)} of {report.num_blocks} blocks held · {self.watch.current_kv_waste:.1%} of their slots empty"
        )
        if cached:
            what += f" · {len(cached)} cached"
        room = width - 2
        lines = [_heading("KV cache", what, width=width)]
        for start in range(0, report.num_blocks, room):
            line = Text(" ")
            blocks = range(start, min(start + room, report.num_blocks))
            for (owner, is_cached), run in itertools.groupby(blocks, key=lambda i: (owners.get(i), i in cached)):
                idle = CACHED_BLOCK if is_cached else FREE
                glyph, style = (idle, "dim") if owner is None else (BLOCK, colours[owner])
                line.append(glyph * len(list(run)), style=style)
            lines.append(line)
        return lines

    def _counters(self) -> Text:
        watch = self.watch
        running = watch.count(State.PREFILL, State.DECODE)
        waiting = watch.count(State.WAITING, State.PREEMPTED)
        summary = watch.summary()
        return Text.assemble(
            " ",
            (f"running {running}", DECODE_COLOUR),
            (f" · waiting {waiting}", "yellow"),
            (f" · done {watch.count(State.DONE)}", "green"),
            f" · preempted {watch.num_preemptions}",
            (f" · {summary.output_tokens_per_s:.0f} tokens/s out", "bold"),
            f", {summary.total_tokens_per_s:.0f} total",
        )


def _heading(title: str, what: str, legend: Text | None = None, *, width: int) -> Text:
    line = Text.assemble((f"{RULE} ", "dim"), (title, "bold"), f" · {what} ")
    legend = legend or Text()
    line.append(RULE * max(0, width - line.cell_len - legend.cell_len), style="dim")
    return line + legend


def _legend() -> Text:
    return Text.assemble(
        " ", (CHUNK, CHUNK_COLOUR), " prompt chunk  ", (DECODE, DECODE_COLOUR), " decode  ",
        (WAITING, "yellow"), " waiting ",
    )  # fmt: skip


def _request_line(request: WatchedRequest, colour: str, width: int) -> Text:
    room = max(8, width - 3 - NAME_WIDTH - STATE_WIDTH - COUNT_WIDTH)
    quiet = request.state in (State.EXPECTED, State.DONE)
    line = Text(" ")
    line.append(f"{DOT} ", style=colour if request.is_live else "dim")
    line.append(f"{request.name:<{NAME_WIDTH}.{NAME_WIDTH - 1}}", style="dim" if quiet else "")
    line.append(f"{request.state.value:<{STATE_WIDTH}}", style=STATE_STYLES[request.state])
    line.append(_strip(request, room))
    line.append(f"{_count(request):>{COUNT_WIDTH}}", style="dim" if quiet else "")
    return line


def _strip(request: WatchedRequest, room: int) -> Text:
    cells = list(request.cells)[-room:]
    strip = Text(" " * (room - len(cells)))
    for cell, run in itertools.groupby(cells):
        glyph, style = CELL_LOOKS[cell]
        strip.append(glyph * len(list(run)), style=style)
    return strip


def _count(request: WatchedRequest) -> str:
    if request.state is State.EXPECTED:
        return ""
    if request.state is State.PREFILL and request.num_computed_tokens < request.num_prompt_tokens:
        return f"{request.num_computed_tokens}/{request.num_prompt_tokens} in"
    found = request.num_cached_tokens
    prompt = f"{found}+{request.num_prompt_tokens - found}" if found else f"{request.num_prompt_tokens}"
    return f"{prompt} in {request.num_output_tokens:>3} out"


class LiveView:
    """Redraws one picture in place, a few times a second at most."""

    def __init__(self, console: Console, title: str) -> None:
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._title = title
        self._drawn_at = 0.0

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def arrived(self, request: WatchedRequest) -> None:
        """The picture shows it with the next step."""

    def stepped(self, watch: BatchWatch) -> None:
        """Draw the batch, unless that was done a moment ago. The last step is always drawn."""
        now = time.monotonic()
        is_last = watch.count(State.DONE) == len(watch.requests)
        if is_last or now - self._drawn_at >= 1 / FRAMES_PER_S:
            self._live.update(BatchPicture(watch, self._title), refresh=True)
            self._drawn_at = now


class PlainView:
    """One line for every step that changes the batch, for pipes and logs."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._arrivals: list[str] = []
        self._inside: set[str] = set()
        self._said_at_step = 0

    def __enter__(self) -> PlainView:
        self._say(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: there is no picture to remove."""

    def arrived(self, request: WatchedRequest) -> None:
        """Mention the request with the next step, if it is queued."""
        self._arrivals.append(request.name)

    def stepped(self, watch: BatchWatch) -> None:
        """Say what changed: who entered, who left, whose chunk shared the step."""
        report = watch.report
        assert report is not None
        news = self._news(watch, report)
        if news or watch.num_steps - self._said_at_step >= PROGRESS_EVERY_STEPS:
            num_decodes = sum(row.is_decode for row in report.rows)
            load = f"{report.num_tokens:>3} tokens, {report.num_used_blocks:>3} blocks, {num_decodes} decoding"
            self._say(f"step {watch.num_steps:>4}: {load}{'; ' if news else ''}{'; '.join(news)}")
            self._said_at_step = watch.num_steps

    def _news(self, watch: BatchWatch, report: StepReport) -> list[str]:
        chunks = {row.request_id: row for row in report.rows if not row.is_decode}
        news = [f"{name} arrives and waits" for name in self._arrivals if name not in chunks]
        self._arrivals.clear()
        for name, row in chunks.items():
            verb = "computes" if name in self._inside else "enters with"
            end, known = row.num_computed_tokens + row.num_tokens, row.num_prompt_tokens + row.num_output_tokens
            part = f"all {known} tokens" if row.num_tokens == known else f"{row.num_computed_tokens}-{end} of {known}"
            found = f", {row.num_cached_tokens} found in the cache" if row.num_cached_tokens else ""
            news.append(f"{name} {verb} {part}{found}")
        self._inside |= chunks.keys()
        self._inside -= set(report.preempted)
        news += [f"{name} is preempted" for name in report.preempted]
        for name in report.finished:
            request = watch.requests[name]
            news.append(f"{name} leaves after {request.num_output_tokens} ({request.finish_reason})")
        return news

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def summary_table(summary: Summary) -> Table:
    """The closing numbers."""
    table = Table(show_header=False, box=None, pad_edge=True, padding=(0, 2, 0, 1))
    table.add_column(style="dim")
    table.add_column(justify="right", style="bold")
    table.add_column(style="dim")
    rows: Iterable[tuple[str, str, str]] = (
        ("output tokens/s", f"{summary.output_tokens_per_s:.1f}", f"{summary.num_output_tokens} tokens out"),
        ("total tokens/s", f"{summary.total_tokens_per_s:.1f}", f"{summary.num_prompt_tokens} tokens in"),
        ("steps", f"{summary.num_steps}", f"{summary.num_mixed_steps} of them mixed chunks with decodes"),
        ("mean batch size", f"{summary.mean_batch_size:.2f}", "requests per step"),
        ("mean KV waste", f"{summary.mean_kv_waste:.1%}", "of the slots in held blocks were empty"),
        ("cached tokens", f"{summary.num_cached_tokens}", "of the prompts were found in the cache"),
        ("preemptions", f"{summary.num_preemptions}", ""),
        ("TTFT p50", f"{summary.ttft_p50_s * 1000:.0f} ms", "from arrival to first token"),
    )
    for row in rows:
        table.add_row(*row)
    return table
