"""Compiling grammars whose rules or definitions follow each other in long chains."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own: what is tested for is that it lives.
PROGRAM = """
import sys
from headway.errors import InvalidRequestError
from headway.loader import open_checkpoint
from headway.loader.embedded import embedded_model_path
from headway.sampling_params import StructuredOutputsParams
from headway.structured.grammars import grammar_of
from headway.structured.guides import GrammarCompiler

NUMBER = 2_500


def definitions(schema):
    chain = {f"d{n}": schema({"$ref": f"#/$defs/d{n + 1}"}) for n in range(NUMBER)}
    return {"json": {"$ref": "#/$defs/d0", "$defs": chain | {f"d{NUMBER}": {"type": "string"}}}}


def rules(body, number):
    return {"grammar": "\\n".join(["start: r0", *(f"r{n}: {body(n)}" for n in range(number)), f'r{number}: "x"'])}


CHAINS = {
    "properties": lambda: definitions(lambda reference: {"type": "object", "properties": {"a": reference}}),
    "allOf": lambda: definitions(lambda reference: {"allOf": [reference]}),
    "rules": lambda: rules(lambda n: f'r{n + 1} | "{n}"', 3 * NUMBER),
    "groups": lambda: rules(lambda n: '("a" ' * 9 + f"r{n + 1}" + ")" * 9, NUMBER),
}
tokenizer = open_checkpoint(embedded_model_path()).tokenizer()
try:
    GrammarCompiler(tokenizer, 0).compile(grammar_of(StructuredOutputsParams(**CHAINS[sys.argv[1]]())))
except InvalidRequestError as error:
    print(error)
print("alive")
"""


@pytest.mark.parametrize("chain", ["properties", "allOf", "rules", "groups"])
def test_long_chains_of_rules_and_references_do_not_end_the_process(chain: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, chain], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("alive\n"), (done.returncode, done.stdout, done.stderr)
