"""The ReLibra planner (arXiv 2605.08639), which reorders experts between batches and replicates them inside batches.

ReLibra uses two mechanisms at two timescales, matched to two bandwidths. Once per batch, homes move between all ranks,
which evens out the load of the nodes. In every micro-batch, hot experts are replicated inside their node, which absorbs
the fluctuations. Both use the true loads, which routing replay gives before the first micro-batch runs. The planner
composes the two; pass options to either one with ``functools.partial``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int, Num, PRNGKeyArray

from relibra_jax.contract.check import check_load
from relibra_jax.contract.plan import contiguous_homes, expert_totals
from relibra_jax.contract.types import EMPTY, Array, Plan, Planner, Price, TokenSample, Topology
from relibra_jax.planning.extra_args import accepted_arguments
from relibra_jax.planning.placement import Placement, place_experts
from relibra_jax.planning.replication import replicate_experts

type Place = Callable[..., Placement]
"""``(load[M L E], previous_home[L E], topology) -> Placement``. The function also receives those of ``key``,
``source_load``, ``tokens``, ``cost`` and ``refine`` that it names as parameters, as `place_experts` does."""
type Replicate = Callable[..., Plan]
"""``(load[M L E], home[L E], topology) -> Plan``. The function also receives ``resident`` and ``source_load`` if it
names them as parameters, as `replicate_experts` does."""


class RelibraState(NamedTuple):
    """The planner state that one batch passes to the next."""

    home: Int[Array, "L E"]
    """The homes of this batch, from which the next placement starts."""
    key: PRNGKeyArray
    """The random key of the next search."""


def keep_homes(load: Int[Array, "M L E"], previous_home: Int[Array, "L E"], topology: Topology) -> Placement:
    """Leave every expert where it is and place no residents: a `Place` for replication alone."""
    del load
    slots = (len(previous_home), topology.num_nodes, topology.ranks_per_node, topology.resident_slots)
    return Placement(jnp.asarray(previous_home, jnp.int32), jnp.full(slots, EMPTY, jnp.int32))


def relibra(*, place: Place = place_experts, replicate: Replicate = replicate_experts) -> Planner:
    """Make the ReLibra planner.

    Source: arXiv 2605.08639.

    Args:
        place: the function that chooses homes and residents before a batch; `keep_homes` moves nothing.
        replicate: the function that chooses replicas and quotas inside a batch.

    Returns:
        A Planner whose state is a RelibraState. The first state is Megatron-LM's contiguous placement.

    >>> import functools
    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=1)
    >>> planner = relibra(replicate=functools.partial(replicate_experts, min_tokens=8))
    >>> load = jnp.array([[[[[80, 10, 6, 4], [0, 0, 0, 0]]]]])
    >>> plan, _ = planner.update(load, planner.init(topology, 1, key=jax.random.key(0)), topology)
    >>> plan.quota.sum(-1).tolist()
    [[[[50, 50]]]]
    """

    def init(topology: Topology, num_layers: int, *, key: PRNGKeyArray) -> RelibraState:
        return RelibraState(contiguous_homes(topology, num_layers), key)

    def update(
        load: Num[Array, "M L N G E"],
        state: RelibraState,
        topology: Topology,
        *,
        tokens: TokenSample | None = None,
        cost: Price | None = None,
        refine: Int[Array, "L E"] | None = None,
    ) -> tuple[Plan, RelibraState]:
        check_load(load, topology)
        by_expert = expert_totals(load)
        by_node = jnp.asarray(load, jnp.int32).sum(3, dtype=jnp.int32)
        key, next_key = jax.random.split(state.key)
        extra = {"key": key, "source_load": by_node, "tokens": tokens, "cost": cost, "refine": refine}
        home, resident = place(by_expert, state.home, topology, **_known(place, extra))
        extra = {"resident": resident, "source_load": by_node, "tokens": tokens, "cost": cost}
        plan = replicate(by_expert, home, topology, **_known(replicate, extra))
        return plan, RelibraState(plan.home, next_key)

    def stay(
        load: Num[Array, "M L N G E"],
        home: Int[Array, "L E"],
        topology: Topology,
        *,
        tokens: TokenSample | None = None,
        cost: Price | None = None,
    ) -> Plan:
        by_node = jnp.asarray(load, jnp.int32).sum(3, dtype=jnp.int32)
        extra = {"source_load": by_node, "tokens": tokens, "cost": cost}
        return replicate(expert_totals(load), home, topology, **_known(replicate, extra))

    return Planner(init, update, stay)


def _known(function: Callable[..., Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Select the extra arguments that a function accepts and that are known, so that None overwrites no caller's."""
    return {name: value for name, value in accepted_arguments(function, extra).items() if value is not None}
