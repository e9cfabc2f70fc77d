"""What quantised weights cost in quality: the same text scored with float32 weights and with each format.

Prints a row of a table for each format:

* bits per weight of the layers, scales included;
* perplexity of the text, and its ratio to that of float32, with the standard error of that ratio;
* agreement: how often the most likely next token is float32's, given the same context;
* the mean KL divergence of the next-token distributions from those of float32, in nats.

A document is a line of a .jsonl file (its strings under the names `--field`, at any depth), a list of token ids of a
.json workload (`prompt_ids`), a file of a folder, or any other file. It is cut to `--context` tokens; all of them but
the first are scored. Documents are taken from the given texts in turn, until there are `--max-tokens`.

Weights are those of the checkpoint as float32 numbers, quantised anew, but for `cpu-stored`. The gpu formats are
emulated in float32: weights and activations take the values that they have on the device, and sums are float32's.

    python benchmarks/quality.py --text answers.jsonl --field prompt response
    python benchmarks/quality.py --model model.gguf --text answers.jsonl src --formats gpu-int4 --reference states.pt

{formats}
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.attention import AttentionBatch, create_backend
from headway.config import ModelConfig
from headway.kv.layer_cache import LayerKVCache
from headway.layers import LinearFactory
from headway.layers.linear import Linear, TorchLinear
from headway.layers.native_ops import NativeOps
from headway.layers.ops import Ops, TorchOps
from headway.layers.quantized_weight import FP8, QuantizedWeight, Weight, dequantised, quantise
from headway.loader import open_checkpoint
from headway.loader.chosen_model import load_model_tokenizer
from headway.loader.embedded import embedded_model_path
from headway.models import assembly
from headway.models.checkpoint import Checkpoint
from headway.models.decoder import Decoder
from headway.tokenizer import Tokenizer

FIELDS = ["prompt", "response", "text", "user", "bot", "turns", "question", "answer"]
BLOCK_SIZE = 16
STEP_TOKENS = 1024
LOGIT_ROWS = 128
"""Logits of so many tokens are held at once."""
TALLY_ROWS = 16
"""So few are compared at once that what is computed of them stays in caches."""

Document = list[int]


class EmulatedLinear(TorchLinear):
    """A layer of a GPU: codes as the float32 numbers they stand for; beside codes of 8 bits, rows become codes too."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        super().__init__(weight.dequantise(), bias)
        self._rows_dtype = weight.codes.dtype if weight.bits == 8 else None
        scale_bytes = 4 if weight.bits == 8 else 2
        self._num_bytes = weight.codes.numel() * weight.bits // 8 + weight.scales.numel() * scale_bytes

    @property
    def num_bytes(self) -> int:
        """As packed on the device."""
        return self._num_bytes

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return super().__call__(x if self._rows_dtype is None else rounded_rows(x, self._rows_dtype), out)


def rounded_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows as codes of `dtype` with a scale each, and back to numbers."""
    largest = 448.0 if dtype == FP8 else 127.0
    scales = (x.abs().amax(1, keepdim=True) / largest).clamp_(min=1e-30)
    codes = x / scales
    return (codes.to(FP8).float() if dtype == FP8 else codes.add_(0.5).floor_()).mul_(scales)


class Bfloat16Linear(TorchLinear):
    """Weight, activations and product rounded to bfloat16. On a CPU without such units torch itself takes minutes."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.bfloat16().float(), bias)

    @property
    def num_bytes(self) -> int:
        """As bfloat16."""
        return self.weight.numel() * 2

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        product = super().__call__(x.bfloat16().float()).bfloat16().float()
        return product if out is None else out.copy_(product)


class EmulatedFactory(LinearFactory):
    """Layers as CUDA's, on the CPU; not quantised ones in bfloat16."""

    def __init__(self, quantization: str, **options: Any) -> None:
        super().__init__(quantization, **options)
        self._format = quantization

    def linear(self, weight: Weight, bias: Tensor | None) -> Linear:
        numbers = dequantised(weight)
        if self._format == "none":
            return Bfloat16Linear(numbers, bias)
        return EmulatedLinear(quantise(numbers, self._format), bias)

    def head(self, weight: Weight) -> Linear:
        numbers = dequantised(weight)
        return Bfloat16Linear(numbers, None) if self._format == "none" else TorchLinear(numbers)


