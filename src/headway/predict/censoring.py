"""Answers that were cut: their length is not known, only that it is at least what was made.

Taking the cut for the length would teach that prompts sent with a small `max_tokens` have short answers. Instead the
logarithm of such a length is replaced by its mean over answers that went on past the cut, E[log L | L > cut]. The
distribution of L is Kaplan and Meier's estimate, which uses cut answers for as long as they were seen. Where no answer
is known to have gone beyond the cut, the cut itself is taken.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def log_lengths(num_output_tokens: npt.ArrayLike, is_cut: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The logarithm of each length, of cut ones as it is to be expected."""
    logs = np.log(np.maximum(np.asarray(num_output_tokens, dtype=np.float64), 1.0))
    cut = np.asarray(is_cut, dtype=bool)
    times, mass = _distribution(logs, cut)
    # Sums of the mass, and of mass times log, beyond each point of the distribution.
    mass_beyond = np.append(np.cumsum(mass[::-1])[::-1], 0.0)
    sum_beyond = np.append(np.cumsum((mass * times)[::-1])[::-1], 0.0)
    place = np.searchsorted(times, logs, side="right")
    found = mass_beyond[place] > 0
    mean_beyond = np.divide(sum_beyond[place], mass_beyond[place], out=logs.copy(), where=found)
    return np.where(cut, np.maximum(mean_beyond, logs), logs)


def _distribution(logs: npt.NDArray[np.float64], cut: npt.NDArray[np.bool_]) -> tuple[npt.NDArray, npt.NDArray]:
    """Where answers ended, in rising order, and the estimated share of answers that end there.

    What is left beyond the last answer that ended, because longer ones were cut, is put at the longest cut."""
    times, ended = np.unique(logs[~cut], return_counts=True)
    at_risk = len(logs) - np.searchsorted(np.sort(logs), times, side="left")
    survival = np.cumprod(1.0 - ended / at_risk)
    mass = np.concatenate(([1.0], survival))[:-1] - survival
    left = survival[-1] if len(survival) else 1.0
    longest = logs.max(initial=0.0)
    return np.append(times, longest), np.append(mass, left)
