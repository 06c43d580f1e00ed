"""The cost model: hardware, model sizes and the way in which layers run, and the price of a batch that follows.

`CostModel.price` is the only price: planners compare plans by it, and `relibra_jax.cost.batch_time` sums it up. By
default it prices what a step runs on GPUs by default: the exchange that ``auto`` chooses, with the padding and the
spare room of its buffers, hops one after the other, and experts that move in pieces over all ranks.
`relibra_jax.nnx.Balancer` replaces every ``auto`` by what its own steps run.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from relibra_jax.contract.types import Price, Topology
from relibra_jax.cost.hardware import Cluster
from relibra_jax.cost.models import Model
from relibra_jax.routing.exchange_rules import (
    AUTO,
    PATHS,
    REPLICA_FETCH,
    choose_path,
    choose_striping,
    exchange_choices,
    ragged_on_a_node,
)
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.limits import check_integer, check_not_negative, check_positive

COMPUTE_BYTES: Final = 2
"""Bytes of one number in computation: bfloat16."""
ACCUMULATOR_BYTES: Final = 4
"""Bytes of one gradient that is summed over micro-batches: float32."""
STATE_BYTES: Final = 12
"""Bytes of one parameter that changes home: a float32 master weight and two float32 Adam moments."""
SEQUENCES: Final = ("packed", "padded", "split")
"""The layouts of samples in sequences: several samples in a sequence, every sample in one of its own, or the samples of
a node in a sequence that its local ranks share."""


class Passes(NamedTuple):
    """The work on a micro-batch, in multiples of one forward pass."""

    compute: int
    """The number of forward passes, where a backward pass counts as two. Replicas are transferred as often: their
    weights in both passes, and their gradients in the backward pass."""
    exchange: int
    """The number of exchanges; dispatch and combine are one each."""


def count_passes(updates: int, *, recompute: bool) -> Passes:
    """Count the passes over a micro-batch.

    Args:
        updates: the number of optimizer updates among which the micro-batches of a batch are divided; each micro-batch
            is in one update. 0 for a stage that only recomputes.
        recompute: True if there is a forward pass for old log-probabilities.

    Raises:
        ValueError: if ``updates`` is not an integer of at least 0, or if there is neither an update nor a recompute.

    >>> count_passes(1, recompute=False), count_passes(4, recompute=True)
    (Passes(compute=3, exchange=4), Passes(compute=4, exchange=6))
    """
    check_integer("updates", updates, least=0)
    forward, backward = (updates > 0) + bool(recompute), int(updates > 0)
    if not forward:
        raise ValueError(f"updates={updates} and recompute={recompute} leave no pass to run")
    return Passes(compute=forward + 2 * backward, exchange=2 * (forward + backward))


@checks_arguments
@dataclass(frozen=True, kw_only=True)
class CostModel:
    """What a batch is priced for: hardware, model sizes, passes, and the way in which layers run.

    Raises:
        ValueError: if a number is out of its range or a name is unknown.

    >>> from relibra_jax.cost.hardware import CLUSTERS
    >>> from relibra_jax.cost.models import MODELS
    >>> cost_model = CostModel(cluster=CLUSTERS["h100"], model=MODELS["gpt-oss-20b"])
    >>> topology = Topology(num_nodes=2, ranks_per_node=8, num_experts=32, replica_slots=2)
    >>> times = cost_model.price(topology)
    >>> times.exchange, f"{times.crossing / times.spread:.0f} {times.push / times.crossing:.0f}"
    ('fitted', '9 6480')
    """

    cluster: Cluster
    """The hardware, for example ``CLUSTERS["h100"]``."""
    model: Model
    """The sizes of the model, for example ``MODELS["qwen3-235b-a22b"]``."""
    path: str = AUTO
    """``flat`` if every token copy is sent by itself, ``hierarchical`` if a token is sent to a node once, or on a
    single node to a rank once, or ``auto`` for the rule of `relibra_jax.routing.exchange_rules.choose_path`."""
    exchange: str = AUTO
    """The exchange of tokens: ``padded``, ``fitted``, ``ragged``, or ``auto`` for what GPUs run. A ragged exchange is
    fitted between nodes; the rows that a rank keeps take no time, although it copies them. ``needed`` prices exchanges
    that send what is needed between nodes too, with which no layer runs."""
    fetch: str = AUTO
    """The exchange of replicas: ``padded``, ``ragged``, or ``auto`` for padded."""
    host_slots: int = 0
    """The number of replicas of a rank that come from its host's memory in a layer of a micro-batch, beside those that
    other ranks send (`relibra_jax.execution.host_replicas`). At most R are copied."""
    striped: bool | None = None
    """Whether the ranks of a node deal their tokens to each other before dispatch: `relibra_jax.routing.striping`. A
    `relibra_jax.nnx.Balancer` replaces None by its choice. Elsewhere None is False, as it is for layers."""
    pieces: int = 1
    """The number of pieces into which layers split the tokens of a rank, so that one travels while the experts of
    another run: `relibra_jax.routing.pieces`."""
    late_replicas: bool = False
    """Whether home experts run while replicas arrive: `relibra_jax.execution.late_replicas`. A fetch must be padded."""
    compute_bytes: int | None = None
    """The bytes of one number in computation: of activations, of weights that are sent, and of gradients of replicas.
    None for 2, bfloat16, unless a `relibra_jax.nnx.Balancer` runs layers of another dtype."""
    dispatch_bytes: int | None = None
    """The bytes of one number of the rows that forward passes dispatch: 1 to price float8, with which no layer runs.
    Combine, gradients and buffers stay as they are, and neither rounding nor scales are priced. None for the bytes of
    computation."""
    spare_room: bool = True
    """Whether buffers with lanes have the spare room with which `relibra_jax.nnx.Balancer` makes them."""
    across_nodes: bool | None = None
    """Whether replicas may be on other nodes than their experts, for planners that choose by the price. A
    `relibra_jax.nnx.Balancer` and `relibra_jax.evaluation` replace None by their choice. Elsewhere None is False."""
    sequences: str = AUTO
    """``packed`` if sequences hold several samples, as with ``Balancer(sequences="packed")``. ``padded`` if every
    sample has a sequence of its own, padded to the longest. ``split`` if the local ranks of a node share its samples.
    ``auto`` is packed unless a `relibra_jax.nnx.Balancer` runs others."""
    updates: int = 1
    """The number of optimizer updates in a batch, among which its micro-batches are divided."""
    recompute: bool = False
    """Whether a batch has one more forward pass, which recomputes old log-probabilities."""
    data_parallel: int = 1
    """The number of data-parallel groups, which run the micro-batches of a batch at the same time."""
    shards: int = 1
    """The number of data-parallel groups over which optimizer state is sharded."""
    scale: float = 1.0
    """The number of tokens that each token stands for, which scales a small trace to the size of a real micro-batch."""
    stretch: float = 1.0
    """The factor by which samples are longer than in the replay, for the cost of attention."""

    def __post_init__(self) -> None:
        for name in ("scale", "stretch"):
            check_positive(name, getattr(self, name))
        for name in ("data_parallel", "shards", "pieces"):
            check_integer(name, getattr(self, name), least=1)
        if self.late_replicas and (self.pieces > 1 or self.fetch not in (AUTO, "padded")):
            raise ValueError(
                f"late_replicas=True needs pieces=1 and fetch='padded', found pieces={self.pieces} and"
                f" fetch={self.fetch!r}"
            )
        for name in ("compute_bytes", "dispatch_bytes"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), least=1)
        check_integer("host_slots", self.host_slots, least=0)
        if self.host_slots and self.late_replicas:
            raise ValueError(
                f"host_slots={self.host_slots}: replicas from the host arrive before experts run, not with"
                " late_replicas=True"
            )
        if self.host_slots and not self.cluster.host_bandwidth:
            raise ValueError(
                f"host_slots={self.host_slots} needs the cluster's host_bandwidth, which is 0: give it, or take"
                " host_slots=0"
            )
        count_passes(self.updates, recompute=self.recompute)
        _check_numbers(self.cluster, self.model)
        fetches = (AUTO, "padded", "ragged")
        kinds = (*fetches, "fitted", "needed")
        for name, names in (
            ("path", (AUTO, *PATHS)),
            ("exchange", kinds),
            ("fetch", fetches),
            ("sequences", (AUTO, *SEQUENCES)),
        ):
            if getattr(self, name) not in names:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(names)}")

    @checks_arguments
    def on(self, topology: Topology) -> "CostModel":
        """Return the cost model with every ``auto`` replaced by what layers run on GPUs, and ``striped`` None by False.

        Args:
            topology: the expert-parallel group.

        Raises:
            ValueError: if a ragged exchange would be flat over several nodes or hierarchical on a single one, or if the
                topology has fewer experts than the model. It may have more, because a model whose experts do not divide
                over the ranks is padded with experts that no token is routed to.
        """
        if topology.num_experts < self.model.num_experts:
            raise ValueError(
                f"cost: the model has num_experts={self.model.num_experts}, but the topology has"
                f" num_experts={topology.num_experts}"
            )
        exchange = exchange_choices(on_gpu=True)[0] if self.exchange == AUTO else self.exchange
        path = self.path
        if path == AUTO:
            path = choose_path(topology, self.model.top_k, exchange)
        if self.exchange == "ragged" and path == "flat" and topology.num_nodes > 1:
            raise ValueError("cost: exchange='ragged' works only inside a node: use path='hierarchical'")
        if self.exchange == "ragged" and path == "hierarchical" and topology.num_nodes == 1:
            raise ValueError(f"cost: {ragged_on_a_node(self.exchange)}")
        kinds = {
            "path": path,
            "exchange": exchange,
            "fetch": REPLICA_FETCH,
            "sequences": "packed",
        }
        chosen: dict[str, Any] = {name: kind for name, kind in kinds.items() if getattr(self, name) == AUTO}
        return dataclasses.replace(self, striped=bool(self.striped) and topology.ranks_per_node > 1, **chosen)

    @checks_arguments
    def with_striping(self, topology: Topology) -> "CostModel":
        """Return the cost model with ``striped`` by the rule of `choose_striping`, if it is None.

        Args:
            topology: the expert-parallel group.

        Raises:
            ValueError: under the conditions of `on`.
        """
        if self.striped is not None:
            return self
        striped = choose_striping(topology, self.model.top_k, self.on(topology).path)
        return dataclasses.replace(self, striped=striped)

    @checks_arguments
    def price(
        self, topology: Topology, *, updates: int | None = None, recompute: bool | None = None
    ) -> Price:
        """Return the seconds that one unit of each kind of work costs a rank, in all passes of a batch.

        Args:
            topology: the expert-parallel group.
            updates: the number of updates of one stage of a batch, 0 for a recompute. None takes that of the batch.
            recompute: whether the stage has a recompute. None takes that of the batch.

        Raises:
            ValueError: under the conditions of `on` and `count_passes`.
        """
        run, model, cluster = self.on(topology), self.model, self.cluster
        number = COMPUTE_BYTES if self.compute_bytes is None else self.compute_bytes
        updates = self.updates if updates is None else updates
        passes = count_passes(updates, recompute=self.recompute if recompute is None else recompute)
        memory, slow, fast, flops, host = cluster.rates
        nodes, local = topology.num_nodes, topology.ranks_per_node
        expert, dense = float(model.expert_params), float(model.dense_params)
        head = 2.0 * model.width * model.vocabulary / model.moe_layers
        row = self.scale * passes.exchange * number * model.width
        # Of every two forward exchanges, one is a dispatch.
        forward = (updates > 0) + (self.recompute if recompute is None else recompute)
        weights = number * expert
        # Kept experts are sent once an update; a recompute before it reads the same.
        kept = max(updates, 1) * weights
        far = self.across_nodes and nodes > 1
        saved = 0 if self.dispatch_bytes is None else forward * (number - self.dispatch_bytes)
        sent = row - self.scale * saved * model.width
        dealt = row * ((1 - 1 / local) / fast + 2.0 / memory) / model.top_k
        # Of the pieces of an expert that moves, every rank gets one, in each of two exchanges.
        moved = 2.0 * STATE_BYTES * expert
        move = moved * (1 - 1 / nodes) / slow if nodes > 1 else moved * (1 - 1 / local) / fast
        # The sum of gradients goes over the ranks of each node, then over nodes in equal parts, and back.
        gradients = dense_gradient_bytes(model)
        reduce = gradients * ((1 - 1 / local) / fast + (1 - 1 / nodes) / local / slow)
        # A resident's weight goes out and its gradient comes back. A step of Adam reads and writes its state, and reads
        # the gradient and writes the weight.
        resident, stepped = number + ACCUMULATOR_BYTES, 2 * STATE_BYTES + ACCUMULATOR_BYTES + number
        owned = topology.home_slots * expert / self.shards + dense / (self.shards * topology.num_ranks)
        # Split sequences gather the keys and values of the other ranks of a node in every pass.
        gathered = number * model.cache_width * (local - 1) / fast if run.sequences == "split" else 0.0
        return Price(
            token=self.scale * passes.compute * (2.0 * dense / flops + gathered),
            pair=self.scale * self.stretch * passes.compute * model.attention_width / flops,
            copy=self.scale * passes.compute * 2.0 * expert / flops,
            crossing=sent / slow,
            spread=sent / fast,
            gather=row / memory,
            fetch=passes.compute * number * expert / fast,
            fetch_across=passes.compute * number * expert / slow,
            from_host=(forward + (updates > 0)) * weights / host if host else 0.0,
            weights_share=(forward + (updates > 0)) / passes.compute,
            keep=kept * (1 / (slow if far else fast) + 1 / host) if host else 0.0,
            move=move,
            push=updates * resident * expert / slow,
            push_inside=updates * resident * expert / fast,
            wait=passes.exchange * cluster.wait_seconds,
            choice=passes.exchange * cluster.choice_seconds,
            stripe=dealt if run.striped else 0.0,
            head=self.scale * passes.compute * head / flops,
            update=updates * (reduce + stepped * owned / memory),
            tile=cluster.tile / self.scale,
            scale=float(self.scale),
            hierarchical=run.path == "hierarchical",
            exchange=run.exchange,
            fetches=run.fetch,
            sequences=run.sequences,
            striped=bool(run.striped),
            pieces=self.pieces,
            late_replicas=self.late_replicas,
            shared_link=cluster.shared_link,
            data_parallel=self.data_parallel,
            spare_room=self.spare_room,
            host_slots=min(self.host_slots, topology.replica_slots),
            across_nodes=bool(self.across_nodes) and nodes > 1,
        )


def dense_gradient_bytes(model: Model) -> float:
    """Return the bytes of the dense gradients of a layer with its share of embedding and head, there and back."""
    numbers = model.dense_params + 2.0 * model.width * model.vocabulary / model.moe_layers
    return 2.0 * ACCUMULATOR_BYTES * numbers


def _check_numbers(cluster: Cluster, model: Model) -> None:
    """Raise ValueError if a speed is not positive and finite, or a size is negative or, where there must be one, 0."""
    for field in dataclasses.fields(cluster):
        if field.type is float and field.default is dataclasses.MISSING:
            check_positive(f"cluster.{field.name}", getattr(cluster, field.name))
    if cluster.host_bandwidth:
        check_positive("cluster.host_bandwidth", cluster.host_bandwidth)
    for name in ("tile", "wait_seconds", "choice_seconds"):
        check_not_negative(f"cluster.{name}", float(getattr(cluster, name)))
    for name in ("moe_layers", "num_experts", "top_k", "width", "expert_width"):
        check_integer(f"model.{name}", getattr(model, name), least=1)
    for name in ("shared_width", "attention_params", "attention_width", "vocabulary"):
        check_integer(f"model.{name}", getattr(model, name), least=0)
