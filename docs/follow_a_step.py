"""Write the list of files in docs/follow_a_step.md from a step that runs.

    .venv/bin/python docs/follow_a_step.py            # rewrite the page (`make docs` does it, too)
    .venv/bin/python docs/follow_a_step.py --check    # exit with 1 if the page is stale
    .venv/bin/python docs/follow_a_step.py --files    # print the files with their exact lines, and write nothing

A tiny model with random weights runs one step with a decode and a prefill chunk. It is the GPU's runner with Triton's
kernels in their interpreter, so no GPU is needed. Whatever file of the package has code that runs from
`EngineCore.step` down is in the list, with the first sentence of its docstring. Sizes are rounded, so that the page
changes when a file of a step comes, goes or grows, and not with each line.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import tempfile
from pathlib import Path
from types import FrameType

from written_part import WrittenPart

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "headway"
PART = WrittenPart(
    ROOT / "docs" / "follow_a_step.md",
    "<!-- files of a step: written by docs/follow_a_step.py from a step that runs -->",
    "<!-- end of files of a step -->",
)
ONLY_IN_HALF_PRECISION = ("layers/skinny_gemm.py",)
"""The traced step is in float32, since the interpreter knows no bfloat16."""
ROUNDED_TO = 50
"""Lines of a file; of all together twice as many."""
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
}


def traced() -> list[str]:
    """Files of the package whose code runs in a step, in this process."""
    os.environ["TRITON_INTERPRET"] = "1"
    from headway.config import EngineConfig
    from headway.engine.llm_engine import LLMEngine
    from headway.sampling_params import SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "config.json"
        model.write_text(json.dumps(SHAPE), encoding="utf-8")
        config = EngineConfig.from_options(
            model=str(model),
            load_format="dummy",
            device="cpu",
            attention_backend="triton",
            dtype="float32",
            num_kv_blocks=32,
            block_size=16,
            max_num_seqs=4,
            max_num_batched_tokens=32,
        )
        engine = LLMEngine.from_config(config)
    engine.add_request("decode", [1, 2, 3], SamplingParams(max_tokens=8, temperature=0.8, seed=1))
    engine.step()
    engine.add_request("prefill", list(range(60)), SamplingParams(max_tokens=2, temperature=0.8, seed=2))
    engine.step()  # admits the second request and computes its first chunk

    root, called = f"{PACKAGE}/", set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            called.add(frame.f_code.co_filename.removeprefix(root))

    sys.setprofile(note)
    engine.core.step()  # a decode and a prefill chunk
    sys.setprofile(None)
    return sorted(called)


def num_lines(path: str) -> int:
    return len((PACKAGE / path).read_text(encoding="utf-8").splitlines())


def purpose(path: str) -> str:
    """The first sentence of a file's docstring."""
    docstring = ast.get_docstring(ast.parse((PACKAGE / path).read_text(encoding="utf-8")))
    if not docstring:
        raise ValueError(f"{path} is part of a step: say at its top what it does")
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return f"{paragraph.partition('. ')[0].rstrip('.')}."


def listing(files: list[str]) -> str:
    """All files of a step: one room after the other, from the loop down to the cache."""
    rooms = ("engine", "core", "executor", "runner", "models", "layers", "attention", "kv")
    order = {room: place for place, room in enumerate(rooms)}
    files = sorted(files, key=lambda path: (order.get(path.split("/")[0], len(rooms)), path))
    total = 2 * ROUNDED_TO * round(sum(map(num_lines, files)) / (2 * ROUNDED_TO))
    rows = []
    for path in files:
        size = max(ROUNDED_TO, ROUNDED_TO * round(num_lines(path) / ROUNDED_TO))
        rows.append(f"| `{path}` | {size} | {purpose(path).replace('|', chr(92) + '|')} |")
    return (
        f"{len(files)} files with about {total:,} lines:\n\n| file | lines | what it is |\n|---|--:|---|\n"
        + "\n".join(rows)
    )


def main() -> int:
    files = sorted({*traced(), *ONLY_IN_HALF_PRECISION})
    if "--files" in sys.argv[1:]:
        print(*(f"{num_lines(path):>5} {path}" for path in files), sep="\n")
        print(f"{sum(map(num_lines, files)):>5} lines in {len(files)} files")
        return 0
    return PART.main(listing(files))


if __name__ == "__main__":
    sys.exit(main())
