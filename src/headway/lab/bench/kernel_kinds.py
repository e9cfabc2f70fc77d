"""What a kernel or operator is for, told by its name. Used by the summary of a profile and by its picture."""

from __future__ import annotations

import re
from collections.abc import Mapping

OTHER = "other"

# The first pattern that fits decides: attention kernels are often built of matmul templates, fused linear layers carry
# the name of the norm in front of them. Words at a name's start are those of our own kernels.
_PATTERNS: Mapping[str, str] = {
    "attention": r"attn|attention|flash|fmha|paged|^decode_|^prefill_|^merge_",
    "sampling": r"sampl|argmax|gumbel|multinomial|topk|top_k|sort|softmax|^_pick|^_threshold|^_edit|^_penalty",
    "linear": r"gemm|gemv|cublas|nvjet|cutlass|wmma|splitk|linear|addmm|matmul|::b?mm|^one_row|^split_|^scaled_|swiglu",
    "norm/rope/activation": r"norm|rope|rotary|silu|sigmoid|gelu|activation",
    "copy": r"memcpy|memset|copy|fill|clone|::to$|cat|index|gather|scatter|embedding|zero|^seat_|^append_",
}
KINDS = (*_PATTERNS, OTHER)
_COMPILED = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in _PATTERNS.items()}


def kind_of(name: str) -> str:
    """One of `KINDS`."""
    for kind, pattern in _COMPILED.items():
        if pattern.search(name):
            return kind
    return OTHER


def short_name(name: str, width: int = 56) -> str:
    """A kernel's name without return type, namespaces' boilerplate and template arguments, cut to `width`."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "").replace("at::native::", "")
    head = plain.split("<", 1)[0].split("(", 1)[0] or plain
    return head if len(head) <= width else head[: width - 1] + "…"
