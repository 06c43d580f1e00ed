"""Glossary of the project, and the types of the arrays that modules pass to each other.

Glossary
--------
logical expert   one set of expert parameters of the model
rank             one device of the expert-parallel group
local rank       the index of a rank inside its node
node             a group of ranks that a fast interconnect connects
slot             room for the weights of one expert on one rank
home             the slot that owns an expert's master weights and optimizer state: a *home slot*
replica          a temporary copy of an expert in a *replica slot*, for one micro-batch of one layer; it has no
                 optimizer state
resident         a copy of an expert in a *resident slot*, which stays there for the whole batch. It has no optimizer
                 state. In every update its weights are sent over the slow network once, and its gradient is sent
                 back once
epoch            what copies of experts and prepared tables belong to: the expert in every slot, and for residents the
                 optimizer's step. They carry it, and layers with another one return NaN
logical order    experts by their ids, wherever their homes are
batch            the work between two placements; it has one or several optimizer updates
update           one optimizer step of a batch
micro-batch      one forward and one backward pass of an update
sequence         one line of a micro-batch ``[sequences, T]``: a *packed* sequence holds several samples one after
                 another, a *padded* one holds one sample
routing replay   the recorded expert ids of every token in every layer
token copy       one token for one of its K experts: a token has K copies in every layer
load             the number of token copies, an integer
quota            the number of token copies that one slot computes
dispatch         sending token copies to the slots that compute them
combine          sending the results back and summing them, weighted by the gate
striped          of layers: the ranks of a node deal their tokens to each other in turn before dispatch
crossing         one transfer to another node: of a token copy (flat dispatch), or of a token (hierarchical dispatch)
visit            one token that needs a node, however many of its experts are there; on a single node, that needs a rank
placement        the map from experts to home slots; to *reorder* is to change it between two batches
replicate        to add replicas inside a batch
imbalance        maximum / mean of the rank loads, 1 is perfect; over several micro-batches, the sum of the maxima
                 / the sum of the means

Dimensions, always in this order
--------------------------------
M micro-batches   L MoE layers   N nodes   G local ranks   E logical experts   K experts of a token (top-k)
S = H + B + R slots of a rank: H home slots, then B resident slots, then R replica slots
B samples of a batch (the code writes out ``resident_slots`` where B could be mistaken for it)
b samples of one rank in one micro-batch   T token positions of a sample   P = N * G ranks
V nodes that tokens visit: N, or P if there is a single node

An array over ranks has the shape of the mesh, ``[..., N, G, ...]``. A *flat rank* is ``n * G + g``, and a *flat home
slot* is ``flat rank * H + h``. ``*stack`` stands for any leading axes along which values of a type are stacked.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from relibra_jax.support.limits import INT32_MAX, check_integer

type Array = jax.Array | np.ndarray

EMPTY: Final = -1
"""Padding value: no token, no sample or no expert at this place. It never marks a real token without a route."""


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class Topology:
    """The shape of one expert-parallel group: its ranks, its experts, and the slots of each rank.

    A topology is hashable, and static under jit. Every rank owns the same number of experts, because the expert weights
    are one evenly sharded array, in which an empty home slot would take the memory of an expert. If the experts of a
    model do not divide over the ranks, pad the model with experts that its router never chooses: they have homes, but
    no tokens and no replicas. EPLB's example of 256 experts in 288 slots of 144 ranks needs 288 home slots here;
    copies of experts need replica slots in addition.

    Raises:
        ValueError: if a count is not a positive integer (``replica_slots`` and ``resident_slots`` may be 0), if the
            experts do not divide evenly over the ranks, or if int32 cannot number all slots.

    >>> topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=32, replica_slots=2, resident_slots=1)
    >>> topology.home_slots, topology.held_slots, topology.slots
    (4, 5, 7)
    """

    num_nodes: int
    """N, the number of nodes of the group."""
    ranks_per_node: int
    """G, the number of ranks of a node."""
    num_experts: int
    """E, the number of logical experts of a layer."""
    replica_slots: int
    """R, the number of replica slots of a rank."""
    resident_slots: int = 0
    """B, the number of resident slots of a rank."""

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
                f" + replica_slots={self.replica_slots}) are more than the {INT32_MAX} slots that int32 can number"
            )

    @property
    def num_ranks(self) -> int:
        """P = N * G, the number of ranks of the group."""
        return self.num_nodes * self.ranks_per_node

    @property
    def home_slots(self) -> int:
        """H, the number of home slots of a rank, which is the number of experts that it owns."""
        return self.num_experts // self.num_ranks

    @property
    def held_slots(self) -> int:
        """H + B, the number of slots of a rank that hold the same expert in every micro-batch."""
        return self.home_slots + self.resident_slots

    @property
    def slots(self) -> int:
        """S = H + B + R, the number of slots of a rank."""
        return self.held_slots + self.replica_slots

    @property
    def visited(self) -> "Topology":
        """The topology to whose nodes hierarchical dispatch sends a token once each: this one, or for a single node one
        with a node for each rank. Arrays over ranks follow with `visited_ranks`.

        >>> topology = Topology(num_nodes=1, ranks_per_node=8, num_experts=32, replica_slots=2)
        >>> topology.visited.num_nodes, topology.visited.ranks_per_node
        (8, 1)
        """
        if self.num_nodes > 1:
            return self
        return replace(self, num_nodes=self.ranks_per_node, ranks_per_node=1)


def visited_ranks(array: Array, topology: Topology, *, axis: int = -3) -> Array:
    """Return an array over the ranks of a topology as one over those of `Topology.visited`.

    Args:
        array: the array ``[..., N, G, ...]``.
        topology: the expert-parallel group.
        axis: the axis of the nodes, which that of the ranks follows.
    """
    return array if topology.num_nodes > 1 else array.swapaxes(axis, axis + 1)


class RoutingReplay(NamedTuple):
    """The experts that every token of a batch used during rollout."""

    expert_ids: Int[Array, "B T L K"]
    """Logical expert ids, in the smallest dtype that holds them. The ids of padding tokens are never read."""
    mask: Bool[Array, "B T"]
    """True for real tokens, False for padding."""


class Assignment(NamedTuple):
    """The samples that each rank holds in each micro-batch.

    With split sequences (`relibra_jax.routing.node_streams`), all ranks of a node share the samples of all of them.
    """

    sample: Int[Array, "M N G b"]
    """Indices of samples of the batch; EMPTY for none."""


class Plan(NamedTuple):
    """The homes of all experts for one batch, the copies of experts, and the number of token copies of every slot."""

    slot_expert: Int[Array, "M L N G S"]
    """The logical expert in each slot; EMPTY for none. Home slots come first, then resident slots, then replica slots.
    Home and resident slots hold the same experts in every micro-batch. The residents of a rank are sorted by the home
    slots of their experts, with empty slots last, and so are its replicas. No rank holds an expert twice."""
    home: Int[Array, "L E"]
    """Flat home slot of each expert, the same for the whole batch. Every rank has exactly H experts."""
    quota: Int[Array, "M L N G S"]
    """The number of token copies that each slot computes."""


class LayerPlan(NamedTuple):
    """The plan of one MoE layer in one micro-batch, with the load for which it was made.

    Layer plans can be stacked over the layers (for a scan), over micro-batches, and over the data-parallel groups of
    the group. Every leaf then has the same leading axes ``*stack``. A single layer plan has none of them.
    """

    slot_expert: Int[Array, "*stack N G S"]
    """The logical expert in each slot, as in `Plan`."""
    home: Int[Array, "*stack E"]
    """Flat home slot of each expert."""
    quota: Int[Array, "*stack N G S"]
    """The number of token copies that each slot computes."""
    load: Int[Array, "*stack N G E"] | None
    """Token copies of each expert, on the rank that dispatches their token. None if the plan was made for other
    routing, for example for live routing: the step then counts the load itself and refits the quotas to it."""

    def layer(self, index: Any) -> "LayerPlan":
        """Return element ``index`` of the first stacked axis, for example one layer of a micro-batch's layer plans."""
        return jax.tree.map(lambda leaf: leaf[index], self)

    def visited(self, topology: Topology) -> "LayerPlan":
        """Return the plan for `Topology.visited`. Its flat slots are the same.

        Args:
            topology: the expert-parallel group.
        """
        slots, quota = (visited_ranks(each, topology) for each in (self.slot_expert, self.quota))
        load = None if self.load is None else visited_ranks(self.load, topology)
        return LayerPlan(slots, self.home, quota, load)


