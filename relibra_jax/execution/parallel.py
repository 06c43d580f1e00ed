"""The settings with which layers execute plans: all that a compiled step depends on besides shapes, and its shardings.

Tokens are sharded over all ranks along their first axis, so the caller's model does not need to know the mesh: ``x`` is
``[B, ..., D]``, and every rank of every group holds ``B / ranks`` sequences of it, in flat order.
"""

import dataclasses
import functools
import itertools
import math
import sys
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import agree_on_kernels
from relibra_jax.contract.types import Array, LayerPlan, Topology, check_shape
from relibra_jax.execution.exchange import KINDS, NCCL_EP, Exchange
from relibra_jax.execution.exchange_verdicts import is_proven
from relibra_jax.execution.fetch_tables import FETCHES, INSIDE_NODES, PULLED, travels_in_pieces
from relibra_jax.execution.late_replicas import LateReplicas
from relibra_jax.execution.mesh import (
    LOCAL,
    NODE,
    RANKS,
    check_mesh,
    why_not_fitted,
    why_not_nccl_ep,
    why_not_ragged,
    why_not_remote,
)
from relibra_jax.routing.exchange_rules import (
    AUTO,
    PATHS,
    REPLICA_FETCH,
    Way,
    between_nodes,
    choose_path,
    choose_striping,
    exchange_choices,
    may_stripe,
    ragged_on_a_node,
)
from relibra_jax.routing.host_share import HostSizes
from relibra_jax.routing.lane_lengths import UNFITTED
from relibra_jax.routing.sizes import Capacities, ExchangeSizes, worst_case_capacities
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.limits import check_integer

_RAGGED_INSIDE: Final = (
    "exchange='ragged' works only inside a node: use path='hierarchical' with capacities that count crossings, or"
    " another exchange"
)


class Kinds(NamedTuple):
    """The path of tokens and the kinds of exchange that a layer runs, with every ``auto`` replaced."""

    path: str
    """``flat`` or ``hierarchical``."""
    exchange: str
    """The exchange of tokens."""
    fetch: str
    """The fetch of replicas."""
    striped: bool
    """Whether the ranks of a node deal their tokens to each other before dispatch."""


