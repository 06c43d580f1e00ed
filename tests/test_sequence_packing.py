"""Packed sequences contain every token once, in order, with little padding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra_jax.contract.types import EMPTY, Assignment, Topology
from relibra_jax.planning.sample_packing import pack_samples
from relibra_jax.routing.sequence_packing import lay_out_sequences

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=4, replica_slots=0)


def check_layout(layout, assignment, lengths):
    """Check that sequences have every token of a rank once, each sample in one piece, and padding last."""
    for place in np.ndindex(*assignment.sample.shape[:3]):
        samples = assignment.sample[place]
        positions = {}
        for sample, position in zip(layout.sample[place], layout.position[place], strict=True):
            real = sample != EMPTY
            assert (np.diff(real.astype(int)) <= 0).all(), "padding before a token"
            for one in dict.fromkeys(sample[real].tolist()):
                assert one not in positions
                where = np.flatnonzero(sample == one)
                assert (np.diff(where) == 1).all()
                positions[one] = position[where].tolist()
        assert positions == {int(one): list(range(lengths[one])) for one in samples if one != EMPTY}


@given(st.lists(st.integers(1, 40), min_size=2, max_size=40), st.integers(1, 2), st.floats(0.1, 1))
def test_lay_out_sequences_gives_every_token_one_place(lengths, micro_batches, least_fill):
    lengths = np.array(lengths)
    assignment = pack_samples(lengths, TOPOLOGY, num_micro_batches=micro_batches)
    layout = lay_out_sequences(assignment, lengths, least_fill=least_fill)
    check_layout(layout, assignment, lengths)
    again = lay_out_sequences(assignment, lengths, least_fill=least_fill, shape=layout.shape)
    if layout.fill >= least_fill:
        assert again.shape == layout.shape


def test_lay_out_sequences_takes_as_many_sequences_as_padding_allows():
    lengths = np.array([8, 8, 4, 4, 8, 8, 4, 4])
    assignment = Assignment(np.arange(8, dtype=np.int32).reshape(1, 1, 2, 4))
    assert lay_out_sequences(assignment, lengths).shape == (3, 8)
    assert lay_out_sequences(assignment, lengths, least_fill=0.7).shape == (4, 8)
    uneven = np.array([9, 8, 4, 4, 8, 8, 4, 4])
    layout = lay_out_sequences(assignment, uneven)
    assert layout.shape == (1, 25)
    assert layout.fill == 49 / 50


def test_lay_out_sequences_keeps_a_shape_while_samples_fill_it():
    assignment = Assignment(np.arange(4, dtype=np.int32).reshape(1, 1, 2, 2))
    assert lay_out_sequences(assignment, np.array([5, 5, 5, 4]), shape=(2, 5)).shape == (2, 5)
    assert lay_out_sequences(assignment, np.array([50, 49, 48, 49]), shape=(2, 51)).shape == (2, 51)
    assert lay_out_sequences(assignment, np.array([5, 5, 5, 6]), shape=(2, 5)).shape == (1, 11)
    assert lay_out_sequences(assignment, np.array([5, 5, 5, 5]), shape=(2, 9)).shape == (2, 5)


def test_lay_out_sequences_rejects_other_samples_and_fills():
    assignment = Assignment(np.arange(4, dtype=np.int32).reshape(1, 1, 2, 2))
    with pytest.raises(ValueError, match="the assignment has sample 3, but lengths has only 3 entries"):
        lay_out_sequences(assignment, np.ones(3, int))
    with pytest.raises(ValueError, match=r"least_fill=0\.0 must be above 0 and at most 1"):
        lay_out_sequences(assignment, np.ones(4, int), least_fill=0.0)
