"""The KV cache as a page that stands for itself: no scripts, nothing to load, the colours of the server's own page."""

from __future__ import annotations

import html
from datetime import datetime

from headway.cli.kv_state import BlockCells, Holder, KVState, Run

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
    """The whole file."""
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
    body = f"<h1>KV cache of {model}</h1>\n<p>{what}</p>\n{_bar(state)}{_tiles(state)}{_map(state.cells)}"
    return f"{head}<body>\n{body}</body></html>\n"


def _bar(state: KVState) -> str:
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


def _map(cells: BlockCells | None) -> str:
    if cells is None:
        return ""
    each = "" if cells.blocks_per_cell == 1 else f"<span>a cell is {cells.blocks_per_cell} blocks</span>"
    legend = "".join(
        f"<span>{_cell(Run(holder, 0, 1))}{holder.value}</span>"
        for holder in (Holder.ONE, Holder.SHARED, Holder.CACHED, Holder.FREE)
    )
    inside = "".join(_cell(run) * run.num_cells for run in cells.runs)
    return f'<div class="legend">{legend}{each}</div>\n<div class="map">{inside}</div>\n'


def _cell(run: Run) -> str:
    if run.holder is not Holder.ONE:
        return f'<i class="{_CLASSES[run.holder]}"></i>'
    return f'<i title="request {run.request + 1}" style="background:hsl({_hue(run.request)} var(--tone))"></i>'


def _hue(request: int) -> int:
    """Neighbours in number are far apart, and none is as violet as what is shared; as in web/canvas.js."""
    turn = request * 0.381966 * 285 % 285
    return round(turn if turn < 225 else turn + 75)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
