"""Replicas that arrive while home experts run: FEPLB's order, static experts first and dynamic ones after them.

Source: FEPLB (arXiv 2604.19654), where copies of experts travel beside the products of those that stay. By default a
layer's whole fetch runs beside its attention, and one grouped product computes all slots. With
``ExpertParallel.late_replicas`` the two exchanges of a padded fetch are apart (`relibra_jax.execution.expert_pieces`):

    attention            beside it, exports are cut into pieces and scattered
    dispatch
    homes, residents     beside their product, ranks send the pieces on and assemble their replicas
    replicas             a second product
    combine

The backward pass has the same order: while the gradients of the homes are computed, replicas are assembled again; the
gradients of replicas return beside what follows.

A grouped product needs its rows from the first on. So the rows of replicas are gathered to the front for the second
product, and its outputs are gathered back: two gathers of rows in the forward pass, and three in the backward pass.
Everything here runs on one rank, inside shard_map.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from relibra_jax.contract.types import EMPTY
from relibra_jax.execution.expert_pieces import assemble
from relibra_jax.execution.gather import gather_rows

type Compute = Callable[..., jax.Array]
"""A function of rows, weights, group sizes and row scales, as `relibra_jax.execution.moe.ExpertMlp`."""


class LateReplicas(NamedTuple):
    """What a layer knows of its replicas before they arrive."""

    axes: tuple[str, ...]
    """The mesh axes of the ranks between which replicas travel."""
    ranks: int
    """The number of these ranks."""
    slots: int
    """R, the number of replica slots of a rank."""

    def pieces(self, expert: tuple[int, int, int]) -> tuple[int, int]:
        """Return the shape of the pieces that a rank sends on.

        Args:
            expert: the shape of an expert.

        >>> LateReplicas(("local",), 4, 2).pieces((3, 5, 2))
        (8, 8)
        """
        matrices, width, columns = expert
        return self.ranks * self.slots, -(-matrices * width * columns // self.ranks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def compute_homes_first(
    compute: Compute,
    late: LateReplicas,
    rows: jax.Array,
    weights: tuple[jax.Array, ...],
    group_sizes: jax.Array,
    row_scale: jax.Array,
) -> jax.Array:
    """Compute the rows of homes and residents while replicas arrive, and then the rows of replicas.

    Args:
        compute: the function that computes groups of rows. Rows after the last group have no meaning.
        late: the replicas.
        rows: the rows ``[r, D]``, sorted by slot.
        weights: the weights of the homes, of the residents if there are any, and the pieces that this rank sends on.
        group_sizes: the number of rows of each slot.
        row_scale: the factor of each row of the output, ``[r]``.

    Returns:
        The outputs of the rows, ``[r, D]``.
    """
    *held, pieces = weights
    # The pieces leave when the tokens have arrived, whose exchange they would slow.
    rows, pieces = jax.lax.optimization_barrier((rows, pieces))
    replicas = _assemble(late, held[0].shape[1:], pieces)
    home, replica = _halves(compute, late, group_sizes)
    outputs = home(rows, held, row_scale)
    outputs, rows = jax.lax.optimization_barrier((outputs, rows))
    is_home = _is_home(late, rows, group_sizes)
    return jnp.where(is_home[:, None], outputs, replica(rows, replicas, row_scale))


def _forward(compute, late, *operands):
    return compute_homes_first(compute, late, *operands), operands


def _backward(compute, late, operands, d_outputs):
    rows, (*held, pieces), group_sizes, row_scale = operands
    rows, d_outputs, pieces = jax.lax.optimization_barrier((rows, d_outputs, pieces))
    replicas, send_back = jax.vjp(functools.partial(_assemble, late, held[0].shape[1:]), pieces)
    home, replica = _halves(compute, late, group_sizes)
    _, pull = jax.vjp(home, rows, held, row_scale)
    d_home, d_held, d_home_scale = pull(d_outputs)
    d_outputs, d_home = jax.lax.optimization_barrier((d_outputs, d_home))
    _, pull = jax.vjp(replica, rows, replicas, row_scale)
    d_replica, d_replicas, d_replica_scale = pull(d_outputs)
    d_weights = (*d_held, *send_back(d_replicas))
    is_home = _is_home(late, rows, group_sizes)
    d_rows = jnp.where(is_home[:, None], d_home, d_replica)
    return d_rows, d_weights, None, jnp.where(is_home, d_home_scale, d_replica_scale)


compute_homes_first.defvjp(_forward, _backward)


def _is_home(late: LateReplicas, rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Mark the rows of homes and residents, which come first."""
    return jnp.arange(len(rows), dtype=jnp.int32) < group_sizes[: -late.slots].sum(dtype=jnp.int32)


def _assemble(late: LateReplicas, expert: tuple[int, ...], pieces: jax.Array) -> jax.Array:
    with jax.named_scope("replica_fetch"):
        return assemble(pieces, late.axes, late.ranks, expert)


def _halves(compute: Compute, late: LateReplicas, group_sizes: jax.Array) -> tuple[Compute, Compute]:
    """Return the functions of rows, weights and row scales that compute the rows of homes, and those of replicas."""
    held_sizes, sizes = group_sizes[: -late.slots], group_sizes[-late.slots :]

    def home(rows, held, row_scale):
        return compute(rows, held, held_sizes, row_scale)

    def replica(rows, replicas, row_scale):
        row = jnp.arange(len(rows), dtype=jnp.int32)
        first, count = held_sizes.sum(dtype=jnp.int32), sizes.sum(dtype=jnp.int32)
        to_front = jnp.where(row < jnp.minimum(count, len(rows) - first), row + first, EMPTY)
        back = jnp.where((row >= first) & (row < first + count), row - first, EMPTY)
        moved, scale = (gather_rows(each, to_front, back[:, None]) for each in (rows, row_scale))
        return gather_rows(compute(moved, [replicas], sizes, scale), back, to_front[:, None])

    return home, replica
