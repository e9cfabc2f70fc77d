"""Every Triton kernel is compiled for an H200, as the engine launches it; no GPU is needed.

What tests in the interpreter cannot see is looked for in the machine code: registers that are written while a wgmma
still reads them, and registers that went to memory because there were too few of them.

`LAUNCHING` is the table of what launches kernels: functions that call the engine's own code, with tensors that have a
shape and no memory. A kernel that nothing in there launches fails its test. Kernels of this process may be made for the
interpreter, so the table is worked off in another one; Triton keeps what it has compiled for the next time.

Compiling all launches takes minutes on two cores. So each entry of the table compiles one launch of each kernel: the
largest step among the new ones. With a GPU, or with `HEADWAY_ALL_LAUNCHES=1`, all are compiled.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Container, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import KernelInterface

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
    from headway.transfer.staged_copies import BlockLayout, move_blocks

    layout = BlockLayout.of([_empty(NUM_BLOCKS, num_bytes, dtype=torch.uint8) for num_bytes in (2**17, 2**17)])
    pieces, blocks = _empty(16, 2**18, dtype=torch.uint8), _empty(16, dtype=torch.int64)
    for rows in (None, blocks):
        move_blocks(pieces, rows, blocks, layout, to_pieces=True)
        move_blocks(pieces, rows, blocks, layout, to_pieces=False)


def _stage(model: str, *, kv_format: str = "bfloat16", quantization: str = "none", looks_up: bool = True) -> Any:
    """Where steps of a model with random weights run; without its weights, and with few of its layers."""
    from headway.attention.triton_paged import TritonPagedAttention
    from headway.kv.layer_cache import LayerKVCache
    from headway.kv_formats import FORMATS
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
    "steps of qwen3-0.6b": lambda: steps("qwen3-0.6b", num_tokens=(16, *FEW)),
    "steps of qwen3-0.6b, int8 cache": lambda: steps("qwen3-0.6b", kv_format="int8", num_tokens=FEW),
    "stored weights": stored_weights,
    "staging": staging,
    "sampling of llama31-8b": lambda: sampling(128256),
    "sampling of qwen3-0.6b": lambda: sampling(151936),
    "blocks to the host": blocks_to_the_host,
    "ranks that meet": meetings,
}
"""Failures name them. What several launch alike is compiled once; whatever is new takes some seconds."""

# ------------------------------------------------------------------------------------------------- in another process


def main(report: Path) -> None:
    """Write down what the table launches, and what becomes of it."""
    found: dict[str, tuple[str, sass.Launch]] = {}
    errors: dict[str, str] = {}
    with (
        mock.patch("headway.attention.triton_device._PRETENDED_PROCESSORS", sass.NUM_PROCESSORS),
        mock.patch("headway.attention.triton_device._UNLIMITED", sass.SHARED_MEMORY_BYTES),
        mock.patch("headway.attention.triton_device._PRETENDS_DEPENDENT_LAUNCHES", True),
    ):
        for name, launching in LAUNCHING.items():
            try:
                for launch in sass.recorded(launching):
                    found.setdefault(launch.key, (name, launch))
            except Exception:
                errors[name] = traceback.format_exc()
    if not (torch.cuda.is_available() or os.environ.get("HEADWAY_ALL_LAUNCHES")):
        found = {f"{name} {sass.name_of(launch.kernel)}": (name, launch) for name, launch in found.values()}
    _launches.extend(launch for _, launch in found.values())
    with multiprocessing.get_context("fork").Pool(NUM_PROCESSES) as pool:
        compiled = pool.map(_compiled, range(len(_launches)), chunksize=1)
    written = {
        "errors": errors,
        "launches": [
            {"kernel": sass.name_of(launch.kernel), "launch": f"{launch} ({name})", **result}
            for (name, launch), result in zip(found.values(), compiled, strict=True)
        ],
    }
    report.write_text(json.dumps(written, indent=1))


_launches: list[sass.Launch] = []
"""Processes that compile them have them from the beginning: they cannot be sent."""


def _compiled(place: int) -> dict[str, Any]:
    try:
        return asdict(_launches[place].compiled())
    except Exception:
        return {"error": traceback.format_exc()}


# --------------------------------------------------------------------------------------------------------------- tests


def kernels() -> list[str]:
    """Of all modules that import Triton. What kernels call has other names."""
    names = []
    for file in sorted(SOURCES.rglob("*.py")):
        if re.search(r"^\s*(import|from) triton\b", file.read_text(encoding="utf-8"), re.MULTILINE):
            module = ".".join(file.relative_to(SOURCES).with_suffix("").parts)
            functions = [
                one for one in vars(importlib.import_module(module)).values() if isinstance(one, KernelInterface)
            ]
            names += [sass.name_of(one) for one in functions if one.fn.__module__ == module]
    return [name for name in names if name.endswith("_kernel")]


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
    assert not loaded["errors"], "\n".join(loaded["errors"].values())
    return loaded


@pytest.mark.parametrize("name", kernels(), ids=lambda name: name.removeprefix("headway."))
def test_kernel(name: str, report: dict[str, Any]) -> None:
    launches = [launch for launch in report["launches"] if launch["kernel"] == name]
    assert launches, "nothing in LAUNCHING launches it"
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


# ------------------------------------------------------------------------------------------- whether hazards are found


def code(*lines: str) -> list[sass.Instruction]:
    """Instructions from address 0 on, 0x10 bytes each, as cuobjdump prints them."""
    return sass.parse("".join(f"  /*{16 * place:04x}*/  {line} ;  /* 0x00 */\n" for place, line in enumerate(lines)))


READ = "HGMMA.64x16x16.F32 R24, R60, gdesc[UR16], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
WRITE = "MOV R62, R5"


OTHER = READ.replace("R60", "R40")
OPEN = READ.removesuffix(", gsb0")
WAIT_FOR_FIRST = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
HARMLESS = ("MOV R59, R5", "MOV R64, R5", "STS [R60], R61", "ISETP.LT.AND P0, PT, R60, R61, PT")
# As Triton 3.6 compiles acc = dot(p0, x0, acc); acc = dot(p1, x1, acc) where both p are made of one load.
LOOP = (
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
HAZARDS: dict[str, tuple[list[str], list[tuple[int, tuple[int, ...]]]]] = {
    "behind the wait": ([READ, WAIT, WRITE], []),
    "before the wait": ([READ, WRITE, WAIT], [(1, (62,))]),
    "other registers": ([READ, *HARMLESS, WAIT], []),
    "operands in shared memory": ([READ.replace("R60, gdesc[UR16]", "gdesc[UR60]"), WRITE, WAIT], []),
    "QGMMA": (["QGMMA.64x16x32.F32.E4M3.E4M3 R24, R60, gdesc[UR16], R24, gsb0", WRITE, WAIT], [(1, (62,))]),
    "IGMMA": (["IGMMA.64x16x32.S8.S8 R24, R60, gdesc[UR16], R24, gsb0", WRITE, WAIT], [(1, (62,))]),
    "across iterations": ([*LOOP, WAIT], [(1, (32, 33, 34, 35))]),
    "a wait at the end of an iteration": ([*LOOP[:-1], WAIT, LOOP[-1]], []),
    "a wait at its beginning": ([WAIT, *LOOP[1:], WAIT], []),
    "a wait leaves the second group": ([READ, OTHER, WAIT_FOR_FIRST, WRITE], []),
    "which is read": ([READ, OTHER, WAIT_FOR_FIRST, "MOV R41, R5"], [(3, (41,))]),
    "a wait for both": ([READ, OTHER, WAIT, "MOV R41, R5"], []),
    "the second is still read": (["MOV R41, R5", READ, OTHER, WAIT_FOR_FIRST, "@P0 BRA 0x0", WAIT], [(0, (41,))]),
    "in the next iteration it is the first": ([READ, WAIT_FOR_FIRST, "MOV R41, R5", OTHER, "@P0 BRA 0x0", WAIT], []),
    "a group of two": ([OPEN, OTHER, WAIT, WRITE], []),
    "between two of a group": ([OPEN, WRITE, OTHER, WAIT], [(1, (62,))]),
    "a group without an end": ([OTHER, OPEN, WAIT, WRITE], [(3, (62,))]),
    "a write that may be": ([READ, f"@P0 {WRITE}", WAIT], [(1, (62,))]),
    "a write that never is": ([READ, f"@!PT {WRITE}", WAIT], []),
    "a wait that may not be": ([READ, f"@P0 {WAIT}", WRITE], [(2, (62,))]),
    "a read that may be": ([f"@P0 {READ}", WRITE, WAIT], [(1, (62,))]),
    "a jump over the wait": ([READ, "@P0 BRA 0x30", WAIT, WRITE], [(3, (62,))]),
    "a jump over the write": ([READ, "BRA 0x30", WRITE, WAIT], []),
    "an end before the wait": ([READ, "@P0 EXIT", WAIT, WRITE], []),
    "a jump of a warp": ([READ, "BRA.U UP0, 0x40", WAIT, "BRA 0x50", WRITE], [(4, (62,))]),
    "threads that meet": (
        [READ, "BSSY B0, 0x60", "@P0 BRA 0x50", WAIT, "BSYNC B0", "BSYNC B0", WRITE],
        [(6, (62,))],
    ),
    "a call": ([READ, "CALL.REL.NOINC 0x40", WAIT, "EXIT", WRITE, "RET.REL.NODEC R6 0x0"], [(4, (62,))]),
    "a wait in the outer loop": ([WAIT, WRITE, READ, "@P0 BRA 0x10", "@P1 BRA 0x0", WAIT], [(1, (62,))]),
    "a wait in both loops": ([WAIT, WRITE, READ, "@P0 BRA 0x0", "@P1 BRA 0x0", WAIT], []),
}
"""Lines of code, and which of them write which registers too early."""


@pytest.mark.parametrize("name", HAZARDS)
def test_hazards(name: str) -> None:
    lines, expected = HAZARDS[name]
    found = sass.hazards(code(*lines, "EXIT"))
    assert [(hazard.write.address // 16, hazard.registers) for hazard in found] == expected


def test_a_hazard_is_named() -> None:
    (hazard,) = sass.hazards(code(READ, WRITE, WAIT, "EXIT"))
    assert str(hazard) == f"0x0010 {WRITE} writes R62 before 0x0000 {READ} is waited for"


@pytest.mark.parametrize(("line", "reason"), [("BRX R4 -0x20", "BRX"), ("BSSY B0, 0x10", "threads go on that meet")])
def test_ways_that_are_not_known_are_refused(line: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        sass.hazards(code(READ, line, WAIT, "EXIT"))


@pytest.mark.parametrize(
    ("line", "first", "count"),
    [
        ("LDSM.16.M88.4 R32, [R5+UR5]", 32, 4),
        ("LDSM.16.MT88.2 R32, [R5]", 32, 2),
        ("LDSM.16.M88 R32, [R5]", 32, 1),
        ("LDS.128 R32, [R5+0x10]", 32, 4),
        ("LDS.U.64 R32, [R5]", 32, 2),
        ("LDG.E.LTC128B.64 R32, desc[UR4][R2.64]", 32, 2),
        ("LDGSTS.E.BYPASS.128 [R32], desc[UR4][R2.64]", 0, 0),
        ("STG.E.128 desc[UR4][R2.64], R32", 0, 0),
        ("ATOMG.E.ADD.STRONG.GPU PT, R32, desc[UR4][R2.64], R5", 32, 1),
        ("ATOMG.E.CAS.64.STRONG.GPU PT, R32, [R2], R4, R6", 32, 2),
        ("SHFL.BFLY PT, R32, R5, 0x1, 0x1f", 32, 1),
        ("LOP3.LUT P0, R32, R4, 0x1, RZ, 0xc0, !PT", 32, 1),
        ("LOP3.LUT P0, RZ, R4, 0x1, RZ, 0xc0, !PT", 0, 0),
        ("ISETP.GE.U32.AND P0, PT, R32, R4, PT", 0, 0),
        ("DSETP.MAX.AND P0, P1, R32, R4, PT", 0, 0),
        ("R2P PR, R32, 0x7f", 0, 0),
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
