"""Standard errors and percentiles."""

import math
import random
import statistics

import pytest

from eval.means import mean_and_error, percentile


def test_error_of_independent_values_is_the_textbooks():
    draw = random.Random(0)
    values = [draw.gauss(1, 2) for _ in range(64 * 400)]
    mean, error = mean_and_error([values])
    assert mean == pytest.approx(statistics.fmean(values))
    assert error == pytest.approx(2 / math.sqrt(len(values)), rel=0.1)


def test_neighbours_that_are_alike_widen_the_error():
    draw = random.Random(0)
    values = [draw.gauss(0, 1) for _ in range(1000)]
    _, error = mean_and_error([[value for value in values for _ in range(64)]])
    assert error == pytest.approx(1 / math.sqrt(1000), rel=0.1), "64 copies of a value say no more than the value"


def test_one_run_has_no_error():
    mean, error = mean_and_error([[1.0, 3.0]])
    assert mean == 2.0
    assert math.isnan(error)


def test_percentile_is_a_value_that_was_there():
    assert percentile(range(1, 101), 99) == 99
    assert percentile([5.0], 99) == 5.0