@checks_arguments
@jax.tree_util.register_static
@dataclass(frozen=True, kw_only=True)
class ExpertParallel:
    """Mesh, topology, buffer sizes and kinds of exchange of an expert-parallel layer. Hashable and static under jit.

    Raises:
        ValueError: if the mesh does not have the topology's ranks, a name is unknown, the capacities lack sizes that
            the path needs, or the chosen exchange or fetch cannot run on this mesh.
    """

    mesh: Mesh
    """The device mesh, from `relibra_jax.execution.mesh.expert_mesh` or another mesh with the same axes."""
    topology: Topology
    """The expert-parallel group."""
    capacities: Capacities | None = None
    """Buffer sizes, from `relibra_jax.routing.sizes.count_capacities`. None takes the worst case for the shapes, which
    live routing needs because its load is unknown beforehand."""
    chunk_tokens: int = 1024
    """The largest number of tokens of a rank that a layer dispatches at once if its load is unknown beforehand
    (`relibra_jax.execution.chunks`). It bounds the buffers for the worst case. Smaller chunks need less memory and read
    the experts' weights more often. Layers with capacities or with a planned load do not use it."""
    data_axes: tuple[str, ...] = None  # type: ignore[assignment]
    """The mesh's other axes over which tokens are split (data, FSDP); all of them by default. Each index along them is
    an expert-parallel group with its own layer plans. The groups share homes and parameters."""
    path: str = AUTO
    """``flat`` for one exchange of token copies over all ranks, or ``hierarchical``: see
    `relibra_jax.execution.dispatch`. ``auto`` follows `relibra_jax.routing.exchange_rules.choose_path`, if the
    capacities count visits."""
    exchange: str = AUTO
    """The kind of token exchange: see `relibra_jax.execution.exchange`. ``auto`` is padded on CPUs. On GPUs it is
    ragged if `relibra_jax.execution.exchange_check` has measured that as right and faster on these GPUs, else fitted,
    unless a `relibra_jax.nnx.Balancer` finds that its first batch takes longer with it. The layer prints the choice
    once. ``nccl_ep`` (`relibra_jax.execution.start_nccl_ep`) raises an error if it cannot run."""
    fetch: str = AUTO
    """The kind of replica fetch: see `relibra_jax.execution.replicas`. ``auto`` is padded. ``remote`` raises an error
    if its kernel cannot run."""
    striped: bool | None = None
    """Whether the ranks of a node deal their tokens to each other before dispatch, which levels lanes:
    `relibra_jax.routing.striping`. The plan's load must then be the striped one. A `relibra_jax.nnx.Balancer`, which
    sees to that, replaces None: by the rule of `relibra_jax.routing.exchange_rules.choose_striping`, unless its first
    batch would take longer so. Layers themselves take None for False."""
    pieces: int = 1
    """The number of pieces into which a layer splits the tokens of a rank (`relibra_jax.routing.pieces`). One piece
    travels while the experts of another run: both ways with a fitted exchange on GPUs, and only the way out with a
    padded one. Capacities must suffice for every piece, whose plans are those of `relibra_jax.routing.pieces`."""
    late_replicas: bool = False
    """Whether home experts run while replicas arrive, and replicas after them: `relibra_jax.execution.late_replicas`.
    It pays where attention is too short to hide a fetch. It needs one piece and a padded fetch."""
    across_nodes: bool | None = None
    """Whether replicas may be on different nodes than their experts' homes, so that their fetch runs over all ranks.
    Planners that ignore nodes need True. A `relibra_jax.nnx.Balancer` replaces None: for `relibra_jax.relibra` by True
    if its first batch takes less time so. Layers themselves take None for False."""
    gather_once: bool = False
    """Whether experts that are sharded over an FSDP axis are gathered before the first micro-batch of an update
    (`relibra_jax.nnx.accumulate_gradients`), instead of by every layer in both passes of every micro-batch. Whole
    weights in the dtype of the computation then lie on every rank and, if gradients are accumulated ``in_place``, as a
    `relibra_jax.models.LanguageModel` can, whole totals of their gradients, which are scattered once. Otherwise
    gradients are still summed in every micro-batch."""
    implementation: str | None = None
    """The implementation of `pallas_kernels.grouped_mlp`. None chooses by the device. With several processes, all of
    them make their settings at the same time, since they agree on what to choose: `pallas_kernels.agree_on_kernels`."""
    attention_implementation: str | None = None
    """The implementation of `pallas_kernels.flash_attention`, which the models of `relibra_jax.models` use for packed
    and for long samples."""
    split_sequences: bool = False
    """Whether the local ranks of a node hold the chunks of one stream of samples, whose attention gathers keys and
    values inside the node: `relibra_jax.routing.node_streams`. A `relibra_jax.nnx.Balancer` sets it for its batches, if
    it has ``sequences="split"``."""
    check_rows: bool = False
    """Whether every token copy carries its expert's number, so that a layer counts the rows that reach the slot of
    their expert. If a count differs from the plan's quota, the output is NaN. It costs a small exchange per layer."""
    num_sequences: int | None = None
    """The number of sequences of a micro-batch on all ranks together, if it is fixed beforehand. A layer then rejects
    any other number."""

    def __post_init__(self) -> None:
        check_mesh(self.mesh, self.topology)
        for name, names in (("path", PATHS), ("exchange", KINDS), ("fetch", FETCHES)):
            if getattr(self, name) not in (AUTO, *names):
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join((AUTO, *names))}")
        if self.data_axes is None:
            others = tuple(axis for axis in self.mesh.axis_names if axis not in RANKS)
            object.__setattr__(self, "data_axes", others)
        check_integer("pieces", self.pieces, least=1)
        check_integer("chunk_tokens", self.chunk_tokens, least=1)
        for axis in self.data_axes:
            if axis in RANKS or axis not in self.mesh.shape:
                raise ValueError(
                    f"data_axes: {axis!r} must be an axis of the mesh {self.mesh.axis_names} other than {RANKS}"
                )
        if self.path == "hierarchical" and self.capacities is not None and self.capacities.node is None:
            raise ValueError(
                "path='hierarchical' needs capacities counted with visits: count_capacities(visits=node_visits(...))"
            )
        if self.late_replicas and (self.pieces > 1 or self._fetch_kind != "padded"):
            raise ValueError(
                f"late_replicas=True needs pieces=1 and fetch='padded', found pieces={self.pieces} and"
                f" fetch={self.fetch!r}"
            )
        devices, nodes = self.mesh.devices.ravel().tolist(), self.topology.num_nodes
        if self.across_nodes and (self.fetch in PULLED or (self.fetch == "ragged" and nodes > 1)):
            raise ValueError(
                f"fetch={self.fetch!r} works only inside a node: use another fetch or across_nodes=False"
            )
        if self.exchange == "ragged" and self.path == "flat" and nodes > 1:
            raise ValueError(_RAGGED_INSIDE)
        if self.path == "hierarchical" and nodes == 1 and self.exchange in ("ragged", "emulated"):
            raise ValueError(ragged_on_a_node(self.exchange))
        if self.exchange == "fitted" and (reason := why_not_fitted(devices)):
            raise ValueError(f"exchange='fitted' cannot run: {reason}")
        if self.exchange == NCCL_EP:
            self._check_nccl_ep()
        if self.fetch == "remote" and (reason := why_not_remote(devices)):
            raise ValueError(f"fetch='remote' cannot run: {reason}")
        if None in (self.implementation, self.attention_implementation):
            agree_on_kernels(devices)
        # Processes agree here on a ragged exchange, because they cannot while they trace a program.
        _ = self.exchanges

    def _check_nccl_ep(self) -> None:
        for name, only in (("path", AUTO), ("pieces", 1), ("check_rows", False)):
            if getattr(self, name) != only:
                raise ValueError(f"exchange='nccl_ep' needs {name}={only!r}, found {getattr(self, name)!r}")
        if reason := why_not_nccl_ep(self.mesh.devices.ravel().tolist()):
            raise ValueError(f"exchange='nccl_ep' cannot run: {reason}")

    @property
    def data_shape(self) -> tuple[int, ...]:
        """The sizes of the data axes, which are the leading axes of layer plans."""
        return tuple(self.mesh.shape[axis] for axis in self.data_axes)

    @property
    def num_groups(self) -> int:
        """The number of expert-parallel groups, one for each index along the data axes."""
        return math.prod(self.data_shape)

    @property
    def ranks(self) -> tuple[int, int]:
        """N and G."""
        return self.topology.num_nodes, self.topology.ranks_per_node

    @property
    def num_ranks(self) -> int:
        """The number of ranks of all groups together, over which tokens are split."""
        return self.num_groups * self.topology.num_ranks

    @property
    def token_spec(self) -> PartitionSpec:
        """The sharding spec of tokens ``[B, ...]``."""
        return PartitionSpec((*self.data_axes, *RANKS))

    @property
    def token_sharding(self) -> NamedSharding:
        """The sharding of tokens ``[B, ...]`` over the mesh."""
        return NamedSharding(self.mesh, self.token_spec)

    @property
    def rank_spec(self) -> PartitionSpec:
        """The sharding spec of arrays ``[*data, N, G, ...]`` over the ranks of all groups."""
        return PartitionSpec(*self.data_axes, *RANKS)

    @property
    def plan_spec(self) -> PartitionSpec:
        """The sharding spec of a layer plan's arrays: every rank of a group holds that group's whole plan."""
        return PartitionSpec(*self.data_axes)

    @property
    def domain(self) -> tuple[str, ...]:
        """The mesh axes along which replicas may travel."""
        return RANKS if self.across_nodes else (LOCAL,)

    @property
    def may_choose_across(self) -> bool:
        """Whether ``across_nodes`` leaves a choice: there are several nodes and replicas, whose fetch can cross."""
        several = self.topology.num_nodes > 1 and self.topology.replica_slots > 0
        return self.across_nodes is None and several and self.fetch not in INSIDE_NODES

    def is_hierarchical(self, top_k: int) -> bool:
        """Return whether tokens with ``top_k`` experts are dispatched hierarchically, once to each node they visit."""
        if self.path != AUTO:
            return self.path == "hierarchical"
        counted = self.capacities is None or self.capacities.node is not None
        return counted and choose_path(self.topology, top_k, self.exchanges[0]) == "hierarchical"

    @property
    def is_striped(self) -> bool:
        """Whether the ranks of a node deal tokens to each other before dispatch."""
        return bool(self.striped) and self.topology.ranks_per_node > 1

    @property
    def aligned_positions(self) -> int:
        """A divisor of the length of every sequence, with which all ranks dispatch equal pieces."""
        return self.pieces * (self.topology.ranks_per_node if self.is_striped else 1)

    @property
    def live(self) -> "ExpertParallel":
        """The settings for layers on live routing: experts at home, no residents or replicas, worst-case buffers."""
        topology = dataclasses.replace(self.topology, replica_slots=0, resident_slots=0)
        # Worst-case lanes are level and long, so there is nothing that striping or pieces could gain.
        options: dict[str, Any] = {"capacities": None, "num_sequences": None, "striped": False, "pieces": 1}
        options["late_replicas"] = False
        return dataclasses.replace(self, topology=topology, split_sequences=False, **options)

    @checks_arguments
    def with_striping(self, top_k: int) -> "ExpertParallel":
        """Return these settings with ``striped`` chosen for tokens with ``top_k`` experts, if it is None."""
        if self.striped is not None:
            return self
        return dataclasses.replace(self, striped=self._striped_by_rule(top_k))

    def _striped_by_rule(self, top_k: int) -> bool:
        return choose_striping(
            self.topology, top_k, "hierarchical" if self.is_hierarchical(top_k) else "flat"
        )

    @property
    def exchanges(self) -> tuple[str, ...]:
        """The kinds of token exchange among which ``exchange`` leaves a choice, for some number of experts."""
        if self.exchange != AUTO:
            return (self.exchange,)
        on_gpu = self.mesh.devices.flat[0].platform in ("gpu", "cuda")
        inside = self.topology.ranks_per_node > 1
        inside &= self.path != ("hierarchical" if self.topology.num_nodes == 1 else "flat")
        return exchange_choices(on_gpu=on_gpu, ragged=on_gpu and inside and is_proven(self.mesh))

    def _exchanges(self, top_k: int) -> tuple[str, ...]:
        """Return those for tokens with ``top_k`` experts; the first is that of layers."""
        if self.exchange != AUTO or self.topology.num_nodes == 1 or self.is_hierarchical(top_k):
            return self.exchanges
        return tuple(kind for kind in self.exchanges if kind != "ragged")

    def ways(self, top_k: int) -> tuple[Way, ...]:
        """Return the ways of running layers among which ``exchange`` and ``striped`` leave a choice; the first by rule.

        All have replicas if there are replica slots, on other nodes only if ``across_nodes`` says so.
        """
        by_rule = self._striped_by_rule(top_k)
        striped = (by_rule, not by_rule) if may_stripe(self.topology, top_k) else (False,)
        if self.striped is not None:
            striped = (self.is_striped,)
        replicas = ((self.topology.replica_slots > 0,), (bool(self.across_nodes),))
        return tuple(itertools.starmap(Way, itertools.product(self._exchanges(top_k), striped, *replicas)))

    def kinds(self, top_k: int) -> Kinds:
        """Return the path and the kinds of exchange that layers run for tokens with ``top_k`` experts."""
        return Kinds(
            path="hierarchical" if self.is_hierarchical(top_k) else "flat",
            exchange=self._exchanges(top_k)[0],
            fetch=self._fetch_kind,
            striped=self.is_striped,
        )

    def token_exchanges(self, num_tokens: int, top_k: int) -> tuple[tuple[Exchange, ...], int]:
        """Return the exchanges of tokens, one for each hop, and the number of rows that a rank computes.

        Args:
            num_tokens: the number of tokens of one piece that one rank dispatches.
            top_k: K, the number of experts of a token.
        """
        sizes = self.capacities or worst_case_capacities(num_tokens, top_k, self.topology)
        kinds = self.kinds(top_k)
        path, kind = kinds.path, kinds.exchange
        if path == "flat" or kind == NCCL_EP:
            if kind == "ragged" and self.topology.num_nodes > 1:
                raise ValueError(_RAGGED_INSIDE)
            return (self._exchange(kind, RANKS, sizes.flat),), sizes.rows
        assert sizes.node is not None, "__post_init__ rejects a hierarchical path without node sizes"
        several = self.topology.num_nodes > 1
        between = self._exchange(between_nodes(kind), (NODE,) if several else (LOCAL,), sizes.node)
        inside = self._exchange(kind, (LOCAL,) if several else (NODE,), sizes.local)
        if inside.ranks == 1:  # rows stay, in the order of slots
            here = ExchangeSizes(pair=0, own=0, send=sizes.rows, receive=sizes.rows)
            inside = dataclasses.replace(inside, kind="ragged", sizes=here, copies=top_k)
        return (between, inside), sizes.rows

    def replica_exchange(self) -> tuple[Exchange, int]:
        """Return the exchange that fetches replicas, and the number of rows for the experts that a rank exports."""
        slots = self.topology.replica_slots
        replicas = self.topology.num_ranks * slots
        experts = min(replicas, self.topology.held_slots)
        if self.capacities is not None:
            replicas, experts = self.capacities.export_copies, self.capacities.exports
        sizes = ExchangeSizes(pair=slots, own=0, send=max(replicas, 1), receive=slots)
        exchange = self._exchange(self._fetch_kind, self.domain, sizes)
        return exchange, max(experts, 1) if travels_in_pieces(exchange) else exchange.send_rows

    def for_links(self, sizes: HostSizes) -> "ExpertParallel":
        """Return the settings with which other ranks send replicas, if some come from the host's memory.

        Args:
            sizes: the sizes of the share of the host, which leaves some replicas for links.
        """
        topology = dataclasses.replace(self.topology, replica_slots=sizes.links)
        capacities = dataclasses.replace(
            worst_case_capacities(1, 1, topology), exports=sizes.exports, export_copies=sizes.export_copies
        )
        return dataclasses.replace(self, topology=topology, capacities=capacities)

    @property
    def late(self) -> LateReplicas | None:
        """The replicas that arrive while home experts run; None if they arrive before."""
        slots = self.topology.replica_slots
        if not (self.late_replicas and slots):
            return None
        exchange, _ = self.replica_exchange()
        return LateReplicas(exchange.axes, exchange.ranks, slots)

    @property
    def _fetch_kind(self) -> str:
        return REPLICA_FETCH if self.fetch == AUTO else self.fetch

    def _exchange(self, kind: str, axes: tuple[str, ...], sizes: ExchangeSizes) -> Exchange:
        ranks = math.prod(self.mesh.shape[axis] for axis in axes)
        if self.pieces > 1:  # pieces choose among parts of the whole lanes
            sizes = dataclasses.replace(sizes, lengths=UNFITTED)
        return Exchange(kind=kind, axes=axes, ranks=ranks, sizes=sizes)

    def print_choices(self, top_k: int) -> None:
        """Print the path and exchanges that ``auto`` chose, on process 0 and once for equal choices."""
        if AUTO not in (self.path, self.exchange, self.fetch):
            return
        if jax.process_index():
            return
        kinds = self.kinds(top_k)
        replicas = f"; replicas {kinds.fetch}" if self.topology.replica_slots else ""
        striped = ", striped" if kinds.striped else ""
        ranks, platform = " x ".join(map(str, self.ranks)), self.mesh.devices.flat[0].platform
        _print_once(
            f"relibra_jax, {ranks} ranks on {platform}: tokens {kinds.path}, {kinds.exchange}{striped}{replicas}"
        )


