"""Answer real schemas, and check every answer that comes to its end.

    python benchmarks/schema_coverage.py SCHEMAS.jsonl [--samples 4] [--seed 0] [--limit N] [--tokens 400] [--generate]

SCHEMAS.jsonl holds {"name": …, "schema": …} per line. Each schema is either refused, with a reason and a path, or
compiled; then random tokens are drawn from its masks, biased towards those that close strings, arrays and objects, or
the embedded model answers, and each answer that ends is checked with the jsonschema package against the schema as it
was given (formats are not asserted; multipleOf is computed in decimals). Prints a table and exits with 1 if any answer
is invalid.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from headway import LLM, SamplingParams
from headway.errors import InvalidRequestError, RequestFailedError
from headway.loader import open_checkpoint
from headway.loader.embedded import embedded_model_path
from headway.sampling_params import StructuredOutputsParams
from headway.structured.compiling import GrammarCompiler
from headway.structured.grammars import grammar_of

Row = dict[str, Any]
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


Answers = Iterator[tuple[Row, str | None]]
"""A schema and an answer that is complete, or none."""


def walked(accepted: list[tuple[Row, str]], compiler: GrammarCompiler, args: argparse.Namespace) -> Answers:
    walker = Walker(compiler.prepare(), random.Random(args.seed), args.tokens)
    for row, grammar in accepted:
        for _ in range(args.samples):
            try:
                yield row, walker.walk(compiler.compile(grammar))
            except RuntimeError as error:
                print(f"stuck    {row['name']}: {str(error).splitlines()[0]}")
                yield row, None


def generated(accepted: list[tuple[Row, str]], llm: LLM, args: argparse.Namespace) -> Answers:
    """By the model, at temperature 1."""
    asked = [(row, number) for row, _ in accepted for number in range(args.samples)]
    prompts = [[{"role": "user", "content": f"Write a JSON example of '{row['name']}'."}] for row, _ in asked]
    params = [
        SamplingParams(
            temperature=1.0,
            max_tokens=args.tokens,
            seed=args.seed + number,
            structured_outputs=StructuredOutputsParams(json=row["schema"]),
        )
        for row, number in asked
    ]
    try:
        outputs = llm.chat(prompts, params)
    except RequestFailedError as error:
        outputs = error.outputs
        names = {output.request_id: row["name"] for (row, _), output in zip(asked, outputs, strict=True)}
        for request_id, why in error.errors.items():
            print(f"stuck    {names[request_id]}: {why}")
    for (row, _), output in zip(asked, outputs, strict=True):
        answer = output.outputs[0]
        yield row, answer.text if answer.finish_reason == "stop" else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schemas", type=Path)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--generate", action="store_true", help="let the embedded model answer, at temperature 1")
    args = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    refused: collections.Counter[str] = collections.Counter()
    rows = [json.loads(line) for line in args.schemas.read_text(encoding="utf-8").splitlines()][: args.limit]
    compiler = GrammarCompiler(open_checkpoint(embedded_model_path()).tokenizer(), 0)
    compiler.prepare()
    accepted = []
    taken_s: list[float] = []
    for row in rows:
        start = time.perf_counter()
        try:
            grammar = grammar_of(StructuredOutputsParams(json=row["schema"]))
            compiler.compile(grammar)
        except InvalidRequestError as error:
            reason = "by the compiler" if error.param == "structured_outputs" else str(error.param).rpartition(".")[2]
            refused[reason] += 1
            print(f"refused  {row['name']}: {error}")
            continue
        taken_s.append(time.perf_counter() - start)
        accepted.append((row, grammar))
    answers = generated(accepted, LLM(), args) if args.generate else walked(accepted, compiler, args)
    for row, answer in answers:
        counts["answers"] += 1
        if answer is None:
            continue
        counts["ended"] += 1
        try:
            problem = jsonschema.exceptions.best_match(checker(row["schema"]).iter_errors(json.loads(answer)))
        except Exception as error:  # the schema itself may be broken, which the checker finds late
            counts["not checkable"] += 1
            print(f"broken   {row['name']}: {type(error).__name__}: {str(error)[:150]}")
            continue
        if problem is not None:
            counts["invalid"] += 1
            print(f"INVALID  {row['name']} at {problem.json_path}: {problem.message[:300]}\n         {answer[:600]}")
    print()
    print(f"schemas           {len(rows)}")
    print(f"accepted          {len(accepted)}")
    print(f"refused           {len(rows) - len(accepted)} ({(len(rows) - len(accepted)) / len(rows):.1%})")
    for feature, number in refused.most_common():
        print(f"  {feature:<20} {number}")
    for key in ("answers", "ended", "not checkable", "invalid"):
        print(f"{key:<17} {counts[key]}")
    if taken_s:
        taken_s.sort()
        print(f"to compile        {taken_s[len(taken_s) // 2] * 1e3:.1f} ms median, {taken_s[-1] * 1e3:.0f} ms at most")
    compiler.close()
    return 1 if counts["invalid"] else 0


if __name__ == "__main__":
    sys.exit(main())
