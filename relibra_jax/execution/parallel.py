"""How plans are run: everything that a compiled step depends on besides shapes, and where its arrays lie.

Tokens are sharded over all ranks along their first axis, so the mesh does not show in the caller's model: ``x`` is
``[B, ..., D]``, and every rank of every data-parallel copy holds ``B / ranks`` rows of it, in flat order.
"""

import functools
import math
import sys
from dataclasses import dataclass
from typing import Final

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from relibra_jax.capacity import Capacities, ExchangeSizes, worst_case_capacities
from relibra_jax.execution.exchange import KINDS, Exchange
from relibra_jax.execution.fetch_tables import FETCHES, PULLED
from relibra_jax.execution.mesh import LOCAL, NODE, RANKS, check_mesh, why_not_remote
from relibra_jax.hot_ranks import HotRanks
from relibra_jax.types import Array, LayerPlan, Topology, check_shape

PATHS: Final = ("flat", "hierarchical")
AUTO: Final = "auto"
"""What stands for the way that suits mesh and model."""
MOST_RAGGED_RANKS: Final = 8
"""Ranks up to which XLA runs a ragged exchange on GPUs in one kernel; beyond, hangs and slow paths are reported."""


@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class ExpertParallel:
    """Mesh, topology, buffer sizes and kinds of exchange of an expert-parallel layer. Hashable and static under jit.

    Raises:
        ValueError: if the mesh lacks the topology's ranks, a name is unknown, sizes that the path needs were not
            counted, or the fetch that was asked for cannot run on this mesh.
    """

    mesh: Mesh
    """The device mesh, from `relibra_jax.execution.mesh.expert_mesh` or another one with its axes."""
    topology: Topology
    """The expert-parallel group."""
    capacities: Capacities | None = None
    """Buffer sizes, from `relibra_jax.capacity.count_capacities`. None for the worst case, computed from the shapes:
    what live routing needs, whose load nobody knows beforehand."""
    data_axes: tuple[str, ...] | None = None
    """The mesh's other axes over which tokens are split (data, FSDP): all of them by default. Each place along them is
    a copy of the expert-parallel group with layer plans of its own; homes and parameters are shared."""
    path: str = AUTO
    """``flat``, one exchange over all ranks, or ``hierarchical``: see `relibra_jax.execution.dispatch`. ``auto`` is
    hierarchical where there are several nodes, a token has several experts, and what crosses was counted."""
    exchange: str = AUTO
    """The kind of token exchange: see `relibra_jax.execution.exchange`. ``auto`` is ragged between at most 8 GPUs of
    one node, and padded elsewhere; what it chose is printed once."""
    fetch: str = AUTO
    """The kind of replica fetch: see `relibra_jax.execution.replica_exchange`; ``auto`` as for ``exchange``. ``remote``
    is never chosen by itself, and refused where its kernel cannot run."""
    across_nodes: bool = False
    """Whether replicas may be on other nodes than their experts' homes, as planners that ignore nodes want it."""
    implementation: str | None = None
    """The implementation of `pallas_kernels.grouped_mlp`."""
    check_rows: bool = False
    """Whether every token copy brings its expert's number along, so that a layer counts the rows that really reached
    the slot of their expert, and turns to NaN where they are not the plan's quota. It costs a small exchange a
    layer."""
    float8: HotRanks | None = None
    """Which ranks compute their experts in float8, for passes that nothing is learnt from: these have no gradient.
    None, the default, for none."""
    rows: int | None = None
    """The rows of a micro-batch on all ranks together, if they are known beforehand: others are refused."""

    def __post_init__(self) -> None:
        check_mesh(self.mesh, self.topology)
        for name, names in (("path", PATHS), ("exchange", KINDS), ("fetch", FETCHES)):
            if getattr(self, name) not in (AUTO, *names):
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join((AUTO, *names))}")
        if self.data_axes is None:
            others = tuple(axis for axis in self.mesh.axis_names if axis not in RANKS)
            object.__setattr__(self, "data_axes", others)
        for axis in self.copies_over:
            if axis in RANKS or axis not in self.mesh.shape:
                raise ValueError(f"data_axes: {axis!r} is no further axis of the mesh {self.mesh.axis_names}")
        if self.path == "hierarchical" and self.capacities is not None and self.capacities.node is None:
            raise ValueError("path='hierarchical' needs capacities counted with visits (node_visits)")
        if self.fetch in PULLED and self.across_nodes:
            raise ValueError(f"fetch={self.fetch!r} stays inside a node, across_nodes=True does not")
        if self.fetch == "remote" and (reason := why_not_remote(self.mesh.devices.ravel().tolist())):
            raise ValueError(f"fetch='remote' cannot run: {reason}")

    @property
    def copies_over(self) -> tuple[str, ...]:
        """The mesh axes of the data-parallel copies."""
        return self.data_axes or ()

    @property
    def copies(self) -> tuple[int, ...]:
        """The sizes of those axes: the leading axes of layer plans."""
        return tuple(self.mesh.shape[axis] for axis in self.copies_over)

    @property
    def ranks(self) -> tuple[int, int]:
        """N and G."""
        return self.topology.num_nodes, self.topology.ranks_per_node

    @property
    def num_ranks(self) -> int:
        """The ranks of all copies together, over which tokens are split."""
        return math.prod(self.copies) * self.topology.num_ranks

    @property
    def token_spec(self) -> PartitionSpec:
        """How tokens ``[B, ...]`` are sharded."""
        return PartitionSpec((*self.copies_over, *RANKS))

    @property
    def token_sharding(self) -> NamedSharding:
        """`token_spec` over the mesh."""
        return NamedSharding(self.mesh, self.token_spec)

    @property
    def rank_spec(self) -> PartitionSpec:
        """How arrays ``[*copies, N, G, ...]`` over the ranks of all copies are sharded."""
        return PartitionSpec(*self.copies_over, *RANKS)

    @property
    def plan_spec(self) -> PartitionSpec:
        """How the leaves of a layer plan are sharded: every rank of a copy holds the whole of them."""
        return PartitionSpec(*self.copies_over)

    @property
    def domain(self) -> tuple[str, ...]:
        """The axes that replicas may cross."""
        return RANKS if self.across_nodes else (LOCAL,)

    def sizes(self, tokens: int, top_k: int) -> Capacities:
        """The buffer sizes of a layer whose ranks hold so many tokens: as counted, or the worst case."""
        return self.capacities or worst_case_capacities(tokens, top_k, self.topology)

    def is_hierarchical(self, top_k: int) -> bool:
        """Whether a token of so many experts crosses to each node once, and not every copy by itself."""
        if self.path != AUTO:
            return self.path == "hierarchical"
        counted = self.capacities is None or self.capacities.node is not None
        return self.topology.num_nodes > 1 and top_k > 1 and counted

    def token_exchange(self, axes: tuple[str, ...], sizes: ExchangeSizes) -> Exchange:
        """The exchange of tokens along ``axes``."""
        return self._over(axes, sizes, self.exchange)

    def replica_exchange(self, sizes: ExchangeSizes) -> Exchange:
        """The exchange of replicas between the ranks of a domain."""
        return self._over(self.domain, sizes, self.fetch)

    def _over(self, axes: tuple[str, ...], sizes: ExchangeSizes, kind: str) -> Exchange:
        ranks = math.prod(self.mesh.shape[axis] for axis in axes)
        return Exchange(kind=self._kind(kind, axes), axes=axes, ranks=ranks, sizes=sizes)

    def _kind(self, kind: str, axes: tuple[str, ...]) -> str:
        if kind != AUTO:
            return kind
        ranks = math.prod(self.mesh.shape[axis] for axis in axes)
        near = NODE not in axes or self.topology.num_nodes == 1
        on_gpu = self.mesh.devices.flat[0].platform in ("gpu", "cuda")
        return "ragged" if on_gpu and near and ranks <= MOST_RAGGED_RANKS else "padded"

    def print_ways(self, top_k: int) -> None:
        """Print what was chosen where ``auto`` stands, on process 0 and once for equal choices."""
        if AUTO not in (self.path, self.exchange, self.fetch) or jax.process_index():
            return
        if self.is_hierarchical(top_k):
            between, inside = (self._kind(self.exchange, (axis,)) for axis in RANKS)
            tokens = f"hierarchical, {between} between nodes and {inside} inside them"
        else:
            tokens = f"flat, {self._kind(self.exchange, RANKS)}"
        replicas = ""
        if self.topology.replica_slots:
            replicas = f"; replicas {self._kind(self.fetch, self.domain)}"
        ranks, platform = " x ".join(map(str, self.ranks)), self.mesh.devices.flat[0].platform
        _print_once(f"relibra_jax, {ranks} ranks on {platform}: tokens {tokens}{replicas}")


