"""Makes Triton's interpreter several times faster for kernels that call other functions.

At every call of a function, not only at that of the kernel, the interpreter walks through all of the language to put
its own functions in place of the compiler's. Here it looks first whether they are there already.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """While open, what is replaced already is not searched again. Of no effect where the interpreter differs."""
    replace = getattr(interpreter, "_patch_builtin", None)
    witness: dict[Any, str | None] = {}

    def replace_once(package: Any, *rest: Any) -> None:
        if package not in witness:
            builtin = (name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member))
            witness[package] = next(builtin, None)
        name = witness[package]
        if replace is not None and (name is None or tl.core.is_builtin(getattr(package, name))):
            replace(package, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_builtin", replace_once, raising=False)
        yield
