"""The modelled time of the layers of a training step under a plan, in seconds, in all passes of a batch.

One layer of one micro-batch, where every phase waits for its slowest rank, because a collective ends it:

    attention  positions x ``token``, and ``pair`` x the squared length of every sample of the rank. Compiled sequences
               have one shape, so every rank has as many positions as the fullest of any micro-batch; that lengths are
               rounded up, by a sixteenth at most, is not counted. Padded sequences cost as if every sample were as long
               as they are
    compute    rows of the rank's slots, filled up to tiles, x ``copy``
    exchange   rows sent between nodes x ``crossing``, then rows sent inside nodes x ``spread``: the hops of
               hierarchical dispatch run one after the other. Flat dispatch is one exchange over both networks at once,
               and dispatch on a single node one inside it.
               Each hop also costs ``wait``, and with a fitted exchange ``choice``. Layers in pieces choose once for
               dispatch and combine, and what is beside the work of another piece does not count (`exposed_exchange`)
    stripe     copies of a rank's tokens x ``stripe``, and ``wait``, if the ranks of a node deal tokens to each other
               before dispatch
    gather     rows that gathers and sums read or write x ``gather``
    exposed    time to transfer replicas, less the attention that hides it; and half of ``wait``, which nothing hides,
               because ranks meet to fetch replicas and to return gradients, and four times to exchange rows. If
               replicas are late, only the first exchange of a fetch is beside attention, and the second beside the
               experts in home and resident slots

`relibra_jax.cost.cost_model` computes the prices. A backward pass costs as much as two forward passes; dispatch and
combine each run once per pass. A replica is sent in the forward pass, sent again in the backward pass, and its gradient
is returned. The factors are those of LAER-MoE (ASPLOS'26: four exchanges, three passes of compute), and the transfers
of replicas those of ReLibra (arXiv 2605.08639). Not counted are embeddings, launches, latencies, and forward passes
that activation checkpointing repeats. Attention is taken to hide a whole padded fetch, of whose two exchanges XLA puts
only the second beside it; if replicas may be on other nodes, only the second is hidden. All of it is a model: nothing
here was measured on a cluster.

`relibra_jax.cost.batch_time` models the time of a whole batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Num

from relibra_jax.contract.types import EMPTY, Array, Assignment, LayerPlan, Price, Topology
from relibra_jax.cost.copies import fetch_time, opening_time
from relibra_jax.cost.traffic import Sent, count_sent
from relibra_jax.routing.exchange_rules import between_nodes
from relibra_jax.support.argument_types import checks_arguments


class RankTime(NamedTuple):
    """The modelled seconds of every rank in each layer and micro-batch, in all passes that the price includes."""

    attention: Float[Array, "M L N G"]
    """Attention, projections and shared experts, for the rank's own sequences."""
    compute: Float[Array, "M L N G"]
    """The experts in the rank's slots."""
    between: Float[Array, "M L N G"]
    """Dispatch and combine between nodes; under flat dispatch, over both networks."""
    inside: Float[Array, "M L N G"]
    """Dispatch and combine inside nodes; 0 under flat dispatch."""
    stripe: Float[Array, "M L N G"]
    """Dealing tokens to the ranks of the node, before dispatch and after combine; 0 if layers are not striped."""
    gather: Float[Array, "M L N G"]
    """Gathers and sums of rows in dispatch and combine."""
    fetch: Float[Array, "M L N G"]
    """Sending and receiving replicas, at the same time as attention."""
    meeting: Float[Array, "M L N G"]
    """Waiting for the ranks with which replicas are exchanged, and the part of the fetch that nothing hides."""
    late: Float[Array, "M L N G"]
    """Waiting for replicas after the experts in home and resident slots; 0 unless replicas are late."""


class LayerTime(NamedTuple):
    """The modelled seconds of a layer in all passes of a micro-batch, as five parts that add up to the total."""

    attention: Float[Array, "M L"]
    """Attention, projections and shared experts."""
    compute: Float[Array, "M L"]
    """The routed experts."""
    exchange: Float[Array, "M L"]
    """Dispatch and combine, with the dealing of tokens of striped layers. With several pieces, without what is beside
    experts."""
    gather: Float[Array, "M L"]
    """Gathers and sums of rows in dispatch and combine."""
    exposed: Float[Array, "M L"]
    """The transfers of replicas that attention does not hide, and the waits of ranks for each other there."""

    @property
    def total(self) -> Float[Array, "M L"]:
        """The seconds of the whole layer."""
        return self.attention + self.compute + self.exchange + self.gather + self.exposed


def sample_attention(lengths: Float[Array, "*samples"], cost: Price) -> Float[jax.Array, "*samples"]:
    """Return the seconds of each sample in one layer that depend on where the sample is assigned.

    They are those of attention between its tokens. All positions of sequences are computed whether or not they hold
    tokens, so the rest of the layer takes equally long for every assignment that fits the sequences, and so does
    attention in padded sequences.

    Args:
        lengths: the number of tokens of each sample.
        cost: the price.
    """
    return jnp.float32(0.0 if cost.sequences == "padded" else cost.pair) * lengths**2


