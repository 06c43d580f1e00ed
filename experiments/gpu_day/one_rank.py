"""The MoE layer on a mesh of one device, which stands in for one rank of a larger group."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu_day.operations import random_array
from experiments.layer_gradients import layer_gradients, layer_output
from experiments.rank_times import expert_gradients
from pallas_kernels import grouped_mlp
from relibra_jax.contract.types import EMPTY, LayerPlan, Topology
from relibra_jax.execution import ExpertParallel, expert_mesh, fetch_replicas, prepare_layer
from relibra_jax.routing.sizes import count_capacities

type Run = Callable[[], Any]
"""A call without arguments, to be timed."""


class OneRank:
    """The slots of one rank on one device, and functions to run the parts of its layer.

    Args:
        weights: the weights of the rank's slots, ``[S, 3, D, F]``. All of them are home slots here.
        tokens: the number of tokens.
        top_k: the number of experts of a token.
        implementation: the implementation of `pallas_kernels` to use.
    """

    def __init__(self, weights: jax.Array, tokens: int, *, top_k: int = 1, implementation: str):
        slots = len(weights)
        self.tokens, self.top_k, self.weights, self.implementation = tokens, top_k, weights, implementation
        self.x = random_array(tokens, weights.shape[2], seed=5)
        self.topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=slots, replica_slots=0)
        full = np.zeros(slots, np.int32)
        full[0] = tokens * top_k
        self.parallel = ExpertParallel(
            mesh=expert_mesh(self.topology, devices=jax.devices()[:1]),
            topology=self.topology,
            capacities=count_capacities(
                jax.tree.map(lambda leaf: leaf[None, None], self.plan(full)), self.topology
            ),
            implementation=implementation,
        )

    def plan(self, sizes: np.ndarray) -> LayerPlan:
        """Return the plan for the given group sizes."""
        slots = np.arange(len(sizes), dtype=np.int32)
        load = sizes.astype(np.int32)[None, None]
        return LayerPlan(slots[None, None], slots, load, load)

    def expert_ids(self, sizes: np.ndarray) -> np.ndarray:
        """Return the experts of every token, ``[1, tokens, top_k]``, of tokens in random order.

        The experts of a token are different, if no group has more rows than there are tokens. Copies that the groups
        leave over are EMPTY.
        """
        ids = np.full(self.tokens * self.top_k, EMPTY, np.int32)
        ids[: sizes.sum()] = np.repeat(np.arange(len(sizes)), sizes)
        return np.random.default_rng(0).permutation(ids.reshape(self.top_k, self.tokens).T)[None]

    def prepare(self, sizes: np.ndarray) -> Run:
        """Return the run of what is done once per batch: the tables for dispatch."""
        return functools.partial(_prepare, self.expert_ids(sizes), self.plan(sizes), self.parallel)

    def fetch(self, sizes: np.ndarray) -> Run:
        """Return the run of a fetch without replicas, which shows the fixed cost of a fetch."""
        experts, x = self.weights[None, None], self.x[None]
        return functools.partial(_fetch, experts, self.prepare(sizes)(), x, self.parallel)

    def forward(self, sizes: np.ndarray) -> Run:
        """Return the run of the layer forward: dispatch, experts and combine."""
        return functools.partial(_forward, *self._arguments(sizes))

    def gradients(self, sizes: np.ndarray) -> Run:
        """Return the run of the layer with the gradients of tokens, gates and experts."""
        return functools.partial(_gradients, *self._arguments(sizes))

    def experts(self, sizes: np.ndarray, *, gradients: bool = False) -> Run:
        """Return the run of only the grouped MLP, on rows that are already sorted."""
        run = expert_gradients if gradients else _experts
        rows = jnp.resize(self.x, (self.tokens * self.top_k, self.x.shape[1]))
        return functools.partial(run, rows, (self.weights,), jnp.asarray(sizes), self.implementation)

    def _arguments(self, sizes: np.ndarray) -> tuple[Any, ...]:
        ids = jnp.asarray(self.expert_ids(sizes))
        gates = jnp.ones(ids.shape, jnp.float32)
        return self.x[None], ids, gates, self.weights[None, None], self.prepare(sizes)(), self.parallel


_prepare = jax.jit(prepare_layer, static_argnums=2)


@functools.partial(jax.jit, static_argnums=3)
def _fetch(experts, layer, x, parallel):
    return fetch_replicas(experts, layer, x, parallel)


@functools.partial(jax.jit, static_argnums=5)
def _forward(x, ids, gates, experts, layer, parallel):
    return layer_output(x, gates, experts, ids=ids, layer=layer, parallel=parallel)


@functools.partial(jax.jit, static_argnums=5)
def _gradients(x, ids, gates, experts, layer, parallel):
    return layer_gradients(x, gates, experts, ids=ids, layer=layer, parallel=parallel)


@functools.partial(jax.jit, static_argnums=3)
def _experts(x, buffers, sizes, implementation):
    return grouped_mlp(x, buffers, sizes, implementation=implementation)
