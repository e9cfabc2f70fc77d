"""The thirty numbers that articles about continuous batching lean on, and the claims that answer them.

Each is compared with values that a claim has measured (`numbers_table`); no measured value stands here.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway_lab.claims.published_gains import GAINS
from headway_lab.claims.published_number import PublishedNumber
from headway_lab.claims.published_service import SERVICE

NUMBERS: Sequence[PublishedNumber] = sorted((*GAINS, *SERVICE), key=lambda one: one.number)
