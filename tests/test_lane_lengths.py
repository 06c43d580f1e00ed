"""Tests for the lengths of lanes among which a fitted exchange chooses."""

import itertools

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from relibra_jax.routing.lane_lengths import (
    FITTED,
    POINTS,
    UNFITTED,
    fitted_lengths,
    lane_lengths,
    sent_lanes,
)

LANES = st.lists(st.integers(0, 1000), min_size=9, max_size=9)
"""As many each time, so that one program serves all."""


def rows_sent(lanes, lengths) -> int:
    """Return the rows that are sent of lanes if each is sent in the least length that suffices."""
    return sum(min(length for length in (0, *lengths) if length >= lane) for lane in lanes)


@given(LANES)
def test_no_lengths_send_fewer_rows_than_the_fitted_ones(lanes):
    """The oracle tries all sets of as many lengths, of which the longest must suffice for the longest lane."""
    fitted = fitted_lengths(jnp.array(lanes)).tolist()
    assert fitted == sorted(fitted)
    assert fitted[-1] == max(lanes)
    sets = itertools.combinations_with_replacement(sorted(set(lanes)), FITTED - 1)
    assert rows_sent(lanes, fitted) == min(rows_sent(lanes, (*each, max(lanes))) for each in sets)


@given(LANES, st.data())
def test_longer_lanes_never_send_fewer_rows(lanes, data):
    """So modelled time does not fall with more work, except by half of the least length, which is for other batches."""
    more = data.draw(st.lists(st.integers(0, 100), min_size=len(lanes), max_size=len(lanes)))
    sent = [
        rows_sent(each, fitted_lengths(jnp.array(each)).tolist())
        for each in (lanes, np.add(lanes, more).tolist())
    ]
    assert sent[0] <= sent[1]


def test_lengths_of_many_lanes_are_nearly_the_best():
    """With more lanes than `POINTS`, lengths suffice for every lane, and rows are within 1% of what all lanes give."""
    lanes = np.random.default_rng(0).gamma(20, 50, 16 * POINTS).astype(int)
    some = fitted_lengths(jnp.array(lanes)).tolist()
    values, counts = np.unique(lanes, return_counts=True)
    least = np.full(len(values) + 1, np.inf)
    least[0] = 0
    for _ in range(FITTED):
        before = least.copy()
        for end, begin in itertools.product(range(1, len(values) + 1), range(len(values))):
            if begin < end:
                least[end] = min(least[end], before[begin] + values[end - 1] * counts[begin:end].sum())
    assert least[-1] <= rows_sent(lanes, some) <= 1.01 * least[-1]


@given(st.lists(st.integers(0, 1000), min_size=FITTED, max_size=FITTED), st.integers(0, 300))
def test_lane_lengths_have_few_lengths_for_any_lane_of_the_buffer(fitted, room):
    fitted = tuple(sorted(fitted))
    lengths = lane_lengths(fitted[-1] + room, fitted)
    assert list(lengths) == sorted(set(lengths))
    assert (lengths[0], lengths[-1]) == (0, fitted[-1] + room)
    assert set(fitted) <= set(lengths)
    assert len(lengths) <= len(lane_lengths(160, UNFITTED)) == FITTED + 4


@given(LANES)
def test_sent_lanes_are_those_of_the_exchange(lanes):
    """The price counts the rows that a fitted exchange sends, whose lengths are static."""
    fitted = tuple(fitted_lengths(jnp.array(lanes)).tolist())
    lengths = lane_lengths(max(lanes) * 5 // 4, fitted)
    sent = [min(length for length in lengths if length >= lane) for lane in lanes]
    assert sent_lanes(jnp.array(lanes)).tolist() == sent
