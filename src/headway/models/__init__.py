"""Decoder models: their description (`config`), their definition (`decoder`), and how weights become one (`assembly`).

Names that need tensors are resolved on first use, so that `headway.models.decoder_config` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.models.decoder_config import DecoderConfig, RopeConfig

if TYPE_CHECKING:
    from headway.models.assembly import load_decoder
    from headway.models.decoder import Decoder

__all__ = ["Decoder", "DecoderConfig", "RopeConfig", "load_decoder"]


def __getattr__(name: str) -> Any:
    if name == "load_decoder":
        from headway.models.assembly import load_decoder

        return load_decoder
    if name == "Decoder":
        from headway.models.decoder import Decoder

        return Decoder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
