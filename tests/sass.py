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
from collections import defaultdict
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

    registers: int
    stack_bytes: int
    """Local memory of a thread: registers that did not fit, and arrays."""
    shared_bytes: int
    num_wgmmas: int
    num_register_operands: int
    """How many of them have their first operand in registers."""
    hazards: list[str]

    @staticmethod
    def of(cubin: bytes, ptx: str, *, shared_bytes: int) -> Compiled:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            usage = re.findall(r"REG:(\d+) STACK:(\d+)", _dumped("--dump-resource-usage", file.name))
            # Without such a wgmma there is nothing to find, and printing takes as long as compiling a small kernel.
            code = _dumped("--dump-sass", file.name) if _WGMMA_OF_REGISTERS.search(ptx) else ""
        functions = [parse(part) for part in re.split(r"^\s*Function : ", code, flags=re.MULTILINE)[1:]]
        readers = [one for function in functions for one in function if one.asynchronously_read]
        if not usage or bool(readers) != bool(code):
            raise ValueError(f"cuobjdump printed something else than expected: {usage}\n{code[:1000]}")
        return Compiled(
            registers=max(int(registers) for registers, _ in usage),
            stack_bytes=max(int(stack) for _, stack in usage),
            shared_bytes=shared_bytes,
            num_wgmmas=ptx.count("wgmma.mma_async"),
            num_register_operands=len(readers),
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

_WGMMA = ("HGMMA", "QGMMA", "IGMMA", "BGMMA")
_WGMMA_SHAPE = re.compile(r"64x(\d+)x\d+")
_NUM_OPERAND_REGISTERS = 4
"""Of the first operand of any wgmma: 64 rows of 32 bytes over the 128 threads of a warp group."""


@dataclass(frozen=True)
class Instruction:
    address: int
    guard: str | None
    """The predicate it depends on, with a ! where that must be false."""
    name: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    text: str = field(repr=False)

    @property
    def is_certain(self) -> bool:
        return self.guard is None or self.guard.lstrip("!U") == "PT"

    @property
    def is_never(self) -> bool:
        return self.guard in ("!PT", "!UPT")

    @property
    def is_wgmma(self) -> bool:
        return self.name in _WGMMA

    @property
    def asynchronously_read(self) -> range:
        """Registers that it reads until it is waited for: the first operand of a wgmma, if it is no descriptor."""
        found = _REGISTER.fullmatch(self.operands[1]) if self.is_wgmma and len(self.operands) > 1 else None
        return _registers(found, _NUM_OPERAND_REGISTERS)

    @property
    def ends_group(self) -> bool:
        """Is this wgmma the last one of a group that can be waited for?"""
        return self.is_wgmma and self.operands[-1].startswith("gsb")

    @property
    def num_groups_left(self) -> int | None:
        """Of a wait: how many groups may be unfinished behind it."""
        if self.name != "WARPGROUP" or "DEPBAR" not in self.modifiers or not self.is_certain:
            return None
        return int(self.operands[-1], 16)

    @property
    def written(self) -> range:
        """The registers that it writes, if it is executed."""
        operands = list(self.operands)
        if self.name in _WRITES_NO_REGISTER:
            return range(0)
        while operands and _PREDICATE.fullmatch(operands[0]):
            del operands[0]
        return _registers(_REGISTER.fullmatch(operands[0]) if operands else None, self._num_written)

    @property
    def _num_written(self) -> int:
        name, modifiers = self.name, self.modifiers
        if self.is_wgmma:
            shape = next(found for m in modifiers if (found := _WGMMA_SHAPE.fullmatch(m)))
            return int(shape[1]) // (4 if modifiers[1:2] == ("F16",) else 2)
        if name == "LDSM":
            return int(modifiers[-1]) if modifiers[-1] in ("2", "4") else 1
        if name in _LOADS:
            return 4 if "128" in modifiers else 2 if "64" in modifiers else 1
        if name in ("HMMA", "IMMA", "BMMA", "QMMA"):
            return 2 if modifiers[1:2] == ("F16",) or modifiers[0] in ("8816", "8832", "88128") else 4
        if name == "DMMA":
            return 4 if modifiers[0] in ("884", "8x8x4") else 8
        if name in ("F2F", "I2F", "FRND"):  # the first type is that of the result
            return 2 if "F64" in modifiers[: 1 + (name == "I2F")] else 1
        if name == "F2I":
            return 2 if {"S64", "U64"} & {*modifiers} else 1
        if name in ("DADD", "DMUL", "DFMA", "LEPC", "GETLMEMBASE"):
            return 2
        if name == "CS2R":
            return 1 if "32" in modifiers else 2
        if name == "SYNCS":
            return 2 if "TRANS64" in modifiers or "64" in modifiers else 1
        return 2 if name == "IMAD" and "WIDE" in modifiers else 1


_LOADS = {"LD", "LDC", "LDG", "LDL", "LDS", "ATOM", "ATOMG", "ATOMS"}
_WRITES_NO_REGISTER = {
    # What they compute is a predicate.
    "DSETP", "FCHK", "FSETP", "HSETP2", "ISETP", "PSETP", "R2P",
    # A register in the first place is read.
    "BAR", "BRX", "CALL", "JMP", "JMX", "NANOSLEEP", "RET", "SETLMEMBASE", "WARPSYNC",
}  # fmt: skip


def _registers(found: re.Match[str] | None, count: int) -> range:
    return range(0) if found is None else range(int(found[1]), int(found[1]) + count)


def parse(text: str) -> list[Instruction]:
    """The instructions of one function, as cuobjdump prints them."""
    instructions = []
    for address, line in _LINE.findall(text):
        found = _TEXT.fullmatch(line)
        if found is None:
            raise ValueError(f"no instruction: {line!r}")
        guard, opcode, rest = found.groups()
        name, *modifiers = opcode.split(".")
        operands = tuple(operand.strip() for operand in rest.split(",")) if rest else ()
        instructions.append(Instruction(int(address, 16), guard, name, tuple(modifiers), operands, line))
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
    meetings = _meetings(instructions)
    successors = []
    for place, instruction in enumerate(instructions):
        goes_on, targets = True, []
        match instruction.name:
            case "BRX" | "JMP" | "JMX":
                raise ValueError(f"it is not known where {instruction.text} goes")
            case "EXIT" | "RET" | "KILL":
                goes_on = not instruction.is_certain
            case "BRA":
                depends = not instruction.is_certain or len(instruction.operands) > 1 or "DIV" in instruction.modifiers
                goes_on, targets = depends, [_jumps_to(instruction)]
            case "CALL":
                targets = [_jumps_to(instruction)]
            case "WARPSYNC" if "COLLECTIVE" in instruction.modifiers:
                targets = [_jumps_to(instruction)]
            case "BSYNC":
                targets = meetings[instruction.operands[0]]
        if instruction.is_never:
            goes_on, targets = True, []
        following = [place + 1] if goes_on and place + 1 < len(instructions) else []
        successors.append([*following, *(places[address] for address in targets)])
    return successors


def _meetings(instructions: Sequence[Instruction]) -> dict[str, list[int]]:
    """Where threads that wait for each other at a BSYNC may go on, other than right behind one, by barrier."""
    usual = {
        (first.operands[0], address)
        for first, second in pairwise(instructions)
        if first.name == "BSYNC"
        for address in (first.address, second.address)
    }
    meetings: dict[str, list[int]] = defaultdict(list)
    for instruction in instructions:
        if instruction.name == "BSSY":
            barrier, address = instruction.operands[0], _jumps_to(instruction)
            if (barrier, address) not in usual:
                meetings[barrier].append(address)
    return meetings


def _jumps_to(instruction: Instruction) -> int:
    found = _ADDRESS.search(instruction.operands[-1])
    if found is None:
        raise ValueError(f"it is not known where {instruction.text} goes")
    return int(found[1], 16)
