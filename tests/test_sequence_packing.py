"""Packed sequences contain every token once, in order, with little padding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra_jax.contract.types import EMPTY, Assignment, Topology
from relibra_jax.planning.sample_packing import pack_samples
from relibra_jax.routing.sequence_packing import STEPS, lay_out_sequences, sequence_length

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


@given(st.lists(st.integers(1, 40), min_size=2, max_size=40), st.integers(1, 2))
def test_lay_out_sequences_gives_every_token_one_place(lengths, micro_batches):
    lengths = np.array(lengths)
    assignment = pack_samples(lengths, TOPOLOGY, num_micro_batches=micro_batches)
    layout = lay_out_sequences(assignment, lengths)
    check_layout(layout, assignment, lengths)
    fullest = np.append(lengths, 0)[assignment.sample].sum(-1).max()
    assert fullest <= layout.sample.shape[-1] <= fullest * (1 + 1 / STEPS)


@given(st.integers(1, 10**6), st.integers(1, 64))
def test_lengths_hold_the_tokens_with_little_padding(tokens, align):
    length = sequence_length(tokens, align)
    assert length % align == 0
    assert tokens <= length < tokens * (1 + 1 / STEPS) + align
    assert sequence_length(sequence_length(tokens, 1), 1) == sequence_length(tokens, 1)


def test_few_lengths_serve_growing_responses():
    assert len({sequence_length(tokens, 1) for tokens in range(1024, 4096)}) <= 2 * STEPS + 1


def test_lay_out_sequences_rejects_other_samples():
    assignment = Assignment(np.arange(4, dtype=np.int32).reshape(1, 1, 2, 2))
    with pytest.raises(ValueError, match="the assignment has sample 3, but lengths has only 3 entries"):
        lay_out_sequences(assignment, np.ones(3, int))
