"""What a decoder takes from each of its layers: heads, rotary table, window, MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headway.errors import UnsupportedModelError
from headway.layers.linear import Gate, Linear, Norm, TorchLinear
from headway.layers.ops import AddMlp, TorchOps
from headway.loader import open_checkpoint
from headway.models import Decoder, load_decoder
from headway.models.decoder import DecoderLayer
from tests.unit.models.harness import Harness
from tests.unit.models.tiny import hf_model, random_prompt, save_folder


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    return load_decoder(open_checkpoint(save_folder(hf_model("llama"), tmp_path)), ops=TorchOps())


def with_last_layer(decoder: Decoder, change: Callable[[DecoderLayer], DecoderLayer]) -> Decoder:
    """The same decoder with its last layer changed."""
    return Decoder(
        decoder.config,
        ops=decoder.ops,
        embedding=decoder.embedding,
        layers=[*decoder.layers[:-1], change(decoder.layers[-1])],
        norm=decoder.norm,
        lm_head=decoder.lm_head,
    )


def logits(decoder: Decoder) -> Tensor:
    return Harness(decoder, block_size=4).prompt_logits(random_prompt(11))


def unshared_kv_heads(layer: DecoderLayer) -> DecoderLayer:
    """A key and a value head for each query head: copies of those that were shared."""
    heads, qkv = layer.heads, layer.qkv
    assert isinstance(qkv, TorchLinear) and qkv.bias is None
    group = heads.num_heads // heads.num_kv_heads
    assert group > 1
    sizes = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
    q, k, v = qkv.weight.unflatten(0, (-1, heads.head_dim)).split(sizes)
    weight = torch.cat((q, k.repeat_interleave(group, 0), v.repeat_interleave(group, 0))).flatten(0, 1)
    return replace(layer, heads=replace(heads, num_kv_heads=heads.num_heads), qkv=TorchLinear(weight))


def test_each_layer_has_its_own_heads(decoder: Decoder) -> None:
    changed = with_last_layer(decoder, unshared_kv_heads)
    assert changed.layers[0].heads.num_kv_heads < changed.layers[-1].heads.num_kv_heads
    torch.testing.assert_close(logits(changed), logits(decoder), rtol=1e-5, atol=1e-5)


def test_each_layer_has_its_own_rotary_table(decoder: Decoder) -> None:
    def unturned(layer: DecoderLayer) -> DecoderLayer:
        cos_sin = torch.zeros_like(layer.heads.cos_sin)
        cos_sin[:, : layer.heads.head_dim // 2] = 1.0
        return replace(layer, heads=replace(layer.heads, cos_sin=cos_sin))

    changed = with_last_layer(decoder, unturned)
    assert not torch.allclose(logits(changed), logits(decoder), atol=1e-4)
    assert changed.num_bytes == decoder.num_bytes + decoder.layers[0].heads.cos_sin.nbytes


def test_a_window_is_refused(decoder: Decoder) -> None:
    with pytest.raises(UnsupportedModelError, match="layer 1 attends to a window of 4 tokens"):
        with_last_layer(decoder, lambda layer: replace(layer, heads=replace(layer.heads, window=4)))


class NoMlp:
    """Adds nothing."""

    linears: tuple[Linear, ...] = ()

    def into_residual(self, norm: Norm, gate: Gate, next_norm: Tensor) -> AddMlp:
        return lambda residual, delta: delta


def test_the_mlp_is_any_object_that_adds_to_the_residual(decoder: Decoder) -> None:
    def silenced(layer: DecoderLayer) -> DecoderLayer:
        down = TorchLinear(torch.zeros(decoder.config.hidden_size, decoder.config.intermediate_size))
        return replace(layer, mlp=replace(layer.mlp, down=down))

    without = with_last_layer(decoder, lambda layer: replace(layer, mlp=NoMlp()))
    torch.testing.assert_close(logits(without), logits(with_last_layer(decoder, silenced)), rtol=1e-5, atol=1e-5)
