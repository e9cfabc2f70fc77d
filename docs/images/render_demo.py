"""Writes docs/images/demo.svg: one real frame of `headway demo`, the fullest one while the long prompt is computed.

Run it: .venv/bin/python docs/images/render_demo.py
"""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from headway.cli import demo
from headway.cli.batch_watch import BatchWatch, State, WatchedRequest
from headway.cli.live_view import BatchPicture
from headway.engine.llm_engine import LLMEngine

TARGET = Path(__file__).with_name("demo.svg")
LONG_REQUEST = "story"
WIDTH = 100


class Camera:
    """A view that keeps the frame in which most requests run beside the long prompt."""

    def __init__(self, title: str) -> None:
        self.svg = ""
        self._title = title
        self._best = (0, 0)

    def arrived(self, request: WatchedRequest) -> None:
        pass

    def stepped(self, watch: BatchWatch) -> None:
        assert watch.report is not None
        fullness = (len(watch.report.rows), watch.report.num_tokens)
        if watch.requests[LONG_REQUEST].state is State.PREFILL and fullness >= self._best:
            self._best = fullness
            console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
            console.print(BatchPicture(watch, self._title))
            svg = console.export_svg(title="headway demo")
            # The picture must not depend on a font from somewhere else.
            svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
            self.svg = svg.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")


def main() -> None:
    config = demo.demo_config({})
    camera = Camera(demo.title(config))
    demo.run_demo(LLMEngine.from_config(config), camera)
    TARGET.write_text(camera.svg)
    print(f"wrote {TARGET}")


if __name__ == "__main__":
    main()
