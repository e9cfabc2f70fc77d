"""Published claims about serving, measured again: each has a workload, a way to measure it, and an outcome."""

from headway_lab.claims.claim import Outcome
from headway_lab.claims.claim_results import Results, Row
from headway_lab.claims.context import Claim
from headway_lab.claims.scenarios import CLAIMS, find_claims

__all__ = ["CLAIMS", "Claim", "Outcome", "Results", "Row", "find_claims"]