@checks_arguments
def attention_time(
    assignment: Assignment,
    lengths: Int[Array, " B"],
    cost: Price,
    *,
    sequence_length: Float[Array, ""] | float | None = None,
) -> tuple[Float[jax.Array, "M N G"], Float[jax.Array, ""]]:
    """Model the seconds of every rank in attention, projections and shared experts of one layer.

    Args:
        assignment: the samples that each rank holds in each micro-batch.
        lengths: the number of tokens of each sample.
        cost: the price.
        sequence_length: T, the number of positions of a padded sequence; None for the longest sample. Packed sequences
            do not read it.

    Returns:
        The seconds, and the number of positions that every rank computes in every micro-batch.
    """
    sample = jnp.asarray(assignment.sample)
    lengths = jnp.asarray(lengths, jnp.float32)
    if cost.sequences == "padded":
        length = jnp.float32(lengths.max() if sequence_length is None else sequence_length)
        seconds = sample.shape[-1] * (cost.token * length + cost.pair * length**2)
        return jnp.full(sample.shape[:-1], seconds, jnp.float32), sample.shape[-1] * length
    own = jnp.where(sample == EMPTY, 0.0, lengths[jnp.maximum(sample, 0)])
    if cost.sequences == "split":  # the ranks of a node share its tokens and their attention evenly
        local = sample.shape[2]
        own = own.reshape(*own.shape[:2], 1, -1)
        positions = own.sum(-1).max() / local
        seconds = cost.token * positions + sample_attention(own, cost).sum(-1) / local
        return jnp.broadcast_to(seconds, sample.shape[:3]), positions
    positions = own.sum(-1).max()
    return jnp.asarray(cost.token * positions + sample_attention(own, cost).sum(-1)), positions


@checks_arguments
def rank_time(
    layer_plans: LayerPlan,
    attention: Float[Array, "M N G"],
    topology: Topology,
    cost: Price,
    *,
    visits: Num[Array, "M L P V"] | None = None,
    pairs: Num[Array, "M L N G N G"] | None = None,
) -> RankTime:
    """Model the time of every rank under a plan.

    Args:
        layer_plans: ``batch_plan.layer_plans()``, stacked ``[M, L]``.
        attention: the seconds of every rank in attention, from `attention_time`.
        topology: the expert-parallel group.
        cost: the price.
        visits: the number of distinct tokens that each rank sends to each node, for hierarchical dispatch; see
            `relibra_jax.cost.traffic.count_traffic`. None for flat dispatch.
        pairs: an estimate of the token copies that each rank sends to each rank. None counts them.

    Returns:
        The times in seconds.

    Raises:
        ValueError: if ``visits`` does not fit the plans or the path.
    """
    quota = jnp.asarray(layer_plans.quota, jnp.float32)
    # Every piece fills tiles of its own.
    tile = cost.pieces * jnp.asarray(cost.tile, jnp.float32)
    filled = jnp.where(tile > 0, jnp.ceil(quota / jnp.where(tile > 0, tile, 1)) * tile, quota)
    sent = count_sent(layer_plans, topology, cost, visits=visits, pairs=pairs)
    between, inside = hop_times(sent, topology, cost)
    if not cost.hierarchical or topology.num_nodes == 1:
        between, inside = jnp.maximum(between, inside), jnp.zeros_like(inside)
    compute = cost.copy * filled.sum(-1)
    copies = jnp.asarray(layer_plans.load, jnp.float32).sum(-1)
    fetch, opening = (part(layer_plans, topology, cost) for part in (fetch_time, opening_time))
    gathered, late = sent.gathered, jnp.zeros_like(fetch)
    if cost.late_replicas and topology.replica_slots:
        homes = cost.copy * filled[..., : topology.held_slots].sum(-1)
        fetch, arriving, opening = jnp.broadcast_to(opening, fetch.shape), fetch - opening, jnp.zeros(())
        late = jnp.maximum(arriving - homes, 0)
        gathered = gathered + _late_rows(quota, topology)
    return RankTime(
        attention=jnp.broadcast_to(attention[:, None], compute.shape),
        compute=compute,
        between=between,
        inside=inside,
        # Ranks deal all positions of their sequences, which are equally many on all of them.
        stripe=jnp.broadcast_to(cost.stripe * copies.max() + cost.wait * cost.striped, compute.shape),
        gather=cost.gather * gathered,
        fetch=fetch - opening,
        meeting=jnp.where(fetch.max() > 0, jnp.full_like(fetch, cost.wait / 2 + opening), 0.0),
        late=late,
    )


