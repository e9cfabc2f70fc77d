"""The jobs of helper processes, and their results.

    GrammarJob   try to compile a grammar, to see whether that ends and how much memory it takes
    ShapeJob     make a grammar from the tools and the constraint of a request; then try to compile it

Jobs and results are JSON: numbers in schemas may have any number of digits.
"""

from __future__ import annotations

import resource
import signal
import sys

import msgspec
from llguidance import LLTokenizer

from headway.errors import InvalidRequestError
from headway.structured.compile_grammar import TRIAL_S, compile_grammar
from headway.structured.output_shape import Shape, ShapeJob, shape_output

LEAST_BYTES = 1024 * 1024
"""The least memory that a compiled grammar is counted as."""


class GrammarJob(msgspec.Struct, tag="grammar", frozen=True):
    """Compile a grammar."""

    grammar: str


class Compiles(msgspec.Struct, tag="compiles", frozen=True):
    """A grammar compiles, and takes this much memory."""

    num_bytes: int


class Refusal(msgspec.Struct, tag="refusal", frozen=True):
    """An `InvalidRequestError`."""

    message: str
    param: str | None

    def error(self) -> InvalidRequestError:
        """The error to raise."""
        return InvalidRequestError(self.message, param=self.param)


Job = GrammarJob | ShapeJob
JobResult = Compiles | Shape | Refusal
_jobs = msgspec.json.Decoder(Job)
_results = msgspec.json.Decoder(JobResult)


def encode_job(job: Job) -> bytes:
    return msgspec.json.encode(job)


def decode_result(result: bytes) -> JobResult:
    return _results.decode(result)


def make_trie(tokenizer: str, n_vocab: int, eos_token: list[int]) -> LLTokenizer:
    """The tokenizer as llguidance knows it. Takes half a second for 50,000 tokens."""
    return LLTokenizer(tokenizer, n_vocab=n_vocab, eos_token=eos_token)


def do_job(trie: LLTokenizer | None, job: bytes) -> bytes:
    """Do a job in a helper process. Without a trie nothing is compiled."""
    return msgspec.json.encode(_result(trie, _jobs.decode(job)))


def _result(trie: LLTokenizer | None, job: Job) -> JobResult:
    try:
        if isinstance(job, GrammarJob):
            return Compiles(_try(trie, job.grammar))
        shape = shape_output(job)
        if shape.grammar is None:
            return shape
        return msgspec.structs.replace(shape, num_bytes=_try(trie, shape.grammar))
    except InvalidRequestError as error:
        return Refusal(str(error), error.param)
    except RecursionError:
        return Refusal("structured_outputs cannot be used: it is nested too deeply", "structured_outputs")


def _try(trie: LLTokenizer | None, grammar: str) -> int:
    """Compile a grammar, within the time that it may take in an engine. Returns how much memory that took."""
    if trie is None:
        return LEAST_BYTES
    left_s, _ = signal.getitimer(signal.ITIMER_PROF)
    if left_s > TRIAL_S:
        signal.setitimer(signal.ITIMER_PROF, TRIAL_S)
    before = _peak_bytes()
    _matcher = compile_grammar(trie, grammar)
    return max(_peak_bytes() - before, LEAST_BYTES)


def _peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
