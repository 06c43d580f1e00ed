"""The words and shapes of the project: every array that crosses a module is described here, and nothing else.

Glossary
--------
logical expert  a set of expert parameters of the model
slot            room for one expert's weights on one rank; *home slots* hold master copies, *resident slots*
                copies for a batch, *replica slots* copies for one micro-batch of one layer
home            the slot that owns an expert's master copy and its optimizer state
replica         a further copy of an expert for one micro-batch, without optimizer state
resident        a further copy of an expert in a *resident slot*, the same for the whole batch, without optimizer
                state: pushed once an update over the slow network, its gradient returned once an update
rank, local     one device; its index inside its node
node            a domain of fast interconnect
batch           everything between two placements; it may hold several optimizer updates
update          one optimizer step of a batch
micro-batch     one forward and backward pass of an update
routing replay  the recorded expert ids of every token, layer by layer
load            token copies (tokens x top-k), an integer
placement       the map of experts to home slots; to *reorder* is to change it between two batches
replicate       to add replicas inside a batch
quota           how many token copies a slot is to compute
imbalance       max / mean of rank load, 1 is perfect; over micro-batches, sum of maxima / sum of means

Dimensions, in this order wherever they meet
--------------------------------------------
M micro-batches   L MoE layers   N nodes   G local ranks   E logical experts   K top-k
S = H + B + R slots a rank: H home slots, then B resident slots, then R replica slots
B samples of a batch (resident slots are written out where B could be read so)
b samples of one rank in one micro-batch   T token positions of a sample

An array over ranks has the mesh's shape ``[..., N, G, ...]``. A *flat rank* is ``n * G + g``; a *flat home
slot* is ``flat rank * H + h``. ``*stack`` stands for any leading axes over which values of a type are stacked.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from relibra_jax.limits import INT32_MAX, check_integer

type Array = jax.Array | np.ndarray

EMPTY: Final = -1
"""Padding: no token here, no sample here, no expert in this slot. Never a real token without a route."""


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class Topology:
    """One expert-parallel group: its ranks, the experts they own and the room they have for replicas.

    Hashable and static under jit. Every rank owns the same number of experts, because expert weights are one array
    that is sharded evenly: an empty home slot would take the memory of an expert. A model whose experts do not divide
    over the ranks is padded with experts that its router never chooses. They have homes, and neither tokens nor
    replicas. EPLB's 256 experts in 288 slots of 144 ranks are 288 homes here; copies need replica slots besides.

    Raises:
        ValueError: if a count is not a positive integer (slots of replicas and residents may be 0), the experts do not
            divide evenly over the ranks, or there are more slots than int32 numbers.

    >>> topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=32, replica_slots=2, resident_slots=1)
    >>> topology.home_slots, topology.held_slots, topology.slots
    (4, 5, 7)
    """

    num_nodes: int
    """N, nodes of the group."""
    ranks_per_node: int
    """G, ranks of a node."""
    num_experts: int
    """E, logical experts of a layer."""
    replica_slots: int
    """R, slots of a rank for replicas."""
    resident_slots: int = 0
    """Slots of a rank for residents."""

    def __post_init__(self) -> None:
        for name, least in (
            ("num_nodes", 1),
            ("ranks_per_node", 1),
            ("num_experts", 1),
            ("replica_slots", 0),
            ("resident_slots", 0),
        ):
            check_integer(name, getattr(self, name), least=least)
        if self.num_experts % self.num_ranks:
            full = -(-self.num_experts // self.num_ranks) * self.num_ranks
            raise ValueError(
                f"num_experts={self.num_experts} must divide evenly over {self.num_ranks} ranks"
                f" ({self.num_nodes} nodes x {self.ranks_per_node}): pad the model to num_experts={full} with experts"
                " that no token is routed to"
            )
        if self.num_ranks * self.slots > INT32_MAX:
            raise ValueError(
                f"{self.num_ranks} ranks x ({self.home_slots} home slots + resident_slots={self.resident_slots}"
                f" + replica_slots={self.replica_slots}) are more slots than the {INT32_MAX} that int32 numbers"
            )

    @property
    def num_ranks(self) -> int:
        """N * G."""
        return self.num_nodes * self.ranks_per_node

    @property
    def home_slots(self) -> int:
        """H, the experts that each rank owns."""
        return self.num_experts // self.num_ranks

    @property
    def held_slots(self) -> int:
        """Slots whose expert is the same in every micro-batch: home slots, then resident slots."""
        return self.home_slots + self.resident_slots

    @property
    def slots(self) -> int:
        """S: home slots, then resident slots, then replica slots."""
        return self.held_slots + self.replica_slots


class RoutingReplay(NamedTuple):
    """Which experts every token used."""

    expert_ids: Int[Array, "B T L K"]
    """Logical expert ids in the smallest dtype that holds them; rows of padding tokens are not read."""
    mask: Bool[Array, "B T"]
    """True where there is a real token."""


class Assignment(NamedTuple):
    """Which samples each rank holds in each micro-batch."""

    sample: Int[Array, "M N G b"]
    """Index of a sample of the batch; EMPTY where there is none."""


class Plan(NamedTuple):
    """Where every expert lives in a batch, which experts are copied where, and how tokens are split."""

    slot_expert: Int[Array, "M L N G S"]
    """The logical expert in each slot, EMPTY for none. Home slots come first, then resident slots, whose experts are
    the same in every micro-batch, then replica slots. Residents, and replicas, are in the order of their experts' home
    slots, empty ones last. No expert is twice on one rank."""
    home: Int[Array, "L E"]
    """Flat home slot of each expert, the same for the whole batch; exactly H experts a rank."""
    quota: Int[Array, "M L N G S"]
    """Token copies that each slot computes."""


class LayerPlan(NamedTuple):
    """What one MoE layer follows in one micro-batch: its part of the plan, and the load that it was made for.

    Layer plans are stacked over layers to be scanned, over micro-batches, and over the data-parallel copies of the
    group: then every leaf has the same leading axes ``*stack``. None of them for a single layer plan.
    """

    slot_expert: Int[Array, "*stack N G S"]
    """The logical expert in each slot, as in `Plan`."""
    home: Int[Array, "*stack E"]
    """Flat home slot of each expert."""
    quota: Int[Array, "*stack N G S"]
    """Token copies that each slot computes."""
    load: Int[Array, "*stack N G E"] | None
    """Token copies by the rank where they lie. None for routing that the plan was not made for, live routing among it:
    it is counted in the step, and the quotas are refitted to it."""

    def layer(self, index: Any) -> "LayerPlan":
        """Element ``index`` of the first stacked axis: of a micro-batch's layer plans, the plan of one layer."""
        return jax.tree.map(lambda leaf: leaf[index], self)


