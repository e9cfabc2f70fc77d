"""The decoder: one definition for every supported family, in the vocabulary of `Ops`, `Linear` and attention.

    residual = embedding(tokens)
    for each layer:
        residual += o(attention(rotate(qkv(norm(residual)))))
        residual += mlp(norm(residual))
    hidden = norm(residual)

Each line of a layer is a function, chosen at load by the kinds of its weights (`LayerForms`). A projection's sum into
the residual may be left as `delta` (see `layers/linear.py`), which the next norm adds. Families differ only in optional
parts (biases, head norms) and in sizes, all given by `DecoderConfig`. Each layer has its own heads, window and rotary
table; nothing here assumes that they are the same in all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from headway.attention.base import AttentionBackend, HeadNorms, Heads
from headway.errors import UnsupportedModelError
from headway.layers.collectives import Collectives
from headway.layers.linear import AfterNorm, Delta, IntoResidual, Linear, Norm
from headway.layers.ops import AddMlp, Mlp, Ops
from headway.models.decoder_config import DecoderConfig


class LayerForms(NamedTuple):
    """The functions that compute a layer's projections, with the norms and sums fused as their weights allow."""

    qkv: AfterNorm
    o: IntoResidual
    mlp: AddMlp


@dataclass(frozen=True)
class DecoderLayer:
    """Weights of one layer; q, k and v are one projection."""

    heads: Heads
    input_norm: Tensor
    qkv: Linear
    head_norms: HeadNorms | None
    o: Linear
    post_attention_norm: Tensor
    mlp: Mlp

    def forms(self, ops: Ops, eps: float, next_norm: Tensor) -> LayerForms:
        """Choose how the projections are computed. `next_norm` is the weight of the norm after the layer."""
        before_mlp = Norm(self.post_attention_norm, eps, ops.norm)
        return LayerForms(
            qkv=self.qkv.after_norm(Norm(self.input_norm, eps, ops.norm)),
            o=self.o.into_residual(self.post_attention_norm),
            mlp=self.mlp.into_residual(before_mlp, ops.silu_mul, next_norm),
        )

    @property
    def own(self) -> DecoderLayer:
        """The layer with this rank's parts as if they were the whole; see `Linear.own`."""
        return replace(self, o=self.o.own, mlp=self.mlp.own)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.o, *self.mlp.linears

    @property
    def tensors(self) -> list[Tensor]:
        norms = [self.input_norm, self.post_attention_norm]
        if self.head_norms is not None:
            norms += [self.head_norms.q, self.head_norms.k]
        return [self.heads.cos_sin, *norms, *(tensor for linear in self.linears for tensor in linear.tensors)]


class Vocabulary:
    """A vocabulary divided among ranks: each rank has its own tokens' vectors and computes their logits."""

    def __init__(self, ranks: Collectives, *, own: range, width: int, size: int) -> None:
        """`width` is the number of tokens per rank; the last rank may have fewer. `size` is the whole vocabulary."""
        self._ranks = ranks
        self._own = own
        self._width = width
        self._size = size

    def embedding(self, ops: Ops, token_ids: Tensor, table: Tensor) -> Tensor:
        """The vectors of any tokens; those of other ranks' tokens come from these ranks."""
        is_other = (token_ids < self._own.start) | (token_ids >= self._own.stop)
        vectors = ops.embedding((token_ids - self._own.start).masked_fill(is_other, 0), table)
        return self._ranks.all_reduce(vectors.masked_fill_(is_other[:, None], 0))

    def logits(self, own: Tensor, out: Tensor | None) -> Tensor:
        """Gather the whole vocabulary's logits from `own`, each rank's logits of the same rows."""
        padded = own if own.shape[1] == self._width else F.pad(own, (0, self._width - own.shape[1]))
        gathered = self._ranks.all_gather(padded.contiguous())
        logits = gathered.transpose(0, 1).reshape(len(own), -1)[:, : self._size]
        return logits.contiguous() if out is None else out.copy_(logits)


