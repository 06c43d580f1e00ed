"""Homes that are chosen from the first batch and kept, for systems that rarely or never move experts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from relibra_jax.contract.plan import contiguous_homes, home_layout
from relibra_jax.contract.types import EMPTY, Array, Topology
from relibra_jax.planning.baselines.eplb import pack_homes


class KeptHomes(NamedTuple):
    """The state of planners that keep the homes of the first batch."""

    home: Int[jax.Array, "L E"]
    """Flat home slot of each expert; EMPTY before the first batch."""


def init_homes(topology: Topology, num_layers: int, *, key: jax.Array | None = None) -> KeptHomes:
    """Make the state before the first batch, which has no homes yet."""
    del key
    return KeptHomes(jnp.full((num_layers, topology.num_experts), EMPTY, jnp.int32))


def kept_homes(load: Int[jax.Array, "M L E"], state: KeptHomes, topology: Topology) -> Int[jax.Array, "L E"]:
    """Return the homes of the previous batch, or in the first batch EPLB's packing of its loads.

    In the first batch, a layer keeps contiguous homes if packing does not balance it better.

    Args:
        load: the number of token copies for each expert.
        state: the state after the previous batch.
        topology: the expert-parallel group.

    Returns:
        Flat home slot of each expert.
    """
    experts, nodes = topology.num_experts, topology.num_nodes
    packed = pack_homes(load.astype(jnp.float32).sum(0), topology, num_groups=experts, num_nodes=nodes)
    contiguous = contiguous_homes(topology, load.shape[1])
    better = sum_of_maxima(load, packed, topology) < sum_of_maxima(load, contiguous, topology)
    first_home = jnp.where(better[:, None], packed, contiguous)
    return jnp.where(state.home == EMPTY, first_home, state.home)


def sum_of_maxima(
    load: Int[jax.Array, "M L E"], home: Int[Array, "L E"], topology: Topology
) -> Float[jax.Array, " L"]:
    """Sum the largest rank load of each micro-batch, without replicas; it determines the time of the batch.

    Args:
        load: the number of token copies for each expert.
        home: flat home slot of each expert.
        topology: the expert-parallel group.

    Returns:
        The sum for each layer, in token copies.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=0)
    >>> load = jnp.array([[[5, 4, 2, 1]], [[1, 1, 3, 3]]])
    >>> [sum_of_maxima(load, jnp.array([home]), topology).item() for home in ([0, 1, 2, 3], [0, 2, 3, 1])]
    [15.0, 10.0]
    """
    experts = home_layout(home, topology).reshape(home.shape[0], topology.num_ranks, -1)

    def top(load: jax.Array, experts: jax.Array) -> jax.Array:
        return load[experts].sum(-1, dtype=jnp.int32).max()

    return jax.vmap(jax.vmap(top), (0, None))(load, experts).astype(jnp.float32).sum(0)
