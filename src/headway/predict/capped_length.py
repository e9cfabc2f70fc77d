"""From a guess of the logarithm of a length to an expected number of tokens, given where the answer will be cut.

If nothing cut it, an answer's length L would be about log-normal around the guess. What the engine has to make is
min(L, max_tokens), and its mean has a closed form. Taking the mean instead of cutting the guess at max_tokens keeps the
order: of two requests that will probably both be cut, the one whose guess is longer still comes out longer.
"""

from __future__ import annotations

import math

LEAST_SIGMA = 0.05
MOST_LOG_LENGTH = 16.0
"""e^16 is nine million tokens: no guess is above that."""


def expected_length(log_length: float, sigma: float, max_tokens: int | None) -> float:
    """The mean of min(L, max_tokens), where log L is normal around `log_length` with standard deviation `sigma`."""
    sigma = max(sigma, LEAST_SIGMA)
    mu = min(log_length, MOST_LOG_LENGTH)
    mean = math.exp(mu + sigma * sigma / 2)
    if max_tokens is not None:
        limit = math.log(max_tokens)
        below = mean * _normal_cdf((limit - mu) / sigma - sigma)
        mean = min(below + max_tokens * _normal_cdf((mu - limit) / sigma), float(max_tokens))
    return max(mean, 1.0)


def _normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))
