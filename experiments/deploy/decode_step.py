"""One decoding step with attention and experts on disjoint devices, and two micro-batches between them.

Source: the ping-pong pipeline of MegaScale-Infer (arXiv 2504.02263). This is executed, unlike the rest of the package,
and small: it shows that the step computes what the model computes, not how fast it is.

Attention ranks share the sequences of a micro-batch. They hold its cache and everything of the model except the
experts: embedding, attention, routers and output head. Every expert rank holds an equal part of the experts of each
layer, in the order of their ids. A token is sent once to each expert rank that has some of its experts, which returns
the sum of their outputs, weighted by the gates.

The step is a sequence of ticks. In each tick attention computes a layer of one micro-batch and the experts one of the
other; then both exchange what they have computed (`experiments.deploy.row_swap`)::

    tick        0     1     2     3     4        A0, A1: attention of micro-batch 0, 1
    attention   A0    A1    A0    A1             E0, E1: their experts
    experts           E0    E1    E0    E1       2 L + 1 ticks for L layers

The host only queues the programs of a tick, so the two sides compute at the same time. Buffers have room for all tokens
of a rank, so no token is ever dropped; on a network they would be sent only as far as they are filled.
"""

import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Int

from experiments.deploy.row_swap import RANK, attention_topology, blank, by_rank, split_devices, swap
from pallas_kernels import grouped_mlp
from relibra_jax.contract.types import EMPTY, Array, check_shape
from relibra_jax.execution.gating import gates_at
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.models import Cache, LanguageModel
from relibra_jax.models.cache import LayerCache, empty_cache
from relibra_jax.nnx.variables import ExpertParam
from relibra_jax.support.limits import check_integer

MICRO_BATCHES: Final = 2
"""The number of micro-batches between attention and experts."""


class Tick(NamedTuple):
    """What the two sides compute at the same time: each a layer of a micro-batch, ``(layer, micro_batch)``, or None."""

    attention: tuple[int, int] | None
    experts: tuple[int, int] | None


def ticks(layers: int) -> list[Tick]:
    """Return the ticks of a step: the experts compute what attention has sent in the tick before.

    Args:
        layers: the number of layers, L.

    >>> [tick.attention for tick in ticks(2)], [tick.experts for tick in ticks(2)]
    ([(0, 0), (0, 1), (1, 0), (1, 1), None], [None, (0, 0), (0, 1), (1, 0), (1, 1)])
    """
    visits = [(layer, micro_batch) for layer in range(layers) for micro_batch in range(MICRO_BATCHES)]
    return [Tick(*pair) for pair in zip([*visits, None], [None, *visits], strict=True)]


class Rows(NamedTuple):
    """The tokens of attention rank m for expert rank n, with room b for all of its tokens of a micro-batch."""

    x: Float[Array, "M N b D"]
    """The input of the experts; 0 for tokens that have none on the rank."""
    expert: Int[Array, "M N b K"]
    """The number of each of a token's experts on the rank; EMPTY for those on other ranks."""
    gate: Float[Array, "M N b K"]
    """Their gates; 0 for those on other ranks."""


