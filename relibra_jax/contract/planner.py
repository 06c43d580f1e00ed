"""The contract of planners: what they may look at, what they return, and the functions that they compose.

A planner is a pair of pure functions, like an optax transformation. Everything that is known of a batch reaches it as
one record, `PlanRequest`; a new fact for planners is one more field.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, PRNGKeyArray

from relibra_jax.contract.plan import expert_totals
from relibra_jax.contract.types import BALANCE, EMPTY, Array, Plan, Price, Topology


class Routes(NamedTuple):
    """Sampled tokens of a batch, identified by their samples, so they do not depend on the assignment of samples."""

    expert_ids: Int[Array, "Q L K"]
    """The logical expert ids of Q tokens."""
    sample: Int[Array, " Q"]
    """The sample to which each token belongs; EMPTY if the batch has no tokens."""


class PlacedRoutes(NamedTuple):
    """The routes of some tokens of a batch, with the places that the assignment of samples gives the tokens."""

    expert_ids: Int[Array, "Q L K"]
    """The logical expert ids of Q sampled tokens."""
    micro_batch: Int[Array, " Q"]
    """The micro-batch of each token; EMPTY if its sample is not assigned."""
    rank: Int[Array, " Q"]
    """The flat rank that holds the sample of each token; EMPTY if it is not assigned."""


class Transitions(NamedTuple):
    """Counts of how often one expert follows another in a batch, for planners that forecast loads from earlier ones.

    The row is the earlier expert, the column the later one. Each of a token's K experts forms a pair with each of the K
    experts that follow, and every pair counts once. `relibra_jax.planning.transitions.count_transitions` counts them.
    """

    along_tokens: Float[Array, "L E E"]
    """Pairs of a token and the next real token of its sample, in the same layer."""
    across_layers: Float[Array, "L E E"]
    """Pairs of the layer below and this layer, for the same token; zeros in layer 0."""


class Placement(NamedTuple):
    """The homes and residents of a whole batch."""

    home: Int[Array, "L E"]
    """Flat home slot of each expert; exactly H experts per rank."""
    resident: Int[Array, "L N G B"]
    """The logical expert in each resident slot, EMPTY for none; never an expert whose home is on that node."""

    @classmethod
    def without_residents(cls, home: Int[Array, "L E"], topology: Topology) -> "Placement":
        """Make a placement that leaves all resident slots EMPTY."""
        ranks = (topology.num_nodes, topology.ranks_per_node)
        slots = (len(home), *ranks, topology.resident_slots)
        return cls(jnp.asarray(home, jnp.int32), jnp.full(slots, EMPTY, jnp.int32))


class PlanRequest(NamedTuple):
    """Everything that a planner may look at to plan one batch.

    >>> request = PlanRequest(jnp.ones((2, 1, 1, 2, 4), jnp.int32))
    >>> request.by_expert.shape, request.by_node.shape
    ((2, 1, 4), (2, 1, 1, 4))
    """

    load: Int[Array, "M L N G E"]
    """The token copies of each expert, on the rank that dispatches their token."""
    routes: PlacedRoutes | None = None
    """The routes of sampled tokens. None if they are unknown, or if nothing is paid for crossings."""
    transitions: Transitions | None = None
    """The transition counts of the batch; counted only for planners with ``uses_transitions``."""
    price: Price = BALANCE
    """The price for which to plan."""
    tokens: Float[Array, "M N G"] | None = None
    """The number of tokens on each rank, which attention takes time for. None if it is unknown."""
    start: Int[Array, "L E"] | None = None
    """The homes that were found for the same batch under its previous assignment of samples. None if the batch is
    planned once; all EMPTY for the first of several plans of the batch."""
    predicted: Float[Array, "M L E"] | None = None
    """The loads that a predictor expects, of which only the proportions count; given only to planners with
    ``uses_predictions``. They plan from these in place of the true loads, and the quotas still sum to ``load``."""
    exports: Int[Array, ""] | None = None
    """The most experts of which a rank may send replicas in a layer and micro-batch. None or 0 leaves it to the
    planner. `relibra_jax.plan_batch` sets it for the parts of a batch, so that replicas inside nodes fit the padded
    fetch that was priced."""

    @property
    def by_expert(self) -> Int[jax.Array, "M L E"]:
        """The number of token copies for each expert, summed over ranks."""
        return expert_totals(self.load)

    @property
    def by_node(self) -> Int[jax.Array, "M L N E"]:
        """The number of token copies for each expert, by the node that holds the tokens."""
        return jnp.asarray(self.load, jnp.int32).sum(3, dtype=jnp.int32)


@runtime_checkable
class Init(Protocol):
    """Make the state of a planner before the first batch, an array tree."""

    def __call__(self, topology: Topology, num_layers: int, *, key: PRNGKeyArray) -> Any: ...


@runtime_checkable
class Update(Protocol):
    """Plan one batch, and return the plan and the state after it.

    Raises:
        ValueError: unless `relibra_jax.contract.check.check_load` accepts the load.
    """

    def __call__(self, request: PlanRequest, state: Any, topology: Topology) -> tuple[Plan, Any]: ...


@runtime_checkable
class Place(Protocol):
    """Choose homes and residents for a batch, given the homes of the batch before."""

    def __call__(
        self, request: PlanRequest, previous_home: Int[Array, "L E"], topology: Topology, *, key: PRNGKeyArray
    ) -> Placement: ...


@runtime_checkable
class Reorder(Protocol):
    """Choose homes and residents for a batch from a planner's state, and return them with the state after the batch."""

    def __call__(self, request: PlanRequest, state: Any, topology: Topology) -> tuple[Placement, Any]: ...


