"""What follows from a Plan: one map is stored, everything else is derived here, so that nothing drifts apart.

Planning and execution both stand on this file and never on each other. The functions without ``check`` in
their name are pure and work under jit and vmap; the judge, `check_plan`, looks at values and runs on the host.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Num

from relibra_jax.types import EMPTY, Array, Plan, Topology


def inverse_permutation(permutation: Int[Array, " n"]) -> Int[jax.Array, " n"]:
    """Where each of ``0..n-1`` stands in ``permutation``; a scatter, several times faster than an argsort.

    >>> inverse_permutation(jnp.array([2, 0, 1])).tolist()
    [1, 2, 0]
    """
    places = jnp.arange(permutation.shape[0], dtype=jnp.int32)
    return jnp.zeros_like(places).at[permutation].set(places, unique_indices=True)


def home_layout(home: Int[Array, "... E"], topology: Topology) -> Int[jax.Array, "... N G H"]:
    """The expert in every home slot: the inverse of ``home``.

    Args:
        home: flat home slot of each expert, a permutation of ``0..E-1`` in every row.
        topology: gives N, G and H.

    Returns:
        Logical expert ids, int32.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=0)
    >>> home_layout(jnp.array([3, 0, 1, 2]), topology).tolist()
    [[[1, 2], [3, 0]]]
    """
    experts = jax.vmap(inverse_permutation)(jnp.asarray(home).reshape(-1, home.shape[-1]))
    shape = (topology.num_nodes, topology.ranks_per_node, topology.home_slots)
    return experts.reshape(*home.shape[:-1], *shape)


def assemble_plan(
    home: Int[Array, "L E"],
    replica: Int[Array, "M L N G R"],
    quota: Int[Array, "M L N G S"],
    topology: Topology,
) -> Plan:
    """The Plan of a placement and of what each micro-batch adds to it.

    Args:
        home: flat home slot of each expert.
        replica: flat home slot whose expert is copied into each replica slot; EMPTY for none.
        quota: token copies of each slot, home slots first.
        topology: gives N, G and H.

    Returns:
        A Plan of int32 arrays.
    """
    layout = home_layout(home, topology)
    experts = layout.reshape(layout.shape[0], -1)
    copied = jax.vmap(lambda row, slots: row[slots], (0, 1), 1)(experts, jnp.maximum(replica, 0))
    slot_expert = jnp.concatenate(
        [
            jnp.broadcast_to(layout, (*quota.shape[:-1], topology.home_slots)),
            jnp.where(replica == EMPTY, EMPTY, copied),
        ],
        axis=-1,
    )
    return Plan(slot_expert, jnp.asarray(home, jnp.int32), jnp.asarray(quota, jnp.int32))


def expert_totals(load: Num[Array, "..."], topology: Topology) -> Int[jax.Array, "M L E"]:
    """``load[M L N G E]`` summed over the ranks where tokens lie, after a look at whether it can be planned.

    Shapes are checked under a trace too, values only outside one.

    Raises:
        ValueError: not integers of shape ``[M L N G E]`` for the topology, a negative load, or a layer with 2**31
            token copies or more in a micro-batch, which int32 does not hold.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=2, replica_slots=0)
    >>> expert_totals(jnp.array([[[[[1, 2], [3, 4]]]]]), topology).tolist()
    [[[4, 6]]]
    """
    ranks = (topology.num_nodes, topology.ranks_per_node, topology.num_experts)
    if len(load.shape) != 5 or load.shape[2:] != ranks or not jnp.issubdtype(load.dtype, jnp.integer):
        raise ValueError(
            f"load: expected integers [M, L, {', '.join(map(str, ranks))}], found {load.dtype}{list(load.shape)}"
        )
    if not isinstance(load, jax.core.Tracer):
        values = np.asarray(load)
        _refuse(
            values < 0,
            "micro-batch layer node local_rank expert",
            lambda at: f"load {values[at]} is negative",
        )
        total = values.sum((2, 3, 4), dtype=np.int64)
        _refuse(
            total >= 2**31, "micro-batch layer", lambda at: f"{total[at]} token copies, 2**31 is too many"
        )
    return jnp.asarray(load, jnp.int32).sum((2, 3))


def layer_plan(plan: Plan, micro_batch: int | jax.Array, layer: int | jax.Array) -> Plan:
    """The plan of one layer of one micro-batch, as execution takes it: leaves without leading axes.

    Under `jax.lax.scan` over layers, ``Plan(plan.slot_expert[m], plan.home, plan.quota[m])`` does the same for all of
    them.

    >>> plan = Plan(np.zeros((2, 3, 1, 1, 5), int), np.zeros((3, 4), int), np.zeros((2, 3, 1, 1, 5), int))
    >>> jax.tree.map(np.shape, layer_plan(plan, 1, 2))
    Plan(slot_expert=(1, 1, 5), home=(4,), quota=(1, 1, 5))
    """
    return Plan(plan.slot_expert[micro_batch, layer], plan.home[layer], plan.quota[micro_batch, layer])


def rank_load(plan: Plan) -> Int[Array, "M L N G"]:
    """Token copies that each rank computes."""
    return plan.quota.sum(-1)


def replica_experts(plan: Plan) -> Int[Array, "M L N G R"]:
    """The experts in the replica slots; EMPTY for none."""
    num_ranks = plan.slot_expert.shape[2] * plan.slot_expert.shape[3]
    return plan.slot_expert[..., plan.home.shape[-1] // num_ranks :]


def replica_count(plan: Plan) -> Int[Array, "M L"]:
    """Replicas that each layer of each micro-batch holds on all ranks together."""
    return (replica_experts(plan) != EMPTY).sum((-3, -2, -1))


def node_quota(plan: Plan) -> Int[jax.Array, "M L N E"]:
    """Token copies of each expert that each node computes."""
    num_experts = plan.home.shape[-1]

    def one_node(experts, quota):
        # EMPTY slots have no quota, so where they are counted does not matter.
        return jnp.zeros(num_experts, jnp.int32).at[experts.ravel()].add(quota.ravel(), mode="drop")

    per_layer = jax.vmap(jax.vmap(jax.vmap(one_node)))
    return per_layer(jnp.asarray(plan.slot_expert), jnp.asarray(plan.quota))


def check_plan(
    plan: Plan, load: Int[Array, "M L N G E"], topology: Topology, *, intra_node: bool = True
) -> None:
    """Raise unless ``plan`` computes exactly ``load`` within the rules of `Plan`.

    The check is exact, because replayed loads are: every token copy is computed once, by a slot that holds its
    expert.

    Args:
        plan: what a planner returned.
        load: token copies by the rank where the tokens lie, as given to the planner.
        topology: as given to the planner.
        intra_node: whether replicas have to stay in their home's node.

    Raises:
        ValueError: the first rule that is broken, with the place and the numbers.
    """
    slot_expert, home, quota = (np.asarray(leaf) for leaf in plan)
    load = np.asarray(load)
    check_shapes(plan, topology)
    expert_totals(load, topology)
    if load.shape[:2] != quota.shape[:2]:
        raise ValueError(f"load of {load.shape[:2]} micro-batches and layers, plan of {quota.shape[:2]}")
    _check_homes(slot_expert, home, topology)
    _check_replicas(slot_expert, home, topology, intra_node=intra_node)
    check_quotas(plan, load, topology)


def _refuse(broken: np.ndarray, names: str, message) -> None:
    """Raise for the first place where ``broken`` is true; ``message(place)`` says what is wrong there."""
    if broken.any():
        place = tuple(int(i) for i in np.argwhere(broken)[0])
        where = ", ".join(f"{name} {i}" for name, i in zip(names.split(), place, strict=True))
        raise ValueError(f"{where.replace('_', ' ')}: {message(place)}")


def check_shapes(plan: Plan, topology: Topology) -> None:
    """Raise unless the arrays of ``plan`` are integers of the shapes that ``topology`` asks for.

    Raises:
        ValueError: with the array's name, the expected and the found shape or dtype.
    """
    rows = np.shape(plan.slot_expert)[:2]
    slots = (*rows, topology.num_nodes, topology.ranks_per_node, topology.slots)
    shapes = Plan(slots, (*rows[1:], topology.num_experts), slots)  # type: ignore[arg-type]
    for name, array, shape in zip(Plan._fields, plan, shapes, strict=True):
        if array.shape != shape:
            raise ValueError(f"{name}: expected shape {shape} for {topology}, found {array.shape}")
        if not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"{name}: expected integers, found {array.dtype}")


def _check_homes(slot_expert, home, topology: Topology) -> None:
    num_experts = topology.num_experts
    _refuse(
        (home < 0) | (home >= num_experts),
        "layer expert",
        lambda place: f"home slot {home[place]} is outside 0..{num_experts - 1}",
    )
    owners = np.stack([np.bincount(row, minlength=num_experts) for row in home])
    _refuse(owners != 1, "layer home_slot", lambda place: f"owned by {owners[place]} experts, not by one")
    layout = np.argsort(home, axis=-1).reshape(home.shape[0], topology.num_nodes, topology.ranks_per_node, -1)
    held = slot_expert[..., : topology.home_slots]
    _refuse(
        held != layout,
        "micro-batch layer node local_rank slot",
        lambda place: f"home slot of expert {layout[place[1:]]} holds {held[place]}",
    )


def _check_replicas(slot_expert, home, topology: Topology, *, intra_node: bool) -> None:
    axes = "micro-batch layer node local_rank slot"
    num_experts = topology.num_experts
    _refuse(
        (slot_expert < EMPTY) | (slot_expert >= num_experts),
        axes,
        lambda place: f"expert {slot_expert[place]} is outside 0..{num_experts - 1}",
    )
    for slot in range(topology.home_slots, topology.slots):
        expert = slot_expert[..., slot]
        again = (slot_expert[..., :slot] == expert[..., None]).any(-1) & (expert != EMPTY)
        _refuse(again, axes.removesuffix(" slot"), lambda place, e=expert: f"holds expert {e[place]} twice")
        if intra_node:
            slots_per_node = topology.ranks_per_node * topology.home_slots
            owner = np.stack([home[i][expert[:, i]] for i in range(len(home))], axis=1) // slots_per_node
            node = np.arange(topology.num_nodes)[:, None]
            _refuse(
                (expert != EMPTY) & (owner != node),
                axes.removesuffix(" slot"),
                lambda place, e=expert, o=owner: (
                    f"replica of expert {e[place]}, whose home is on node {o[place]}"
                ),
            )


def check_quotas(plan: Plan, load: Int[Array, "M L N G E"], topology: Topology) -> None:
    """Raise unless every expert's quotas add up to its load.

    Raises:
        ValueError: the first place that is wrong, with both numbers.
    """
    slot_expert, quota = np.asarray(plan.slot_expert), np.asarray(plan.quota)
    axes = "micro-batch layer node local_rank slot"
    _refuse(quota < 0, axes, lambda place: f"quota {quota[place]} is negative")
    _refuse(
        (quota != 0) & (slot_expert == EMPTY), axes, lambda place: f"quota {quota[place]} on an empty slot"
    )
    micro_batches, layers = quota.shape[:2]
    rows = np.arange(micro_batches * layers)[:, None]
    computed = np.zeros((micro_batches * layers, topology.num_experts), np.int64)
    flat = slot_expert.reshape(len(computed), -1)
    np.add.at(computed, (rows, np.where(flat == EMPTY, 0, flat)), quota.reshape(len(computed), -1))
    computed = computed.reshape(micro_batches, layers, -1)
    wanted = np.asarray(load).sum((2, 3), dtype=np.int64)
    _refuse(
        computed != wanted,
        "micro-batch layer expert",
        lambda place: f"quotas sum to {computed[place]}, load is {wanted[place]}",
    )
