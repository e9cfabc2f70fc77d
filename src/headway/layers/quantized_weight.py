"""A weight as codes and scales: the form that every quantised format takes before a kind of `Linear` packs it.

    w[o, i] = (codes[o, i] - zeros[t]) * scales[t] + offsets[t]        t: the tile of output o and input i

`quantise` makes one from a float weight. `stacked` joins the outputs of several, as q, k and v are in one projection.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
ONLINE_FORMATS = ("fp8", "int8", "int4")
"""The formats that `quantise` makes."""
INT4_GROUPS = (128, 64, 32)
"""Numbers of inputs that share a scale, in order of preference: the first that divides a weight's inputs is used."""

_MAX_AT_ONCE = 2**27  # numbers that are float32 for a while
_FP8_LARGEST = 448.0
_INT8_LARGEST = 127.0
_INT4_LOWEST = -8.0
# A group's scale may be a little smaller than its largest value needs: that value is clamped, the others are closer.
_INT4_STRETCHES = (1.0, 0.95, 0.9, 0.86, 0.82, 0.78)


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [outputs, inputs]."""

    codes: Tensor
    """[outputs, inputs]: int8, or float8 e4m3."""
    scales: Tensor
    """[tiles of outputs, tiles of inputs]: all tiles have one size, except that the last ones may be smaller."""
    zeros: Tensor | None = None
    """Shaped as the scales; None: 0."""
    offsets: Tensor | None = None
    """Shaped as the scales; None: 0."""
    groups: Tensor | None = None
    """[inputs]: the tile of each input, if they are not in order (GPTQ's `desc_act`)."""
    tile: tuple[int, int] = (1, 1)
    """The number of outputs and of inputs in a tile."""
    bits: int = 8
    """How many bits a code needs: 8 or 4."""
    lowest: int = -8
    """The lowest 4-bit code: codes are -8 to 7, or 0 to 15."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def is_fp8(self) -> bool:
        return self.codes.dtype == FP8

    def to(self, device: torch.device) -> QuantizedWeight:
        """The weight on `device`."""

        def moved(part: Tensor | None) -> Tensor | None:
            return None if part is None else part.to(device)

        return replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            zeros=moved(self.zeros),
            offsets=moved(self.offsets),
            groups=moved(self.groups),
        )

    def dequantise(self) -> Tensor:
        """The weight as float32, by the module's formula."""
        values = self.codes.float()
        if self.zeros is not None:
            values -= self._spread(self.zeros.float())
        values *= self._spread(self.scales.float())
        if self.offsets is not None:
            values += self._spread(self.offsets.float())
        return values

    def _spread(self, tiles: Tensor) -> Tensor:
        num_outputs, num_inputs = self.codes.shape
        rows = tiles.expand(num_outputs, -1) if len(tiles) == 1 else tiles.repeat_interleave(self.tile[0], 0)
        rows = rows[:num_outputs]
        if self.groups is not None:
            return rows[:, self.groups]
        if rows.shape[1] == 1:
            return rows
        return rows.repeat_interleave(self.tile[1], 1)[:, :num_inputs]

    def by_rows(self, group_size: int | None = None) -> QuantizedWeight:
        """The same weight in tiles of one output, ordered by group and without zeros. Scales and offsets are float32
        [outputs, groups]; zeros are folded in as offset - zero × scale. `group_size` must divide the tiles' size."""
        size = self.tile[1] if group_size is None else group_size

        def spread(tiles: Tensor) -> Tensor:
            rows = tiles.float().repeat_interleave(self.tile[0], 0)[: len(self.codes)]
            times = self.tile[1] // size
            return rows.repeat_interleave(times, 1)[:, : math.ceil(self.codes.shape[1] / size)].contiguous()

        scales = spread(self.scales)
        offsets = None if self.offsets is None else spread(self.offsets)
        if self.zeros is not None and bool((self.zeros != 0).any()):
            moved = -spread(self.zeros) * scales
            offsets = moved if offsets is None else offsets + moved
        return replace(self, scales=scales, zeros=None, offsets=offsets, tile=(1, size))

    def rows(self, part: range) -> QuantizedWeight:
        """The weight of these outputs."""
        if self.tile[0] >= len(self.codes) and len(self.scales) == 1:
            return replace(self, codes=self.codes[_slice(part)].clone(), tile=(len(part), self.tile[1]))
        weight = self if self.tile[0] == 1 else self.by_rows()
        return replace(
            weight,
            codes=weight.codes[_slice(part)].clone(),
            scales=weight.scales[_slice(part)].clone(),
            zeros=None if weight.zeros is None else weight.zeros[_slice(part)].clone(),
            offsets=None if weight.offsets is None else weight.offsets[_slice(part)].clone(),
        )

    def columns(self, part: range) -> Weight:
        """The weight of these inputs; as floats, if the inputs are not in the order of their groups."""
        if self.groups is not None:
            return self.dequantise()[:, _slice(part)].clone()
        size, num_inputs = self.tile[1], self.codes.shape[1]
        if self.scales.shape[1] == 1:
            return replace(self, codes=self.codes[:, _slice(part)].contiguous(), tile=(self.tile[0], len(part)))
        weight = self
        if part.start % size or (part.stop % size and part.stop != num_inputs):
            size = math.gcd(size, part.start, part.stop)
            weight = self.by_rows(size)
        tiles = slice(part.start // size, -(-part.stop // size))
        return replace(
            weight,
            codes=weight.codes[:, _slice(part)].contiguous(),
            scales=weight.scales[:, tiles].contiguous(),
            zeros=None if weight.zeros is None else weight.zeros[:, tiles].contiguous(),
            offsets=None if weight.offsets is None else weight.offsets[:, tiles].contiguous(),
        )


Weight = Tensor | QuantizedWeight


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)


def dequantised(weight: Weight) -> Tensor:
    """The weight as floats: a float weight unchanged, a quantised one as float32."""
    return weight.dequantise() if isinstance(weight, QuantizedWeight) else weight


def quantise(weight: Tensor, format: str, *, groups: Sequence[int] | None = None) -> QuantizedWeight:
    """Quantise a float weight to the nearest codes, with one scale per output and group of inputs. Of the sizes
    `groups`, the first that divides a row is used; if none does, the whole row is one group. By default `fp8` and
    `int8` have no groups, and `int4` tries INT4_GROUPS."""
    if weight.numel() > _MAX_AT_ONCE and len(weight) > 1:
        parts = weight.split(max(_MAX_AT_ONCE // weight.shape[1], 1))
        made = stacked([quantise(part, format, groups=groups) for part in parts])
        assert isinstance(made, QuantizedWeight)
        return made
    wide = weight.float()
    size = _group_size(weight.shape[1], INT4_GROUPS if groups is None and format == "int4" else groups or ())
    if format == "int4":
        return _quantise_int4(wide, size)
    wide = wide.view(len(weight), -1, size)
    largest = wide.abs().amax(2, keepdim=True).clamp_(min=1e-30)
    scales = largest / (_FP8_LARGEST if format == "fp8" else _INT8_LARGEST)
    codes = (wide / scales).to(FP8) if format == "fp8" else (wide / scales).round_().to(torch.int8)
    return QuantizedWeight(codes.view(weight.shape), scales[:, :, 0].contiguous(), tile=(1, size))


def _group_size(num_inputs: int, sizes: Sequence[int]) -> int:
    return next((size for size in sizes if num_inputs % size == 0), num_inputs)


def _quantise_int4(weight: Tensor, size: int) -> QuantizedWeight:
    """Quantise to codes -8 to 7. A group's scale maps its value of largest magnitude to -8, or is a little smaller and
    clamps it, whichever leaves the least error."""
    num_outputs, num_inputs = weight.shape
    grouped = weight.view(num_outputs, -1, size)
    outermost = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))
    outermost = torch.where(outermost == 0, 1e-30, outermost)
    best, least = outermost / _INT4_LOWEST, torch.full_like(outermost, torch.inf)
    for stretch in _INT4_STRETCHES:
        scales = outermost * (stretch / _INT4_LOWEST)
        error = torch.div(grouped, scales).round_().clamp_(_INT4_LOWEST, 7).mul_(scales).sub_(grouped)
        squares = error.square_().sum(2, keepdim=True)
        best = torch.where(squares < least, scales, best)
        least = torch.minimum(squares, least)
    codes = torch.div(grouped, best).round_().clamp_(_INT4_LOWEST, 7).to(torch.int8)
    return QuantizedWeight(codes.view(num_outputs, num_inputs), best[:, :, 0].contiguous(), tile=(1, size), bits=4)


def stacked(weights: Sequence[Weight]) -> Weight:
    """Join the outputs of several weights with the same inputs. Next to 8-bit codes, 4-bit codes become 8-bit ones; if
    the formats have nothing in common, all become floats."""
    if len(weights) == 1:
        return weights[0]
    first = weights[0]
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if len(quantized) < len(weights) or not isinstance(first, QuantizedWeight) or not _go_together(quantized):
        return torch.cat([dequantised(weight) for weight in weights])
    size = math.gcd(*(weight.tile[1] for weight in quantized))
    rows = [weight.by_rows(size) for weight in quantized]
    offsets = None
    if any(weight.offsets is not None for weight in rows):
        offsets = torch.cat([torch.zeros_like(w.scales) if w.offsets is None else w.offsets for w in rows])
    is_int4 = all(weight.bits == 4 and weight.lowest == first.lowest for weight in quantized)
    return QuantizedWeight(
        torch.cat([weight.codes for weight in rows]),
        torch.cat([weight.scales for weight in rows]),
        offsets=offsets,
        groups=first.groups,
        tile=(1, size),
        bits=4 if is_int4 else 8,
        lowest=first.lowest,
    )


def _go_together(weights: Sequence[QuantizedWeight]) -> bool:
    first = weights[0]
    if any(weight.is_fp8 != first.is_fp8 for weight in weights):
        return False
    orders = [weight.groups for weight in weights]
    if any((order is None) != (orders[0] is None) for order in orders):
        return False
    return orders[0] is None or all(
        order is not None and weight.tile == first.tile and torch.equal(order, orders[0])
        for order, weight in zip(orders, weights, strict=True)
    )
