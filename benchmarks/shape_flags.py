"""Flags of measurements on one engine with random weights: its shape, and the formats of its numbers."""

from __future__ import annotations

import argparse
from typing import Any

from headway.config import KV_CACHE_DTYPES, QUANTIZATIONS


def shape_parser(description: str | None, *, model: str) -> argparse.ArgumentParser:
    """`model`: where none is named."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=model, help="a built-in shape or a config.json")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="auto", choices=QUANTIZATIONS)
    parser.add_argument("--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES)
    return parser


def shape_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of the engine. It has no prefix cache: prompts are random, and rounds have the same ones."""
    return {
        "model": arguments.model,
        "load_format": "dummy",
        "dtype": arguments.dtype,
        "quantization": arguments.quantization,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "enable_prefix_caching": False,
    }
