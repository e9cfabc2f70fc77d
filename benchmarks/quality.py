"""What the fast number format costs in quality: the same text scored by the float32 reference and by the fast mode.

Reads token ids (a JSON list of {"prompt_ids": [...]}) or plain text, and prints for each mode the perplexity, how often
its most likely next token is the reference's, and the mean distance of log-probabilities of the true next tokens.

    python benchmarks/quality.py TEXT_OR_WORKLOAD [--model PATH] [--max-tokens 10000]
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from headway import LLM, SamplingParams

CONTEXT_TOKENS = 512


def read_pieces(path: Path, llm: LLM, max_tokens: int) -> list[list[int]]:
    """Token ids in pieces of at most `CONTEXT_TOKENS`."""
    if path.suffix == ".json":
        texts = [row["prompt_ids"] for row in json.loads(path.read_text())]
    else:
        texts = [llm.get_tokenizer().encode(path.read_text(), add_special_tokens=False)]
    pieces = [text[i : i + CONTEXT_TOKENS] for text in texts for i in range(0, len(text), CONTEXT_TOKENS)]
    kept, total = [], 0
    for piece in pieces:
        if len(piece) > 1 and total < max_tokens:
            kept.append(piece)
            total += len(piece)
    return kept


def score(llm: LLM, pieces: list[list[int]]) -> list[tuple[float, int]]:
    """For every token but the first of each piece: its log-probability, and the token thought most likely there."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    scored = []
    for output in llm.generate(pieces, params):
        for token, position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            best = next(other for other, entry in position.items() if entry.rank == 1)
            scored.append((position[token].logprob, best))
    return scored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default=None, help="default: the embedded model")
    parser.add_argument("--max-tokens", type=int, default=10_000)
    options = parser.parse_args()
    reference = LLM(options.model, dtype="float32", device="cpu")
    pieces = read_pieces(options.text, reference, options.max_tokens)
    expected = score(reference, pieces)
    reference.shutdown()
    found = score(LLM(options.model, dtype="auto", quantization="int8", device="cpu"), pieces)
    count = len(expected)
    agree = sum(a[1] == b[1] for a, b in zip(expected, found, strict=True)) / count
    distance = sum(abs(a[0] - b[0]) for a, b in zip(expected, found, strict=True)) / count
    perplexity = [math.exp(-sum(logprob for logprob, _ in scored) / count) for scored in (expected, found)]
    print(f"{count} tokens in {len(pieces)} pieces")
    print(f"float32  perplexity {perplexity[0]:.4f}")
    print(
        f"int8     perplexity {perplexity[1]:.4f} ({100 * (perplexity[1] / perplexity[0] - 1):+.2f}%), "
        f"same most likely token {100 * agree:.2f}%, mean |logprob difference| {distance:.4f}"
    )


if __name__ == "__main__":
    main()
