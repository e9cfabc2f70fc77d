"""Where kernel tests run: on the GPU where there is one, elsewhere in Triton's interpreter, on CPU tensors.

Import it before anything that imports triton: whether a kernel is compiled or interpreted is settled as it is defined.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")

if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

T = TypeVar("T")


def choose(table: Iterable[T], *few: T) -> list[T]:
    """The cases of a test: the whole table on a GPU, and these few of it in the interpreter, where they take long."""
    cases = list(table)
    missing = [case for case in few if case not in cases]
    assert few and not missing, f"not in the table: {missing}"
    return cases if ON_GPU else list(few)


def _multiply_bfloat16_as_numbers() -> None:
    """Correct the interpreter's dot: numpy has no bfloat16, and it multiplies the bits as if they were integers."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def widened(matrix: Any) -> Any:
        if matrix.dtype.scalar != tl.bfloat16:
            return matrix
        return TensorHandle((matrix.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot_of_numbers(self, widened(a), widened(b), *rest)

    dot_of_numbers = InterpreterBuilder.create_dot
    InterpreterBuilder.create_dot = create_dot


if not ON_GPU:
    from tests.quick_interpreter import make_interpreter_quick

    _multiply_bfloat16_as_numbers()
    make_interpreter_quick()
