"""What Triton's kernels become on an H200, found out without one: launches are recorded, compiled and read as SASS.

`recorded` runs the code that launches kernels and keeps what it launches them with instead of launching them;
`Launch.compiled` compiles one for the device and reads back what ptxas made of it.

`hazards` looks for one mistake in that: a wgmma runs beside the instructions behind it, and reads its first operand,
where that is in registers, until it is waited for. Whoever writes these registers earlier changes what is multiplied.
Triton 3.6 compiles such writes into loops (issue 9433), and results are wrong now and then, never in the interpreter.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

CAPABILITY = 90
NUM_PROCESSORS = 132
SHARED_MEMORY_BYTES = 227 * 1024

_WGMMA_OF_REGISTERS = re.compile(r"wgmma\.mma_async[\w.]*\s*\{[^}]*\}\s*,\s*\{")
"""In PTX: the sums and the first operand are lists of registers. Otherwise the operand is a descriptor."""

# ------------------------------------------------------------------------------------------------------------ launches


@dataclass(frozen=True)
class Launch:
    """A kernel with all that is settled when it is compiled."""

    kernel: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]

    @property
    def key(self) -> str:
        """The same for launches that are compiled once."""
        return repr((name_of(self.kernel), self.signature, self.constants, self.attributes, self.options))

    def __str__(self) -> str:
        names = self.kernel.arg_names
        constants = [f"{names[path[0]]}={value}" for path, value in self.constants.items() if value is not None]
        return f"{self.kernel.fn.__name__}({', '.join(constants)}) of {self.options['num_warps']} warps"

    def compiled(self) -> Compiled:
        import triton
        from triton.compiler import ASTSource

        source = ASTSource(self.kernel, self.signature, self.constants, self.attributes)
        binary = triton.compile(source, target=_target(), options=self.options)
        return Compiled.of(binary.asm["cubin"], binary.asm["ptx"], shared_bytes=binary.metadata.shared)


@dataclass(frozen=True)
class Compiled:
    """What ptxas made of a launch."""

    stack_bytes: int
    """Local memory of a thread: registers that did not fit, and arrays."""
    shared_bytes: int
    hazards: list[str]

    @staticmethod
    def of(cubin: bytes, ptx: str, *, shared_bytes: int) -> Compiled:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            usage = re.findall(r"STACK:(\d+)", _dumped("--dump-resource-usage", file.name))
            # Without such a wgmma there is nothing to find, and printing takes as long as compiling a small kernel.
            code = _dumped("--dump-sass", file.name) if _WGMMA_OF_REGISTERS.search(ptx) else ""
        functions = [parse(part) for part in re.split(r"^\s*Function : ", code, flags=re.MULTILINE)[1:]]
        readers = [one for function in functions for one in function if one.asynchronously_read]
        if not usage or bool(readers) != bool(code):
            raise ValueError(f"cuobjdump printed something else than expected: {usage}\n{code[:1000]}")
        return Compiled(
            stack_bytes=max(map(int, usage)),
            shared_bytes=shared_bytes,
            hazards=[str(hazard) for function in functions for hazard in hazards(function)],
        )


def recorded(launching: Callable[[], object]) -> list[Launch]:
    """What a function launches; nothing is launched."""
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    launches: list[Launch] = []
    backend = make_backend(_target())

    @functools.cache
    def binder(kernel: Any) -> Any:
        return create_function_from_signature(kernel.signature, kernel.params, backend)

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """As the method that it replaces, until there is something to compile."""
        kwargs["debug"] = False
        bound, specialization, rest = binder(self)(*args, **kwargs)
        options, signature, constants, attributes = self._pack_args(backend, kwargs, bound, specialization, rest)
        launches.append(Launch(self, signature, constants, attributes, vars(options)))

    with mock.patch.object(JITFunction, "run", run):
        launching()
    return launches


def name_of(kernel: Any) -> str:
    return f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"


@functools.cache
def _target() -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", CAPABILITY, 32)


def _dumped(option: str, file: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, option, file], capture_output=True, text=True, check=True).stdout


# ---------------------------------------------------------------------------------------------------------------- code

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,6})\*/\s+(.*?)\s*;", re.MULTILINE)
_TEXT = re.compile(r"(?:@(!?U?P(?:\d+|T))\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)\s*(.*)", re.DOTALL)
_PREDICATE = re.compile(r"!?U?P(?:\d+|T)")
_REGISTER = re.compile(r"R(\d+)(?:\.\w+)*")
_ADDRESS = re.compile(r"0x([0-9a-f]+)$")

_NUM_OPERAND_REGISTERS = 4
"""Of the first operand of any wgmma: 64 rows of 32 bytes over the 128 threads of a warp group."""
_WGMMA = re.compile(r"[HQIB]GMMA\.64x(\d+)x\d+(\.F16)?")
_NUM_WRITTEN = [
    # What they compute is a predicate, or a register in the first place is read.
    (r"(D|F|H|I|P)SETP|FCHK|R2P|BAR|CALL|NANOSLEEP|RET|SETLMEMBASE|WARPSYNC", 0),
    (r"LDSM\..*\.4$|(LD[CGLS]?|ATOM[GS]?)\..*\b128\b", 4),
    (r"LDSM\..*\.2$|(LD[CGLS]?|ATOM[GS]?)\..*\b64\b|SYNCS\..*64", 2),
    (r"[HIBQ]MMA\.(\w+\.F16\b|8816|8832|88128)", 2),
    (r"[HIBQ]MMA|DMMA\.(884|8x8x4)", 4),
    (r"DMMA", 8),
    (r"(F2F|FRND|I2F)\.F64|I2F\.\w+\.F64|F2I\..*[SU]64\b|D(ADD|MUL|FMA)|LEPC|GETLMEMBASE", 2),
    (r"CS2R(?!\.32)|IMAD\..*\bWIDE", 2),
]
"""How many registers an instruction writes: by the first pattern that its name begins with; all others write one."""


@dataclass(frozen=True)
class Instruction:
    address: int
    guard: str | None
    """The predicate it depends on, with a ! where that must be false."""
    name: str
    """With what stands behind its points."""
    operands: tuple[str, ...]
    text: str = field(repr=False)

    @property
    def is_certain(self) -> bool:
        return self.guard is None or self.guard.lstrip("!U") == "PT"

    @property
    def is_never(self) -> bool:
        return self.guard in ("!PT", "!UPT")

    @property
    def asynchronously_read(self) -> range:
        """Registers that it reads until it is waited for: the first operand of a wgmma, if it is no descriptor."""
        is_wgmma = _WGMMA.match(self.name) and len(self.operands) > 1
        return _registers(self.operands[1], _NUM_OPERAND_REGISTERS) if is_wgmma else range(0)

    @property
    def ends_group(self) -> bool:
        """Is this wgmma the last one of a group that can be waited for?"""
        return bool(_WGMMA.match(self.name)) and self.operands[-1].startswith("gsb")

    @property
    def num_groups_left(self) -> int | None:
        """Of a wait: how many groups may be unfinished behind it."""
        if not self.name.startswith("WARPGROUP.DEPBAR") or not self.is_certain:
            return None
        return int(self.operands[-1], 16)

    @property
    def written(self) -> range:
        """The registers that it writes, if it is executed."""
        operands = [operand for operand in self.operands if not _PREDICATE.fullmatch(operand)]
        if wgmma := _WGMMA.match(self.name):
            return _registers(operands[0], int(wgmma[1]) // (4 if wgmma[2] else 2))
        count = next((count for pattern, count in _NUM_WRITTEN if re.match(pattern, self.name)), 1)
        return _registers(operands[0], count) if operands else range(0)


def _registers(operand: str, count: int) -> range:
    found = _REGISTER.fullmatch(operand)
    return range(int(found[1]), int(found[1]) + count) if found else range(0)


def parse(text: str) -> list[Instruction]:
    """The instructions of one function, as cuobjdump prints them."""
    instructions = []
    for address, line in _LINE.findall(text):
        found = _TEXT.fullmatch(line)
        if found is None:
            raise ValueError(f"no instruction: {line!r}")
        guard, name, rest = found.groups()
        operands = tuple(operand.strip() for operand in rest.split(",")) if rest else ()
        instructions.append(Instruction(int(address, 16), guard, name, operands, line))
    return instructions


# ------------------------------------------------------------------------------------------------------------- hazards


@dataclass(frozen=True)
class Hazard:
    """A write to what an unfinished wgmma reads."""

    write: Instruction
    wgmma: Instruction
    registers: tuple[int, ...]

    def __str__(self) -> str:
        names = ", ".join(f"R{register}" for register in self.registers)
        return (
            f"{self.write.address:#06x} {self.write.text} writes {names} before "
            f"{self.wgmma.address:#06x} {self.wgmma.text} is waited for"
        )


_Pending = frozenset[tuple[int, int]]
"""Unfinished wgmmas that read registers: which instruction, and the how many-th last group it is in, from 1; 0: that
group has no end yet."""
_MOST_GROUPS = 8  # older ones are not told apart


def hazards(instructions: Sequence[Instruction]) -> list[Hazard]:
    """On any way through the code, around loops as often as it takes: what may be unfinished where registers change."""
    if not any(instruction.asynchronously_read for instruction in instructions):
        return []
    successors = _successors(instructions)
    before: dict[int, _Pending] = {0: frozenset()}
    waiting = [0]
    while waiting:
        place = waiting.pop()
        after = _after(place, instructions[place], before[place])
        for successor in successors[place]:
            known = before.get(successor)
            if known is None or not after <= known:
                before[successor] = after | (known or frozenset())
                waiting.append(successor)
    found = []
    for place, pending in sorted(before.items()):
        write = instructions[place]
        if write.is_never:
            continue
        for reader in sorted({reader for reader, _ in pending}):
            wgmma = instructions[reader]
            if both := sorted({*write.written} & {*wgmma.asynchronously_read}):
                found.append(Hazard(write, wgmma, tuple(both)))
    return found


def _after(place: int, instruction: Instruction, pending: _Pending) -> _Pending:
    if instruction.is_never:
        return pending
    left = instruction.num_groups_left
    if left is not None:
        return frozenset((reader, age) for reader, age in pending if age <= left)
    if instruction.asynchronously_read:
        pending |= {(place, 0)}
    if instruction.ends_group:
        older = frozenset((reader, min(age + 1, _MOST_GROUPS)) for reader, age in pending)
        return older if instruction.is_certain else older | pending
    return pending


def _successors(instructions: Sequence[Instruction]) -> list[list[int]]:
    """Which instructions may follow each one."""
    places = {instruction.address: place for place, instruction in enumerate(instructions)}
    pairs = list(pairwise(instructions))
    meetings = {(one.operands[0], at.address) for one, behind in pairs if one.name == "BSYNC" for at in (one, behind)}
    successors = []
    for place, instruction in enumerate(instructions):
        kind, *modifiers = instruction.name.split(".")
        if kind in ("BRX", "JMP", "JMX"):
            raise ValueError(f"it is not known where {instruction.text} goes")
        if kind == "BSSY" and (instruction.operands[0], _jumps_to(instruction)) not in meetings:
            raise ValueError(f"it is not known where threads go on that meet at {instruction.text}")
        is_choice = not instruction.is_certain or (
            kind == "BRA" and (len(instruction.operands) > 1 or "DIV" in modifiers)
        )
        following = [place + 1] if is_choice or kind not in ("EXIT", "RET", "KILL", "BRA") else []
        if (kind in ("BRA", "CALL") or "COLLECTIVE" in modifiers) and not instruction.is_never:
            following.append(places[_jumps_to(instruction)])
        successors.append([one for one in following if one < len(instructions)])
    return successors


def _jumps_to(instruction: Instruction) -> int:
    found = _ADDRESS.search(instruction.operands[-1])
    if found is None:
        raise ValueError(f"it is not known where {instruction.text} goes")
    return int(found[1], 16)
