"""Digests: equal exactly when the tokens before and in a block are, and the salt."""

from __future__ import annotations

import itertools

from headway.core import Request
from headway.core.kv.blocks import DIGEST_BYTES, root_digest, tail_digest
from headway.core.request_options import RequestOptions


def digests(tokens: list[int], block_size: int = 2, salt: str | None = None) -> list[bytes]:
    request = Request("r", tokens, max_tokens=1, options=RequestOptions(cache_salt=salt))
    return list(request.block_digests(block_size, len(tokens) // block_size))


def test_no_two_prefixes_share_a_digest() -> None:
    """Every sequence over three tokens, with and without a salt: full blocks, tails and roots."""
    seen: dict[bytes, object] = {}
    for salt in (None, "x", "y"):
        seen[root_digest(salt)] = (salt, ())
        for length in (1, 2, 3, 4):
            for tokens in itertools.product(range(3), repeat=length):
                full = digests(list(tokens), salt=salt)
                before = full[-1] if full else root_digest(salt)
                digest = tail_digest(before, tokens[-1:]) if length % 2 else before
                assert seen.setdefault(digest, (salt, tokens)) == (salt, tokens)
                assert len(digest) == DIGEST_BYTES
    assert len(seen) == 3 * (1 + 3 + 9 + 27 + 81)


def test_a_digest_depends_on_where_blocks_end() -> None:
    assert digests([1, 2, 3, 4], block_size=4)[-1] != digests([1, 2, 3, 4], block_size=2)[-1]
    assert tail_digest(root_digest(None), (1, 2)) != digests([1, 2], block_size=2)[0], "a tail is no full block"


def test_token_ids_are_told_apart_up_to_the_largest() -> None:
    values = [0, 1, 255, 256, 65536, 2**31 - 1]
    assert len({digests([value, 0])[0] for value in values}) == len(values)


def test_any_string_is_a_salt_and_none_is_the_empty_one() -> None:
    salts = ["", "a", "A", "a\0", "ä", "\ud800", "x" * 300]
    assert len({root_digest(salt) for salt in salts}) == len(salts)
    assert root_digest(None) == root_digest("")


def test_digests_of_output_are_those_of_a_prompt_with_the_same_tokens() -> None:
    request = Request("r", [1, 2, 3], max_tokens=9)
    request.block_digests(2, 1)
    for token in (4, 5, 6):
        request.append_output_token(token)
    assert request.block_digests(2, 3) == digests([1, 2, 3, 4, 5, 6])


def test_each_digest_is_computed_once() -> None:
    request = Request("r", range(8), max_tokens=1)
    first = request.block_digests(2, 2)[:2]
    assert [one is other for one, other in zip(first, request.block_digests(2, 4))] == [True, True]


def test_a_fork_computes_no_digest_again_and_leaves_its_parent_as_it_is() -> None:
    parent = Request("r", range(4), max_tokens=1)
    parent.arrive(7, now_s=1.0)
    first = parent.block_digests(2, 2)
    fork = Request("f", range(6), max_tokens=1, fork_of=parent)
    fork.arrive(9, now_s=2.0)
    assert all(one is other for one, other in zip(first, fork.block_digests(2, 2), strict=True))
    assert fork.block_digests(2, 3) == digests([0, 1, 2, 3, 4, 5])
    assert len(parent.block_digests(2, 2)) == 2
    assert (fork.is_fork, fork.order_index, fork.arrival_index) == (True, 7, 9)
    assert (parent.is_fork, parent.order_index) == (False, 7)
