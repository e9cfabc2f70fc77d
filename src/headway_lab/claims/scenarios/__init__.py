"""One file for each claim: its text, its workload and its measure; and all of them, in the order of the table."""

from __future__ import annotations

from collections.abc import Sequence

from headway.errors import ConfigError, did_you_mean
from headway_lab.claims.context import Claim
from headway_lab.claims.scenarios.batching_eras import ERAS, KV_WASTE, PAGING
from headway_lab.claims.scenarios.batching_load import BATCH_SIZE, ORCA, QUEUE_DEPTH, SPECULATION
from headway_lab.claims.scenarios.chunked_prefill import CHUNKED_PREFILL, SARATHI_CAPACITY
from headway_lab.claims.scenarios.gain_map import GAIN_MAP
from headway_lab.claims.scenarios.kv_memory import KV_QUANTISATION, PREEMPTION_TAIL, PREFIX_SHARING
from headway_lab.claims.scenarios.long_prompt import LONG_PROMPT
from headway_lab.claims.scenarios.naive_loop import NAIVE_LOOP
from headway_lab.claims.scenarios.operating import COST, RESERVED_KV, TUNING
from headway_lab.claims.scenarios.padding import PADDING
from headway_lab.claims.scenarios.paging_cost import PAGING_COST
from headway_lab.claims.scenarios.predictor_price import PREDICTOR_PRICE
from headway_lab.claims.scenarios.quoted_gains import MAGNUS_LATENCY, RANKING_THROUGHPUT
from headway_lab.claims.scenarios.sampling_spread import SAMPLING_SPREAD
from headway_lab.claims.scenarios.scheduling_policies import LEARNED_RANKING, MAGNUS, SLO_TAIL
from headway_lab.claims.scenarios.starvation import STARVATION
from headway_lab.claims.scenarios.weight_formats import WEIGHT_FORMATS

CLAIMS: dict[str, Claim] = {
    claim.id: claim
    for claim in (
        ERAS,
        PADDING,
        NAIVE_LOOP,
        SAMPLING_SPREAD,
        GAIN_MAP,
        ORCA,
        KV_WASTE,
        PAGING,
        CHUNKED_PREFILL,
        SARATHI_CAPACITY,
        PREFIX_SHARING,
        QUEUE_DEPTH,
        PREEMPTION_TAIL,
        BATCH_SIZE,
        SPECULATION,
        LEARNED_RANKING,
        RANKING_THROUGHPUT,
        PREDICTOR_PRICE,
        MAGNUS,
        MAGNUS_LATENCY,
        SLO_TAIL,
        KV_QUANTISATION,
        RESERVED_KV,
        TUNING,
        COST,
        PAGING_COST,
        LONG_PROMPT,
        STARVATION,
        WEIGHT_FORMATS,
    )
}


def find_claims(names: Sequence[str]) -> list[Claim]:
    """The claims of these names, in the order of the table; all if no names are given. `ConfigError` for an unknown
    name."""
    for name in names:
        if name not in CLAIMS:
            hint = did_you_mean(name, CLAIMS) or f" The claims are: {', '.join(CLAIMS)}."
            raise ConfigError(f"There is no claim '{name}'.{hint}")
    return [claim for name, claim in CLAIMS.items() if not names or name in names]