class SplitModel:
    """A language model with attention and experts on disjoint devices.

    Args:
        model: the model, whose parameters are copied to the devices.
        devices: the devices, those of attention first.
        attention_ranks: M, the number of attention ranks. The other devices are the N expert ranks.

    Raises:
        ValueError: if a side has no device, the experts do not divide over N, or the model has dense layers, shared
            experts, windows, or experts other than plain SwiGLU.
    """

    def __init__(self, model: LanguageModel, devices: Sequence[jax.Device], *, attention_ranks: int):
        config = model.config
        self.config, self.meshes = config, split_devices(devices, attention_ranks=attention_ranks)
        expert_ranks = self.meshes.experts.size
        if config.num_experts % expert_ranks:
            raise ValueError(
                f"num_experts={config.num_experts} must divide evenly over {expert_ranks} expert ranks"
            )
        if config.dense_layers or config.shared_width or config.windows or not config.has_plain_experts:
            raise ValueError(
                f"dense_layers={config.dense_layers}, shared_width={config.shared_width}, windows={config.windows} and"
                f" has_plain_experts={config.has_plain_experts}: the step runs only layers with plain experts and"
                " attention to all tokens"
            )
        self.parallel = ExpertParallel(
            mesh=self.meshes.attention, topology=attention_topology(attention_ranks)
        )
        experts = model.layers.experts
        weights = experts.experts[...].reshape(config.layers, config.num_experts, *experts.experts.shape[-3:])
        home = experts.home[...].reshape(*experts.home.shape, 1, 1, 1)
        weights = jnp.take_along_axis(weights, home, axis=1)  # in the order of expert ids
        weights = weights.reshape(config.layers, expert_ranks, -1, *weights.shape[2:])
        self.weights = jax.device_put(weights, NamedSharding(self.meshes.experts, PartitionSpec(None, RANK)))
        self.graph: Any
        self.graph, experts_state, *rest = nnx.split(model, ExpertParam, ...)
        # Attention ranks hold an empty array in the place of the experts.
        empty = jax.tree.map(lambda leaf: jnp.zeros((config.layers, 0), leaf.dtype), experts_state)
        self.state = jax.device_put((empty, *rest), NamedSharding(self.meshes.attention, PartitionSpec()))

    def empty_cache(self, sequences: int, room: int) -> tuple[Cache, Cache]:
        """Allocate the caches of both micro-batches on the attention ranks.

        Args:
            sequences: the number of sequences of both micro-batches together.
            room: the number of columns: one for each token of a sequence.

        Raises:
            ValueError: if the sequences do not divide over micro-batches and attention ranks.
        """
        ways = MICRO_BATCHES * self.meshes.attention.size
        check_integer("sequences", sequences, least=1)
        if sequences % ways:
            raise ValueError(
                f"sequences={sequences} must divide evenly over {ways} = 2 micro-batches x attention ranks"
            )
        first, second = (
            empty_cache(self.config, sequences // MICRO_BATCHES, room, self.parallel)
            for _ in range(MICRO_BATCHES)
        )
        return first, second

    def step(
        self, tokens: Int[Array, " B"], caches: tuple[Cache, Cache]
    ) -> tuple[Float[jax.Array, "B V"], tuple[Cache, Cache]]:
        """Run the next token of every sequence.

        Args:
            tokens: the tokens of all sequences; the first half is micro-batch 0.
            caches: the caches of the micro-batches, with room for one more column. They are written in place.

        Returns:
            The logits of the token after each given one, float32, and the caches with the given tokens.

        Raises:
            ValueError: if there is not one token for each sequence of the caches.
        """
        check_shape("tokens", tokens.shape, (sum(len(cache.positions) for cache in caches),))
        meshes, expert_ranks = self.meshes, self.meshes.experts.size
        own = tokens.shape[0] // MICRO_BATCHES // meshes.attention.size
        room = {"dtype": jnp.dtype(self.config.dtype)}
        nothing = blank(meshes.experts, meshes.attention.size, own, self.config.width, **room)
        returned = [blank(meshes.attention, expert_ranks, own, self.config.width, **room)] * MICRO_BATCHES
        halves = jnp.split(jnp.asarray(tokens, jnp.int32), MICRO_BATCHES)
        begun = [_begin(self.graph, self.state, *half) for half in zip(halves, caches, strict=True)]
        x, positions, extended = (list(each) for each in zip(*begun, strict=True))
        rows = received = None
        for tick in ticks(self.config.layers):
            results = nothing
            if tick.attention is not None:
                layer, half = tick.attention
                state = (x[half], returned[half], positions[half], extended[half])
                x[half], extended[half], rows = _attend(
                    *(self.graph, self.state, layer, *state),
                    parallel=self.parallel,
                    expert_ranks=expert_ranks,
                )
            if tick.experts is not None:
                results = _compute(self.weights, tick.experts[0], received, mesh=meshes.experts)
            # The last swap sends the rows of the one before again, and nobody reads them.
            received, arrived = swap(rows, results, meshes)
            if tick.experts is not None:
                returned[tick.experts[1]] = arrived
        logits = [_finish(self.graph, self.state, *half) for half in zip(x, returned, strict=True)]
        return jnp.concatenate(logits), (extended[0], extended[1])


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _begin(graph: Any, state: Any, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Array, Cache]:
    """Return the embeddings ``[B, 1, D]``, the positions of the tokens, and the cache with a column for them."""
    model: LanguageModel = nnx.merge(graph, *state)
    positions, cache = cache.add_columns(jnp.ones((len(tokens), 1), bool))
    return model.embedding[...][tokens][:, None].astype(model.config.dtype), positions, cache


@functools.partial(
    jax.jit, static_argnums=0, static_argnames=("parallel", "expert_ranks"), donate_argnames="cache"
)
def _attend(
    graph: Any,
    state: Any,
    layer: jax.Array | int,
    x: jax.Array,
    returned: jax.Array,
    positions: jax.Array,
    cache: Cache,
    *,
    parallel: ExpertParallel,
    expert_ranks: int,
) -> tuple[jax.Array, Cache, Rows]:
    """Add what the experts of the layer before have returned, attend, and choose the experts of this layer."""
    model: LanguageModel = nnx.merge(graph, *state)
    config, sharding = model.config, by_rank(parallel.mesh)
    blocks, stacked = nnx.split(model.layers)
    block = nnx.merge(blocks, jax.tree.map(lambda leaf: leaf[layer], stacked))
    x = _add(x, returned)
    attention, layer_cache = block.attention(
        *(block.attention_norm(x), positions, None, LayerCache(cache, jnp.asarray(layer))), parallel=parallel
    )
    assert layer_cache is not None
    x = x + attention
    tokens = block.experts_norm(x)[:, 0]
    ids, logits = block.experts.route(tokens)
    gates = gates_at(logits, ids, config.gating)
    per_rank = config.num_experts // expert_ranks
    rank, number = (part[:, None] for part in jnp.divmod(jnp.asarray(ids, jnp.int32), per_rank))
    here = rank == jnp.arange(expert_ranks, dtype=jnp.int32)[None, :, None]  # [B, N, K]

    def of_ranks(chosen: jax.Array) -> jax.Array:
        """Return ``[M, N, b, ...]``, sharded over the attention ranks, of ``[B, N, ...]``."""
        split = chosen.reshape(parallel.num_ranks, -1, *chosen.shape[1:]).swapaxes(1, 2)
        return jax.lax.with_sharding_constraint(split, sharding)

    rows = Rows(
        x=of_ranks(jnp.where(here.any(-1)[..., None], tokens[:, None], 0)),
        expert=of_ranks(jnp.where(here, number, EMPTY)),
        gate=of_ranks(jnp.where(here, gates[:, None], 0)),
    )
    return x, layer_cache.cache, rows


@functools.partial(jax.jit, static_argnames="mesh")
def _compute(weights: jax.Array, layer: jax.Array | int, rows: Rows, *, mesh: Mesh) -> jax.Array:
    """Return the sums ``[N, M, b, D]`` of the outputs of each token's experts on the rank, weighted by their gates."""

    def on_rank(weights: jax.Array, rows: Rows) -> jax.Array:
        experts, top_k = weights[layer, 0], rows.expert.shape[-1]
        number = rows.expert.reshape(-1)
        order = jnp.argsort(jnp.where(number == EMPTY, len(experts), number), stable=True)
        sizes = (number[None] == jnp.arange(len(experts), dtype=jnp.int32)[:, None]).sum(1, dtype=jnp.int32)
        token = order // top_k
        outputs = grouped_mlp(
            rows.x.reshape(-1, rows.x.shape[-1])[token], [experts], sizes, rows.gate.reshape(-1)[order]
        )
        copies = jnp.zeros_like(outputs).at[order].set(outputs)
        return copies.reshape(*rows.expert.shape, -1).sum(-2)

    spec = PartitionSpec(RANK)
    return jax.shard_map(
        on_rank, mesh=mesh, in_specs=(PartitionSpec(None, RANK), spec), out_specs=spec, check_vma=False
    )(weights, rows)


@functools.partial(jax.jit, static_argnums=0)
def _finish(graph: Any, state: Any, x: jax.Array, returned: jax.Array) -> jax.Array:
    """Return the logits ``[B, V]``."""
    model: LanguageModel = nnx.merge(graph, *state)
    return model.logits(model.norm(_add(x, returned))[:, 0])


def _add(x: jax.Array, returned: jax.Array) -> jax.Array:
    """Add the sums ``[M, N, b, D]`` of all expert ranks to the tokens ``[B, 1, D]``."""
    return x + returned.sum(1).reshape(x.shape)