@functools.cache
def _print_once(line: str) -> None:
    print(line, file=sys.stderr)


def check_tokens(name: str, array: Array, parallel: ExpertParallel) -> None:
    """Raise unless the number of sequences in ``array`` divides evenly over the ranks and fits the prepared batch.

    Args:
        name: the name of the array in the error.
        array: an array ``[B, ...]`` over the sequences of a micro-batch.
        parallel: the execution settings.

    Raises:
        ValueError: if the first axis is not a multiple of the number of ranks or of ``parallel.num_sequences``, or an
            axis is empty.
    """
    if parallel.num_sequences is not None and (array.ndim < 1 or array.shape[0] % parallel.num_sequences):
        raise ValueError(
            f"{name}: shape {tuple(array.shape)}, but the batch was prepared with {parallel.num_sequences}"
            " sequences per micro-batch: pass one whole micro-batch of PreparedBatch.to_ranks"
        )
    if array.ndim < 2 or array.shape[0] % parallel.num_ranks or not all(array.shape):
        ranks = " x ".join(map(str, (*parallel.data_shape, *parallel.ranks)))
        raise ValueError(
            f"{name}: expected [B, ...] with B a multiple of {parallel.num_ranks} ranks ({ranks}) and no empty axis,"
            f" found shape {tuple(array.shape)}"
        )


