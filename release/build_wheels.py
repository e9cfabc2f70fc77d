"""Builds a release: the source distribution, the wheel for any platform, and a wheel for each common platform.

    pip install build wheel ziglang
    python release/build_wheels.py --output dist                          # everything
    python release/build_wheels.py --output dist --platforms linux-x86_64

The wheel for any platform has the C sources of the CPU kernels, and the first start compiles them. The wheel for a
platform has compiled libraries besides, one for each common instruction set (decision 18). zig compiles for all
platforms on one machine, and against a given version of glibc.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from headway.child_process import python_command  # noqa: E402
from headway.native.build import COMMON_FLAGS, SOURCE_DIR, ZIG_FLAGS, Compiler, compile_library  # noqa: E402
from headway.native.shipped import (  # noqa: E402
    INSTRUCTION_SETS,
    SHIPPED_DIR,
    InstructionSet,
    shipped_name,
    sources_hash,
)
from headway.progress import meter  # noqa: E402


@dataclass(frozen=True)
class Platform:
    """A platform that gets a wheel of its own."""

    tag: str
    """The platform's tag in the wheel's name."""
    zig_target: str
    instruction_sets: tuple[str, ...]


# torch's own wheels for Linux need glibc 2.28, too.
PLATFORMS = {
    "linux-x86_64": Platform(
        "manylinux_2_28_x86_64", "x86_64-linux-gnu.2.28", ("avx512-vnni", "avx512", "avx2-vnni", "avx2")
    ),
    "linux-aarch64": Platform("manylinux_2_28_aarch64", "aarch64-linux-gnu.2.28", ("neon-dotprod", "neon")),
    "macos-arm64": Platform("macosx_11_0_arm64", "aarch64-macos.11.0", ("neon-dotprod",)),
}


def build_portable(output: Path) -> Path:
    """Build the source distribution, and from it the wheel for any platform. Returns the wheel's path."""
    _run(sys.executable, "-m", "build", "--outdir", str(output), str(ROOT))
    (wheel,) = output.glob("headway-*-py3-none-any.whl")
    return wheel


def build_for(platform: Platform, portable: Path, output: Path) -> Path:
    """Build a platform's wheel: the portable one with compiled libraries in it."""
    with tempfile.TemporaryDirectory(prefix="wheel-") as name:
        _run(sys.executable, "-m", "wheel", "unpack", "--dest", name, str(portable))
        (tree,) = Path(name).iterdir()
        native = tree / SOURCE_DIR.parent.relative_to(ROOT / "src")
        folder = native / SHIPPED_DIR.name
        folder.mkdir()
        wanted = [one for one in INSTRUCTION_SETS if one.name in platform.instruction_sets]
        for instructions in wanted:
            for sources in (native / SOURCE_DIR.name, native / SOURCE_DIR.name / "files"):
                compile_for(platform, instructions, sources, folder)
        (info,) = tree.glob("*.dist-info")
        _set_tag(info / "WHEEL", platform.tag)
        _run(sys.executable, "-m", "wheel", "pack", "--dest-dir", str(output), str(tree))
    (wheel,) = output.glob(f"headway-*-py3-none-{platform.tag}.whl")
    return wheel


def compile_for(platform: Platform, instructions: InstructionSet, sources: Path, folder: Path) -> Path:
    """Compile a folder of C sources for some instructions into `folder`."""
    library = folder / shipped_name(sources, sources_hash(sources).hexdigest(), instructions)
    command = tuple(python_command("ziglang", "cc"))
    flags = (*COMMON_FLAGS, *ZIG_FLAGS, "-target", platform.zig_target, f"-mcpu={instructions.zig_cpu}", "-s")
    with meter(None, f"Compiling {sources.name} for {platform.tag}, {instructions.name}") as progress:
        compile_library(Compiler(command, "zig", is_zig=True), flags, sources, library, progress)
    library.chmod(0o755)
    return library


def _set_tag(file: Path, tag: str) -> None:
    replacements = {"Root-Is-Purelib:": "Root-Is-Purelib: false", "Tag:": f"Tag: py3-none-{tag}"}
    lines = file.read_text(encoding="utf-8").splitlines()
    changed = [replacements.get(line.partition(" ")[0], line) for line in lines]
    file.write_text("\n".join(changed) + "\n", encoding="utf-8")


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="DIR", help="(default: dist)")
    parser.add_argument(
        "--platforms",
        nargs="*",
        choices=PLATFORMS,
        default=list(PLATFORMS),
        help="Those that get a wheel. (default: all)",
    )
    arguments = parser.parse_args(argv)
    if arguments.output.exists() and any(arguments.output.glob("headway-*")):
        parser.error(f"{arguments.output} has a release already; remove it or name another folder with --output")
    arguments.output.mkdir(parents=True, exist_ok=True)
    portable = build_portable(arguments.output)
    wheels = [portable]
    for name in arguments.platforms:
        started_s = time.monotonic()
        wheels.append(build_for(PLATFORMS[name], portable, arguments.output))
        print(f"{name}: {time.monotonic() - started_s:.0f} s")
    for path in sorted(arguments.output.iterdir()):
        print(f"{path.stat().st_size:>12,}  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
