"""The operations of one MoE layer on a rank of an evenly loaded group, each with what it reads, writes and sends.

The list follows what layers run (`relibra_jax.execution`). A hop of dispatch consists of

    choice    the device waits for the host, which reads the length of a fitted exchange
    pack      the rows of the send buffer are gathered from tokens; what is longer than its rows gets zeros
    exchange  the collective over the links, which reads and writes buffers meanwhile
    gates     the collective of the gates, and the gathers around it
    pick      the delivered rows are gathered from what has arrived. Ragged exchanges deliver rows where they are
              needed, so they have no pick. They gather the rows that they send on from where these arrived, so the
              hop before them has none either

and a hop of combine of choice, pack back (not with ragged exchanges, nor before them), exchange back, and

    sum       the copies of each token are gathered and added up. A ragged exchange adds them into the rows that the
              hop before it sends back

The backward pass is combine and dispatch in reverse: gradients of outputs are dispatched, and those of tokens and gates
are combined. Multiplications by one or NaN are fused into gathers; their small kernels count as checks.

An operation takes as long as the slowest of its links, its memory and its products; and in addition a launch for each
kernel, a latency for each collective, and a wait for each choice. Gates have collectives of their own, whose latency
counts where nothing else runs beside them: compiled programs run the others beside gathers of rows and products
(``make aot``). The rates are those of
`relibra_jax.cost.hardware`, by which `relibra_jax.cost.cost_model.CostModel.price` prices batches.
"""

import math
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from relibra_jax.contract.types import Topology
from relibra_jax.cost.cost_model import COMPUTE_BYTES, CostModel
from relibra_jax.cost.hardware import Cluster
from relibra_jax.cost.hop_rows import HopRows, even_hops
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.limits import check_integer

type Pass = Literal["batch", "forward", "backward"]
"""When an operation runs: in a pass of a layer, or once for each layer and micro-batch when a batch is prepared."""
type Part = Literal["attention", "experts", "links", "rows", "small", "replicas"]
"""What an operation is: attention; the products of experts; rows on links; gathers and sums of rows; what takes its
time by launches, latencies and choices; or the transfer of replicas, which runs beside attention."""

GATE_BYTES: Final = 4
INDEX_BYTES: Final = 4
CHECK_LAUNCHES: Final = 6
"""The small kernels of a pass outside gathers and products: checks, offsets of groups, scales, conversions. The profile
of a layer with gradients on an H100 has 13 for both passes (experiments/results/kernels/h100.jsonl)."""
TABLE_LAUNCHES: Final = 250
"""The kernels that prepare the tables of a layer, by the time for few tokens: 0.76 ms on an H100 and on an H200."""
TABLE_BYTES: Final = 3600
"""The bytes of memory that take as long as preparing a token copy, by the time for 131,072 copies on an H100, 0.94 ms.
Sorting reads and writes them many times."""


class Operation(NamedTuple):
    """One operation of a layer on a rank."""

    name: str
    during: Pass
    """The pass in which it runs."""
    part: Part
    """What it is."""
    scope: str = "other"
    """The named scope in which it runs, as profiles have it (`experiments.gpu_day.layer_profile`)."""
    read: float = 0.0
    """The bytes of device memory that it reads."""
    written: float = 0.0
    """The bytes of device memory that it writes."""
    across: float = 0.0
    """The bytes that it sends to other nodes."""
    inside: float = 0.0
    """The bytes that it sends to other ranks of the node."""
    flops: float = 0.0
    """The operations of its products. The gradients of an MLP count as six products; those that are computed again are
    in the efficiency of the cluster."""
    launches: int = 0
    """The kernels that it launches, without those of collectives."""
    collectives: int = 0
    """The collectives that it runs."""
    choices: int = 0
    """The times that the device waits for the host."""

    def seconds(self, cluster: Cluster) -> float:
        """Return the seconds that it takes on a cluster.

        >>> from relibra_jax.cost.hardware import CLUSTERS
        >>> gather = Operation("pick", "forward", "rows", "dispatch", read=1e9, written=1e9, launches=1)
        >>> f"{1e3 * gather.seconds(CLUSTERS['h100']):.2f} ms"
        '0.75 ms'
        """
        rates = cluster.rates
        fixed = self.launches * cluster.launch_seconds + self.collectives * cluster.collective_seconds
        return (
            max(
                (self.read + self.written) / rates.memory,
                self.across / rates.slow,
                self.inside / rates.fast,
                self.flops / rates.flops,
            )
            + fixed
            + self.choices * cluster.choice_seconds
        )


