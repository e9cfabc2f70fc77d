"""`python -m headway.native`: find the CPU kernels, or build them now, and print the result."""

from __future__ import annotations

import sys
import time

from headway.errors import NativeBuildError
from headway.native.build import ISA_VARIABLE, build
from headway.native.lib import NativeLibrary


def main() -> int:
    """Find the library in the wheel or in the cache, or build it, and load it. If that fails, print the compiler's
    output and return 1."""
    start = time.perf_counter()
    try:
        result = build()
        library = NativeLibrary(result.path)
    except NativeBuildError as error:
        print(error, file=sys.stderr)
        return 1
    seconds = time.perf_counter() - start
    if result.is_shipped:
        print(f"came with the wheel: {result.path}")
        print(f"{ISA_VARIABLE}=native compiles kernels for this very machine instead")
    else:
        print(f"{'compiled' if result.compiled else 'found in the cache'} in {seconds:.2f} s: {result.path}")
        print(f"compiler: {' '.join(result.compiler)}")
        print(f"flags: {' '.join(result.flags)}")
    print(f"instruction set: {library.isa}; threads: {library.get_num_threads()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
