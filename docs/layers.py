"""Write the list of layers in docs/architecture.md from the import contract in pyproject.toml.

    .venv/bin/python docs/layers.py            # rewrite the page (`make docs` does it, too)
    .venv/bin/python docs/layers.py --check    # exit with 1 if the page is stale

The order is the contract's. What a layer is for stands in `PURPOSES`: a new one needs a line there.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from written_part import WrittenPart

ROOT = Path(__file__).resolve().parent.parent
PART = WrittenPart(
    ROOT / "docs" / "architecture.md",
    "<!-- layers: written by docs/layers.py from pyproject.toml -->",
    "<!-- end of layers -->",
)
PURPOSES = {
    "__main__": "python -m headway",
    "cli": "one module per command",
    "doctor": "what a machine has, and what is wrong with it",
    "console": "what commands share: flags, tables, files, profiles",
    "server": "HTTP front end and page",
    "front": "engine processes: routing, supervision, resumption",
    "engine_process": "the engine as a process",
    "llm": "the Python API",
    "async_llm": "the same for asyncio programs",
    "async_outputs": "outputs of AsyncLLM, from deltas",
    "engine": "the loop; text ↔ tokens",
    "executor": "who runs a step",
    "worker": "load, plan memory, run",
    "runner": "plan → tensors → tokens",
    "loader": "safetensors, GGUF, hub, random weights",
    "models": "one decoder for all families",
    "attention": "over the paged cache",
    "layers": "kinds of linear layers and MLPs, operations of a decoder",
    "transfer": "KV blocks between memories and processes",
    "wire": "messages of front ends and engine processes",
    "kv": "the cache as tensors",
    "native": "CPU kernels in C",
    "structured": "answers with a form: grammars, tool calls, reasoning",
    "tokenizer": "text, chat templates",
    "predict": "lengths of answers",
    "core": "decisions: no tensors, clock or I/O",
    "config": "every option",
    "settings": "options with nothing left open",
    "sampling_params": "what a request asks for",
    "outputs": "what it gets",
    "counters": "numbers that are declared once",
    "kv_formats": "in which numbers the cache is stored",
    "errors": "what can go wrong",
    "cache_dir": "files kept between runs",
    "child_process": "how processes are started",
    "tracing": "spans for profiles",
    "progress": "how far long work is, on stderr",
    "option_fields": "how an option is declared and checked",
    "text_files": "small files that an operator names",
    "price": "what tokens cost",
    "installing": "how to install what is missing",
}


def layers() -> list[list[str]]:
    """Modules of each layer, from top to bottom."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    [contract] = [one for one in contracts if one["type"] == "layers"]
    return [[name.strip("() ") for name in layer.replace("|", ":").split(":")] for layer in contract["layers"]]


def listing() -> str:
    """A line for each module; "·" marks one that shares the layer of the line above."""
    lines = []
    for modules in layers():
        for place, name in enumerate(modules):
            if name not in PURPOSES:
                raise ValueError(f"docs/layers.py: say in PURPOSES what '{name}' is for")
            same_layer = "·" if place else " "
            lines.append(f"   {same_layer} {name:<17}{PURPOSES[name]}")
    known = {name for modules in layers() for name in modules}
    if unknown := sorted(set(PURPOSES) - known):
        raise ValueError(f"docs/layers.py: no layer is called {', '.join(unknown)}")
    return "\n".join(["```", *lines, "```"])


if __name__ == "__main__":
    sys.exit(PART.main(listing()))
