"""Inter-batch reordering: which home slot owns each expert for the next batch.

Replicas mend imbalance inside a node, and only there: what is left is the imbalance between nodes. So every
layer is solved twice, experts to nodes and then each node's experts to its ranks; without replica slots nothing
mends a rank, and it is solved once, experts to ranks. Each time the problem is the same: I items with shares
``x[i, m]`` of the mean group load of the batch, in groups of equal size, and

    minimise  sum_m max_g sum_{i in g} x[i, m]  +  sum_g sum_{i in g} cost[g, i].

The first term is the imbalance over the batch. ``cost`` holds, in the same unit, what does not depend on the
other items: the price of moving an expert and of token copies that cross nodes.

The search itself is in `relibra_jax.planning.annealing`.
"""

import functools
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Int, Num, PRNGKeyArray

from relibra_jax.planning.annealing import HOTTEST, METHODS, REFINING, Groups, search_groups
from relibra_jax.types import Array, Topology

INSIDE: Final = 4
"""How much dearer a move is between ranks of a node than between nodes. Replicas mend what it leaves there: on
recorded loads balance and replicas stayed the same, and 41% (2 nodes) and 20% (4 nodes) of the moves went away."""


@functools.partial(
    jax.jit,
    static_argnames=("topology", "method", "steps", "move_cost", "crossing_cost", "smoothing"),
)
def place_experts(
    load: Int[Array, "M L E"],
    previous_home: Int[Array, "L E"],
    topology: Topology,
    *,
    key: PRNGKeyArray,
    method: str = "anneal",
    steps: int = 10_000,
    move_cost: float = 0.02,
    smoothing: float = 0.0,
    source_load: Num[Array, "L N E"] | None = None,
    crossing_cost: float = 0.3,
    refine: Int[Array, "L E"] | None = None,
) -> Int[jax.Array, "L E"]:
    """Choose every expert's home for a batch, so that nodes and then ranks carry even load.

    Source: ReLibra (arXiv 2605.08639), inter-batch expert reordering; the file's docstring has the objective.

    Args:
        load: token copies of each expert, from all ranks together; used as float32 shares.
        previous_home: flat home slots before the batch. An expert that stays on its rank keeps its slot, and one
            that leaves it costs something.
        topology: of the group; ``replica_slots`` only matters in being 0 or not.
        key: the same key gives the same placement.
        method: 'anneal'; 'descent', steepest over all pairs, from LPT; or 'lpt', heaviest expert first to the
            lightest group that has room, blind to costs. The first two never end worse than they start.
        steps: of annealing between nodes, and four times fewer inside them; 40,000 is thorough.
        move_cost: moving all experts of a layer to other nodes must lower its imbalance by this much times the
            square root of N, as the imbalance to be gained also grows with N. 0 is thorough.
        smoothing: softness of the maximum while annealing, as a multiple of the temperature: with
            ``s = smoothing * temperature / M`` the peak of a micro-batch is ``s * log(sum_g exp(load / s))``.
            0 is the maximum itself, equally good in our measurements and more than twice as fast.
        source_load: where the batch's token copies lie; with it, copies that cross nodes have a price.
        crossing_cost: the imbalance worth accepting to have no copy cross nodes. At the default what is free is
            taken; 1 already costs balance on recorded loads.
        refine: a placement to start from instead of ``previous_home``, and to stay close to: found for loads much
            like these, such as those before samples were assigned.

    Returns:
        Flat home slot of each expert, int32; exactly H experts a rank.

    Raises:
        ValueError: an unknown method, no steps, a negative cost, or shapes that disagree with the topology.

    >>> topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=4, replica_slots=1)
    >>> load = jnp.array([[[9, 8, 2, 1]], [[7, 9, 2, 2]]])
    >>> home = place_experts(load, jnp.array([[0, 1, 2, 3]]), topology, key=jax.random.key(0))
    >>> (home // topology.home_slots).tolist()
    [[0, 1, 1, 0]]
    """
    _check(load.shape, previous_home.shape, topology, method, steps, move_cost, crossing_cost, smoothing)
    layers, experts = previous_home.shape
    previous = jnp.asarray(previous_home, jnp.int32)
    home = previous if refine is None else jnp.asarray(refine, jnp.int32)
    hottest = HOTTEST if refine is None else REFINING
    load = jnp.asarray(load, jnp.float32)
    crossing = jnp.zeros((layers, experts, topology.num_nodes))  # no price
    if source_load is not None:
        crossing = crossing_cost * _crossing(jnp.asarray(source_load, jnp.float32))

    nodes, locals_ = topology.num_nodes, topology.ranks_per_node
    levels = [(1, nodes, steps, move_cost), (nodes, locals_, max(steps // 4, 1), INSIDE * move_cost)]
    if topology.replica_slots == 0:
        levels = [(1, nodes * locals_, steps, move_cost)]
    for level, (domains, groups, effort, price) in enumerate(levels):
        size = experts // (domains * groups)
        if groups == 1 or (size == 1 and domains == nodes):
            continue  # one group, or one expert on each of a node's ranks: nothing to gain
        start = _arrange(load, previous, home, crossing, domains, groups, price)
        found = search_groups(start, method, jax.random.fold_in(key, level), effort, smoothing, hottest)
        group = (jnp.argsort(found, axis=0) // size).T.reshape(layers, domains, -1)
        group = (group + groups * jnp.arange(domains)[None, :, None]).reshape(layers, experts)
        group = jnp.take_along_axis(group, home, axis=-1)
        home = jax.vmap(_settle, (0, 0, None))(group, previous, size)
    return home


def _check(load, home, topology, method, steps, move_cost, crossing_cost, smoothing):
    experts = topology.num_experts
    if load[-1] != experts or home != (load[1], experts):
        raise ValueError(
            f"load{list(load)} and previous_home{list(home)} must agree on layers and {experts} experts"
        )
    if method not in METHODS:
        raise ValueError(f"method={method!r} must be one of {METHODS}")
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1")
    for name, value in (("move_cost", move_cost), ("crossing_cost", crossing_cost), ("smoothing", smoothing)):
        if not value >= 0:
            raise ValueError(f"{name}={value} must not be negative")


def _crossing(source_load):
    """Copies of each expert that would cross nodes if it lived in each, over all copies of its layer: [L E N]."""
    away = source_load.sum(1, keepdims=True) - source_load
    return away.swapaxes(1, 2) / jnp.maximum(source_load.sum((1, 2)), 1)[:, None, None]


def _arrange(load, previous, home, crossing, domains, groups, move_cost):
    """The problem of placing each domain's experts in its groups; items are slots of ``home``, layer by layer."""
    layers, experts = home.shape
    size = experts // domains
    expert = jnp.argsort(home, axis=-1)
    share = jnp.take_along_axis(load, expert[None], axis=-1).reshape(-1, layers * domains, size)
    share *= groups / jnp.maximum(share.sum((0, 2), keepdims=True), 1)
    group = jnp.take_along_axis(previous, expert, axis=-1) // (size // groups)
    group = group.reshape(layers, domains, size) - groups * jnp.arange(domains)[None, :, None]
    cost = (1 - jax.nn.one_hot(group.reshape(-1, size), groups)) * (move_cost * groups**0.5 / size)
    if domains == 1:  # else its node is decided
        crossing = jnp.take_along_axis(crossing, expert[..., None], axis=1)
        cost += jnp.repeat(crossing, groups // crossing.shape[-1], axis=-1)
    item = jnp.tile(jnp.arange(size)[:, None], (1, layers * domains))
    return Groups(share.transpose(2, 0, 1), cost.transpose(2, 1, 0), item)


def _settle(group, previous_home, size):
    """Slots of one layer: who stays in its group keeps its slot, the others fill the free slots in order."""
    stays = previous_home // size == group
    free = jnp.argsort(jnp.zeros_like(stays).at[previous_home].set(stays), stable=True)
    movers = jnp.argsort(jnp.where(stays, group.size, group), stable=True)
    return jnp.where(stays, previous_home, jnp.zeros_like(previous_home).at[movers].set(free))
