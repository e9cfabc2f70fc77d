"""All claims, in the order of the table."""

from __future__ import annotations

from collections.abc import Sequence

from headway.config import did_you_mean
from headway.errors import ConfigError
from headway.lab.claims.claim import Claim
from headway.lab.claims.scenarios import (
    batch_size,
    chunked_prefill,
    eras,
    kv_quantisation,
    kv_waste,
    learned_ranking,
    magnus,
    orca,
    paging,
    preemption_tail,
    prefix_sharing,
    queue_depth,
    sarathi_capacity,
    slo_tail,
)

CLAIMS: dict[str, Claim] = {
    module.CLAIM.id: module.CLAIM
    for module in (
        eras,
        orca,
        kv_waste,
        paging,
        chunked_prefill,
        sarathi_capacity,
        prefix_sharing,
        queue_depth,
        preemption_tail,
        batch_size,
        learned_ranking,
        magnus,
        slo_tail,
        kv_quantisation,
    )
}


def find_claims(names: Sequence[str]) -> list[Claim]:
    """Those of these names, in the order of the table; all if there are none. `ConfigError` for one that is unknown."""
    for name in names:
        if name not in CLAIMS:
            hint = did_you_mean(name, CLAIMS) or f" The claims are: {', '.join(CLAIMS)}."
            raise ConfigError(f"There is no claim '{name}'.{hint}")
    return [claim for name, claim in CLAIMS.items() if not names or name in names]
