"""Which requests of a log belong together: most probably turns of one conversation, or one question asked again.

They must not be learnt from on one side of a split and asked about on the other. A log has no conversations' ids, but
the turns of one begin alike. So a request's group is the shortest beginning that few others share; beginnings that many
share are a system prompt or a template. Where all of its beginnings are common, it is grouped with its equals only.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

from headway.predict.features import PromptFeatures

MOST_TURNS = 16
MOST_SHARE = 0.005
"""A beginning is common if more requests than this share of all, and than `MOST_TURNS`, have it."""


def group_draws(features: Sequence[PromptFeatures], seed: int) -> list[float]:
    """A number in [0, 1) for each request, the same for a whole group."""
    most = max(MOST_TURNS, MOST_SHARE * len(features))
    counts = Counter(head for each in features for head in enumerate(each.keys.heads))
    draws = []
    for each in features:
        rare = next((head for head in enumerate(each.keys.heads) if counts[head] <= most), None)
        group = each.grams if rare is None else repr(rare).encode()
        digest = hashlib.blake2b(group, digest_size=8, key=seed.to_bytes(16, "little", signed=True))
        draws.append(int.from_bytes(digest.digest(), "little") / 2**64)
    return draws
