"""The ReLibra planner (arXiv 2605.08639), which reorders experts between batches and replicates them inside batches.

ReLibra uses two mechanisms at two timescales, matched to two bandwidths. Once per batch, homes move between all ranks,
which evens out the load of the nodes. In every micro-batch, hot experts are replicated inside their node, which absorbs
the fluctuations. Both use the true loads, which routing replay gives before the first micro-batch runs. The planner
composes the two; pass options to either one with ``functools.partial``.
"""

import dataclasses
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, PRNGKeyArray

from relibra_jax.contract.check import check_load
from relibra_jax.contract.plan import contiguous_homes
from relibra_jax.contract.planner import Place, Placement, Planner, PlanRequest, Replicate
from relibra_jax.contract.types import Array, Plan, Topology
from relibra_jax.planning.horizon import History, batches_served
from relibra_jax.planning.placement import place_experts
from relibra_jax.planning.replicate_for_time import replicate_for_time
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.limits import check_integer

BATCHES: Final = 8
"""The number of batches that new homes are expected to serve."""


class RelibraState(NamedTuple):
    """The planner state that one batch passes to the next."""

    home: Int[Array, "L E"]
    """The homes of this batch, from which the next placement starts."""
    key: PRNGKeyArray
    """The random key of the next search."""
    history: History
    """What is known of the batches so far, which tells for how many batches homes serve."""

    @classmethod
    def at(cls, home: Int[Array, "L E"], topology: Topology, *, key: PRNGKeyArray) -> "RelibraState":
        """Make the state of a planner that has seen no batch, with experts at given homes."""
        return cls(jnp.asarray(home, jnp.int32), key, History.of_no_batches(home, topology))


def keep_homes(
    request: PlanRequest, previous_home: Int[Array, "L E"], topology: Topology, *, key: PRNGKeyArray
) -> Placement:
    """Leave every expert where it is and place no residents: a `Place` for replication alone."""
    del request, key
    return Placement.without_residents(previous_home, topology)


@checks_arguments
def relibra(
    *, place: Place = place_experts, replicate: Replicate = replicate_for_time, batches: int = BATCHES
) -> Planner:
    """Make the ReLibra planner.

    Source: arXiv 2605.08639.

    Args:
        place: the function that chooses homes and residents before a batch; `keep_homes` moves nothing.
        replicate: the function that chooses replicas and quotas inside a batch. They are inside nodes unless the price
            says that they may be on other nodes.
        batches: the number of batches that new homes are expected to serve, if loads stay as they are. Moves of experts
            are paid for once and save time in all of them (`relibra_jax.planning.horizon`). With 1, a move has to pay
            in the batch for which it is made. The search itself divides the price of moves in the first batch alone.

    Returns:
        A Planner whose state is a RelibraState. The first state is Megatron-LM's contiguous placement.

    >>> import functools
    >>> import jax.numpy as jnp
    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=1)
    >>> planner = relibra(replicate=functools.partial(replicate_for_time, min_tokens=8))
    >>> request = PlanRequest(jnp.array([[[[[80, 10, 6, 4], [0, 0, 0, 0]]]]]))
    >>> plan, _ = planner.update(request, planner.init(topology, 1, key=jax.random.key(0)), topology)
    >>> plan.quota.sum(-1).tolist()
    [[[[50, 50]]]]
    """

    check_integer("batches", batches, least=1)

    def init(topology: Topology, num_layers: int, *, key: PRNGKeyArray) -> RelibraState:
        return RelibraState.at(contiguous_homes(topology, num_layers), topology, key=key)

    def reorder(
        request: PlanRequest, state: RelibraState, topology: Topology
    ) -> tuple[Placement, RelibraState]:
        check_load(request.load, topology)
        key, next_key = jax.random.split(state.key)
        # The search finds what suits this batch. Only from the first homes, which suit none, does that suit later ones.
        served = jnp.where(state.history.batches > 0, 1, batches)
        price = dataclasses.replace(request.price, move=request.price.move / served)
        placement = place(request._replace(price=price), state.home, topology, key=key)
        placement = Placement(*(jnp.asarray(leaf, jnp.int32) for leaf in placement))
        return placement, RelibraState(
            placement.home, next_key, state.history.after(state.home, request, topology)
        )

    def serves(
        home: Int[Array, "L E"], request: PlanRequest, state: RelibraState, topology: Topology
    ) -> Float[jax.Array, " L"]:
        return batches_served(home, state.home, state.history, request, topology, most=batches)

    def update(request: PlanRequest, state: RelibraState, topology: Topology) -> tuple[Plan, RelibraState]:
        placement, state = reorder(request, state, topology)
        return replicate(request, placement, topology), state

    return Planner(init, update, reorder, replicate, serves)
