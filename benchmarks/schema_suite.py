"""Hold grammars against the official JSON-Schema-Test-Suite.

    python benchmarks/schema_suite.py SUITE/tests [--by-keyword] [--show-refused]

SUITE is a checkout of json-schema-org/JSON-Schema-Test-Suite, or the folder `json` of jsonschema's source distribution.
Each schema of drafts 4 to 2020-12 is either refused, or compiled; then each instance is tried on the grammar as compact
JSON. A grammar may refuse a valid instance (names in another order, values that a rewriting leaves out). It must
never take an invalid one: then this prints it, and exits with 1.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from headway.errors import InvalidRequestError
from headway.sampling_params import StructuredOutputsParams
from headway.structured.compile_grammar import compile_grammar
from headway.structured.grammars import grammar_of

DRAFTS = ("draft4", "draft6", "draft7", "draft2019-09", "draft2020-12")
BYTES = LLTokenizer("byte")


def groups(suite: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Draft, keyword and group of tests. Up to draft 7 the suite's schemas do not name their draft."""
    for draft in DRAFTS:
        for file in sorted((suite / draft).glob("*.json")):
            for group in json.loads(file.read_text(encoding="utf-8")):
                schema = group["schema"]
                if isinstance(schema, dict) and "-" not in draft:
                    named = f"http://json-schema.org/{draft.replace('draft', 'draft-0')}/schema#"
                    group["schema"] = {"$schema": named} | schema
                yield draft, file.stem, group


def compiled(schema: Any) -> LLMatcher:
    return compile_grammar(BYTES, grammar_of(StructuredOutputsParams(json=json.dumps(schema))))


def takes(start: LLMatcher, instance: Any) -> bool:
    text = json.dumps(instance, ensure_ascii=False, separators=(",", ":")).encode()
    matcher = start.deep_copy()
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--by-keyword", action="store_true")
    parser.add_argument("--show-refused", action="store_true")
    args = parser.parse_args()
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    num_wrong = 0
    for draft, keyword, group in groups(args.suite):
        rows = [counts["all"], counts[draft], counts[f"  {keyword}"]]
        valid = [test["data"] for test in group["tests"] if test["valid"]]
        found: collections.Counter[str] = collections.Counter(schemas=1, valid=len(valid))
        try:
            start = compiled(group["schema"])
        except InvalidRequestError as error:
            if args.show_refused:
                print(f"refused  {draft}/{keyword}: {group['description']}: {error}")
        else:
            found.update(accepted=1, taken=sum(takes(start, one) for one in valid))
            for test in group["tests"]:
                if not test["valid"] and takes(start, test["data"]):
                    num_wrong += 1
                    print(f"INVALID  {draft}/{keyword}: {group['description']}: {test['description']}")
        for row in rows:
            row.update(found)
    print(f"{'':<24}{'schemas':>9}{'accepted':>10}{'valid':>8}{'taken':>8}")
    for name, row in counts.items():
        if args.by_keyword or not name.startswith(" "):
            print(f"{name:<24}{row['schemas']:>9}{row['accepted']:>10}{row['valid']:>8}{row['taken']:>8}")
    print(f"invalid instances taken: {num_wrong}")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
