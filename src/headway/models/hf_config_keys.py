"""The keys of each architecture's configuration class in transformers 5, and how each is treated.

A key of the class that changes the computation is read, or has a rule that accepts only values which turn the feature
off. A key that the class does not have means nothing to the architecture and is ignored, as transformers does.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from headway.errors import UnsupportedModelError
from headway.models.known_keys import KnownKeys, anything, only

_READ = (
    *("architectures", "dtype", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *(
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "max_position_embeddings",
        "rms_norm_eps",
    ),
    *("rope_parameters", "tie_word_embeddings", "eos_token_id"),
)
_WITHOUT_EFFECT = (
    # keys of training, of other tasks, and of transformers itself
    *("transformers_version", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "id2label", "label2id"),
    *("problem_type", "initializer_range", "use_cache", "attention_dropout", "pad_token_id", "bos_token_id"),
)


def _full_attention(source: str, key: str, value: Any) -> None:
    """Accept a list of layers that all have full attention, or null."""
    kinds = (
        set(value)
        if isinstance(value, list) and all(isinstance(kind, str) for kind in value)
        else {reprlib.repr(value)}
    )
    other = kinds - {"full_attention", "attention"}
    if value is not None and other:
        raise UnsupportedModelError(
            f"{source}: {key!r} has {', '.join(sorted(other))}, which is not supported; only full_attention is"
        )


_COMMON: KnownKeys = {
    **dict.fromkeys((*_READ, *_WITHOUT_EFFECT), anything),
    "is_encoder_decoder": only(None, False),
    "per_layer_config": only(None, {}),
}
_WINDOWS: KnownKeys = {
    "use_sliding_window": only(None, False),
    "layer_types": _full_attention,
    **dict.fromkeys(("sliding_window", "max_window_layers"), anything),  # mean nothing unless use_sliding_window is set
}
KEYS_OF_ARCHITECTURE: Mapping[str, KnownKeys] = {
    # pretraining_tp computes the same products in parts
    "LlamaForCausalLM": {**_COMMON, **dict.fromkeys(("attention_bias", "mlp_bias", "pretraining_tp"), anything)},
    "MistralForCausalLM": {**_COMMON, "sliding_window": anything},
    "Qwen2ForCausalLM": {**_COMMON, **_WINDOWS},
    "Qwen3ForCausalLM": {**_COMMON, **_WINDOWS, "attention_bias": anything},
}