@runtime_checkable
class Replicate(Protocol):
    """Choose replicas and quotas for given homes and residents."""

    def __call__(self, request: PlanRequest, placement: Placement, topology: Topology) -> Plan: ...


@runtime_checkable
class Serves(Protocol):
    """Estimate for how many batches the homes of a plan pay, for each layer, given the state before the batch."""

    def __call__(
        self, home: Int[Array, "L E"], request: PlanRequest, state: Any, topology: Topology
    ) -> Float[jax.Array, " L"]: ...


class Planner(NamedTuple):
    """A planner: pure functions that work under jit, vmap and scan.

    >>> from relibra_jax import static
    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=0)
    >>> state = static().init(topology, 1, key=jax.random.key(0))
    >>> plan, state = static().update(PlanRequest(jnp.ones((2, 1, 1, 2, 4), jnp.int32)), state, topology)
    >>> plan.quota[0, 0].tolist()
    [[[2, 2], [2, 2]]]
    """

    init: Init
    """Makes the state before the first batch."""
    update: Update
    """Plans one batch."""
    reorder: Reorder | None = None
    """The first half of ``update``, for planners that have the two halves."""
    replicate: Replicate | None = None
    """The second half: adds replicas to homes and residents. A planner with both halves keeps its homes in a field
    ``home`` of its state, a NamedTuple, and can start from ``request.start``. Where transfers are paid for or samples
    assigned, `relibra_jax.plan_batch` calls the halves in place of ``update``, so they must give the same plan; it
    adds replicas to many micro-batches in parts, so a request may have a part of a batch. Where transfers are paid for,
    it never returns a plan that costs more than to leave the experts where they are. None for planners that are run as
    they are, such as baselines."""
    serves: Serves | None = None
    """The number of batches among which the price of moves is divided where plans are compared. None for 1. A planner
    with it keeps a `relibra_jax.planning.horizon.History` in a field ``history`` of its state."""
    uses_transitions: bool = False
    """Whether ``update`` reads ``request.transitions``, which take long to count."""
    uses_predictions: bool = False
    """Whether ``update`` plans from ``request.predicted`` in place of the true loads, if it is given."""

    @property
    def takes_homes(self) -> bool:
        """Whether the planner has ``reorder`` and ``replicate``, so that plans can be made for given homes."""
        return self.reorder is not None and self.replicate is not None
