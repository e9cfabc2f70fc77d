"""One normalised description of a decoder, whatever family it is of and whatever file it came from.

Standard library only: the scheduler, the simulator and the command line can reason about a model without tensors.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearScaling:
    """All frequencies divided by one factor (position interpolation)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a smooth ramp between (Llama 3.1 and later)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: interpolate slow dimensions, keep fast ones, and sharpen attention by `attention_factor`."""

    factor: float
    original_max_position: int
    attention_factor: float
    """Multiplies cosines and sines; already resolved from mscale and friends."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Round the ends of the ramp to whole dimensions."""


@dataclass(frozen=True)
class FrequencyFactors:
    """Each frequency divided by a factor of its own, as a GGUF file's `rope_freqs.weight` gives them."""

    factors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding over the whole head."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class DecoderConfig:
    """Shape and switches of a decoder-only transformer with RMS norm, SwiGLU and rotary positions."""

    architecture: str
    """"llama", "mistral", "qwen2" or "qwen3"."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Longest context the model was made for."""
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    """The output projection is the embedding table."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm over each head of q and k before the rotation."""
    rope: RopeConfig = RopeConfig()
    torch_dtype: str = "float32"
    """The dtype the checkpoint declares: "float32", "float16" or "bfloat16"."""
    stored: str = ""
    """What the checkpoint's linear layers are quantised to, for people; empty: floats."""

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """KV-cache bytes of one token over all layers."""
        return 2 * self.num_layers * self.kv_size * dtype_bytes

    @property
    def num_parameters(self) -> int:
        """Weights in the whole model; a tied embedding counts once."""
        embedding = self.vocab_size * self.hidden_size
        attention = self.hidden_size * (self.qkv_size + self.q_size)
        attention += self.qkv_size * self.qkv_bias + self.hidden_size * self.o_bias + 2 * self.head_dim * self.qk_norm
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        layer = attention + mlp + 2 * self.hidden_size
        return embedding * (1 if self.tie_embeddings else 2) + self.num_layers * layer + self.hidden_size