@checks_arguments
def layer_operations(
    cost_model: CostModel,
    topology: Topology,
    tokens: int,
    *,
    sample_tokens: int | None = None,
    checkpointed: bool = False,
) -> tuple[Operation, ...]:
    """List the operations of one MoE layer for one micro-batch, on a rank of an evenly loaded group.

    All slots but those of residents have equally many copies, and routing is uniform over the experts. Every rank
    exports as many experts as it has replica slots.

    Args:
        cost_model: the model and the way in which layers run, in one piece.
        topology: the expert-parallel group.
        tokens: t, the number of tokens of a rank.
        sample_tokens: the number of tokens of each sample, to list attention with its projections and the shared
            experts. None leaves them out.
        checkpointed: whether the backward pass dispatches tokens and fetches replicas again, as under
            `jax.checkpoint`.

    Returns:
        The operations in their order: of the preparation, the forward pass and the backward pass.

    Raises:
        ValueError: if a number of tokens is not a positive integer, layers run in several pieces, the exchange is
            ``needed``, a ragged exchange would be flat over several nodes, or the topology has fewer experts than the
            model.

    >>> from relibra_jax.cost.hardware import CLUSTERS
    >>> from relibra_jax.cost.models import MODELS
    >>> cost_model = CostModel(cluster=CLUSTERS["h100"], model=MODELS["qwen3-30b-a3b"], exchange="ragged")
    >>> topology = Topology(num_nodes=1, ranks_per_node=8, num_experts=128, replica_slots=0)
    >>> [each.name for each in layer_operations(cost_model, topology, 8192) if each.during == "forward"]
    ['pack', 'exchange', 'gates', 'checks', 'expert products', 'exchange back', 'sum']
    """
    check_integer("tokens", tokens, least=1)
    if cost_model.pieces != 1:
        raise ValueError(f"pieces={cost_model.pieces}: operations are listed for layers in one piece")
    if cost_model.exchange == "needed":
        raise ValueError("exchange='needed': no layer runs it, so it has no operations")
    if sample_tokens is not None:
        check_integer("sample_tokens", sample_tokens, least=1)
    layer = _Layer(cost_model.on(topology), topology, tokens)
    return tuple(layer.operations(sample_tokens, checkpointed=checkpointed))


