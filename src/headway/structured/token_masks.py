"""What crosses from guides to the sampler."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class TokenMasks(NamedTuple):
    """What guided requests of a step may choose from."""

    request_ids: tuple[str, ...]
    bits: NDArray[np.uint32]
    """[requests, words]: bit i of word w allows token 32 w + i."""
