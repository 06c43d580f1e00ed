"""The words and shapes of the project: every array that crosses a module is described here, and nothing else.

Glossary
--------
logical expert  a set of expert parameters of the model
slot            room for one expert's weights on one rank; *home slots* hold master copies, *replica slots*
                hold copies for one micro-batch of one layer
home            the slot that owns an expert's master copy and its optimizer state
replica         a further copy of an expert, without optimizer state
rank, local     one device; its index inside its node
node            a domain of fast interconnect
batch           one policy update; a *micro-batch* is one forward and backward pass inside it
routing replay  the recorded expert ids of every token, layer by layer
load            token copies (tokens x top-k), an integer
placement       the map of experts to home slots; to *reorder* is to change it between batches
replicate       to add replicas inside a batch
quota           how many token copies a slot is to compute
imbalance       max / mean of rank load, 1 is perfect; over micro-batches, sum of maxima / sum of means

Dimensions, in this order wherever they meet
--------------------------------------------
M micro-batches   L MoE layers   N nodes   G local ranks   S = H + R slots a rank (H home, then R replica)
E logical experts   K top-k   B samples of a batch   b samples of one rank in one micro-batch
T token positions of a sample

An array over ranks has the mesh's shape ``[..., N, G, ...]``. A *flat rank* is ``n * G + g``; a *flat home
slot* is ``flat rank * H + h``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

type Array = jax.Array | np.ndarray

EMPTY: Final = -1
"""Padding: no token here, no sample here, no expert in this slot. Never a real token without a route."""


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class Topology:
    """One expert-parallel group: its ranks, the experts they own and the room they have for replicas.

    Hashable and static under jit.

    Raises:
        ValueError: a count is not a positive integer (``replica_slots`` may be 0), or the experts do not
            divide evenly over the ranks.

    >>> Topology(num_nodes=2, ranks_per_node=4, num_experts=32, replica_slots=2).home_slots
    4
    """

    num_nodes: int
    ranks_per_node: int
    num_experts: int
    replica_slots: int

    def __post_init__(self) -> None:
        for name, least in (
            ("num_nodes", 1),
            ("ranks_per_node", 1),
            ("num_experts", 1),
            ("replica_slots", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
                raise ValueError(f"{name}={value!r} must be an integer of at least {least}")
        if self.num_experts % self.num_ranks:
            raise ValueError(
                f"num_experts={self.num_experts} must divide evenly over {self.num_ranks} ranks"
                f" ({self.num_nodes} nodes x {self.ranks_per_node})"
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
    def slots(self) -> int:
        """S = H + R."""
        return self.home_slots + self.replica_slots


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
    """The logical expert in each slot, EMPTY for none; slots ``0..H-1`` are the home slots."""
    home: Int[Array, "L E"]
    """Flat home slot of each expert, the same for the whole batch; exactly H experts a rank."""
    quota: Int[Array, "M L N G S"]
    """Token copies that each slot computes."""


class PhysicalExperts(NamedTuple):
    """Which physical slot holds which logical expert, as EPLB and the engines that adopted it write it."""

    physical_to_logical: Int[Array, "L P"]
    """The logical expert in each physical slot."""
    logical_to_physical: Int[Array, "L E C"]
    """The physical slots of each expert, in order of copying; EMPTY where it has fewer than C copies."""
    logical_count: Int[Array, "L E"]
    """Copies of each expert."""


class Planner(NamedTuple):
    """A pair of pure functions, in the manner of an optax transformation.

    ``init(topology, num_layers, *, key)`` returns the state before the first batch: an array tree.
    ``update(load, state, topology, *, refine=None)`` takes ``load[M L N G E]`` (where the tokens lie) and returns
    ``(Plan, state)``. ``refine[L E]`` are homes found for the same batch before its samples were assigned anew;
    planners that search go on from there, others have no use for it. Both work under jit, vmap and scan.
    """

    init: Callable[..., Any]
    update: Callable[..., tuple[Plan, Any]]


def check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raise unless the array that ``name`` tells has the expected shape; says both.

    >>> check_shape("mask", (2, 3), (2, 4))
    Traceback (most recent call last):
    ...
    ValueError: mask: expected shape (2, 4), found (2, 3)
    """
    if tuple(found) != tuple(expected):
        raise ValueError(f"{name}: expected shape {tuple(expected)}, found {tuple(found)}")