def load_emulated(checkpoint: Checkpoint, *, quantization: str) -> Decoder:
    with patch.object(assembly, "LinearFactory", EmulatedFactory):
        return assembly.load_decoder(checkpoint, quantization=quantization, ops=TorchOps())


@dataclass(frozen=True)
class Format:
    """A way to hold the weights."""

    meaning: str
    load: Callable[[Checkpoint], Decoder]


def _loaded(ops: type[Ops], **options: Any) -> Callable[[Checkpoint], Decoder]:
    return lambda checkpoint: assembly.load_decoder(checkpoint, ops=ops(), **options)


FORMATS = {
    "float32": Format("the reference", _loaded(TorchOps)),
    "bfloat16": Format(
        "weights, activations and products; emulated as the gpu formats",
        functools.partial(load_emulated, quantization="none"),
    ),
    "gpu-fp8": Format(
        "e4m3 with a scale for each output; activations e4m3 with a scale for each row",
        functools.partial(load_emulated, quantization="fp8"),
    ),
    "gpu-int8": Format(
        "a scale for each output; activations int8 with a scale for each row",
        functools.partial(load_emulated, quantization="int8"),
    ),
    "gpu-int4": Format(
        "a scale for each output and 128 inputs (64 or 32 where these do not divide)",
        functools.partial(load_emulated, quantization="int4"),
    ),
    "cpu-int8": Format(
        "the CPU kernels: a scale for each output and 64 inputs; activations int8; the head too",
        _loaded(NativeOps, quantization="int8"),
    ),
    "cpu-int4": Format(
        "the CPU kernels: a scale for each output and 32 inputs; activations int8; the head as cpu-int8",
        _loaded(NativeOps, quantization="int4"),
    ),
    "cpu-stored": Format(
        "the CPU kernels: 4-bit weights as the checkpoint has them, others as cpu-int8; activations int8",
        _loaded(NativeOps, quantization="int8", keeps_stored=True),
    ),
}


