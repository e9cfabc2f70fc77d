"""The KV cache as text: a bar, the numbers, and a map with one sign per block.

On a terminal blocks have the colours of the requests that hold them; elsewhere a request is a letter.
"""

from __future__ import annotations

import string
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.text import Text

from headway.cli.kv_state import BlockCells, Holder, KVState, Run
from headway.cli.live_view import BLOCK, CACHED_BLOCK, FREE, OWNER_COLOURS, RULE, TO_ASCII

SHARED_BLOCK = "◆"
CACHE_COLOUR = "medium_purple1"
LIVE_COLOUR = "turquoise2"
LIVE_BAR, CACHED_BAR = "█", "▒"
LABEL_WIDTH = 12
_REQUEST_COLOURS = tuple(colour for colour in OWNER_COLOURS if colour != CACHE_COLOUR)
_PLAIN = {Holder.FREE: ".", Holder.CACHED: "+", Holder.SHARED: "*"}
_COLOURED = {
    Holder.FREE: (FREE, "dim"),
    Holder.CACHED: (CACHED_BLOCK, CACHE_COLOUR),
    Holder.SHARED: (SHARED_BLOCK, CACHE_COLOUR),
}
_ASCII = {
    **TO_ASCII,
    **str.maketrans({SHARED_BLOCK: "*", LIVE_BAR: "#", CACHED_BAR: "+", FREE: ".", "×": "x", "–": "-"}),
}


@dataclass(frozen=True)
class KVPicture:
    """One moment. Fits its width to the console that prints it."""

    state: KVState

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, 200)
        is_coloured = console.is_terminal and not console.no_color and console.color_system is not None
        lines = [_header(self.state, width), _bar(self.state, width), *_facts(self.state)]
        if self.state.cells is not None:
            lines += _map(self.state.cells, width, is_coloured=is_coloured)
        for line in lines:
            line.truncate(width)
            if options.ascii_only:
                line.plain = line.plain.translate(_ASCII)
        yield Group(*lines)


def _header(state: KVState, width: int) -> Text:
    left = Text.assemble((" KV cache ", "bold reverse"), " ", (state.model, "bold"))
    right = Text(f"{state.num_running} running · {state.num_waiting} waiting ")
    left.truncate(max(0, width - right.cell_len - 1), overflow="ellipsis")
    return left + Text(" " * (width - left.cell_len - right.cell_len)) + right


def _bar(state: KVState, width: int) -> Text:
    """Live, cached and free blocks, drawn to scale."""
    room = width - 2
    ends = [state.num_live_blocks, state.num_live_blocks + state.num_cached_blocks]
    live, kept = (round(end * room / state.num_blocks) for end in ends)
    bar = Text(" ")
    bar.append(LIVE_BAR * live, style=LIVE_COLOUR)
    bar.append(CACHED_BAR * (kept - live), style=CACHE_COLOUR)
    bar.append(FREE * (room - kept), style="dim")
    return bar


def _facts(state: KVState) -> list[Text]:
    blocks = Text.assemble(
        (f"{state.num_live_blocks:,} live", LIVE_COLOUR),
        (f" · {state.num_cached_blocks:,} cached", CACHE_COLOUR),
        f" · {state.num_free_blocks:,} free · of {state.num_blocks:,}, {state.block_size} tokens each",
    )
    lines = [
        _fact("blocks", blocks),
        _fact("sharing", Text(f"×{state.sharing_factor:.2f} requests per live block")),
        _fact("waste", Text(f"{state.waste:.1%} of the room in live blocks holds no token")),
        _fact(
            "recomputed", Text(f"{state.num_recomputed_tokens:,} tokens, after {state.num_preemptions:,} preemptions")
        ),
    ]
    if state.num_host_slots:
        lines.insert(1, _fact("host", Text(state.host_text)))
    if not state.is_caching:
        return [*lines, _fact("prefixes", Text("are not cached (--no-enable-prefix-caching)"))]
    return [*lines, *_cache_facts(state)]


def _cache_facts(state: KVState) -> list[Text]:
    hits = f"{_percent(state.recent_hit_rate)} in the last minute · {_percent(state.hit_rate)} since the start"
    saved = f"{state.num_saved_tokens:,} prompt tokens found in the cache"
    evicted = f"{state.num_evicted_blocks:,} of {state.num_inserted_blocks:,} blocks that were cached"
    return [
        _fact("hit rate", Text(hits)),
        _fact("saved", Text(saved)),
        _fact("evicted", Text(evicted)),
    ]


def _fact(label: str, text: Text) -> Text:
    return Text.assemble(" ", (f"{label:<{LABEL_WIDTH}}", "dim"), text)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _map(cells: BlockCells, width: int, *, is_coloured: bool) -> list[Text]:
    signs = Text()
    for run in cells.runs:
        sign, style = _look(run, is_coloured=is_coloured)
        signs.append(sign * run.num_cells, style=style)
    room = width - 2
    rows = [Text(" ") + signs[start : start + room] for start in range(0, len(signs), room)]
    return [_heading(cells, width, is_coloured=is_coloured), *rows]


def _look(run: Run, *, is_coloured: bool) -> tuple[str, str]:
    if run.holder is Holder.ONE:
        if is_coloured:
            return BLOCK, _REQUEST_COLOURS[run.request % len(_REQUEST_COLOURS)]
        return string.ascii_lowercase[run.request % 26], ""
    return _COLOURED[run.holder] if is_coloured else (_PLAIN[run.holder], "")


def _heading(cells: BlockCells, width: int, *, is_coloured: bool) -> Text:
    title = "a sign per block" if cells.blocks_per_cell == 1 else f"a sign per {cells.blocks_per_cell} blocks"
    line = Text.assemble((f"{RULE} ", "dim"), ("map", "bold"), f" · {title} ")
    legend = Text(" ")
    for holder in (Holder.ONE, Holder.SHARED, Holder.CACHED, Holder.FREE):
        sign, style = _look(Run(holder, 0, 1), is_coloured=is_coloured)
        if holder is Holder.ONE and not is_coloured:
            sign = "a-z"
        legend.append_text(Text.assemble((sign, style), f" {holder.value}  "))
    line.append(RULE * max(0, width - line.cell_len - legend.cell_len), style="dim")
    return line + legend