def _late_rows(quota: Float[jax.Array, "M L N G S"], topology: Topology) -> Float[jax.Array, "M L N G"]:
    """Return the rows that late replicas read and write more, in the mean of dispatch and combine.

    In the forward and backward pass, five gathers bring the rows of replicas to the front or back, and write as many
    rows as the fullest rank has. Two of them also read the rows of homes, to which they add theirs.
    """
    replicas, rows = quota[..., topology.held_slots :].sum(-1), quota.sum(-1)
    return (5 * (replicas + rows.max()) + 2 * rows) / 4


def hop_times(
    sent: Sent, topology: Topology, cost: Price
) -> tuple[Float[jax.Array, "M L N G"], Float[jax.Array, "M L N G"]]:
    """Return the seconds of dispatch and combine, ``[M, L, N, G]``, between nodes and inside them.

    Flat dispatch is both at once, and takes the longer. On a single node there is only one hop, inside it.

    Args:
        sent: the rows that the exchanges send, from `relibra_jax.cost.traffic.count_sent`.
        topology: the expert-parallel group.
        cost: the price.
    """

    def fixed(kind: str, ranks: int) -> Array | float:
        chooses = kind == "fitted" and cost.pieces == 1
        return cost.pieces * cost.wait + (cost.choice if chooses else 0.0) if ranks > 1 else 0.0

    between = cost.crossing * sent.between + fixed(kind_between(cost), topology.num_nodes)
    inside = cost.spread * sent.inside + fixed(cost.exchange, topology.ranks_per_node)
    return jnp.asarray(between), jnp.asarray(inside)


def kind_between(cost: Price) -> str:
    """Return the kind of the exchange between nodes. Under flat dispatch there is one for all ranks."""
    return between_nodes(cost.exchange) if cost.hierarchical else cost.exchange


@checks_arguments
def layer_time(time: RankTime, cost: Price) -> LayerTime:
    """Compute the time of layers from that of ranks; every phase waits for its slowest rank.

    Args:
        time: the time of every rank.
        cost: the price, which says how exchanges run.

    >>> from relibra_jax.contract.types import BALANCE
    >>> one = jnp.array([[[[1.0, 2.0]]]])
    >>> layer_time(RankTime(one, one, one, one, one, one, 3 * one, one, 0 * one), BALANCE).exposed.tolist()
    [[6.0]]
    """
    attention, compute, between, inside, stripe, gather, fetch, meeting, _ = (
        part.max((-2, -1)) for part in time
    )
    exposed = jnp.maximum(fetch - attention, 0) + meeting
    exposed += (time.compute + time.late).max((-2, -1)) - compute
    exchange = exposed_exchange(between, inside, compute, cost)
    if cost.pieces > 1 and kind_between(cost) == "fitted":  # one choice for dispatch and combine, at all hops
        exchange = exchange + cost.choice / 2
    return LayerTime(attention, compute, exchange + stripe, gather, exposed)


def exposed_exchange(
    between: Float[Array, "*stack"],
    inside: Float[Array, "*stack"],
    compute: Float[Array, "*stack"],
    cost: Price,
) -> Float[jax.Array, "*stack"]:
    """Return the seconds of dispatch and combine in which no experts run, if tokens travel in equal pieces.

    A piece crosses beside the experts of the one before it, and spreads when these have run. With a fitted exchange it
    returns beside the experts of the next: XLA compiles layers so (`experiments.aot.pieces`). With other exchanges it
    returns after the last experts. Each network carries one piece at a time. The passes of a batch are taken together.

    Args:
        between: the seconds of dispatch and combine between nodes, of all pieces together.
        inside: the same inside nodes.
        compute: the seconds of the experts.
        cost: the number of pieces and the kind of exchange. With one piece, nothing is beside experts.

    >>> from dataclasses import replace
    >>> four, price = jnp.array(4.0), Price(token=0.0, copy=0.0, crossing=0.0, spread=0.0, move=0.0, push=0.0)
    >>> for kind in ("fitted", "padded"):
    ...     prices = [replace(price, exchange=kind, pieces=pieces) for pieces in (1, 2, 4)]
    ...     print([float(exposed_exchange(four, 0 * four, four, each)) for each in prices])
    [4.0, 2.0, 1.0]
    [4.0, 3.0, 2.5]
    """
    pieces = cost.pieces
    if pieces == 1:
        return jnp.asarray(between + inside)
    cross, spread, experts = (jnp.asarray(part) / pieces for part in (between / 2, inside / 2, compute))
    arrived, computed = [], jnp.zeros_like(experts)
    for piece in range(pieces):
        arrived.append(jnp.maximum(cross * (piece + 1), computed) + spread)
        computed = arrived[-1] + experts
    # A piece returns inside its node after the next one has spread there, and the last one after its experts.
    returns = [*arrived[1:], computed] if cost.exchange == "fitted" else [computed] * pieces
    between_free, inside_free = cross * pieces, jnp.zeros_like(experts)
    for ready in returns:
        inside_free = jnp.maximum(ready, inside_free) + spread
        between_free = jnp.maximum(inside_free, between_free) + cross
    return between_free - compute
