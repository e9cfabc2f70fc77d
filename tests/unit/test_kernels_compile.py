"""Every Triton kernel is compiled for an H200, as the engine launches it; no GPU is needed.

What tests in the interpreter cannot see is looked for in the machine code: registers that are written while a wgmma
still reads them, and registers that went to memory because there were too few of them.

`LAUNCHING` is the table of what launches kernels: functions that call the engine's own code, with tensors that have a
shape and no memory. A kernel that nothing in there launches fails its test. Kernels of this process may be made for the
interpreter, so the table is worked off in another one; Triton keeps what it has compiled for the next time.
"""

from __future__ import annotations

import ast
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Container, Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from tests import sass

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src"
META = torch.device("meta")
BF16 = torch.bfloat16
NUM_PROCESSES = min(2, os.cpu_count() or 1)

ALLOWED_STACK_BYTES = {
    # As many programs as possible at once are worth more than the last few registers.
    "headway.attention.paged_kernels.decode_kernel": 16,
    # The sums of 128 query rows alone are half of all registers; a few of the rest are stored and loaded for each tile.
    "headway.attention.paged_kernels.prefill_kernel": 360,
}
"""How much local memory a thread may have; kernels that are not listed have none."""

# ---------------------------------------------------------------------------------------------------- what is launched

MAX_NUM_SEQS = 128
MAX_NUM_TOKENS = 2048
MAX_MODEL_LEN = 8192
BLOCK_SIZE = 64
NUM_BLOCKS = 1024
ALL = range(1, MAX_NUM_TOKENS + 1)
FEW = (1, 64, MAX_NUM_TOKENS)


def steps(
    model: str, *, kv_format: str = "bfloat16", quantization: str = "none", num_tokens: Container[int] = ALL
) -> None:
    """Decoding and chunks, with and without drafts, of all sizes that there are CUDA graphs of, or of some."""
    stage = _stage(model, kv_format=kv_format, quantization=quantization)
    for shape in stage.shapes():
        if shape.num_tokens in num_tokens:
            stage.run_shape(shape)


def staging() -> None:
    """Requests that enter, and a step of theirs that is no graph, with drafts whose number the host does not know."""
    from headway.core.scheduler_output import NewRequest
    from headway.runner.rows import StepRows
    from headway.runner.sampler import Seat, StepDrafts
    from headway.sampling_params import SamplingParams

    blocks = np.array([[0, 0, 7], [1, 0, 8]], dtype=np.int32)
    seats = [Seat(row, NewRequest(str(row), (1, 2), (3,), SamplingParams()), SamplingParams(), 0) for row in (0, 1)]
    drafts = StepDrafts(
        num_lines=np.array([3]), rows=np.array([0, 0]), positions=np.array([3, 4]), token_ids=np.array([5, -1])
    )
    step = StepRows.flat(
        np.array([0, 0, 0, 1]),
        np.array([1, 1, 1, 300]),
        np.array([2, 3, 4, 0]),
        sampled=np.array([0, 1, 2]),
        drafts=drafts,
        line_offsets=np.array([0, 1, 2, -1]),
        sample_offsets=np.array([0, 1, 2]),
    )
    for looks_up in (True, False):
        stage = _stage("qwen3-0.6b", looks_up=looks_up)
        stage.seat(seats, blocks)
        stage.hidden(stage.stage(step, blocks, exact=True))


