"""The assignment of samples from which the plan of a batch starts."""

import dataclasses
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from relibra_jax.contract.replay import rank_tokens
from relibra_jax.contract.types import Array, Assignment, Price, Topology
from relibra_jax.cost.step_time import attention_time
from relibra_jax.planning.assignment import assign_in_order, order_for_groups, with_positions
from relibra_jax.planning.level_packing import pack_by_level
from relibra_jax.planning.sample_packing import pack_samples

LEAST_GAIN: Final = 0.04
"""The share of attention's time that packing by level must save; otherwise samples are packed by tokens. Less may be
lost in exchanges: with 3.3% of attention saved at the start, and samples assigned by price, a modelled batch took 0.3%
longer than from packing by tokens."""


def start_assignment(
    lengths: Int[Array, " B"], topology: Topology, *, num_micro_batches: int, price: Price
) -> Assignment:
    """Assign samples by their lengths alone: as sequences are laid out, and so that attention takes the least time.

    Padded sequences hold one sample each and are all equally long, so the samples stay in their order, with equally
    many on every rank. Packed sequences start from samples packed by tokens (`relibra_jax.planning.sample_packing`),
    or with long samples together (`relibra_jax.planning.level_packing`) where that saves `LEAST_GAIN` of the time in
    attention. The latter never needs more memory: its fullest rank has at most as many tokens. Long samples are dealt
    to all data-parallel groups. For split sequences, samples are packed into nodes in the same way.

    Args:
        lengths: the number of tokens of each sample. Traced lengths are packed by tokens.
        topology: the expert-parallel group.
        num_micro_batches: M, the number of micro-batches.
        price: the price, which tells how sequences are laid out.

    Returns:
        The assignment. Its number of positions per rank is a power of two for packed sequences, so that batches of
        similar lengths have equal shapes.

    Raises:
        ValueError: if ``num_micro_batches`` is below 1 or above the number of samples.
    """
    if price.sequences == "padded":
        return assign_in_order(len(lengths), topology, num_micro_batches=num_micro_batches)
    if price.sequences == "split":
        return _pack_nodes(lengths, topology, num_micro_batches, price)
    by_tokens = pack_samples(lengths, topology, num_micro_batches=num_micro_batches)
    if isinstance(lengths, jax.core.Tracer):
        return by_tokens
    by_tokens = with_positions(by_tokens, 1 << (by_tokens.sample.shape[-1] - 1).bit_length())
    if isinstance(price.pair, jax.core.Tracer) or not float(price.pair) > 0:
        return by_tokens
    by_level = pack_by_level(
        lengths,
        topology,
        num_micro_batches=num_micro_batches,
        # A sample without tokens counts as one, as it does in packings.
        tokens_per_rank=int(rank_tokens(by_tokens, np.maximum(np.asarray(lengths), 1)).max()),
        samples_per_rank=max(by_tokens.sample.shape[-1], 2),  # two short samples may be less than a long one
    )
    if by_level is None:
        return by_tokens
    old, new = (_for_groups(packing, lengths, price) for packing in (by_tokens, by_level))
    return new[1] if new[0] < (1 - LEAST_GAIN) * old[0] else old[1]


def _pack_nodes(
    lengths: Int[Array, " B"], topology: Topology, num_micro_batches: int, price: Price
) -> Assignment:
    """Pack samples into nodes, as if each were a rank; the entries of its ranks together are those of the node."""
    nodes, local = topology.num_nodes, topology.ranks_per_node
    merged = dataclasses.replace(topology, ranks_per_node=1)
    whole = dataclasses.replace(price, sequences="packed")
    packed = start_assignment(lengths, merged, num_micro_batches=num_micro_batches, price=whole)
    room = -(-packed.sample.shape[-1] // local)
    return Assignment(with_positions(packed, local * room).sample.reshape(-1, nodes, local, room))


def _for_groups(packing: Assignment, lengths: Int[Array, " B"], price: Price) -> tuple[float, Assignment]:
    """Order micro-batches for the data-parallel groups; return the seconds of the slowest group's attention as well."""
    attention, _ = attention_time(packing, jnp.asarray(lengths), price)
    seconds = np.asarray(attention.max((1, 2)))
    order = np.asarray(order_for_groups(seconds, price.data_parallel))
    groups = 1 if len(order) % price.data_parallel else price.data_parallel
    slowest = float(seconds[order].reshape(groups, -1).sum(1).max())
    return slowest, Assignment(np.asarray(packing.sample)[order])