def layer_plans(plan: Plan, load: Int[Array, "M L N G E"] | None) -> LayerPlan:
    """The layer plans of a plan and its load, stacked ``[M, L]``; NumPy arrays stay NumPy arrays."""
    numpy = all(isinstance(leaf, np.ndarray) for leaf in plan)
    home = (np if numpy else jnp).broadcast_to(plan.home, (len(plan.quota), *plan.home.shape))
    return LayerPlan(plan.slot_expert, home, plan.quota, load)


class BatchPlan(NamedTuple):
    """All that is known of a batch before it runs."""

    assignment: Assignment
    """Which rank holds which sample in each micro-batch."""
    load: Int[Array, "M L N G E"]
    """Token copies by the rank where they lie."""
    plan: Plan
    """Made for ``load``."""

    def layer_plans(self) -> LayerPlan:
        """The layer plans of all micro-batches, stacked ``[M, L]``.

        >>> plan = Plan(np.zeros((2, 3, 1, 1, 5), int), np.zeros((3, 4), int), np.zeros((2, 3, 1, 1, 5), int))
        >>> batch = BatchPlan(Assignment(np.zeros((2, 1, 1, 1), int)), np.zeros((2, 3, 1, 1, 4), int), plan)
        >>> jax.tree.map(np.shape, batch.layer_plans().layer(0).layer(2))
        LayerPlan(slot_expert=(1, 1, 5), home=(4,), quota=(1, 1, 5), load=(1, 1, 4))
        """
        return layer_plans(self.plan, self.load)

    def micro_batch(self, index: Any) -> LayerPlan:
        """The layer plans of one micro-batch, stacked ``[L]``: what a scan over layers runs through."""
        slot_expert, home, quota = self.plan
        return LayerPlan(slot_expert[index], home, quota[index], self.load[index])


