"""Walk through the grammars of real schemas and check every answer that a walk completes.

    python benchmarks/schema_coverage.py SCHEMAS.jsonl [--samples 4] [--seed 0] [--limit N] [--tokens 400]

SCHEMAS.jsonl holds {"name": …, "schema": …} per line. Each schema is either refused, with a reason and a path, or
compiled; then random tokens are drawn from its masks, biased towards those that close strings, arrays and objects, and
each answer that ends is checked with the jsonschema package against the schema as it was given (formats are not
asserted; multipleOf is computed in decimals). Prints a table and exits with 1 if any answer is invalid.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from headway.errors import InvalidRequestError
from headway.loader import open_checkpoint
from headway.loader.embedded import embedded_model_path
from headway.structured.compiling import LIMITS
from headway.structured.json_schema import prepare_schema

CLOSING = tuple(b'"}],')


def multiple_of(validator: Any, factor: Any, instance: Any, schema: Any) -> Any:
    """Check in decimals: 19.99 is a multiple of 0.01, which doubles deny."""
    if validator.is_type(instance, "number") and Decimal(repr(instance)) % Decimal(repr(factor)):
        yield jsonschema.ValidationError(f"{instance!r} is not a multiple of {factor!r}")


def checker(schema: Any) -> Any:
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return jsonschema.validators.extend(kind, {"multipleOf": multiple_of})(schema)


class Walker:
    """Draw tokens from the masks of one grammar."""

    def __init__(self, tokenizer: LLTokenizer, chance: random.Random, tokens: int) -> None:
        self._tokenizer = tokenizer
        self._chance = chance
        self._tokens = tokens
        self._ends = set(tokenizer.eos_tokens)
        self._texts = [tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size)]
        self._closing = np.array([bool(text) and text[0] in CLOSING for text in self._texts])
        self._blank = np.array([not text.strip() for text in self._texts])

    def walk(self, matcher: LLMatcher) -> str | None:
        """Return a complete answer, or None if it would be too long."""
        drawn: list[int] = []
        close = self._chance.choice([0.1, 0.4, 0.8])
        while len(drawn) < self._tokens:
            if matcher.is_accepting() and (matcher.is_stopped() or self._chance.random() < 0.5):
                return b"".join(self._texts[token] for token in drawn).decode(errors="strict")
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.unpackbits(bits, bitorder="little")[: len(self._texts)].astype(bool)
            for end in self._ends:
                allowed[end] = False
            if not allowed.any():
                return None if not matcher.is_accepting() else b"".join(self._texts[one] for one in drawn).decode()
            closing = np.flatnonzero(allowed & self._closing)
            dense = np.flatnonzero(allowed & ~self._blank)
            if len(closing) and self._chance.random() < close:
                token = int(self._chance.choice(closing))
            else:
                token = int(self._chance.choice(dense if len(dense) else np.flatnonzero(allowed)))
            if not matcher.consume_token(token):
                raise RuntimeError(matcher.get_error())
            drawn.append(token)
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schemas", type=Path)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=400)
    args = parser.parse_args()
    text = open_checkpoint(embedded_model_path()).tokenizer()
    tokenizer = LLTokenizer(text.backend.to_str(), eos_token=list(text.eos_token_ids))
    walker = Walker(tokenizer, random.Random(args.seed), args.tokens)
    counts: collections.Counter[str] = collections.Counter()
    refused: collections.Counter[str] = collections.Counter()
    rows = [json.loads(line) for line in args.schemas.read_text(encoding="utf-8").splitlines()][: args.limit]
    slowest: list[tuple[float, str]] = []
    for row in rows:
        start = time.perf_counter()
        try:
            prepared = prepare_schema(row["schema"], path="schema")
        except InvalidRequestError as error:
            refused[str(error.param).rpartition(".")[2]] += 1
            print(f"refused  {row['name']}: {error}")
            continue
        first = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(prepared), log_level=0, limits=LIMITS)
        slowest.append((time.perf_counter() - start, row["name"]))
        if first.is_error():
            refused["by the compiler"] += 1
            print(f"refused  {row['name']}: {first.get_error().splitlines()[0]}")
            continue
        counts["accepted"] += 1
        validator = checker(row["schema"])
        for _ in range(args.samples):
            counts["walks"] += 1
            try:
                answer = walker.walk(first.deep_copy())
            except RuntimeError as error:
                counts["stuck"] += 1
                print(f"stuck    {row['name']}: {str(error).splitlines()[0]}")
                continue
            if answer is None:
                continue
            counts["ended"] += 1
            try:
                problem = jsonschema.exceptions.best_match(validator.iter_errors(json.loads(answer)))
            except Exception as error:  # the schema itself may be broken, which the checker finds late
                counts["not checkable"] += 1
                print(f"broken   {row['name']}: {type(error).__name__}: {str(error)[:150]}")
                continue
            if problem is not None:
                counts["invalid"] += 1
                print(
                    f"INVALID  {row['name']} at {problem.json_path}: {problem.message[:300]}\n         {answer[:600]}"
                )
    slowest.sort()
    print()
    print(f"schemas           {len(rows)}")
    print(f"accepted          {counts['accepted']}")
    print(f"refused           {len(rows) - counts['accepted']} ({(len(rows) - counts['accepted']) / len(rows):.1%})")
    for feature, number in refused.most_common():
        print(f"  {feature:<20} {number}")
    for key in ("walks", "ended", "stuck", "not checkable", "invalid"):
        print(f"{key:<17} {counts[key]}")
    if slowest:
        median, most = slowest[len(slowest) // 2][0], slowest[-1][0]
        print(f"to compile        {median * 1e3:.1f} ms median, {most * 1e3:.0f} ms at most")
    return 1 if counts["invalid"] else 0


if __name__ == "__main__":
    sys.exit(main())