def sampling(vocab_size: int) -> None:
    """Edits, filters, penalties and drafts, of logits as they are and of float32 ones, which edits leave."""
    from headway.core.scheduler_output import NewRequest
    from headway.runner.logit_edits import LineMasks, LogitEntries, StepEdits
    from headway.runner.sampler import FILTERS, PENALTIES, SamplingRows, Seat, StepDrafts
    from headway.runner.triton_sampling import TritonSampling
    from headway.sampling_params import SamplingParams

    numbers = _empty(3, MAX_NUM_SEQS, dtype=torch.int32)
    rows = SamplingRows(MAX_NUM_SEQS, vocab_size)
    kernels = TritonSampling(
        rows,
        token_rows=_empty(MAX_NUM_SEQS, MAX_MODEL_LEN, dtype=torch.int32),
        lengths=numbers[0],
        sample_rows=numbers[1],
        sample_positions=numbers[2],
    )
    kernels.download = lambda tensor: tensor  # type: ignore[method-assign]  # there is nothing to copy
    params = SamplingParams(presence_penalty=0.5, top_p=0.9)
    kernels.seat([Seat(0, NewRequest("0", (1, 2), (3,), params), params, 0)])
    lines = np.arange(6)
    entries = LogitEntries(np.zeros((5, 9), dtype=np.int32), np.zeros(4, dtype=np.int32))
    masks = LineMasks(lines.astype(np.int32), np.zeros((len(lines), -(-vocab_size // 32)), dtype=np.int32))
    drafts = StepDrafts(num_lines=np.array([2, 4]), rows=lines[:4], positions=lines[:4], token_ids=lines[:4])
    for logits in (_empty(len(lines), vocab_size), _empty(len(lines), vocab_size, dtype=torch.float32)):
        kernels.edit(logits, lines, lines, StepEdits(None, penalised=False, masks=masks), keep_logits=False)
        for used in (0, FILTERS, PENALTIES):
            kernels.pick(logits, lines, lines, used=used)
            kernels.pick(logits, lines, lines, used=used, drafts=drafts)
    for offsets in (None, drafts.line_offsets):
        edits = StepEdits(entries, penalised=True, masks=masks, line_offsets=offsets)
        kernels.edit(_empty(len(lines), vocab_size), lines, lines, edits, keep_logits=True)


def stored_weights() -> None:
    """Products with weights that checkpoints have as codes of groups: FP8 in blocks, bytes as in GGUF, four bits."""
    from headway.layers.quantized_linear import QuantizedLinear
    from headway.layers.quantized_weight import FP8, QuantizedWeight

    size = 4096
    codes, per_group = _empty(size, size, dtype=torch.int8), _empty(size, size // 32)
    for weight in (
        QuantizedWeight(codes.view(FP8), _empty(size // 128, size // 128), tile=(128, 128)),
        QuantizedWeight(codes, per_group, tile=(1, 32)),
        QuantizedWeight(codes, per_group, offsets=per_group, tile=(1, 32), bits=4, lowest=0),
    ):
        linear = QuantizedLinear(weight, None, dtype=BF16)
        for num_rows in FEW:
            linear(_empty(num_rows, size))


def blocks_to_the_host() -> None:
    from headway.kv.staged_copies import BlockLayout, move_blocks

    layout = BlockLayout.of([_empty(NUM_BLOCKS, num_bytes, dtype=torch.uint8) for num_bytes in (2**17, 2**17)])
    pieces, blocks = _empty(16, 2**18, dtype=torch.uint8), _empty(16, dtype=torch.int64)
    for rows in (None, blocks):
        move_blocks(pieces, rows, blocks, layout, to_pieces=True)
        move_blocks(pieces, rows, blocks, layout, to_pieces=False)


def _stage(model: str, *, kv_format: str = "bfloat16", quantization: str = "none", looks_up: bool = True) -> Any:
    """Where steps of a model with random weights run; without its weights, and with few of its layers."""
    from headway.attention import FORMATS
    from headway.attention.triton_paged import TritonPagedAttention
    from headway.kv.layer_cache import LayerKVCache
    from headway.layers.triton_ops import TritonOps
    from headway.loader import dummy
    from headway.models.assembly import load_decoder
    from headway.runner.base import PagedModel, RunnerSettings
    from headway.runner.graphed_runner import GraphedStage

    class Shapes(dummy.DummyCheckpoint):
        def read(self, name: str, *, device: torch.device | str = "cpu") -> torch.Tensor:
            return _empty(*self.index[name].shape)

    with (
        mock.patch.dict(dummy.BUILTIN_SHAPES, {model: {**dummy.BUILTIN_SHAPES[model], "num_hidden_layers": 2}}),
        mock.patch("headway.models.assembly.is_finite", return_value=True),
    ):
        decoder = load_decoder(
            Shapes(model),
            device=META,
            dtype=BF16,
            quantization=quantization,
            ops=TritonOps(),
            max_model_len=MAX_MODEL_LEN,
        )
    config = decoder.config
    shape = NUM_BLOCKS, config.num_kv_heads, config.head_dim, BLOCK_SIZE
    cache = LayerKVCache.zeros(*shape, dtype=FORMATS[kv_format], device=META, token_major=True)
    attention = TritonPagedAttention([cache] * config.num_layers, config.num_heads)
    settings = RunnerSettings(
        META, MAX_NUM_SEQS, MAX_NUM_TOKENS, MAX_MODEL_LEN, BLOCK_SIZE, max_num_lines=2 * MAX_NUM_SEQS
    )
    return GraphedStage(PagedModel(decoder, attention), settings, looks_up=looks_up)


def meetings() -> None:
    """Of ranks that share a GPU."""
    from headway.layers.triton_ops import meet

    for size in (2, 4):
        numbers = _empty(size, dtype=torch.int64)
        meet(numbers, numbers, _empty(1, dtype=torch.int64), rank=size - 1)


def _empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


LAUNCHING: dict[str, Callable[[], None]] = {
    "steps of llama31-8b": lambda: steps("llama31-8b"),
    "steps of llama31-8b, fp8 cache": lambda: steps("llama31-8b", kv_format="fp8", num_tokens=FEW),
    "steps of llama31-8b, int4 cache": lambda: steps("llama31-8b", kv_format="int4", num_tokens=FEW),
    "steps of llama31-8b, fp8 weights": lambda: steps("llama31-8b", quantization="fp8", num_tokens=FEW),
    "steps of llama31-8b, int8 weights": lambda: steps("llama31-8b", quantization="int8", num_tokens=FEW),
    "steps of llama31-8b, int4 weights": lambda: steps("llama31-8b", quantization="int4", num_tokens=(16, *FEW)),
    "steps of qwen3-0.6b": lambda: steps("qwen3-0.6b"),
    "steps of qwen3-0.6b, int8 cache": lambda: steps("qwen3-0.6b", kv_format="int8", num_tokens=FEW),
    "stored weights": stored_weights,
    "staging": staging,
    "sampling of llama31-8b": lambda: sampling(128256),
    "sampling of qwen3-0.6b": lambda: sampling(151936),
    "blocks to the host": blocks_to_the_host,
    "ranks that meet": meetings,
}
"""Failures name them. What several launch alike is compiled once; whatever is new takes some seconds."""

# ---------------------------------------------------------------------------------------------------- a known mistake

KNOWN = "a known mistake"
_TWO_CODES = tl.constexpr("""{
    .reg .b32 sorted;
    .reg .b16 even, odd;
    prmt.b32 sorted, $2, $2, 0x3120;
    mov.b32 {even, odd}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")


@triton.jit
def known_mistake_kernel(out, x, weight, K, SAFE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words of two FP8 codes, turned into float16 in registers. Not SAFE: Triton 3.6 loads the next words too early."""
    m, n, k = tl.arange(0, 16), tl.arange(0, 64), tl.arange(0, 64)
    acc = tl.zeros([64, 16], tl.float32)
    for first in tl.range(0, K, 128, num_stages=4):
        words = tl.load(weight + n[:, None] * (K // 2) + first // 2 + k[None, :])
        x0 = tl.load(x + m[:, None] * K + first + k[None, :])
        x1 = tl.load(x + m[:, None] * K + first + 64 + k[None, :])
        w0, w1 = tl.inline_asm_elementwise(
            _TWO_CODES, "=&r,=&r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
        if SAFE:
            acc += tl.dot(w1, x1.T, tl.dot(w0, x0.T))
        else:
            acc = tl.dot(w0, x0.T, acc)
            acc = tl.dot(w1, x1.T, acc)
    tl.store(out + n[:, None] * 16 + m[None, :], acc)


def known_mistake() -> None:
    size = 4096
    x, weight = _empty(16, size, dtype=torch.float16), _empty(64, size // 2, dtype=torch.int16)
    for safe in (True, False):
        known_mistake_kernel[(1,)](_empty(64, 16, dtype=torch.float32), x, weight, size, SAFE=safe)


# ------------------------------------------------------------------------------------------------- in another process


def main(report: Path) -> None:
    """Write down what the table launches, what becomes of it, and which functions take part."""
    found: dict[str, tuple[str, sass.Launch]] = {}
    errors: dict[str, str] = {}
    with (
        mock.patch("headway.attention.triton_device._PRETENDED_PROCESSORS", sass.NUM_PROCESSORS),
        mock.patch("headway.attention.triton_device._UNLIMITED", sass.SHARED_MEMORY_BYTES),
        mock.patch("headway.attention.triton_device._PRETENDS_DEPENDENT_LAUNCHES", True),
    ):
        for name, launching in {**LAUNCHING, KNOWN: known_mistake}.items():
            try:
                for launch in sass.recorded(launching):
                    found.setdefault(launch.key, (name, launch))
            except Exception:
                errors[name] = traceback.format_exc()
    names, launches = zip(*found.values(), strict=True)

    def compile_one(place: int) -> dict[str, Any]:
        try:
            return asdict(launches[place].compiled())
        except Exception:
            return {"error": traceback.format_exc()}

    compiled = _in_parallel(compile_one, len(launches))
    reached = {sass.name_of(function) for function in _reached({launch.kernel for launch in launches})}
    written = {
        "errors": errors,
        "functions": sorted(sass.name_of(function) for function in _jit_functions()),
        "reached": sorted(reached),
        "launches": [
            {"kernel": sass.name_of(launch.kernel), "launch": f"{launch} ({name})", **result}
            for name, launch, result in zip(names, launches, compiled, strict=True)
        ],
    }
    report.write_text(json.dumps(written, indent=1))


def _in_parallel(work: Callable[[int], Any], count: int) -> list[Any]:
    """work(0), work(1), … in processes that share what there is when they begin."""
    with multiprocessing.get_context("fork").Pool(NUM_PROCESSES, _take_up, (work,)) as pool:
        return pool.map(_do, range(count), chunksize=1)


_work: Callable[[int], Any]


def _take_up(work: Callable[[int], Any]) -> None:
    global _work
    _work = work


def _do(place: int) -> Any:
    return _work(place)


def _jit_functions() -> Iterator[Any]:
    """Of all modules that mention Triton, whether kernels or functions that kernels call."""
    from triton.runtime.jit import JITFunction

    for file in _files_with("triton"):
        module = importlib.import_module(_module_name(file))
        members = [member for member in vars(module).values() if isinstance(member, JITFunction)]
        yield from (member for member in members if member.fn.__module__ == module.__name__)


def _reached(kernels: set[Any]) -> set[Any]:
    """These, and all that they call."""
    from triton.runtime.jit import JITFunction

    reached: set[Any] = set()
    waiting = [*kernels]
    while waiting:
        function = waiting.pop().fn
        names, known = function.__code__.co_names, function.__globals__
        modules = [known[name] for name in names if isinstance(known.get(name), ModuleType)]
        values = [known.get(name) for name in names]
        values += [getattr(module, name, None) for module in modules for name in names]
        called = {value for value in values if isinstance(value, JITFunction)}
        waiting += called - reached - kernels
        reached |= called
    return reached | kernels


def _files_with(text: str) -> list[Path]:
    return [file for file in sorted(SOURCES.rglob("*.py")) if text in file.read_text(encoding="utf-8")]


def _module_name(file: Path) -> str:
    return ".".join(file.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")


# --------------------------------------------------------------------------------------------------------------- tests


def decorated_functions() -> list[str]:
    """All functions in the sources that are decorated with `triton.jit`."""
    return [
        f"{_module_name(file)}.{node.name}"
        for file in _files_with("triton.jit")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)
    ]


FUNCTIONS = decorated_functions()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("kernels") / "report.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    places = [environment.get("PYTHONPATH"), str(ROOT), str(SOURCES)]
    environment["PYTHONPATH"] = os.pathsep.join(place for place in places if place)
    command = [sys.executable, "-m", "tests.unit.test_kernels_compile", str(path)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


@pytest.mark.parametrize("name", FUNCTIONS, ids=lambda name: name.removeprefix("headway."))
def test_kernel(name: str, report: dict[str, Any]) -> None:
    assert name in report["reached"], "nothing in LAUNCHING launches it, and no kernel that is launched calls it"
    launches = [launch for launch in report["launches"] if launch["kernel"] == name]
    problems = [f"{launch['launch']}: {problem}" for launch in launches for problem in _problems(name, launch)]
    assert not problems, "\n".join(problems)


def _problems(name: str, launch: dict[str, Any]) -> Iterator[str]:
    if "error" in launch:
        yield launch["error"]
        return
    if launch["hazards"]:
        yield f"{len(launch['hazards'])} hazards\n" + "\n".join(launch["hazards"][:8])
    for what, limit in (
        ("stack_bytes", ALLOWED_STACK_BYTES.get(name, 0)),
        ("shared_bytes", sass.SHARED_MEMORY_BYTES),
    ):
        if launch[what] > limit:
            yield f"{launch[what]} {what}, at most {limit} are allowed"


@pytest.mark.parametrize("name", LAUNCHING)
def test_launching(name: str, report: dict[str, Any]) -> None:
    assert name not in report["errors"], report["errors"][name]


def test_no_function_is_overlooked(report: dict[str, Any]) -> None:
    assert sorted(FUNCTIONS) == report["functions"]


def test_what_is_allowed_is_needed(report: dict[str, Any]) -> None:
    assert ALLOWED_STACK_BYTES.keys() <= {
        launch["kernel"] for launch in report["launches"] if launch.get("stack_bytes")
    }


# ------------------------------------------------------------------------------------------- whether hazards are found


def test_a_known_mistake_is_found(report: dict[str, Any]) -> None:
    """By the Triton that makes it; all make code in which it could be."""
    safe, other = [launch for launch in report["launches"] if launch["kernel"].endswith("known_mistake_kernel")]
    assert safe["num_register_operands"] and other["num_register_operands"]
    assert not safe["hazards"]
    if triton.__version__.startswith("3.6."):
        assert any("LDSM" in hazard for hazard in other["hazards"])


def code(*lines: str) -> list[sass.Instruction]:
    """Instructions from address 0 on, 0x10 bytes each, as cuobjdump prints them."""
    encoding = f"/* 0x{0:016x} */"
    printed = "".join(
        f"        /*{16 * place:04x}*/    {line.rjust(30) if line.startswith('@') else line} ;    {encoding}\n"
        f"                                {encoding}\n"
        for place, line in enumerate(lines)
    )
    return sass.parse(f'\t\tFunction : kernel\n\t.headerflags\t@"EF_CUDA_SM90"\n{printed}\t\t..........\n')


def found(*lines: str) -> list[tuple[int, tuple[int, ...]]]:
    """Which line writes which registers too early."""
    return [(hazard.write.address // 16, hazard.registers) for hazard in sass.hazards(code(*lines))]


READ = "HGMMA.64x16x16.F32 R24, R60, gdesc[UR16], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
WRITE = "MOV R62, R5"


def test_parts_of_an_instruction() -> None:
    (write,) = code("@!P1 IMAD.WIDE.U32 R70, R13.reuse, 0x2, R70")
    assert (write.guard, write.name, write.modifiers) == ("!P1", "IMAD", ("WIDE", "U32"))
    assert write.operands == ("R70", "R13.reuse", "0x2", "R70")
    assert not write.is_certain and not write.is_wgmma


def test_a_write_behind_the_wait_is_none() -> None:
    assert found(READ, WAIT, WRITE, "EXIT") == []


def test_a_write_before_the_wait() -> None:
    assert found(READ, WRITE, WAIT, "EXIT") == [(1, (62,))]
    (hazard,) = sass.hazards(code(READ, WRITE, WAIT, "EXIT"))
    assert str(hazard) == f"0x0010 {WRITE} writes R62 before 0x0000 {READ} is waited for"


def test_other_registers_may_be_written() -> None:
    assert found(READ, "MOV R59, R5", "MOV R64, R5", "STS [R60], R61", "ISETP.LT.AND P0, PT, R60, R61, PT", WAIT) == []


def test_operands_in_shared_memory_are_no_registers() -> None:
    assert found("HGMMA.64x16x16.F32.BF16 R24, gdesc[UR16], R24, !UPT, gsb0", "MOV R17, R5", WAIT, "EXIT") == []


@pytest.mark.parametrize("name", ["HGMMA.64x16x16.F32", "QGMMA.64x16x32.F32.E4M3.E4M3", "IGMMA.64x16x32.S8.S8"])
def test_every_kind_of_wgmma(name: str) -> None:
    assert found(f"{name} R24, R60, gdesc[UR16], R24, gsb0", WRITE, WAIT, "EXIT") == [(1, (62,))]


def test_across_iterations() -> None:
    """As Triton 3.6 compiles acc = dot(p0, x0, acc); acc = dot(p1, x1, acc) where both p are made of one load."""
    loop = (
        "DEPBAR.LE SB0, 0x9",
        "LDSM.16.M88.4 R32, [R5+UR5]",
        "F2FP.F16.E4M3.UNPACK_B R60, R32",
        "F2FP.F16.E4M3.UNPACK_B R44, R33",
        "WARPGROUP.ARRIVE",
        "HGMMA.64x16x16.F32 R24, R60, gdesc[UR16], R24",
        "HGMMA.64x16x16.F32 R24, R44, gdesc[UR16], R24, gsb0",
        "WARPGROUP.DEPBAR.LE gsb0, 0x0",
        "WARPGROUP.ARRIVE",
        "HGMMA.64x16x16.F32 R24, R32, gdesc[UR16], R24, gsb0",
        "LDGDEPBAR",
        "@!P1 BRA 0x0",
    )
    assert found(*loop, WAIT, "EXIT") == [(1, (32, 33, 34, 35))]
    assert found(*loop[:-1], WAIT, loop[-1], "EXIT") == []
    assert found(WAIT, *loop[1:], WAIT, "EXIT") == []


def test_a_wait_may_leave_groups_unfinished() -> None:
    second = READ.replace("R60", "R40")
    wait_for_first = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
    assert found(READ, second, wait_for_first, WRITE, "EXIT") == []
    assert found(READ, second, wait_for_first, "MOV R41, R5", "EXIT") == [(3, (41,))]
    assert found(READ, second, WAIT, "MOV R41, R5", "EXIT") == []
    # In the next iteration the second is the first but one, and its registers are free.
    assert found("MOV R41, R5", READ, second, wait_for_first, "@P0 BRA 0x0", WAIT, "EXIT") == [(0, (41,))]
    assert found(READ, wait_for_first, "MOV R41, R5", second, "@P0 BRA 0x0", WAIT, "EXIT") == []


def test_a_group_ends_with_its_last_wgmma() -> None:
    first = READ.removesuffix(", gsb0")
    second = READ.replace("R60", "R40")
    assert found(first, second, WAIT, WRITE, "EXIT") == []
    assert found(first, WRITE, second, WAIT, "EXIT") == [(1, (62,))]
    assert found(second, first, WAIT, WRITE, "EXIT") == [(3, (62,))]


def test_predicates() -> None:
    assert found(READ, f"@P0 {WRITE}", WAIT, "EXIT") == [(1, (62,))]
    assert found(READ, f"@!PT {WRITE}", WAIT, "EXIT") == []
    assert found(READ, f"@P0 {WAIT}", WRITE, "EXIT") == [(2, (62,))]
    assert found(f"@P0 {READ}", WRITE, WAIT, "EXIT") == [(1, (62,))]


def test_ways_through_the_code() -> None:
    assert found(READ, "@P0 BRA 0x30", WAIT, WRITE, "EXIT") == [(3, (62,))]
    assert found(READ, "BRA 0x30", WRITE, WAIT, "EXIT") == []
    assert found(READ, "@P0 EXIT", WAIT, WRITE, "EXIT") == []
    assert found(READ, "BRA.U UP0, 0x40", WAIT, "BRA 0x50", WRITE, "EXIT") == [(4, (62,))]
    assert found(READ, "BSSY B0, 0x60", "@P0 BRA 0x50", WAIT, "BSYNC B0", "BSYNC B0", WRITE, "EXIT") == [(6, (62,))]
    assert found(READ, "CALL.REL.NOINC 0x40", WAIT, "EXIT", WRITE, "RET.REL.NODEC R6 0x0") == [(4, (62,))]
    # A loop in a loop: waited for in the outer one only.
    assert found(WAIT, WRITE, READ, "@P0 BRA 0x10", "@P1 BRA 0x0", WAIT, "EXIT") == [(1, (62,))]
    assert found(WAIT, WRITE, READ, "@P0 BRA 0x0", "@P1 BRA 0x0", WAIT, "EXIT") == []


def test_jumps_to_anywhere_are_refused() -> None:
    with pytest.raises(ValueError, match="BRX"):
        found(READ, "BRX R4 -0x20", WAIT, "EXIT")


@pytest.mark.parametrize(
    ("line", "first", "count"),
    [
        ("LDSM.16.M88.4 R32, [R5+UR5]", 32, 4),
        ("LDSM.16.MT88.2 R32, [R5]", 32, 2),
        ("LDSM.16.M88 R32, [R5]", 32, 1),
        ("LDS.128 R32, [R5+0x10]", 32, 4),
        ("LDS.U.64 R32, [R5]", 32, 2),
        ("LDG.E.LTC128B.64 R32, desc[UR4][R2.64]", 32, 2),
        ("LDL.LU R32, [R1+0x8]", 32, 1),
        ("LDC.64 R32, c[0x0][0x210]", 32, 2),
        ("LDGSTS.E.BYPASS.128 [R32], desc[UR4][R2.64]", 0, 0),
        ("STG.E.128 desc[UR4][R2.64], R32", 0, 0),
        ("STSM.16.M88.4 [R32], R36", 0, 0),
        ("RED.E.ADD.STRONG.GPU desc[UR4][R2.64], R32", 0, 0),
        ("ATOMG.E.ADD.STRONG.GPU PT, R32, desc[UR4][R2.64], R5", 32, 1),
        ("ATOMG.E.CAS.64.STRONG.GPU PT, R32, [R2], R4, R6", 32, 2),
        ("SHFL.BFLY PT, R32, R5, 0x1, 0x1f", 32, 1),
        ("LOP3.LUT P0, R32, R4, 0x1, RZ, 0xc0, !PT", 32, 1),
        ("LOP3.LUT P0, RZ, R4, 0x1, RZ, 0xc0, !PT", 0, 0),
        ("ISETP.GE.U32.AND P0, PT, R32, R4, PT", 0, 0),
        ("DSETP.MAX.AND P0, P1, R32, R4, PT", 0, 0),
        ("R2P PR, R32, 0x7f", 0, 0),
        ("R2UR UR4, R32", 0, 0),
        ("P2R R32, PR, RZ, 0x7f", 32, 1),
        ("IADD3 R32, P0, R4, R5, RZ", 32, 1),
        ("IMAD.WIDE.U32 R32, R13, 0x2, R70", 32, 2),
        ("IMAD.HI.U32 R32, R13, R14, RZ", 32, 1),
        ("CS2R R32, SRZ", 32, 2),
        ("CS2R.32 R32, SR_CLOCKLO", 32, 1),
        ("DFMA R32, R4, R6, R8", 32, 2),
        ("F2F.F64.F32 R32, R5", 32, 2),
        ("F2F.F32.F64 R32, R4", 32, 1),
        ("I2F.F64.S64 R32, R4", 32, 2),
        ("I2F.S64 R32, R4", 32, 1),
        ("F2I.S64.F64.TRUNC R32, R4", 32, 2),
        ("F2I.F64.TRUNC R32, R4", 32, 1),
        ("F2FP.BF16.F32.PACK_AB R32, R5, R6", 32, 1),
        ("HMMA.16816.F32.BF16 R32, R4, R8, R32", 32, 4),
        ("HMMA.16816.F16 R32, R4, R8, R32", 32, 2),
        ("IMMA.16832.S8.S8 R32, R4.ROW, R8.COL, R32", 32, 4),
        ("HGMMA.64x128x16.F32.BF16 R32, gdesc[UR4], R32, gsb0", 32, 64),
        ("HGMMA.64x128x16.F16 R32, gdesc[UR4], R32, gsb0", 32, 32),
        ("BAR.SYNC.DEFER_BLOCKING R32, R33", 0, 0),
        ("WARPSYNC.COLLECTIVE R32, 0x10", 0, 0),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R32", 0, 0),
    ],
)
def test_registers_that_are_written(line: str, first: int, count: int) -> None:
    (instruction,) = code(line)
    assert [*instruction.written] == [*range(first, first + count)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
