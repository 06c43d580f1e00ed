"""Exact checks on the host of plans (by the rules of `relibra_jax.contract.types.Plan`), loads and homes.

The replayed load is exact, so the check of a plan is exact too: every token copy must be computed once, in a slot that
holds its expert. Each array is checked once, where it enters: `check_load` before planning, `check_plan` between
planning and the step. If a step runs an invalid plan that was never checked, it returns NaN
(`relibra_jax.execution.plan_guard`).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Num

from relibra_jax.contract.types import EMPTY, Array, Plan, Topology
from relibra_jax.support.argument_types import checks_arguments

_RANK = "micro-batch layer node local_rank"
_SLOT = f"{_RANK} slot"


@checks_arguments
def check_load(load: Num[Array, "..."], topology: Topology) -> None:
    """Raise ValueError unless planners can use ``load``. Inside jit only its shape and dtype are checked.

    Args:
        load: token copies, integers ``[M, L, N, G, E]``.
        topology: the expert-parallel group.

    Raises:
        ValueError: if the shape does not fit the topology, if the dtype is not an integer, if a load is negative, or if
            a layer of a micro-batch has 2**31 or more token copies, which int32 cannot hold.

    >>> topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=2, replica_slots=0)
    >>> check_load(np.array([[[[[3, -1]]]]]), topology)
    Traceback (most recent call last):
    ValueError: micro-batch 0, layer 0, node 0, local rank 0, expert 1: load -1 is negative
    """
    ranks = (topology.num_nodes, topology.ranks_per_node, topology.num_experts)
    if len(load.shape) != 5 or load.shape[2:] != ranks or not jnp.issubdtype(load.dtype, jnp.integer):
        raise ValueError(
            f"load: expected integers [M, L, {', '.join(map(str, ranks))}], found {load.dtype}{list(load.shape)}"
        )
    if isinstance(load, jax.core.Tracer):
        return
    values = np.asarray(load)
    _raise_where(values < 0, f"{_RANK} expert", lambda at: f"load {values[at]} is negative")
    total = values.sum((2, 3, 4), dtype=np.int64)
    _raise_where(
        total >= 2**31, "micro-batch layer", lambda at: f"{total[at]} token copies must be fewer than 2**31"
    )


@checks_arguments
def check_plan(
    plan: Plan, load: Int[Array, "M L N G E"], topology: Topology, *, across_nodes: bool = False
) -> None:
    """Raise ValueError unless ``plan`` follows the rules of `Plan` and computes exactly ``load``.

    Args:
        plan: the plan to check.
        load: the token copies for which it was made, on the rank that dispatches their token.
        topology: the expert-parallel group.
        across_nodes: True if a replica may be in a node that holds its expert neither at home nor as a resident.

    Raises:
        ValueError: if the plan breaks a rule. The message gives the place and the numbers of the first violation.
    """
    check_slots(plan, topology, across_nodes=across_nodes)
    check_load(load, topology)
    if load.shape[:2] != plan.quota.shape[:2]:
        raise ValueError(
            f"load has {load.shape[:2]} micro-batches and layers, but the plan has {plan.quota.shape[:2]}"
        )
    computed = _quota_by_expert(plan, topology)
    expected = np.asarray(load).sum((2, 3), dtype=np.int64)
    _raise_where(
        computed != expected,
        "micro-batch layer expert",
        lambda place: f"the quotas sum to {computed[place]}, but the load is {expected[place]}",
    )


def check_slots(plan: Plan, topology: Topology, *, across_nodes: bool = False) -> None:
    """Check everything that `check_plan` checks without a load: shapes, homes, residents, replicas, signs of quotas.

    Args:
        plan: the plan to check.
        topology: the expert-parallel group.
        across_nodes: True if a replica may be in a node that holds its expert neither at home nor as a resident.

    Raises:
        ValueError: if the plan breaks a rule. The message gives the place and the numbers of the first violation.
    """
    check_plan_shapes(plan, topology)
    slot_expert, home, quota = (np.asarray(leaf) for leaf in plan)
    _check_home_slots(slot_expert, home, topology)
    _check_copies(slot_expert, home, topology, across_nodes=across_nodes)
    _raise_where(quota < 0, _SLOT, lambda place: f"quota {quota[place]} is negative")
    _raise_where(
        (quota != 0) & (slot_expert == EMPTY), _SLOT, lambda place: f"quota {quota[place]} on an empty slot"
    )


def check_plan_shapes(plan: Plan, topology: Topology) -> None:
    """Raise ValueError unless the arrays of ``plan`` are integers and have the shapes of the topology.

    Raises:
        ValueError: if a shape or dtype is wrong. The message gives the expected and the actual one.
    """
    shape = np.shape(plan.quota)
    lead = shape[:2] if len(shape) == 5 else ("M", "L")
    ranks = (topology.num_nodes, topology.ranks_per_node, topology.slots)
    if not all(lead):
        raise ValueError(
            f"the plan has {lead[0]} micro-batches and {lead[1]} layers, but must have at least one of each"
        )
    for name, array, expected in (
        ("slot_expert", plan.slot_expert, (*lead, *ranks)),
        ("home", plan.home, (lead[1], topology.num_experts)),
        ("quota", plan.quota, (*lead, *ranks)),
    ):
        if np.shape(array) != expected:
            raise ValueError(f"{name}: expected shape {expected} for {topology}, found {np.shape(array)}")
        if not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"{name}: expected integers, found {array.dtype}")


def check_homes(home: Num[Array, "..."], num_experts: int, name: str = "home") -> Int[np.ndarray, "L E"]:
    """Check that every layer of ``home`` is a permutation of the home slots, and return it as NumPy int32.

    Args:
        home: flat home slot of each expert, integers ``[L, E]``.
        num_experts: E, the number of logical experts of a layer.
        name: the name of the array, for error messages.

    Raises:
        ValueError: if the shape or dtype is wrong, or if a home slot does not have exactly one expert. The message
            gives the first such layer and slot.
    """
    values = np.asarray(home)
    if values.ndim != 2 or values.shape[1] != num_experts or not np.issubdtype(values.dtype, np.integer):
        raise ValueError(
            f"{name}: expected integers [L, {num_experts}], found {values.dtype}{list(values.shape)}"
        )
    for layer, row in enumerate(values):
        if row.min() < 0 or row.max() >= num_experts:
            slot = int(row[(row < 0) | (row >= num_experts)][0])
            raise ValueError(f"{name}, layer {layer}: home slot {slot} is outside 0..{num_experts - 1}")
        owners = np.bincount(row, minlength=num_experts)
        if (owners != 1).any():
            slot = int(np.argmax(owners != 1))
            raise ValueError(
                f"{name}, layer {layer}, home slot {slot}: owned by {owners[slot]} experts, not by one"
            )
    return values.astype(np.int32)


def _raise_where(broken: np.ndarray, names: str, message: Callable[[tuple[int, ...]], str]) -> None:
    """Raise ValueError for the first place where ``broken`` is true.

    Args:
        broken: True where a rule is broken.
        names: the names of the axes of ``broken``, separated by spaces.
        message: returns the description of the fault at a place.
    """
    if broken.any():
        place = tuple(int(i) for i in np.argwhere(broken)[0])
        where = ", ".join(f"{name} {i}" for name, i in zip(names.split(), place, strict=True))
        raise ValueError(f"{where.replace('_', ' ')}: {message(place)}")


def _check_home_slots(slot_expert: np.ndarray, home: np.ndarray, topology: Topology) -> None:
    num_experts = topology.num_experts
    _raise_where(
        (home < 0) | (home >= num_experts),
        "layer expert",
        lambda place: f"home slot {home[place]} is outside 0..{num_experts - 1}",
    )
    owners = np.stack([np.bincount(row, minlength=num_experts) for row in home])
    _raise_where(
        owners != 1, "layer home_slot", lambda place: f"owned by {owners[place]} experts, not by one"
    )
    layout = np.argsort(home, axis=-1).reshape(home.shape[0], topology.num_nodes, topology.ranks_per_node, -1)
    home_expert = slot_expert[..., : topology.home_slots]
    _raise_where(
        home_expert != layout,
        _SLOT,
        lambda place: f"the home slot of expert {layout[place[1:]]} holds {home_expert[place]}",
    )


def _check_copies(
    slot_expert: np.ndarray, home: np.ndarray, topology: Topology, *, across_nodes: bool
) -> None:
    homes, held_slots = topology.home_slots, topology.held_slots
    _raise_where(
        (slot_expert < EMPTY) | (slot_expert >= topology.num_experts),
        _SLOT,
        lambda place: f"expert {slot_expert[place]} is outside 0..{topology.num_experts - 1}",
    )
    for slot in range(homes, topology.slots):
        expert = slot_expert[..., slot]
        repeated = (slot_expert[..., :slot] == expert[..., None]).any(-1) & (expert != EMPTY)
        _raise_where(repeated, _RANK, functools.partial(_held_twice, expert))
    _raise_where(
        slot_expert[..., :held_slots] != slot_expert[:1, ..., :held_slots],
        _SLOT,
        lambda place: (
            f"the resident slot holds {slot_expert[place]}, but {slot_expert[0][place[1:]]} in micro-batch 0"
        ),
    )
    if not across_nodes:
        _check_nodes(slot_expert, home, topology)
    for name, copies in (
        ("residents", slot_expert[..., homes:held_slots]),
        ("replicas", slot_expert[..., held_slots:]),
    ):
        _check_order(name, copies, home)


def _held_twice(expert: np.ndarray, place: tuple[int, ...]) -> str:
    return f"holds expert {expert[place]} twice"


def _check_nodes(slot_expert: np.ndarray, home: np.ndarray, topology: Topology) -> None:
    """Raise unless every replica is in a node that holds its expert in a home or resident slot."""
    nodes, experts = topology.num_nodes, topology.num_experts
    held_expert, replica = np.split(slot_expert, [topology.held_slots], axis=-1)
    layer, node = np.arange(len(home)).reshape(-1, 1, 1, 1), np.arange(nodes).reshape(-1, 1, 1)
    # One more column, for the EMPTY (-1) of empty slots.
    holds = np.zeros((len(home), nodes, experts + 1), bool)
    holds[layer, node, held_expert[0]] = True
    misplaced = (replica != EMPTY) & ~holds[layer, node, replica]

    def message(place: tuple[int, ...]) -> str:
        expert = replica[place][np.argmax(misplaced[place])]
        owner = home[place[1], expert] // (experts // nodes)
        return (
            f"replica of expert {expert}, whose home is on node {owner} and which is no resident of node {place[2]};"
            " replicas in nodes that do not hold their expert need across_nodes=True"
        )

    _raise_where(misplaced.any(-1), _RANK, message)


def _check_order(name: str, copies: np.ndarray, home: np.ndarray) -> None:
    """Raise unless copies ``[M, L, N, G, slots]`` are sorted by the home slots of their experts, empty slots last."""
    source = np.stack([home[layer][copies[:, layer]] for layer in range(len(home))], axis=1)
    source = np.where(copies == EMPTY, home.shape[-1], source)
    _raise_where(
        (source[..., :-1] > source[..., 1:]).any(-1),
        _RANK,
        lambda place: (
            f"{name} {copies[place].tolist()} have home slots {source[place].tolist()}, but must be sorted by home"
            " slot, empty slots last; assemble_plan sorts them"
        ),
    )


def _quota_by_expert(plan: Plan, topology: Topology) -> np.ndarray:
    """Sum the quotas of all slots of each expert, ``[M, L, E]``."""
    slot_expert, quota = np.asarray(plan.slot_expert), np.asarray(plan.quota)
    rows = quota.shape[0] * quota.shape[1]
    computed = np.zeros((rows, topology.num_experts), np.int64)
    experts = slot_expert.reshape(rows, -1)
    at = (np.arange(rows)[:, None], np.where(experts == EMPTY, 0, experts))
    np.add.at(computed, at, quota.reshape(rows, -1))
    return computed.reshape(*quota.shape[:2], -1)
