"""SVG as strings: elements, text, and the style that every chart carries, for light and for dark surroundings."""

from __future__ import annotations

import html

NUM_COLOURS = 7
"""After so many series the colours come again, dashed."""
FONT_PX = 12.0
_WIDTH_PER_CHARACTER = 0.56
"""Of the font's size; a guess on the wide side, since nobody knows which font the reader has."""

# Okabe and Ito's colours, told apart with every kind of colour vision; lightened for dark surroundings.
_STYLE = """
.hw-chart{--hw-text:#1c2128;--hw-dim:#5d6570;--hw-grid:#e3e5e8;--hw-axis:#9aa1aa;--hw-back:#fff;
--hw-1:#0072b2;--hw-2:#d55e00;--hw-3:#009e73;--hw-4:#b8568f;--hw-5:#c98a00;--hw-6:#3a9ad9;--hw-7:#5d6570;
font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;font-size:12px;display:block;
width:100%;height:auto;font-variant-numeric:tabular-nums}
@media (prefers-color-scheme:dark){.hw-chart{--hw-text:#e3e7eb;--hw-dim:#98a2ae;--hw-grid:#272e37;--hw-axis:#5d6773;
--hw-back:#151a20;--hw-1:#58b2ee;--hw-2:#f58b4c;--hw-3:#33c99b;--hw-4:#e59cc6;--hw-5:#ecc04d;--hw-6:#9fd3ff;
--hw-7:#aeb7c2}}
.hw-chart text{fill:var(--hw-text)}.hw-chart .hw-dim{fill:var(--hw-dim)}
.hw-chart .hw-title{font-size:14px;font-weight:600}.hw-chart .hw-note{font-size:11px}
.hw-chart .hw-halo{paint-order:stroke;stroke:var(--hw-back);stroke-width:3px;stroke-linejoin:round}
.hw-chart .hw-hit{fill:transparent}.hw-chart .hw-hit:hover{fill:var(--hw-text);fill-opacity:.25}
"""


def tag(name: str, *content: str, **attributes: str | float) -> str:
    """An element. Attributes are escaped, content is markup; `class_` and `font_size` become class and font-size."""
    shown = "".join(f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"' for key, value in attributes.items())
    return f"<{name}{shown}>{''.join(content)}</{name}>" if content else f"<{name}{shown}/>"


def text(content: str, x: float, y: float, **attributes: str | float) -> str:
    """Plain text at a place."""
    return tag("text", html.escape(content), x=x, y=y, **attributes)


def hover(content: str) -> str:
    """What the browser shows when the mouse rests on the element that this stands in."""
    return tag("title", html.escape(content))


def text_width(content: str, font_px: float = FONT_PX) -> float:
    """About how wide it is going to be."""
    return len(content) * font_px * _WIDTH_PER_CHARACTER


def colour(index: int) -> str:
    """The colour of the series of this number."""
    return f"var(--hw-{index % NUM_COLOURS + 1})"


def dashes(index: int) -> str:
    """The pattern of its line."""
    return ("none", "6 4", "2 3")[index // NUM_COLOURS % 3]


def document(title: str, width: float, height: float, *content: str) -> str:
    """The picture as a whole. It is as wide as what it stands in."""
    return tag(
        "svg",
        tag("style", _STYLE),
        *content,
        xmlns="http://www.w3.org/2000/svg",
        class_="hw-chart",
        viewBox=f"0 0 {_value(width)} {_value(height)}",
        role="img",
        aria_label=title,
    )


def _value(value: str | float) -> str:
    if isinstance(value, str):
        return html.escape(value)
    return f"{value:.2f}".rstrip("0").rstrip(".")
