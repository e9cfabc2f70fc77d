"""The KV cache as text or as a page: a bar, the numbers, and a map with one sign per block.

On a terminal blocks have the colours of the requests that hold them; elsewhere a request is a letter. The page is
self-contained: it has no scripts, loads nothing, and uses the colours of the server's own page.
"""

from __future__ import annotations

import html
import string
from dataclasses import dataclass
from datetime import datetime

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
    """Draws one state of the cache, as wide as the console that prints it."""

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


# ---- as a page ------------------------------------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light dark; --bg: #f6f6f3; --card: #fff; --line: #dedfd9; --text: #1c2128; --dim: #626a73;
  --live: #0e97ad; --reused: #6d4be0; --cached: #c9bff0; --free: #e4e5e0; --tone: 62% 46% }
@media (prefers-color-scheme: dark) { :root { --bg: #0d1014; --card: #151a20; --line: #272e37; --text: #e3e7eb;
  --dim: #949eaa; --live: #22c7de; --reused: #9b82ff; --cached: #453c73; --free: #20262e; --tone: 68% 62% } }
body { margin: 0 auto; max-width: 62rem; padding: 2rem 1.25rem; background: var(--bg); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif }
h1 { margin: 0; font-size: 1.4rem; letter-spacing: -.01em } p { margin: .2rem 0 1.2rem; color: var(--dim) }
dl { display: grid; grid-template-columns: repeat(5, 1fr); gap: 1px; margin: 0 0 1.2rem;
  border: 1px solid var(--line); border-radius: 10px; background: var(--line); overflow: hidden }
dl div { padding: .55rem .8rem; background: var(--card) } dt { font-size: 12px; color: var(--dim) }
dd { margin: 0; font-size: 1.2rem; font-weight: 600; font-variant-numeric: tabular-nums }
dd small { display: block; font-size: 12px; font-weight: 400; color: var(--dim) }
@media (max-width: 40rem) { dl { grid-template-columns: repeat(2, 1fr) } }
.bar { display: flex; height: 10px; margin-bottom: 1.2rem; border-radius: 5px; background: var(--free);
  overflow: hidden }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin-bottom: .6rem; font-size: 13px; color: var(--dim) }
.legend i { display: inline-block; vertical-align: -2px; margin-right: .4rem }
.map { display: flex; flex-wrap: wrap; gap: 2px } i { width: 14px; height: 14px; border-radius: 2px }
.bar i { border-radius: 0 }
.live { background: var(--live) } .cached { background: var(--cached) } .free { background: var(--free) }
.shared { background: radial-gradient(circle, var(--bg) 2px, var(--reused) 2.5px) }
"""
_CLASSES = {Holder.FREE: "free", Holder.CACHED: "cached", Holder.SHARED: "shared"}


def page(state: KVState, taken_at: datetime) -> str:
    """The whole HTML file."""
    model = html.escape(state.model)
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>KV cache of {model}</title>\n<style>{_STYLE}</style></head>\n"
    )
    what = (
        f"{state.num_blocks:,} blocks of {state.block_size} tokens · {state.num_running:,} requests run, "
        f"{state.num_waiting:,} wait · {taken_at.isoformat(sep=' ', timespec='seconds')}"
    )
    if state.num_host_slots:
        what += f"<br>{state.host_text}"
    body = f"<h1>KV cache of {model}</h1>\n<p>{what}</p>\n{_html_bar(state)}{_tiles(state)}{_html_map(state.cells)}"
    return f"{head}<body>\n{body}</body></html>\n"


def _html_bar(state: KVState) -> str:
    parts = (("live", state.num_live_blocks), ("cached", state.num_cached_blocks))
    inside = "".join(f'<i class="{name}" style="width:{100 * n / state.num_blocks:.2f}%"></i>' for name, n in parts)
    return f'<div class="bar">{inside}</div>\n'


def _tiles(state: KVState) -> str:
    tiles = [
        ("Live", f"{state.num_live_blocks:,}", "blocks"),
        ("Cached", f"{state.num_cached_blocks:,}", "blocks"),
        ("Free", f"{state.num_free_blocks:,}", "blocks"),
        ("Sharing", f"×{state.sharing_factor:.2f}", "requests per live block"),
        ("Waste", f"{state.waste:.1%}", "of live blocks empty"),
        ("Hit rate", _percent(state.recent_hit_rate), "last minute"),
        ("Hit rate", _percent(state.hit_rate), "since the start"),
        ("Saved", f"{state.num_saved_tokens:,}", "prompt tokens"),
        ("Evicted", f"{state.num_evicted_blocks:,}", f"of {state.num_inserted_blocks:,} blocks"),
        ("Computed again", f"{state.num_recomputed_tokens:,}", "tokens, after preemptions"),
    ]
    rows = [f"<div><dt>{name}</dt><dd>{value} <small>{unit}</small></dd></div>" for name, value, unit in tiles]
    return f"<dl>{''.join(rows)}</dl>\n"


def _html_map(cells: BlockCells | None) -> str:
    if cells is None:
        return ""
    each = "" if cells.blocks_per_cell == 1 else f"<span>a cell is {cells.blocks_per_cell} blocks</span>"
    legend = "".join(
        f"<span>{_html_cell(Run(holder, 0, 1))}{holder.value}</span>"
        for holder in (Holder.ONE, Holder.SHARED, Holder.CACHED, Holder.FREE)
    )
    inside = "".join(_html_cell(run) * run.num_cells for run in cells.runs)
    return f'<div class="legend">{legend}{each}</div>\n<div class="map">{inside}</div>\n'


def _html_cell(run: Run) -> str:
    if run.holder is not Holder.ONE:
        return f'<i class="{_CLASSES[run.holder]}"></i>'
    return f'<i title="request {run.request + 1}" style="background:hsl({_hue(run.request)} var(--tone))"></i>'


def _hue(request: int) -> int:
    """The hue of a request, as in web/canvas.js. Consecutive numbers differ clearly, and none is the violet of shared
    blocks."""
    turn = request * 0.381966 * 285 % 285
    return round(turn if turn < 225 else turn + 75)
