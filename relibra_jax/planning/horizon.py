"""For how many batches a move of experts pays: measured by what the moves of earlier batches went on to save.

An expert moves once, and its new home serves the batches that follow as far as their loads are like those of the batch
for which it moved. The moves before a batch promise a saving in that batch. The next batch tells how much of it is
kept: its time at the homes before the moves, less its time at the homes after them. If each batch keeps a share r of
the saving of the one before, a move saves ``1 + r + r**2 + ... = 1 / (1 - r)`` times as much as in its first batch.

The times are those of the busiest node or rank from the token copies of a whole batch, so they take little time.
"""

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from relibra_jax.contract.planner import PlanRequest
from relibra_jax.contract.types import Array, Topology
from relibra_jax.cost.copies import reorder_time

FIRST: Final = 0.75
"""The share of a saving that is taken to be kept before any was measured: a move pays for four batches."""
MOST: Final = 0.9
"""The largest share, so that no move is paid for by more than ten batches."""
MEMORY: Final = 0.5
"""The weight of a batch in the measurement, relative to the weight of the batch after it."""


class Savings(NamedTuple):
    """What the moves of the batches so far promised to save, and what they saved in the batch that followed."""

    home: Int[Array, "L E"]
    """The homes before the moves of the last batch."""
    supply: Float[Array, "L N E"]
    """The token copies of the last batch for each expert, by the node that holds them; 0 before the first batch."""
    promised: Float[Array, ""]
    """The seconds that moves promised to save, with `MEMORY`."""
    kept: Float[Array, ""]
    """The seconds that they saved one batch later."""

    @classmethod
    def of_no_moves(cls, home: Int[Array, "L E"], topology: Topology) -> "Savings":
        """Make the savings before the first batch."""
        supply = jnp.zeros((len(home), topology.num_nodes, topology.num_experts), jnp.float32)
        return cls(jnp.asarray(home, jnp.int32), supply, jnp.float32(0), jnp.float32(0))

    @property
    def batches(self) -> Float[jax.Array, ""]:
        """The number of batches for which a move is expected to pay."""
        measured = self.kept / jnp.where(self.promised > 0, self.promised, 1.0)
        return 1 / (1 - jnp.clip(jnp.where(self.promised > 0, measured, FIRST), 0.0, MOST))


def measure_savings(
    savings: Savings, home: Int[Array, "L E"], request: PlanRequest, topology: Topology
) -> Savings:
    """Measure in a new batch what the moves before the last one still save.

    Args:
        savings: the savings up to the last batch.
        home: the homes of the last batch.
        request: the new batch.
        topology: the expert-parallel group.

    Returns:
        The savings up to the new batch, for the moves that are made now.
    """
    supply = jnp.asarray(request.by_node, jnp.float32).sum(0)

    def saved(supply: jax.Array) -> jax.Array:
        before, after = (_seconds(supply, homes, request, topology) for homes in (savings.home, home))
        return before - after

    # Moves were made because they promised to save what they cost, whatever is estimated here.
    paid = reorder_time(home, savings.home, topology, request.price) / savings.batches
    promised = jnp.maximum(saved(jnp.asarray(savings.supply)), paid)
    memory = jnp.where(promised > 0, MEMORY, 1.0)
    return Savings(
        jnp.asarray(home, jnp.int32),
        supply,
        memory * savings.promised + promised,
        memory * savings.kept + jnp.where(promised > 0, saved(supply), 0.0),
    )


def _seconds(
    supply: Float[jax.Array, "L N E"], home: Int[Array, "L E"], request: PlanRequest, topology: Topology
) -> Float[jax.Array, ""]:
    """Estimate the seconds of experts and of crossings, if every token is computed at its expert's home.

    With replica slots the busiest node counts, otherwise the busiest rank.
    """
    price, nodes = request.price, topology.num_nodes
    top_k = 1 if request.routes is None or not price.hierarchical else request.routes.expert_ids.shape[-1]
    bins = nodes if topology.replica_slots else topology.num_ranks
    bin_of = jnp.asarray(home) // (topology.num_experts // bins)
    in_bin = (bin_of[:, :, None] == jnp.arange(bins)[None, None]).astype(jnp.float32)
    load = jnp.einsum("lne,leb->lnb", supply, in_bin, precision=jax.lax.Precision.HIGHEST)
    on_node = load.reshape(*load.shape[:2], nodes, -1).sum(-1)
    away = jnp.where(jnp.eye(nodes, dtype=bool)[None], 0.0, on_node)
    busiest = jnp.maximum(away.sum(2), away.sum(1)).max(1) / topology.ranks_per_node
    fullest = load.sum(1).max(1) * bins / topology.num_ranks
    return (price.copy * fullest + price.crossing / top_k * busiest).sum()
