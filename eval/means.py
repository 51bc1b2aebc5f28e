"""Means over tokens with their standard errors."""

import math
from collections.abc import Sequence

RUN = 64  # tokens a batch


def mean_and_error(windows: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(mean, its standard error) over all tokens of all windows.

    Neighbouring tokens are alike (a hard passage is hard for many tokens), so the error comes from batch means: runs of
    at most 64 tokens within a window count as one observation each, weighted by their length (ratio estimator). With a
    single run the error is NaN.
    """
    runs = [window[i : i + RUN] for window in windows for i in range(0, len(window), RUN)]
    tokens = sum(map(len, runs))
    mean = math.fsum(math.fsum(run) for run in runs) / tokens
    if len(runs) < 2:
        return mean, math.nan
    spread = math.fsum((math.fsum(run) - len(run) * mean) ** 2 for run in runs) * len(runs) / (len(runs) - 1)
    return mean, math.sqrt(spread) / tokens


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` per cent of `values` do not exceed."""
    return sorted(values)[max(math.ceil(len(values) * percent / 100) - 1, 0)]
