"""Whether another device, or another build, samples the same tokens: seeded requests in float32, written to a file.

Every draw is a hash of (seed, position, token), so in float32 two devices differ only where the rounding of their
logits decides between two tokens; from there on that sequence goes its own way.

    python benchmarks/same_samples.py --device cpu --out cpu.json
    python benchmarks/same_samples.py --device cuda --compare cpu.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from headway import LLM, SamplingParams
from tests.integration.prompts import PROMPTS

NUM_PROMPTS = 36


def params_of(index: int, num_tokens: int) -> SamplingParams:
    """Penalties and filters, and a seed for each prompt."""
    return SamplingParams(
        temperature=0.8,
        top_p=0.95,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.1,
        seed=1000 + index,
        max_tokens=num_tokens,
        ignore_eos=True,
    )


def sample(model: str | None, device: str, num_prompts: int, num_tokens: int) -> list[list[int]]:
    llm = LLM(model, device=device, dtype="float32", quantization="none", max_model_len=2048)
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(num_prompts)]
    params = [params_of(index, num_tokens) for index in range(num_prompts)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def compare(found: list[list[int]], expected: list[list[int]]) -> str:
    """How much of the sequences is the same; tokens count up to the first that differs."""
    if len(found) != len(expected):
        raise SystemExit(f"{len(found)} sequences, but the file has {len(expected)}")
    same_tokens, lines = 0, []
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        pairs = zip(ours, theirs, strict=False)
        prefix = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
        same_tokens += prefix
        if ours != theirs:
            lines.append(f"  sequence {index} differs from token {prefix} on")
    num_tokens = sum(map(len, expected))
    num_same = len(found) - len(lines)
    summary = f"{num_same} of {len(found)} sequences are equal, {same_tokens} of {num_tokens} tokens"
    return "\n".join([summary, *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="default: the embedded model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--num-prompts", type=int, default=NUM_PROMPTS)
    parser.add_argument("--num-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, help="where to write the token ids")
    parser.add_argument("--compare", type=Path, help="a file that another run wrote")
    arguments = parser.parse_args()
    found = sample(arguments.model, arguments.device, arguments.num_prompts, arguments.num_tokens)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found))
    if arguments.compare is not None:
        print(compare(found, json.loads(arguments.compare.read_text())))


if __name__ == "__main__":
    main()