class _Layer:
    """The sizes of a layer on a rank, from which its operations follow."""

    def __init__(self, run: CostModel, topology: Topology, tokens: int):
        self.run, self.topology, self.tokens, self.model = run, topology, tokens, run.model
        self.number = COMPUTE_BYTES if run.compute_bytes is None else run.compute_bytes
        self.row = self.number * run.model.width
        self.copies = float(tokens * run.model.top_k)
        self.expert = float(self.number * run.model.expert_params)
        self.hops = even_hops(run, topology, tokens)
        # A ragged hop shares its gathers with the hop before it.
        self.shared = len(self.hops) > 1 and self.hops[-1].kind == "ragged"

    def operations(self, sample_tokens: int | None, *, checkpointed: bool) -> Iterator[Operation]:
        size = TABLE_BYTES * self.copies / 2
        yield Operation(
            "tables", "batch", "small", "prepare_layer", size, size, launches=TABLE_LAUNCHES, collectives=3
        )
        yield from self._fetch("forward", "replicas")
        if sample_tokens is not None:
            yield self._attention("forward", sample_tokens)
        yield from self._dispatch("forward", gates=True)
        yield self._checks("forward")
        yield self._experts("forward")
        yield from self._combine("forward", gates=False)
        if checkpointed:
            yield from self._fetch("backward", "replicas again")
            yield from self._dispatch("backward", gates=True, suffix=" again")
        yield from self._dispatch("backward", gates=False)
        yield self._checks("backward")
        yield self._experts("backward")
        yield from self._combine("backward", gates=True)
        if sample_tokens is not None:
            yield self._attention("backward", sample_tokens)
        yield from self._fetch("backward", "gradients of replicas")

    def _attention(self, during: Pass, sample_tokens: int) -> Operation:
        token = 2.0 * self.model.dense_params + sample_tokens * self.model.attention_width
        passes = 1 if during == "forward" else 2
        return Operation("attention", during, "attention", flops=passes * self.tokens * token)

    def _checks(self, during: Pass) -> Operation:
        """Return the small kernels of a pass. Forward, ids are compared with those of the tables on all ranks."""
        forward = during == "forward"
        ids = INDEX_BYTES * self.copies * forward
        return Operation(
            "checks", during, "small", read=ids, launches=CHECK_LAUNCHES, collectives=int(forward)
        )

    def _experts(self, during: Pass) -> Operation:
        """Return the grouped MLP: two kernels forward and three backward (`pallas_kernels.grouped_mlp.mosaic`)."""
        slots = self.topology.home_slots + self.topology.replica_slots
        tile = self.run.cluster.tile
        rows = slots * math.ceil(self.copies / slots / tile) * tile if tile else self.copies
        products = 2.0 * self.model.expert_params * rows
        wide, hidden = self.copies * self.row, self.copies * self.number * self.model.expert_width
        weights = slots * self.expert
        name: tuple[str, Pass, Part, str] = ("expert products", during, "experts", "experts")
        if during == "forward":
            return Operation(*name, wide + hidden + weights, wide + hidden, flops=products, launches=2)
        read, written = 4 * wide + 5 * hidden + 2 * weights, wide + 3 * hidden + weights
        return Operation(*name, read, written, flops=2 * products, launches=3)

    def _dispatch(self, during: Pass, *, gates: bool, suffix: str = "") -> Iterator[Operation]:
        """Yield the way of tokens to experts; in the backward pass, of the gradients that combine sends back."""
        scope = "dispatch" if gates else "combine"
        if self.run.striped:
            yield from self._stripe(during, scope, gates=gates, suffix=suffix)
        for hop in self.hops:
            if hop.ranks > 1:
                yield from self._choice(during, scope, hop, suffix)
                yield self._gather(_named("pack", hop, suffix), during, scope, hop.leaving, hop.buffer)
                yield from self._exchange(during, scope, hop, gates=gates, suffix=suffix)
            shares = self.shared and hop is self.hops[0]
            if (hop.kind != "ragged" or hop.ranks == 1) and not shares:
                yield self._gather(_named("pick", hop, suffix), during, scope, hop.arriving, hop.delivered)

    def _combine(self, during: Pass, *, gates: bool) -> Iterator[Operation]:
        """Yield the way of results back; in the backward pass, of the gradients of tokens and gates."""
        scope = "dispatch" if gates else "combine"
        first = self.hops[0]
        for hop in reversed(self.hops):
            if hop.ranks > 1:
                yield from self._choice(during, scope, hop, " back")
                if hop.kind != "ragged" and not (self.shared and hop is first):
                    yield self._gather(_named("pack", hop, " back"), during, scope, hop.leaving, hop.buffer)
                yield from self._exchange(during, scope, hop, gates=gates, suffix=" back")
            written = hop.elements
            if self.shared and hop is not first:
                written = first.arriving / first.ranks + (first.buffer if first.ranks > 1 else 0.0)
            yield self._gather(_named("sum", hop, ""), during, scope, hop.arriving, written)
        if self.run.striped:
            yield from self._stripe(during, scope, gates=gates, suffix=" back")

    def _choice(self, during: Pass, scope: str, hop: HopRows, suffix: str) -> Iterator[Operation]:
        if hop.kind == "fitted":
            yield Operation(_named("choice", hop, suffix), during, "small", scope, choices=1)

    def _gather(self, name: str, during: Pass, scope: str, read: float, written: float) -> Operation:
        return Operation(name, during, "rows", scope, read * self.row, written * self.row, launches=1)

    def _exchange(
        self, during: Pass, scope: str, hop: HopRows, *, gates: bool, suffix: str
    ) -> Iterator[Operation]:
        name, buffer = _named("exchange", hop, suffix), hop.buffer * self.row
        across, inside = hop.across * self.row, hop.inside * self.row
        yield Operation(name, during, "links", scope, buffer, buffer, across, inside, collectives=1)
        if gates:
            size = GATE_BYTES * hop.gates
            moved = size * (hop.buffer + hop.delivered)
            across, inside = hop.across * size, hop.inside * size
            name = _named("gates", hop, suffix)
            # Dispatched gates follow their rows through a ragged exchange, and the experts wait for both.
            alone = int(hop.kind == "ragged" and "back" not in suffix)
            yield Operation(
                name, during, "small", scope, moved, moved, across, inside, launches=2, collectives=alone
            )

    def _stripe(self, during: Pass, scope: str, *, gates: bool, suffix: str) -> Iterator[Operation]:
        """Yield the dealing of tokens inside a node: a copy that orders them by rank, and an exchange."""
        away, size = 1 - 1 / self.topology.ranks_per_node, float(self.tokens * self.row)
        yield Operation(f"deal copy{suffix}", during, "rows", scope, size, size, launches=1)
        yield Operation(
            f"deal{suffix}", during, "links", scope, size, size, inside=away * size, collectives=1
        )
        if gates:
            size = GATE_BYTES * self.copies
            yield Operation(
                f"deal gates{suffix}",
                during,
                "small",
                scope,
                2 * size,
                2 * size,
                inside=away * size,
                launches=1,
                collectives=1,
            )

    def _fetch(self, during: Pass, name: str) -> Iterator[Operation]:
        """Yield the transfer of replicas or of their gradients, and the copies around it.

        In pieces, every expert goes through all ranks: exports are packed, pieces are ordered, and experts assembled.
        """
        if not self.topology.replica_slots:
            return
        size = self.topology.replica_slots * self.expert
        exchanges = 2 if self.run.fetch == "padded" else 1
        away = exchanges * (1 - 1 / self.topology.ranks_per_node) if self.run.fetch == "padded" else 1.0
        copies = (1 + exchanges) * size
        kind: tuple[Pass, Part, str] = (during, "replicas", "replica_fetch")
        yield Operation(f"{name}, copies", *kind, copies, copies, launches=1 + exchanges)
        yield Operation(name, *kind, size, size, inside=away * size, collectives=exchanges)


def _named(name: str, hop: HopRows, suffix: str) -> str:
    return f"{name}{suffix}{' ' if hop.name else ''}{hop.name}"