class PhysicalExperts(NamedTuple):
    """Which physical slot holds which logical expert, as EPLB and the engines that adopted it write it."""

    physical_to_logical: Int[Array, "L P"]
    """The logical expert in each physical slot."""
    logical_to_physical: Int[Array, "L E C"]
    """The physical slots of each expert, in order of copying; EMPTY where it has fewer than C copies."""
    logical_count: Int[Array, "L E"]
    """Copies of each expert."""


class TokenSample(NamedTuple):
    """Some of a batch's tokens with their routes and places, for planners that look beyond loads."""

    expert_ids: Int[Array, "Q L K"]
    """The experts of Q sampled tokens, logical ids."""
    micro_batch: Int[Array, " Q"]
    """The micro-batch in which each token is computed."""
    rank: Int[Array, " Q"]
    """The flat rank where it lies."""


class Transitions(NamedTuple):
    """How often one expert follows another in a batch, for planners that expect loads from others.

    Rows are the expert before, columns the expert after. Every pair of one of a token's K experts and one of the K that
    follow counts once. Made by `relibra_jax.planning.transitions.count_transitions`.
    """

    along_tokens: Float[Array, "L E E"]
    """From a token to the next real one of its sample, in the same layer."""
    across_layers: Float[Array, "L E E"]
    """From the layer below to this layer, for the same token; zeros in layer 0."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class UnitTimes:
    """Seconds that one unit of work costs a rank in all passes of a batch over it: what a planner weighs.

    A tree of scalars, so that they are data to a compiled planner. `relibra_jax.cost.unit_times` makes them for a
    cluster and a model. Only their ratios matter.
    """

    token: Float[Array, ""] | float
    """Attention, and what else is outside the routed experts, for one token where it lies."""
    copy: Float[Array, ""] | float
    """The experts' products for one token copy where it is computed."""
    crossing: Float[Array, ""] | float
    """What crosses between nodes once, sent or received over the slow network: a token to each node that it visits
    (hierarchical dispatch), or every token copy by itself (flat dispatch)."""
    spread: Float[Array, ""] | float
    """One token copy sent or received inside a node."""
    move: Float[Array, ""] | float
    """One expert of one layer moved to another node with its optimizer state, once a batch."""
    push: Float[Array, ""] | float
    """One resident of one layer: its weights pushed and its gradient returned, in all updates of a batch together."""
    hierarchical: bool = field(default=True, metadata={"static": True})
    """Whether a token crosses to a node once; otherwise each of its copies does."""


class Planner(NamedTuple):
    """A pair of pure functions, in the manner of an optax transformation with extra arguments.

    Both work under jit, vmap and scan. ``init`` and ``update`` are called as

    - ``init(topology, num_layers, *, key) -> state``: the state before the first batch, an array tree;
    - ``update(load, state, topology, *, tokens=None, transitions=None, cost=None, refine=None) -> (Plan, state)``:
      the plan of a batch.

    Arguments of ``update``:

    - ``load``: ``[M, L, N, G, E]`` token copies by the rank where they lie, which `relibra_jax.plan_check.check_load`
      accepts; ``update`` checks it.
    - ``state``: what ``init`` or the update before returned.
    - ``topology``: the expert-parallel group.
    - ``tokens``: a `TokenSample` of the batch, or None.
    - ``transitions``: the `Transitions` of the batch, or None. They are counted only for planners that take them.
    - ``cost``: the `UnitTimes` of the cluster and the model, or None.
    - ``refine``: ``[L, E]`` homes found for the same batch before its samples were assigned anew; None where
      there are none, and EMPTY throughout where turns follow.

    A planner that has no use for one of the last four does not name it: `relibra_jax.planning.extra_args` leaves it
    out of the call, as optax does.
    """

    init: Callable[..., Any]
    """Makes the first state."""
    update: Callable[..., tuple[Plan, Any]]
    """Plans a batch."""


def check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raise unless the array that ``name`` tells has the expected shape; says both.

    >>> check_shape("mask", (2, 3), (2, 4))
    Traceback (most recent call last):
    ...
    ValueError: mask: expected shape (2, 4), found (2, 3)
    """
    if tuple(found) != tuple(expected):
        raise ValueError(f"{name}: expected shape {tuple(expected)}, found {tuple(found)}")
