"""Small tokenizers made on the spot: a trained byte-level one and a sentencepiece-like one, as GGUF metadata."""

from __future__ import annotations

import functools
import json
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog. It's 1234567 times 89, isn't it?\n\nWe'll see; they've gone.",
    "def area(radius):\n    return 3.14159 * radius ** 2\n\n\nprint(area(10))  # 314.159\r\n\tTabs  and   runs    of",
    "Ünïcödé ñandú naïve café — “quotes” … 日本語のテキスト 中文字符 한국어 текст на русском ελληνικά",
    "emoji 👩‍👩‍👧‍👦🎉🎉 flags 🇫🇷 math ∑∫√ ½ ² ① Ⅷ ٣٤٥ ४५ combining e\u0301 nbsp\u00a0em\u2003end",
    "   leading and trailing   \n \n\t\n",
    "HELLO World iPhone McDonald's DON'T I'M YOU'RE",
]

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<tool_call>", "héllo wörld"]
PIECES = [
    *("▁t", "▁th", "▁the", "er", "▁a", "in", "▁in", "on", "an", "▁an", "▁and", "re", "▁re", "es", "s▁", "he", "▁he"),
    *("▁▁", "▁▁▁▁", "qu", "▁qu", "ui", "ick", "ck", "uick", "▁quick", "12", "3."),
]


@functools.cache
def _trained(digits_apart: bool) -> str:
    """tokenizer.json of a byte-level BPE trained on the texts, with GPT-2's word split."""
    backend = Backend(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words] if digits_apart else [words])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    return backend.to_str()


def trained_backend(*, digits_apart: bool) -> Backend:
    """The trained tokenizer itself: what a tokenizer rebuilt from its vocabulary must equal."""
    return Backend.from_str(_trained(digits_apart))


def byte_level_metadata(*, pre: str, digits_apart: bool = False, **overrides: Any) -> dict[str, Any]:
    """GGUF metadata of the trained tokenizer; `overrides` are keys without their prefix, None removes one."""
    model = json.loads(_trained(digits_apart))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__) + USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    types = [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS) - len(USER_DEFINED)) + [4] * len(USER_DEFINED)
    fields: dict[str, Any] = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": types,
        "merges": merges,
        "bos_token_id": 1,
        "eos_token_id": 0,
        "add_bos_token": False,
    }
    return prefixed(fields | overrides)


def sentencepiece_metadata(**overrides: Any) -> dict[str, Any]:
    """GGUF metadata of a sentencepiece-like vocabulary: three specials, 256 bytes, characters, then merged pieces."""
    printable = {c for text in TEXTS[:2] for c in text if c.isascii() and c.isprintable()}
    characters = [*sorted(printable - {" "}), "▁", "é"]
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + PIECES + characters
    scores = (
        [0.0] * 259 + [-float(place) for place in range(len(PIECES))] + [-1000.0 - i for i in range(len(characters))]
    )
    types = [2, 3, 3] + [6] * 256 + [1] * (len(PIECES) + len(characters))
    fields: dict[str, Any] = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return prefixed(fields | overrides)


def prefixed(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with GGUF's prefix; keys that have a dot are left as they are."""
    named = {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    return {key: value for key, value in named.items() if value is not None}
