"""For how many batches a move of experts pays: it is paid for once and saves time as long as loads stay alike.

How long that is depends on how far the loads of the next batches are like those of this one. The batches before tell:
homes that are better for this batch and would have been as much better for the batches before are likely to be better
for the next ones too. What is better for this batch alone is taken to be chance. And if every batch moves experts, the
homes of none of them last.

The savings that are compared are those of the busiest node, from the token copies of a whole batch, which takes little
time. Without replica slots or on one node they are those of the busiest rank.
"""

from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from relibra_jax.contract.planner import PlanRequest
from relibra_jax.contract.types import Array, Topology

UNSEEN: Final = 0.75
"""The share of a saving that is taken to last before there was any other batch."""
MEMORY: Final = 0.75
"""The weight of the batches before in a mean of all batches so far; the last batch has the rest."""


class History(NamedTuple):
    """What a planner remembers of the batches before."""

    load: Float[Array, "L N E"]
    """The mean of the batches: the share of each expert in a layer's copies, by the node that holds the tokens."""
    home: Int[Array, "L E"]
    """The homes before the last batch."""
    moved: Float[Array, " L"]
    """The share of experts that a batch moved to another rank, without the first batch; each batch counts half as much
    as the one after it."""
    batches: Int[Array, ""]
    """The number of batches."""

    @classmethod
    def of_no_batches(cls, home: Int[Array, "L E"], topology: Topology) -> "History":
        """Make the history before the first batch, with experts at given homes."""
        load = jnp.zeros((len(home), topology.num_nodes, topology.num_experts), jnp.float32)
        moved = jnp.zeros(len(home), jnp.float32)
        return cls(load, jnp.asarray(home, jnp.int32), moved, jnp.zeros((), jnp.int32))

    def after(self, home: Int[Array, "L E"], request: PlanRequest, topology: Topology) -> "History":
        """Return the history after one more batch.

        Args:
            home: the homes of the last batch, before those of the new one.
            request: the new batch.
            topology: the expert-parallel group.
        """
        seen = jnp.where(self.batches > 0, MEMORY, 0.0)
        load = seen * jnp.asarray(self.load) + (1 - seen) * _shares(request)
        return History(
            load, jnp.asarray(home, jnp.int32), self.moved_so_far(home, topology), self.batches + 1
        )

    def over_nodes(self, nodes: int) -> "History":
        """Return the history for another number of nodes, each of which gets an equal part of the loads of all."""
        load = jnp.asarray(self.load)
        if load.shape[1] == nodes:
            return self
        return self._replace(load=jnp.repeat(load.sum(1, keepdims=True) / nodes, nodes, axis=1))

    def moved_so_far(self, home: Int[Array, "L E"], topology: Topology) -> Float[jax.Array, " L"]:
        """Return the mean share of experts that a batch moved, with the last batch, whose homes are ``home``."""
        new, old = (jnp.asarray(each) // topology.home_slots for each in (home, self.home))
        last = (new != old).mean(1, dtype=jnp.float32)
        moved = (jnp.asarray(self.moved) + last) / 2
        return jnp.where(self.batches > 1, moved, 0.0)


def batches_served(
    home: Int[Array, "L E"],
    before: Int[Array, "L E"],
    history: History,
    request: PlanRequest,
    topology: Topology,
    *,
    most: int,
) -> Float[jax.Array, " L"]:
    """Estimate the number of batches that new homes serve, compared with the homes of the batch before.

    Args:
        home: the new homes.
        before: the homes of the batch before.
        history: what is known of the batches before.
        request: the batch.
        topology: the expert-parallel group.
        most: the number if all of the saving lasts.

    Returns:
        The number for each layer, from 1 to ``most``.
    """

    def saved(supply: jax.Array) -> jax.Array:
        old, new = (_seconds(supply, homes, request, topology) for homes in (before, home))
        return old - new

    now = saved(_shares(request))
    lasts = saved(jnp.asarray(history.load)) / jnp.where(now > 0, now, 1.0)
    lasts = jnp.where(history.batches > 0, jnp.clip(lasts, 0.0, 1.0), UNSEEN)
    served = 1 + (most - 1) * jnp.where(now > 0, lasts, 0.0)
    # Homes from which a share m of the experts moves in every batch last for 1 / m batches.
    return jnp.minimum(served, 1 / jnp.maximum(history.moved_so_far(before, topology), 1 / most))


def _shares(request: PlanRequest) -> Float[jax.Array, "L N E"]:
    supply = jnp.asarray(request.by_node, jnp.float32).sum(0)
    return supply / jnp.maximum(supply.sum((1, 2), keepdims=True), 1)


def _seconds(
    supply: Float[jax.Array, "L N E"], home: Int[Array, "L E"], request: PlanRequest, topology: Topology
) -> Float[jax.Array, " L"]:
    """Estimate the seconds a token copy of experts and of crossings, if each is computed at its expert's home."""
    price, nodes = request.price, topology.num_nodes
    top_k = 1 if request.routes is None or not price.hierarchical else request.routes.expert_ids.shape[-1]
    bins = nodes if topology.replica_slots and nodes > 1 else topology.num_ranks
    bin_of = jnp.asarray(home) // (topology.num_experts // bins)
    in_bin = (bin_of[:, :, None] == jnp.arange(bins)[None, None]).astype(jnp.float32)
    load = jnp.einsum("lne,leb->lnb", supply, in_bin, precision=jax.lax.Precision.HIGHEST)
    on_node = load.reshape(*load.shape[:2], nodes, -1).sum(-1)
    away = jnp.where(jnp.eye(nodes, dtype=bool)[None], 0.0, on_node)
    busiest = jnp.maximum(away.sum(2), away.sum(1)).max(1) / topology.ranks_per_node
    fullest = load.sum(1).max(1) * bins / topology.num_ranks
    return jnp.asarray(price.copy * fullest + price.crossing / top_k * busiest)