def check_exchanges(parallel: ExpertParallel) -> None:
    """Raise ValueError if tokens or replicas would be sent by an exchange that the devices do not have."""
    topology = parallel.topology
    kinds = {"exchange": parallel.exchange, "fetch": parallel.fetch if topology.replica_slots else None}
    for name, kind in kinds.items():
        sends = kind == "ragged" and topology.ranks_per_node > 1
        if sends and (reason := why_not_ragged(parallel.mesh.devices.ravel().tolist())):
            raise ValueError(f"{name}='ragged' cannot run: {reason}")


def check_layer_plan(plan: LayerPlan, parallel: ExpertParallel) -> None:
    """Raise ValueError unless ``plan`` has the shapes of one layer of one micro-batch, and its exchanges can run."""
    check_exchanges(parallel)
    topology, lead = parallel.topology, parallel.data_shape
    slots = (*lead, *parallel.ranks, topology.slots)
    for name, shape in (("slot_expert", plan.slot_expert.shape), ("quota", plan.quota.shape)):
        if shape != slots:
            raise ValueError(
                f"plan.{name}: expected shape {slots}, found {tuple(shape)}: a rank has {topology.home_slots} home"
                f" slots, resident_slots={topology.resident_slots} and replica_slots={topology.replica_slots}; execute"
                " a plan under the topology for which it was planned"
            )
    check_shape("plan.home", plan.home.shape, (*lead, topology.num_experts))
    if plan.load is not None:
        check_shape("plan.load", plan.load.shape, (*lead, *parallel.ranks, topology.num_experts))
