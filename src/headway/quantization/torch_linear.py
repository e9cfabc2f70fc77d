"""A linear layer on a plain torch tensor: any device, any float dtype, nothing quantised."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class TorchLinear:
    """Holds the weight [out, in] as it is given."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self.num_bytes = weight.nbytes + (bias.nbytes if bias is not None else 0)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)