def named_strings(value: Any, names: Sequence[str], *, is_named: bool = False) -> Iterator[str]:
    """The strings under these names, at any depth and in their order."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from named_strings(part, names, is_named=name in names)
    elif isinstance(value, list):
        for part in value:
            yield from named_strings(part, names, is_named=is_named)
    elif isinstance(value, str) and is_named:
        yield value


def read_documents(path: Path, names: Sequence[str], tokenizer: Tokenizer) -> Iterator[Document]:
    """Of one text, uncut."""
    if path.is_dir():
        for file in sorted(file for file in path.rglob("*") if file.suffix in (".py", ".md", ".txt")):
            yield tokenizer.encode(file.read_text(), add_special_tokens=False)
    elif path.suffix == ".json":
        yield from (row["prompt_ids"] for row in json.loads(path.read_text()))
    elif path.suffix == ".jsonl":
        for line in path.read_text().splitlines():
            text = "\n\n".join(named_strings(json.loads(line), names))
            yield tokenizer.encode(text, add_special_tokens=False)
    else:
        yield tokenizer.encode(path.read_text(), add_special_tokens=False)


def take_documents(sources: Sequence[Iterable[Document]], *, context: int, max_tokens: int) -> list[Document]:
    """From each in turn, until so many tokens are scored."""
    taken: list[Document] = []
    for document in chain.from_iterable(zip_longest(*sources)):
        if document is None or len(document) < 2:
            continue
        room = max_tokens - num_scored(taken)
        if room <= 0:
            break
        taken.append(document[: min(context, room + 1)])
    return taken


def num_scored(documents: Sequence[Document]) -> int:
    return sum(len(document) - 1 for document in documents)


def steps_of(documents: Sequence[Document]) -> Iterator[list[Document]]:
    """Whole documents, together at most `STEP_TOKENS`."""
    step: list[Document] = []
    for document in documents:
        if step and sum(map(len, step)) + len(document) > STEP_TOKENS:
            yield step
            step = []
        step.append(document)
    yield step


class Reader:
    """Runs a decoder over documents; each begins anew."""

    def __init__(self, decoder: Decoder) -> None:
        config = decoder.config
        # A step's documents are as many tokens, and each may leave its last block almost empty.
        num_blocks = 2 * STEP_TOKENS // BLOCK_SIZE + STEP_TOKENS // 2
        shape = (num_blocks, config.num_kv_heads, config.head_dim, BLOCK_SIZE)
        caches = [LayerKVCache.zeros(*shape, dtype=decoder.embedding.dtype) for _ in decoder.layers]
        self._decoder = decoder
        self._attention = create_backend("cpu", caches, config.num_heads)

    def states(self, step: Sequence[Document]) -> Tensor:
        """What comes before the head, of all tokens but the last of each document."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        table: list[list[int]] = []
        starts = [0]
        num_blocks = 0
        for document in step:
            own = math.ceil(len(document) / BLOCK_SIZE)
            table.append(list(range(num_blocks, num_blocks + own)))
            slots += [num_blocks * BLOCK_SIZE + position for position in range(len(document))]
            positions += range(len(document))
            token_ids += document
            starts.append(len(token_ids))
            num_blocks += own
        width = max(map(len, table))
        lengths = [len(document) for document in step]
        self._attention.plan(
            AttentionBatch(
                num_tokens=len(token_ids),
                num_requests=len(step),
                max_query_len=max(lengths),
                max_seq_len=max(lengths),
                query_start=torch.tensor(starts, dtype=torch.int32),
                seq_lens=torch.tensor(lengths, dtype=torch.int32),
                block_table=torch.tensor([row + [0] * (width - len(row)) for row in table], dtype=torch.int32),
                slot_mapping=torch.tensor(slots),
            )
        )
        ends = set(starts)
        wanted = torch.tensor([row for row in range(len(token_ids)) if row + 1 not in ends])
        return self._decoder.forward(torch.tensor(token_ids), torch.tensor(positions), self._attention, wanted)


@dataclass
class Tally:
    """One format beside the reference, token by token."""

    logprobs: list[Tensor] = field(default_factory=list)
    """Of the true next tokens."""
    reference_logprobs: list[Tensor] = field(default_factory=list)
    divergences: list[Tensor] = field(default_factory=list)
    agreements: list[Tensor] = field(default_factory=list)

    def add(self, logits: Tensor, reference: Tensor, targets: Tensor) -> None:
        """Logits [tokens, vocabulary] of both."""
        logprobs, expected = (part.float().log_softmax(1) for part in (logits, reference))
        self.logprobs.append(logprobs.gather(1, targets[:, None])[:, 0].double())
        self.reference_logprobs.append(expected.gather(1, targets[:, None])[:, 0].double())
        self.agreements.append((logits.argmax(1) == reference.argmax(1)).double())
        self.divergences.append((expected.exp() * (expected - logprobs)).sum(1).double())

    def row(self, name: str, bits: float) -> str:
        """A line of the table."""
        logprobs, expected = torch.cat(self.logprobs), torch.cat(self.reference_logprobs)
        ratio = (expected - logprobs).mean().exp().item()
        error = ratio * (expected - logprobs).std().item() / math.sqrt(len(logprobs))
        return (
            f"| {name} | {bits:.2f} | {(-logprobs).mean().exp():.4f} | {ratio:.4f} ± {error:.4f} | "
            f"{100 * torch.cat(self.agreements).mean():.2f}% | {torch.cat(self.divergences).mean():.5f} |"
        )


