"""The assignment of samples from which the plan of a batch starts."""

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from relibra_jax.contract.types import EMPTY, Array, Assignment, Price, Topology
from relibra_jax.cost.step_time import attention_time
from relibra_jax.planning.assignment import assign_in_order
from relibra_jax.planning.sample_packing import pack_samples

MOST_TOKENS: Final = 1.05
"""The most tokens that packing by attention may give to a rank, as a multiple of packing by tokens."""


def start_assignment(
    lengths: Int[Array, " B"], topology: Topology, *, num_micro_batches: int, price: Price
) -> Assignment:
    """Assign samples by their lengths alone: as sequences are laid out, and so that attention takes the least time.

    Padded sequences hold one sample each and are all equally long, so the samples stay in their order, with equally
    many on every rank. Packed sequences start from one of two packings (`relibra_jax.planning.sample_packing`), by
    tokens or by the seconds that a sample spends in attention, whichever takes less time. Packing by attention must not
    need more than `MOST_TOKENS` times the memory.

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
    by_tokens = pack_samples(lengths, topology, num_micro_batches=num_micro_batches)
    if isinstance(lengths, jax.core.Tracer):
        return by_tokens
    by_tokens = _even_room(by_tokens)
    if isinstance(price.pair, jax.core.Tracer) or not float(price.pair) > 0:
        return by_tokens
    numbers = np.asarray(lengths, float)
    token, pair = float(price.token), float(price.pair)
    # Packing takes lengths of whole tokens, so the unit is the time of a sample with one token.
    seconds = ((token * numbers + pair * numbers**2) / (token + pair)).round().astype(int)
    by_attention = _even_room(pack_samples(seconds, topology, num_micro_batches=num_micro_batches))
    (old_time, old_most), (new_time, new_most) = (
        _attention(packing, lengths, price) for packing in (by_tokens, by_attention)
    )
    return by_attention if new_time < old_time and new_most <= MOST_TOKENS * old_most else by_tokens


def _attention(packing: Assignment, lengths: Int[Array, " B"], price: Price) -> tuple[float, float]:
    """Return the seconds of attention in all micro-batches, and the positions of the fullest rank."""
    attention, positions = attention_time(packing, jnp.asarray(lengths), price)
    return float(attention.max((1, 2)).sum()), float(positions)


def _even_room(assignment: Assignment) -> Assignment:
    """Add empty positions up to the next power of two."""
    sample = np.asarray(assignment.sample)
    positions = 1 << (sample.shape[-1] - 1).bit_length()
    missing = ((0, 0),) * 3 + ((0, positions - sample.shape[-1]),)
    return Assignment(np.pad(sample, missing, constant_values=EMPTY))
