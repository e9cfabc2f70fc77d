"""A report as one HTML file: headings, text, tables and charts, for light and dark, nothing loaded, no scripts."""

from __future__ import annotations

import argparse
import contextlib
import html
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headway import __version__
from headway.errors import ConfigError
from headway_lab.charts.page_style import STYLE
from headway_lab.charts.scale import number_text

Cell = str | float | int | None

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


Tone = Literal["good", "part", "bad", "calm"]
"""The colour of a badge; its text says the same."""


@dataclass(frozen=True)
class Badge:
    """A short text in a colour."""

    text: str
    tone: Tone

    def render(self) -> str:
        return f'<span class="badge {self.tone}">{html.escape(self.text)}</span>'


@dataclass(frozen=True)
class Link:
    """A line of a list of contents."""

    text: str
    anchor: str
    badge: Badge | None = None

    def render(self) -> str:
        badge = "" if self.badge is None else self.badge.render()
        return f'<li><a href="#{html.escape(self.anchor)}">{html.escape(self.text)}</a>{badge}</li>'


class Page:
    """A page that grows from top to bottom. Texts given to it are shown as they are, and never read as markup."""

    def __init__(self, title: str, subtitle: str = "") -> None:
        self._title = title
        self._subtitle = subtitle
        self._origin: Origin | None = None
        self._parts: list[str] = []

    def heading(self, text: str, *, anchor: str = "") -> None:
        """Add a heading; links of `contents` lead to its anchor."""
        self._parts.append(f"<h2{_id(anchor)}>{html.escape(text)}</h2>")

    def contents(self, groups: Mapping[str, Sequence[Link]]) -> None:
        """Add a list of contents, in named groups."""
        sections = [
            f"<section><h3>{html.escape(name)}</h3><ol>{''.join(link.render() for link in links)}</ol></section>"
            for name, links in groups.items()
        ]
        self._parts.append(f"<nav>{''.join(sections)}</nav>")

    @contextlib.contextmanager
    def card(self, title: str, *, anchor: str = "", badge: Badge | None = None) -> Iterator[None]:
        """Everything that is added meanwhile stands on a card with this title."""
        shown = "" if badge is None else badge.render()
        head = f'<div class="head"><h3>{html.escape(title)}</h3>{shown}</div>'
        self._parts.append(f"<article{_id(anchor)}>{head}")
        yield
        self._parts.append("</article>")

    @contextlib.contextmanager
    def folded(self, title: str) -> Iterator[None]:
        """Everything that is added meanwhile is shown when a reader opens it."""
        self._parts.append(f"<details><summary>{html.escape(title)}</summary>")
        yield
        self._parts.append("</details>")

    def badges(self, badges: Sequence[Badge]) -> None:
        """Add a line of badges."""
        self._parts.append(f"<p>{' '.join(badge.render() for badge in badges)}</p>")

    def text(self, text: str, *, is_dim: bool = False) -> None:
        """Add paragraphs, which empty lines separate; none for an empty text."""
        kind = ' class="dim"' if is_dim else ""
        for paragraph in re.split(r"\n\s*\n", text.strip()) if text.strip() else ():
            self._parts.append(f"<p{kind}>{html.escape(paragraph)}</p>")

    def code(self, text: str) -> None:
        """Add a command or a file, shown as it is."""
        self._parts.append(f"<pre>{html.escape(text.strip())}</pre>")

    def facts(self, facts: Mapping[str, Cell]) -> None:
        """Add a few important numbers, as tiles."""
        tiles = [f"<div><dt>{html.escape(name)}</dt><dd>{_cell(fact)}</dd></div>" for name, fact in facts.items()]
        self._parts.append(f"<dl>{''.join(tiles)}</dl>")

    def texts(self, texts: Mapping[str, str]) -> None:
        """Add a few short texts beside each other, each with its title."""
        tiles = [f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd></div>" for name, text in texts.items()]
        self._parts.append(f'<dl class="texts">{"".join(tiles)}</dl>')

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[Cell]], *, numeric: bool = True) -> None:
        """Add a table. `numeric`: every column but the first is aligned right."""
        head = "".join(f"<th>{html.escape(header)}</th>" for header in headers)
        body = "\n".join(f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>" for row in rows)
        kind = ' class="numeric"' if numeric else ""
        self._parts.append(
            f'<div class="table"><table{kind}><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'
        )

    def chart(self, svg: str, caption: str = "", *, narrow: str = "") -> None:
        """Add a chart of this package, and a caption that says what it shows. `narrow`: the same for a phone."""
        below = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
        both = f'<div class="wide">{svg}</div><div class="narrow">{narrow}</div>' if narrow else svg
        self._parts.append(f"<figure>{both}{below}</figure>")

    def made_by(self, origin: Origin) -> None:
        """Set the foot of the page."""
        self._origin = origin

    def render(self) -> str:
        title = html.escape(self._title)
        subtitle = f'<p class="subtitle">{html.escape(self._subtitle)}</p>\n' if self._subtitle else ""
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<style>{STYLE}</style></head>\n"
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


def _id(anchor: str) -> str:
    return f' id="{html.escape(anchor)}"' if anchor else ""


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