@functools.cache
def _print_once(line: str) -> None:
    print(line, file=sys.stderr)


def check_tokens(name: str, array: Array, parallel: ExpertParallel) -> None:
    """Raise unless the first axis of ``array`` divides over the ranks, and is the prepared batch's.

    Raises:
        ValueError: if it is not, with both numbers.
    """
    if parallel.rows is not None and (array.ndim < 1 or array.shape[0] % parallel.rows):
        raise ValueError(
            f"{name}: shape {tuple(array.shape)}, but the batch was prepared with {parallel.rows} rows a micro-batch:"
            " give a micro-batch of PreparedBatch.to_ranks as it is"
        )
    if array.ndim < 2 or array.shape[0] % parallel.num_ranks:
        ranks = " x ".join(map(str, (*parallel.copies, *parallel.ranks)))
        raise ValueError(
            f"{name}: expected [B, ...] with B a multiple of {parallel.num_ranks} ranks ({ranks}), found shape"
            f" {tuple(array.shape)}"
        )


def check_layer_plan(plan: LayerPlan, parallel: ExpertParallel) -> None:
    """Raise unless ``plan`` has the shapes of one layer of one micro-batch, for all copies of the group.

    Raises:
        ValueError: if an array has another shape, with both.
    """
    topology, lead = parallel.topology, parallel.copies
    slots = (*lead, *parallel.ranks, topology.slots)
    for name, found in (("slot_expert", plan.slot_expert.shape), ("quota", plan.quota.shape)):
        if found != slots:
            raise ValueError(
                f"plan.{name}: expected shape {slots}, found {tuple(found)}: a rank has {topology.home_slots} home"
                f" slots, resident_slots={topology.resident_slots} and replica_slots={topology.replica_slots}; run a"
                " plan under the topology that it was made for"
            )
    check_shape("plan.home", plan.home.shape, (*lead, topology.num_experts))
    if plan.load is not None:
        check_shape("plan.load", plan.load.shape, (*lead, *parallel.ranks, topology.num_experts))