def layer_plans(plan: Plan, load: Int[Array, "M L N G E"] | None) -> LayerPlan:
    """Build the layer plans of a plan and its load, stacked ``[M, L]``. NumPy arrays stay NumPy arrays."""
    numpy = all(isinstance(leaf, np.ndarray) for leaf in plan)
    home = (np if numpy else jnp).broadcast_to(plan.home, (len(plan.quota), *plan.home.shape))
    return LayerPlan(plan.slot_expert, home, plan.quota, load)


class BatchPlan(NamedTuple):
    """Everything that is planned for a batch before it runs: the assignment of samples, the load and the plan."""

    assignment: Assignment
    """The samples that each rank holds in each micro-batch."""
    load: Int[Array, "M L N G E"]
    """Token copies of each expert, on the rank that dispatches their token: the one that holds it, or another one of
    its node if layers are striped (`relibra_jax.routing.striping`)."""
    plan: Plan
    """The plan that was made for ``load``."""

    def layer_plans(self) -> LayerPlan:
        """Build the layer plans of all micro-batches, stacked ``[M, L]``.

        >>> plan = Plan(np.zeros((2, 3, 1, 1, 5), int), np.zeros((3, 4), int), np.zeros((2, 3, 1, 1, 5), int))
        >>> batch = BatchPlan(Assignment(np.zeros((2, 1, 1, 1), int)), np.zeros((2, 3, 1, 1, 4), int), plan)
        >>> jax.tree.map(np.shape, batch.layer_plans().layer(0).layer(2))
        LayerPlan(slot_expert=(1, 1, 5), home=(4,), quota=(1, 1, 5), load=(1, 1, 4))
        """
        return layer_plans(self.plan, self.load)

    def micro_batch(self, index: Any) -> LayerPlan:
        """Build the layer plans of one micro-batch, stacked ``[L]`` for a scan over the layers."""
        slot_expert, home, quota = self.plan
        return LayerPlan(slot_expert[index], home, quota[index], self.load[index])


