"""What a full block of tokens is known by: a digest of its tokens and of all tokens before them.

    digest of block i = blake2b(digest of block i - 1, tokens of block i)        before the first: the root

Two blocks have the same digest exactly when the same tokens lead up to and through them, so their keys and values are
the same. The digest is cryptographic (256 bits): nobody can make up a prompt that is taken for another one. The root
holds what else sets caches apart, the salt of a tenant for instance.
"""

from __future__ import annotations

from array import array
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
    return blake2b(array("i", tokens).tobytes(), digest_size=DIGEST_BYTES, key=before, person=b"headway-tail").digest()


def extend_digests(request: Request, block_size: int, num_blocks: int) -> list[bytes]:
    """Digests of the request's first full blocks, at least `num_blocks` of them; all those tokens must be known.

    They are kept with the request, so each is computed once.
    """
    digests = request.block_digests
    if len(digests) >= num_blocks:
        return digests
    first = len(digests) * block_size
    tokens = memoryview(array("i", request.known_tokens(first, num_blocks * block_size)).tobytes())
    digest = digests[-1] if digests else root_digest(request.cache_salt)
    size = 4 * block_size
    for start in range(0, len(tokens), size):
        digest = blake2b(tokens[start : start + size], digest_size=DIGEST_BYTES, key=digest).digest()
        digests.append(digest)
    return digests
