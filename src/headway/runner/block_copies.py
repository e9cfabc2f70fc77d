"""Copies of KV blocks, for requests that go on from the same partly filled block in different ways."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.attention import LayerKVCache


def copy_blocks(kv_caches: Sequence[LayerKVCache], copies: Sequence[tuple[int, int]]) -> None:
    """Copy blocks (from, to) in every layer, behind what is queued on the device and before what comes."""
    if not copies:
        return
    pairs = torch.tensor(copies, dtype=torch.int64)
    device = kv_caches[0].v.device
    if device.type == "cuda":
        pairs = pairs.pin_memory().to(device, non_blocking=True)
    sources, targets = pairs.unbind(1)
    for cache in kv_caches:
        cache.copy_blocks(sources, targets)