class PhysicalExperts(NamedTuple):
    """The map between physical slots and logical experts, in the format of EPLB and of the engines that adopted it.

    Here ``P`` counts physical slots, and ``C`` is the largest number of copies that an expert has.
    """

    physical_to_logical: Int[Array, "L P"]
    """The logical expert in each physical slot."""
    logical_to_physical: Int[Array, "L E C"]
    """The physical slots of each expert, in the order in which its copies were made; EMPTY beyond its last copy."""
    logical_count: Int[Array, "L E"]
    """The number of copies of each expert."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Price:
    """The price of a batch: the seconds that one unit of each kind of work costs a rank, in all passes of the batch.

    Planners compare plans by these prices, and `relibra_jax.cost.batch_time.batch_time` sums them up. They are a tree
    of scalars, so that a compiled planner takes them as data. `relibra_jax.cost.cost_model.CostModel.price`
    computes them for a cluster, a model and the way in which layers run. Prices that are not given are 0, and exchanges
    then send only the rows that are needed.
    """

    token: Float[Array, ""] | float
    """Everything outside the routed experts, except attention to other tokens, for one position of a rank's
    sequences."""
    copy: Float[Array, ""] | float
    """The matrix products of an expert for one token copy, on the rank that computes it."""
    crossing: Float[Array, ""] | float
    """One row, sent or received over the slow network between nodes. Under hierarchical dispatch a token crosses once
    to each node that it visits; under flat dispatch each of its copies crosses by itself."""
    spread: Float[Array, ""] | float
    """One row, sent or received inside a node: a token copy, or under hierarchical dispatch on a single node a token
    for each rank that it visits."""
    move: Float[Array, ""] | float
    """One expert of one layer that leaves its rank with its optimizer state, once a batch."""
    push: Float[Array, ""] | float
    """One resident of one layer that crosses to another node: its weights sent and its gradient returned, in all
    updates of a batch together."""
    pair: Float[Array, ""] | float = 0.0
    """Attention of one token to one token of its sample: a sample of l tokens costs ``pair * l**2``."""
    push_inside: Float[Array, ""] | float = 0.0
    """The same as ``push``, for one resident that is sent inside a node."""
    fetch: Float[Array, ""] | float = 0.0
    """One replica that is sent inside its node, in all passes of a micro-batch."""
    fetch_across: Float[Array, ""] | float = 0.0
    """The same for one replica that is sent to another node."""
    from_host: Float[Array, ""] | float = 0.0
    """The weights of one replica that is copied from the host's memory, in all passes of a micro-batch. Its gradient
    still costs a part of ``fetch``."""
    weights_share: Float[Array, ""] | float = 1.0
    """The part of ``fetch`` that sends weights; the rest returns gradients."""
    keep: Float[Array, ""] | float = 0.0
    """One expert of one layer that is sent to a rank and written to its host memory, in all updates of the batch."""
    gather: Float[Array, ""] | float = 0.0
    """One row that a gather or a sum of dispatch or combine reads or writes."""
    wait: Float[Array, ""] | float = 0.0
    """The wait of ranks for each other at one hop of a layer, or where they deal tokens, in all passes of a
    micro-batch."""
    choice: Float[Array, ""] | float = 0.0
    """The choice of a fitted exchange's length at one hop of a layer, in all passes of a micro-batch."""
    stripe: Float[Array, ""] | float = 0.0
    """Dealing tokens to the ranks of the node, for one token copy of a rank, in all passes of a micro-batch; 0 if
    layers are not striped."""
    head: Float[Array, ""] | float = 0.0
    """The output head, for one position of a rank's sequences and one layer's share of it."""
    update: Float[Array, ""] | float = 0.0
    """The sum of dense gradients over ranks and the optimizer step, for one layer, in all updates of the batch."""
    tile: Float[Array, ""] | float = 0.0
    """The number of token copies that fill a tile of a grouped product; a slot costs as much as full tiles. 0 for no
    tiles."""
    scale: Float[Array, ""] | float = 1.0
    """The number of rows for which one counted row stands, because buffer sizes are rounded up to whole rows."""
    hierarchical: bool = field(default=True, metadata={"static": True})
    """True for hierarchical dispatch, which sends a token once to each node, or on a single node to each rank. False
    for flat dispatch, which sends every copy of a token by itself."""
    host_slots: int = field(default=0, metadata={"static": True})
    """The number of replicas of a rank that come from the host's memory, in a layer of a micro-batch."""
    exchange: str = field(default="needed", metadata={"static": True})
    """The exchange of tokens: ``padded``, ``fitted``, ``ragged``, or ``needed`` for one that sends what is needed."""
    fetches: str = field(default="ragged", metadata={"static": True})
    """The exchange of replicas."""
    sequences: str = field(default="packed", metadata={"static": True})
    """``packed`` if sequences hold several samples one after another, ``padded`` if they hold one sample each, and
    ``split`` if the local ranks of a node share its samples (`relibra_jax.routing.node_streams`)."""
    striped: bool = field(default=False, metadata={"static": True})
    """True if the ranks of a node deal their tokens to each other before dispatch. The load of a plan then says which
    rank dispatches a token copy (`relibra_jax.routing.striping`)."""
    pieces: int = field(default=1, metadata={"static": True})
    """The number of pieces into which layers split tokens, so that one travels while the experts of another run
    (`relibra_jax.routing.pieces`)."""
    late_replicas: bool = field(default=False, metadata={"static": True})
    """True if home experts run while replicas arrive (`relibra_jax.execution.late_replicas`)."""
    shared_link: bool = field(default=False, metadata={"static": True})
    """True if the ranks of a node share one link to other nodes, whose time is that of all their data together."""
    data_parallel: int = field(default=1, metadata={"static": True})
    """The number of data-parallel groups, which run the micro-batches of a batch at the same time."""
    spare_room: bool = field(default=True, metadata={"static": True})
    """Whether buffers with lanes have spare room (`relibra_jax.routing.sizes.with_spare_room`)."""
    across_nodes: bool = field(default=False, metadata={"static": True})
    """Whether replicas may be on other nodes than their experts. A padded fetch then runs over all ranks. It is
    not data, because their search would be half of what compiles for replicas, and most runs never try it."""

    @property
    def even_ranks(self) -> bool:
        """Whether every rank dispatches a like mixture of its node's tokens, as with striped layers or split
        sequences. Until tokens have their places, loads are then split evenly over the ranks of a node."""
        return self.striped or self.sequences == "split"

    def visit(self, topology: Topology) -> Float[Array, ""] | float:
        """The price of one row to or from another node of `Topology.visited`.

        Args:
            topology: the expert-parallel group.
        """
        return self.crossing if topology.num_nodes > 1 else self.spread


BALANCE: Final = Price(token=0.0, copy=1.0, crossing=0.0, spread=0.0, move=0.0, push=0.0, hierarchical=False)
"""The price of balance alone: only the copies of the busiest rank cost time."""


def check_shape(name: str, actual: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raise ValueError unless an array has the expected shape.

    Args:
        name: the name of the array, for the error message.
        actual: the shape that the array has.
        expected: the shape that it must have.

    >>> check_shape("mask", (2, 3), (2, 4))
    Traceback (most recent call last):
    ...
    ValueError: mask: expected shape (2, 4), found (2, 3)
    """
    if tuple(actual) != tuple(expected):
        raise ValueError(f"{name}: expected shape {tuple(expected)}, found {tuple(actual)}")
