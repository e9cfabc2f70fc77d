"""A report as one HTML file: headings, text, tables and charts, for light and dark, nothing loaded, no scripts."""

from __future__ import annotations

import argparse
import html
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway import __version__
from headway.errors import ConfigError
from headway_lab.charts.scale import number_text

Cell = str | float | int | None

_STYLE = """
:root { color-scheme: light dark; --bg: #f6f6f3; --card: #fff; --line: #dedfd9; --text: #1c2128; --dim: #5d6570 }
@media (prefers-color-scheme: dark) { :root { --bg: #0d1014; --card: #151a20; --line: #272e37; --text: #e3e7eb;
  --dim: #98a2ae } }
body { margin: 0 auto; max-width: 62rem; padding: 2rem 1.25rem 3rem; background: var(--bg); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif }
h1 { margin: 0; font-size: 1.5rem; letter-spacing: -.01em } h2 { margin: 2rem 0 .6rem; font-size: 1.15rem }
.subtitle { margin: .2rem 0 1.2rem; color: var(--dim) } p { margin: .5rem 0 1rem; max-width: 46rem }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: 1px; margin: 0 0 1.2rem;
  border: 1px solid var(--line); border-radius: 10px; background: var(--line); overflow: hidden }
dl div { padding: .55rem .8rem; background: var(--card) } dt { font-size: 12px; color: var(--dim) }
dd { margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums }
figure { margin: 0 0 1.2rem; padding: .7rem .6rem; border: 1px solid var(--line); border-radius: 10px;
  background: var(--card) }
figcaption { padding: .2rem .6rem 0; font-size: 13px; color: var(--dim) }
.table { margin: 0 0 1.2rem; overflow-x: auto; border: 1px solid var(--line); border-radius: 10px;
  background: var(--card) }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .8rem; text-align: left; border-top: 1px solid var(--line) } thead th { border-top: 0 }
th { font-size: 12.5px; font-weight: 600; color: var(--dim) } .numeric :is(th, td):not(:first-child) {
  text-align: right } .numeric td { white-space: nowrap } .numeric td:first-child { white-space: normal }
pre { margin: 0 0 1.2rem; padding: .7rem .9rem; overflow-x: auto; border: 1px solid var(--line); border-radius: 10px;
  background: var(--card); font-size: 13px }
footer { margin: 2.5rem 0 0; padding: .9rem 0 0; border-top: 1px solid var(--line); color: var(--dim); font-size: 13px;
  overflow-wrap: anywhere }
footer p { max-width: none; margin: .15rem 0 }
"""
_HIDDEN = "HIDDEN"
_SECRETS = frozenset({"--api-key"})
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")


@dataclass(frozen=True)
class Origin:
    """What a reader needs to make a page again, shown at its foot."""

    command: str
    version: str
    seed: str
    machine: str


def command_text(arguments: Sequence[str]) -> str:
    """A command as it is typed, without the secrets in it."""
    shown, hides_next = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hides_next:
            argument, hides_next = _HIDDEN, False
        elif name in _SECRETS:
            argument, hides_next = (f"{name}={_HIDDEN}", False) if equals else (name, True)
        shown.append(_CREDENTIALS.sub(_HIDDEN, argument))
    return shlex.join(shown)


class Page:
    """A page that grows from top to bottom. Texts given to it are shown as they are, and never read as markup."""

    def __init__(self, title: str, subtitle: str = "") -> None:
        self._title = title
        self._subtitle = subtitle
        self._origin: Origin | None = None
        self._parts: list[str] = []

    def heading(self, text: str) -> None:
        self._parts.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str) -> None:
        """Add paragraphs, which empty lines separate."""
        for paragraph in re.split(r"\n\s*\n", text.strip()):
            self._parts.append(f"<p>{html.escape(paragraph)}</p>")

    def code(self, text: str) -> None:
        """Add a command or a file, shown as it is."""
        self._parts.append(f"<pre>{html.escape(text.strip())}</pre>")

    def facts(self, facts: Mapping[str, Cell]) -> None:
        """Add a few important numbers, as tiles."""
        tiles = [f"<div><dt>{html.escape(name)}</dt><dd>{_cell(fact)}</dd></div>" for name, fact in facts.items()]
        self._parts.append(f"<dl>{''.join(tiles)}</dl>")

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[Cell]], *, numeric: bool = True) -> None:
        """Add a table. `numeric`: every column but the first is aligned right."""
        head = "".join(f"<th>{html.escape(header)}</th>" for header in headers)
        body = "\n".join(f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>" for row in rows)
        kind = ' class="numeric"' if numeric else ""
        self._parts.append(
            f'<div class="table"><table{kind}><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'
        )

    def chart(self, svg: str, caption: str = "") -> None:
        """Add a chart of this package, and a caption that says what it shows."""
        below = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
        self._parts.append(f"<figure>{svg}{below}</figure>")

    def made_by(self, origin: Origin) -> None:
        """Set the foot of the page."""
        self._origin = origin

    def render(self) -> str:
        title = html.escape(self._title)
        subtitle = f'<p class="subtitle">{html.escape(self._subtitle)}</p>\n' if self._subtitle else ""
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<style>{_STYLE}</style></head>\n"
            f"<body>\n<h1>{title}</h1>\n{subtitle}"
            + "\n".join(self._parts)
            + f"\n{_footer(self._origin)}</body></html>\n"
        )

    def save(self, path: str | Path) -> None:
        """Write the page; `OSError` if that fails."""
        Path(path).write_text(self.render(), encoding="utf-8")


def write_page(arguments: argparse.Namespace, page: Page, *, seed: int | str, machine: str) -> None:
    """Write a page to --html, with the command that made it at its foot. `ConfigError` if it cannot be written."""
    path = arguments.html
    page.made_by(Origin(command_text(arguments.command_line), __version__, str(seed), machine))
    try:
        page.save(path)
    except OSError as error:
        raise ConfigError(f"Cannot write the report '{path}': {error.strerror}.") from error
    print(f"Wrote {path}", file=sys.stderr)


def _footer(origin: Origin | None) -> str:
    if origin is None:
        return ""
    facts = f"Headway {origin.version} · seed: {origin.seed} · machine: {origin.machine}"
    command = f"<code>{html.escape(origin.command)}</code>"
    return f"<footer><p>Made by {command}</p><p>{html.escape(facts)}</p></footer>\n"


def _cell(cell: Cell) -> str:
    if cell is None:
        return "–"
    return html.escape(cell if isinstance(cell, str) else number_text(cell))
