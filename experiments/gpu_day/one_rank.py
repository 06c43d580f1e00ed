"""The layer on a mesh of one device, which takes the place of one rank of a larger group."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu_day.operations import random_array
from pallas_kernels import grouped_mlp
from relibra_jax.capacity import count_capacities
from relibra_jax.execution import ExpertParallel, expert_mesh, fetch_replicas, moe_layer, prepare_layer
from relibra_jax.types import EMPTY, LayerPlan, Topology

type Run = Callable[[], Any]
"""A call without arguments, to be timed."""


class OneRank:
    """One rank's slots on one device.

    Args:
        weights: ``[S, 3, D, F]``, the weights of its slots, all of them homes here.
        tokens: the room for its token copies, each a token of one expert.
        implementation: the implementation of `pallas_kernels`.
    """

    def __init__(self, weights: jax.Array, tokens: int, *, implementation: str):
        slots = len(weights)
        self.tokens, self.weights, self.implementation = tokens, weights, implementation
        self.x = random_array(tokens, weights.shape[2], seed=5)
        self.topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=slots, replica_slots=0)
        full = np.zeros(slots, np.int32)
        full[0] = tokens
        self.parallel = ExpertParallel(
            mesh=expert_mesh(self.topology, devices=jax.devices()[:1]),
            topology=self.topology,
            capacities=count_capacities(
                jax.tree.map(lambda leaf: leaf[None, None], self.plan(full)), self.topology
            ),
            implementation=implementation,
        )

    def plan(self, sizes: np.ndarray) -> LayerPlan:
        """The plan of the rank's groups."""
        slots = np.arange(len(sizes), dtype=np.int32)
        load = sizes.astype(np.int32)[None, None]
        return LayerPlan(slots[None, None], slots, load, load)

    def expert_ids(self, sizes: np.ndarray) -> np.ndarray:
        """The expert of every token, ``[1, tokens, 1]``, in an order drawn at random; EMPTY on padding."""
        ids = np.full(self.tokens, EMPTY, np.int32)
        ids[: sizes.sum()] = np.repeat(np.arange(len(sizes)), sizes)
        return np.random.default_rng(0).permutation(ids)[None, :, None]

    def prepare(self, sizes: np.ndarray) -> Run:
        """What is done once a batch: the tables of dispatch."""
        return functools.partial(_prepare, self.expert_ids(sizes), self.plan(sizes), self.parallel)

    def fetch(self, sizes: np.ndarray) -> Run:
        """The fetch of replicas, of which there are none: what its frame costs."""
        experts, x = self.weights[None, None], self.x[None]
        return functools.partial(_fetch, experts, self.prepare(sizes)(), x, self.parallel)

    def forward(self, sizes: np.ndarray) -> Run:
        """Dispatch, experts, combine."""
        return functools.partial(_forward, *self._arguments(sizes))

    def gradients(self, sizes: np.ndarray) -> Run:
        """The same with the gradients of tokens, gates and experts."""
        return functools.partial(_gradients, *self._arguments(sizes))

    def experts(self, sizes: np.ndarray, *, gradients: bool = False) -> Run:
        """The grouped MLP alone, on rows that are sorted already."""
        run = _experts_gradients if gradients else _experts
        return functools.partial(run, self.x, self.weights, jnp.asarray(sizes), self.implementation)

    def _arguments(self, sizes: np.ndarray) -> tuple[Any, ...]:
        ids = jnp.asarray(self.expert_ids(sizes))
        gates = jnp.ones(ids.shape, jnp.float32)
        return self.x[None], ids, gates, self.weights[None, None], self.prepare(sizes)(), self.parallel


_prepare = jax.jit(prepare_layer, static_argnums=2)


@functools.partial(jax.jit, static_argnums=3)
def _fetch(experts, layer, x, parallel):
    return fetch_replicas(experts, layer, x, parallel)


def layer_output(x, gates, experts, *, ids, layer, parallel):
    """What `moe_layer` returns for tokens, behind the fetch of the layer's replicas."""
    held, x = fetch_replicas(experts, layer, x, parallel)
    return moe_layer(x, ids, gates, held, layer, parallel).output


@functools.partial(jax.jit, static_argnums=5)
def _forward(x, ids, gates, experts, layer, parallel):
    return layer_output(x, gates, experts, ids=ids, layer=layer, parallel=parallel)


@functools.partial(jax.jit, static_argnums=5)
def _gradients(x, ids, gates, experts, layer, parallel):
    call = functools.partial(layer_output, ids=ids, layer=layer, parallel=parallel)
    out, pull = jax.vjp(call, x, gates, experts)
    return out, *pull(out)


@functools.partial(jax.jit, static_argnums=3)
def _experts(x, weights, sizes, implementation):
    return grouped_mlp(x, [weights], sizes, implementation=implementation)


@functools.partial(jax.jit, static_argnums=3)
def _experts_gradients(x, weights, sizes, implementation):
    def call(x, weights):
        return grouped_mlp(x, [weights], sizes, implementation=implementation)

    out, pull = jax.vjp(call, x, weights)
    return out, *pull(out)