@dataclass(frozen=True)
class Reference:
    """float32: what comes before the head for every scored token, and the head."""

    documents: list[Document]
    states: Tensor
    head: Tensor

    @staticmethod
    def of(checkpoint: Checkpoint, documents: list[Document], kept: Path | None) -> Reference:
        """From the file `kept` where it is there; otherwise computed, and written there."""
        name = assembly.EMBEDDING if checkpoint.config.tie_embeddings else assembly.LM_HEAD
        head = checkpoint.read(name).float()
        if kept is not None and kept.exists():
            found = torch.load(kept)
            if found["documents"] != documents:
                sys.exit(f"{kept} is of another text; give another --reference")
            return Reference(documents, found["states"], head)
        reader, progress = Reader(FORMATS["float32"].load(checkpoint)), Progress("float32", num_scored(documents))
        states = torch.cat([progress.after(reader.states(step)) for step in steps_of(documents)])
        if kept is not None:
            torch.save({"documents": documents, "states": states}, kept)
        return Reference(documents, states, head)


class Progress:
    """On stderr."""

    def __init__(self, name: str, num_tokens: int) -> None:
        self._name, self._num_tokens = name, num_tokens
        self._done = 0
        self._begin = time.perf_counter()

    def after(self, states: Tensor) -> Tensor:
        """Say that these have been computed."""
        self._done += len(states)
        passed = time.perf_counter() - self._begin
        print(f"{self._name}: {self._done} of {self._num_tokens} tokens, {passed:.0f} s", file=sys.stderr, flush=True)
        return states


def measure(name: str, checkpoint: Checkpoint, reference: Reference) -> str:
    """A line of the table."""
    tally = Tally()
    is_reference = name == "float32"
    decoder = None if is_reference else FORMATS[name].load(checkpoint)
    reader = None if decoder is None else Reader(decoder)
    progress = Progress(name, len(reference.states))
    done = 0
    for step in steps_of(reference.documents):
        targets = torch.tensor([token for document in step for token in document[1:]])
        expected = reference.states[done : done + len(targets)]
        states = expected if reader is None else reader.states(step)
        for begin in range(0, len(targets), LOGIT_ROWS):
            rows = slice(begin, begin + LOGIT_ROWS)
            expected_logits = F.linear(expected[rows], reference.head)
            logits = expected_logits if decoder is None else decoder.logits(states[rows])
            for few in zip(*(part.split(TALLY_ROWS) for part in (logits, expected_logits, targets[rows])), strict=True):
                tally.add(*few)
        done += len(targets)
        progress.after(states)
    return tally.row(name, 32 if decoder is None else bits_per_weight(decoder))


def bits_per_weight(decoder: Decoder) -> float:
    """Of the layers, without embedding and head."""
    linears = [linear for layer in decoder.layers for linear in layer.linears]
    num_weights = sum(linear.in_features * linear.out_features for linear in linears)
    return 8 * sum(linear.num_bytes for linear in linears) / num_weights


def main() -> None:
    formats = "\n".join(f"    {name:<12}{format.meaning}" for name, format in FORMATS.items())
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").format(formats=formats), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder, a .gguf file or a hub id; default: the embedded model")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="files or folders")
    parser.add_argument("--field", nargs="+", default=FIELDS, help=f"of .jsonl files; default: {' '.join(FIELDS)}")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--context", type=int, default=512, help="most tokens of a document")
    parser.add_argument("--max-tokens", type=int, default=10_000, help="how many are scored")
    parser.add_argument("--reference", type=Path, help="a file that keeps float32's results for other formats later")
    options = parser.parse_args()
    if not 2 <= options.context <= STEP_TOKENS:
        parser.error(f"--context: 2 to {STEP_TOKENS}")
    model = options.model or str(embedded_model_path())
    checkpoint = open_checkpoint(model)
    tokenizer = load_model_tokenizer(ModelConfig(model=model))
    if tokenizer is None:
        parser.error(f"{model} has no tokenizer")
    sources = [read_documents(path, options.field, tokenizer) for path in options.text]
    documents = take_documents(sources, context=options.context, max_tokens=options.max_tokens)
    with torch.inference_mode():
        reference = Reference.of(checkpoint, documents, options.reference)
        print(f"{num_scored(documents):,} tokens of {len(documents)} documents\n")
        print("| format | bits per weight | perplexity | ratio to float32 | agreement | KL |")
        print("|---|--:|--:|--:|--:|--:|", flush=True)
        for name in options.formats:
            print(measure(name, checkpoint, reference), flush=True)


if __name__ == "__main__":
    main()
