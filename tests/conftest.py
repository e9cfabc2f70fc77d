"""Without a GPU, Triton kernels are tested through Triton's interpreter, which must be chosen before Triton loads."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