class Decoder:
    """A model that is ready to run. Stateless: the KV cache belongs to the attention backend."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        ops: Ops,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        norm: Tensor,
        lm_head: Linear,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        """`vocabulary` is given if `embedding` and `lm_head` are only this rank's part."""
        for index, layer in enumerate(layers):
            if layer.heads.window is not None:
                raise UnsupportedModelError(
                    f"layer {index} attends to a window of {layer.heads.window} tokens, which is not supported"
                )
        self.config = config
        self.ops = ops
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.lm_head = lm_head
        self._vocabulary = vocabulary
        next_norms = [*(layer.input_norm for layer in layers[1:]), norm]
        self._forms = [
            layer.forms(ops, config.rms_norm_eps, next_norm)
            for layer, next_norm in zip(layers, next_norms, strict=True)
        ]

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend, wanted_rows: Tensor | None = None
    ) -> Tensor:
        """Hidden states of the step that `attention` has planned; writes the step's keys and values.

        token_ids and positions are int64 [T], in the order of the planned batch. `wanted_rows` are int64 indices of the
        tokens whose hidden states are returned, in the order of the result. The work after the last layer's attention
        is done only for them; `None` means all tokens. Returns [T or len(wanted_rows), hidden].
        """
        ops, last_layer = self.ops, len(self.layers) - 1
        if self._vocabulary is None:
            residual = ops.embedding(token_ids, self.embedding)
        else:
            residual = self._vocabulary.embedding(ops, token_ids, self.embedding)
        delta: Delta = None
        for index, (layer, forms) in enumerate(zip(self.layers, self._forms, strict=True)):
            attended = self._attend(index, layer, forms.qkv(residual, delta), positions, attention)
            if index == last_layer and wanted_rows is not None:
                if not len(wanted_rows):
                    return residual[:0]
                # The norm before qkv has taken delta, so the residual is whole.
                attended, residual = attended.index_select(0, wanted_rows), residual.index_select(0, wanted_rows)
            delta = forms.mlp(residual, forms.o(residual, attended))
        return ops.norm(residual, delta, self.norm, self.config.rms_norm_eps)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows of `forward`'s result [R, hidden] -> [R, vocab], in the dtype the model computes in.

        They are not converted to float32: a sampler reads them directly; only sums of probabilities need float32. They
        are written to `out` [R, vocab] if it is given.
        """
        if self._vocabulary is None:
            return self.lm_head(hidden, out)
        return self._vocabulary.logits(self.lm_head(hidden), out)

    def _attend(
        self, index: int, layer: DecoderLayer, qkv: Tensor, positions: Tensor, attention: AttentionBackend
    ) -> Tensor:
        """Rotate, write keys and values, and attend, in one call if the backend can do so for the planned step."""
        if attention.takes_qkv:
            return attention.run_qkv(index, qkv, positions, layer.heads, layer.head_norms)
        kv, slot_mapping = attention.kv_caches[index], attention.batch.slot_mapping
        return attention.run(
            index, self.ops.rope_write_kv(qkv, positions, slot_mapping, layer.heads, layer.head_norms, kv)
        )

    @property
    def forms_alone(self) -> LayerForms:
        """The first layer's functions on this rank's parts, without the other ranks, to compile and to measure them."""
        return self.layers[0].own.forms(self.ops, self.config.rms_norm_eps, self.norm)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights and the rotary tables. Shared tensors (tied embeddings, tables) count once."""
        tensors = [self.embedding, self.norm, *self.lm_head.tensors]
        tensors += [tensor for layer in self.layers for tensor in layer.tensors]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    @property
    def num_step_bytes(self) -> int:
        """Bytes of the linear layers' weights, which every step reads."""
        return self.lm_head.num_bytes + sum(linear.num_bytes for layer in self.layers for linear in layer.linears)
