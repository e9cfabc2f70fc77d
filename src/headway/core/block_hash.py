"""What a full block of tokens is known by: a digest of its tokens and of all tokens before them.

    digest of block i = blake2b(digest of block i - 1, tokens of block i)        before the first: the root

Two blocks have the same digest exactly when the same tokens lead up to and through them, so their keys and values are
the same. The digest is cryptographic (256 bits): nobody can make up a prompt that is taken for another one. The root
holds what else sets caches apart, the salt of a tenant for instance.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

from headway.core.request import Request

DIGEST_BYTES = 32


def root_digest(salt: str | None) -> bytes:
    """What the first block of a request with this salt comes after. Any string will do, also one that is no text."""
    return blake2b(
        (salt or "").encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES, person=b"headway-root"
    ).digest()


def tail_digest(before: bytes, tokens: tuple[int, ...]) -> bytes:
    """Of a block that is not full: `tokens` are what it holds, `before` the digest of the block before it."""
    packed = struct.pack(f"{len(tokens)}i", *tokens)
    return blake2b(before + packed, digest_size=DIGEST_BYTES, person=b"headway-tail").digest()


def extend_digests(request: Request, block_size: int, num_blocks: int) -> list[bytes]:
    """Digests of the request's first full blocks, at least `num_blocks` of them; all those tokens must be known.

    They are kept with the request, so each is computed once.
    """
    digests = request.block_digests
    if len(digests) >= num_blocks:
        return digests
    tokens = request.known_tokens(len(digests) * block_size, num_blocks * block_size)
    packed = struct.pack(f"{len(tokens)}i", *tokens)
    digest = digests[-1] if digests else root_digest(request.options.cache_salt)
    size = 4 * block_size
    for start in range(0, len(packed), size):
        # Always as many bytes of the digest before, so that they cannot be taken for tokens.
        digest = blake2b(digest + packed[start : start + size], digest_size=DIGEST_BYTES).digest()
        digests.append(digest)
    return digests
