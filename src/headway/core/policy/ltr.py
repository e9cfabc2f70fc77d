"""Learning to rank: in the order of a learned score.

A scheduler needs no lengths, only who is shorter than whom, and that is what a ranker learns best. The order is
that of sjf; what differs is where the numbers come from: without a learned predictor this policy has nothing to go by
and is refused at start.
"""

from __future__ import annotations

from headway.core.policy.sjf import SjfPolicy


class LtrPolicy(SjfPolicy):
    """The score is the request's prediction."""

    name = "ltr"
    summary = "in the order of a learned ranking of answer lengths"
