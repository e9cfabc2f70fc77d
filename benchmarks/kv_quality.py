"""What a quantised KV cache costs in quality: real text and real weights, each format against full precision.

For each format, in float32 arithmetic, prints a row of a table:

* bytes of KV cache per token;
* perplexity of the text, and by how much it is above that of the first format;
* how often the most likely next token is the first format's, given the same context;
* the mean distance of the true next token's log-probability;
* how many tokens of a greedy continuation are the same before the first that differs, and how many continuations are
  the same to the end.

Texts are read in pieces of at most `--context` tokens. A .jsonl file gives one text per line, its long strings in their
order; any other file is one text.

    python benchmarks/kv_quality.py [MODEL] --text FILE... [--formats float32 int8] [--max-tokens 8000] [--prompts 24]
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

from headway import LLM, SamplingParams
from headway.kv_formats import FORMATS as KV_FORMATS

FORMATS = ["float32", "float16", "int8", "fp8", "int4"]
PROMPT_TOKENS = 96


@dataclass(frozen=True)
class Work:
    """The same for all formats, in token ids."""

    pieces: list[list[int]]
    prompts: list[list[int]]
    num_output_tokens: int


@dataclass(frozen=True)
class Result:
    """Of one format."""

    bytes_per_token: float
    logprobs: list[float]
    """Of each true next token."""
    best: list[int]
    """The most likely next token, at the same places."""
    continuations: list[list[int]]

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))


def read_texts(path: Path) -> list[str]:
    """The file's texts; strings of a line that are shorter than a few words are names and labels."""
    if path.suffix != ".jsonl":
        return [path.read_text()]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return ["\n".join(value for value in row.values() if isinstance(value, str) and len(value) > 20) for row in rows]


def prepare(options: argparse.Namespace) -> Work:
    """Texts of all files in turn, until there are enough tokens."""
    tokenizer = LLM(options.model, dtype="float32", device="cpu", num_kv_blocks=64).get_tokenizer()
    files = [read_texts(path) for path in options.text]
    longest = max(len(texts) for texts in files)
    texts = [texts[i] for i in range(longest) for texts in files if i < len(texts)]
    pieces: list[list[int]] = []
    prompts: list[list[int]] = []
    flow: list[int] = []
    for text in texts:
        ids = tokenizer.encode(text + "\n\n", add_special_tokens=False)
        if len(prompts) < options.prompts and len(ids) >= PROMPT_TOKENS:
            prompts.append(ids[:PROMPT_TOKENS])
        flow += ids
        if len(flow) >= options.max_tokens and len(prompts) >= options.prompts:
            break
    flow = flow[: options.max_tokens]
    pieces = [flow[i : i + options.context] for i in range(0, len(flow), options.context)]
    return Work([piece for piece in pieces if len(piece) > 1], prompts, options.output_tokens)


def measure(model: str | None, format: str, work: Work) -> Result:
    """One engine, which scores the pieces and continues the prompts."""
    llm = LLM(
        model,
        dtype="float32",
        device="cpu",
        kv_cache_dtype=format,
        attention_backend="auto" if "native" in KV_FORMATS[format].kernels else "torch_padded",
        max_model_len=4096,
        kv_cache_memory=2**29,
    )
    logprobs, best = [], []
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    for output in llm.generate(work.pieces, params, use_tqdm=False):
        assert output.prompt_logprobs is not None
        for token, position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert position is not None
            logprobs.append(position[token].logprob)
            best.append(next(other for other, entry in position.items() if entry.rank == 1))
    params = SamplingParams(temperature=0, max_tokens=work.num_output_tokens, ignore_eos=True)
    continuations = [output.outputs[0].token_ids for output in llm.generate(work.prompts, params, use_tqdm=False)]
    plan = llm.engine.plan
    llm.shutdown()
    return Result(plan.bytes_per_block / plan.block_size, logprobs, best, [list(ids) for ids in continuations])


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many tokens are the same before the first that differs."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def row(format: str, reference: Result, result: Result) -> str:
    """A line of the table."""
    count = len(reference.best)
    agree = sum(a == b for a, b in zip(reference.best, result.best, strict=True)) / count
    distance = sum(abs(a - b) for a, b in zip(reference.logprobs, result.logprobs, strict=True)) / count
    lengths = [common_prefix(a, b) for a, b in zip(reference.continuations, result.continuations, strict=True)]
    same = sum(a == b for a, b in zip(reference.continuations, result.continuations, strict=True))
    above = 100 * (result.perplexity / reference.perplexity - 1)
    return (
        f"| {format} | {result.bytes_per_token:,.0f} | {result.perplexity:.4f} | {above:+.2f}% | {100 * agree:.2f}% | "
        f"{distance:.4f} | {sum(lengths) / len(lengths):.1f} of {len(reference.continuations[0])} | "
        f"{same} of {len(lengths)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=None, help="default: the embedded model")
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument(
        "--formats",
        nargs="+",
        default=FORMATS,
        choices=KV_FORMATS,
        help="the first is what the others are compared with",
    )
    parser.add_argument("--max-tokens", type=int, default=8_000)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--output-tokens", type=int, default=64)
    options = parser.parse_args()
    work = prepare(options)
    scored = sum(len(piece) - 1 for piece in work.pieces)
    print(f"{scored} tokens in pieces of {options.context}, {len(work.prompts)} prompts of {PROMPT_TOKENS} tokens")
    print("| format | bytes per token | perplexity | above | same next token | logprob distance | common | identical |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    reference: Result | None = None
    for format in options.formats:
        result = measure(options.model, format, work)
        reference = reference or result
        print(row(format, reference, result), flush=True)


if __name__ == "__main__":
    main()
