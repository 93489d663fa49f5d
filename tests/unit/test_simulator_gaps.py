"""Quantiles of millions of gaps."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workloads.results import LatencyHistogram


@given(values=st.lists(st.floats(1e-6, 100.0), min_size=1, max_size=200), share=st.floats(0.01, 1.0))
def test_quantiles_are_right_within_a_bin(values: list[float], share: float) -> None:
    gaps, backwards = LatencyHistogram(), LatencyHistogram()
    for value in values:
        gaps.add(value)
    for value in reversed(values):
        backwards.add(value)
    exact = float(np.quantile(values, share, method="inverted_cdf"))
    assert abs(math.log(gaps.quantile_s(share) / exact)) < 0.0051
    assert math.isclose(gaps.mean_s, float(np.mean(values)), rel_tol=1e-3)
    assert vars(gaps) == vars(backwards)


def test_of_nothing_nothing_is_known() -> None:
    assert math.isnan(LatencyHistogram().mean_s)
    assert math.isnan(LatencyHistogram().quantile_s(0.5))


def test_several_at_once_are_as_many() -> None:
    one, other = LatencyHistogram(), LatencyHistogram()
    one.add(0.01, 3)
    for _ in range(3):
        other.add(0.01)
    assert vars(one) == vars(other)
    assert one.count == 3
