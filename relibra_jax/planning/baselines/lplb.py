"""LPLB, DeepSeek's linear-programming load balancer (github.com/deepseek-ai/LPLB), as a planner.

Every rank copies its heaviest experts along the edges of a fixed graph between ranks. In each micro-batch, a linear
program decides how many tokens each edge carries. With ``w`` the rank loads, ``f`` the tokens on the edges and ``c``
the loads of the copied experts:

    minimise t   subject to   w_p - sum_{e leaves p} f_e + sum_{e enters p} f_e <= t,   0 <= f <= c.

A primal-dual interior-point method solves the program. It starts strictly feasible and runs a fixed number of steps,
so its time does not depend on the data. Every step is one Cholesky solve with as many unknowns as the domain has
ranks.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Num

from relibra_jax.contract.planner import Planner, PlanRequest
from relibra_jax.contract.types import EMPTY, Array, Plan, Topology
from relibra_jax.planning.baselines.eplb import pack_homes
from relibra_jax.planning.baselines.forecasts import plan_expected
from relibra_jax.planning.baselines.graphs import graph_edges
from relibra_jax.planning.per_node import merge_copies, plan_per_node
from relibra_jax.support.argument_types import checks_arguments

STEPS = 14
"""Interior-point steps, after which the largest rank load is within 0.1% of the optimum (tests/test_lplb.py)."""


def split_over_edges(
    load: Float[jax.Array, " P"], capacity: Float[jax.Array, "P d"], edges: Int[np.ndarray, "P d"]
) -> Float[jax.Array, "P d"]:
    """Choose the number of tokens on each edge so that the largest rank load is smallest.

    Args:
        load: the number of tokens of each rank before the split.
        capacity: the most tokens that each edge can carry.
        edges: the rank at the end of each edge, as `graph_edges` returns it.

    Returns:
        The number of tokens on each edge, between 0 and ``capacity``.

    >>> edges = graph_edges("ring", 3, 1)
    >>> split_over_edges(jnp.array([9.0, 0.0, 0.0]), jnp.array([[9.0], [0.0], [0.0]]), edges).round(1).tolist()
    [[4.5], [0.0], [0.0]]
    """
    ranks = load.size
    mean = jnp.maximum(load.mean(), 1e-6)
    w, c = load / mean, (capacity / mean).ravel()
    usable = c > 0
    c = jnp.where(usable, c, 1.0)
    eye = np.eye(ranks, dtype=np.float32)
    flow_matrix = jnp.asarray(eye[:, edges.ravel()] - np.repeat(eye, edges.shape[1], 1)) * usable[None]
    num_flows = c.size
    # x = (f, s, t) with A f + s - t = -w, f + v = c, all positive; z and q are the duals of x and v, y of the rows.
    matrix = jnp.concatenate([flow_matrix, jnp.asarray(eye), jnp.full((ranks, 1), -1, jnp.float32)], 1)

    def flows(x):
        return x[:num_flows]

    def longest_step(value, change):
        return jnp.min(jnp.where(change < 0, -value / jnp.minimum(change, -1e-30), jnp.inf))

    def step(carry, _):
        x, v, z, q, best = carry
        gap = (x @ z + v @ q) / (x.size + v.size)
        toward = 0.1 * gap
        r1, r2 = toward / x - z, toward / v - q
        theta = 1 / (z / x).at[:num_flows].add(q / v)
        r = r1.at[:num_flows].add(-r2)
        normal = (matrix * theta[None]) @ matrix.T
        dy = -jax.scipy.linalg.solve(normal, matrix @ (theta * r), assume_a="pos")
        dx = theta * (matrix.T @ dy + r)
        dv = -flows(dx)
        dz, dq = r1 - z / x * dx, r2 - q / v * dv
        primal = jnp.minimum(1.0, 0.95 * jnp.minimum(longest_step(x, dx), longest_step(v, dv)))
        dual = jnp.minimum(1.0, 0.95 * jnp.minimum(longest_step(z, dz), longest_step(q, dq)))
        x, v, z, q = x + primal * dx, v + primal * dv, z + dual * dz, q + dual * dq
        # Near the optimum float32 runs out of digits, so the best flow is kept instead of the last one.
        flow = jnp.clip(flows(x), 0, c) * usable
        top = jnp.max(w + flow_matrix @ flow)
        best_flow, best_top = best
        better = top < best_top
        return (x, v, z, q, (jnp.where(better, flow, best_flow), jnp.where(better, top, best_top))), None

    half = c / 2
    start_load = w + flow_matrix @ half
    top = start_load.max() + 0.1
    x = jnp.concatenate([half, top - start_load, top[None]])
    z = jnp.full_like(x, 0.5 / ranks).at[-1].set(0.5)
    q = jnp.full_like(c, 0.5 / ranks)
    start = (x, half, z, q, (jnp.zeros_like(c), w.max()))
    (*_, (flow, _)), _ = jax.lax.scan(step, start, length=STEPS)
    return flow.reshape(edges.shape) * mean


@checks_arguments
@functools.cache
def lplb(
    *,
    graph: str | None = None,
    loads: str = "true",
    scope: str = "micro_batch",
    across_nodes: bool = False,
    keep_homes: bool = False,
) -> Planner:
    """Make a planner from LPLB: homes by EPLB's packing, copies along a fixed graph, and a split by linear program.

    Source: github.com/deepseek-ai/LPLB; with true loads it is the LPLB+ of ReLibra (arXiv 2605.08639). As in LPLB, the
    split of each micro-batch always uses its true loads.

    Args:
        graph: the name of the graph, a key of `relibra_jax.planning.baselines.graphs.GRAPHS`. None chooses it by the
            number of ranks, see `relibra_jax.planning.baselines.graphs.default_graph`. If the graph has more edges per
            rank than there are replica slots, only the first edges are used.
        loads: the loads by which homes and copied experts are chosen: ``true`` for those of the batch, or another name
            in `relibra_jax.planning.baselines.forecasts.FORECASTS`, for example ``history``.
        scope: how often to choose the copied experts: once per ``batch``, or for every ``micro_batch``.
        across_nodes: whether one graph joins all ranks. Otherwise each node has its own graph.
        keep_homes: whether to keep the homes of the first batch. Otherwise homes are packed again in every batch, which
            moves nearly every expert and pays only if loads change more between batches than within one.

    Returns:
        A Planner whose state is a PlacedState.

    Raises:
        ValueError: if ``loads`` or ``scope`` is unknown. The planner raises it if ``graph`` is unknown or is for
            a different number of ranks.
    """

    def pack(for_homes, topology: Topology) -> Array:
        return pack_homes(for_homes, topology, num_groups=topology.num_experts, num_nodes=topology.num_nodes)

    def fill(request: PlanRequest, expected, home, topology: Topology) -> Plan:
        # Under vmap this is a loop: batched linear algebra sums in a different order, and a difference in the last
        # digit can move a token. A process that plans a batch with others and one that plans it alone would then
        # disagree.
        split = functools.partial(_split, topology=topology, graph=graph, across_nodes=across_nodes)
        return jax.custom_batching.sequential_vmap(split)(request.by_expert, expected, home)

    return plan_expected(pack, fill, loads=loads, scope=scope, keep_homes=keep_homes)


@functools.partial(jax.jit, static_argnames=("topology", "graph", "across_nodes"))
def _split(load, expected, home, *, topology: Topology, graph: str | None, across_nodes: bool) -> Plan:
    """Make the plan for given homes; always compiled, so that rounding is the same whether or not the planner is."""
    domains = 1 if across_nodes else topology.num_nodes
    edges = graph_edges(graph, topology.num_ranks // domains, topology.replica_slots)
    rule = functools.partial(_copy_along, edges=edges, replica_slots=topology.replica_slots)
    return plan_per_node(rule, load, expected, home, topology, across_nodes=across_nodes)


def _copy_along(
    load: Num[jax.Array, "P H"],
    expected: Num[jax.Array, "P H"],
    *,
    edges: Int[np.ndarray, "P d"],
    replica_slots: int,
) -> tuple[Int[jax.Array, "P R"], Int[jax.Array, "P S"]]:
    """Copy each rank's heaviest experts along its edges in one domain, and split tokens by linear program."""
    ranks, homes = load.shape
    degree = min(edges.shape[1], homes)
    edges = edges[:, :degree]
    heaviest = jnp.argsort(-expected, axis=-1, stable=True)[:, :degree]
    if not degree:
        return jnp.full((ranks, replica_slots), EMPTY, jnp.int32), jnp.pad(load, ((0, 0), (0, replica_slots)))
    capacity = jnp.take_along_axis(load, heaviest, -1)
    to_self = edges == np.arange(ranks)[:, None]
    flow = split_over_edges(
        load.sum(-1).astype(jnp.float32), jnp.where(to_self, 0, capacity).astype(jnp.float32), edges
    )
    sent = jnp.minimum(jnp.round(flow).astype(load.dtype), capacity)
    change = jnp.zeros(ranks, load.dtype).at[edges].add(sent) - sent.sum(-1)
    rank_load = load.sum(-1)
    sent = jnp.where(
        (rank_load + change).max() <= rank_load.max(), sent, 0
    )  # rounding must not raise the largest load

    at_home = load - jnp.zeros_like(load).at[jnp.arange(ranks)[:, None], heaviest].set(sent)
    source = (jnp.arange(ranks)[:, None] * homes + heaviest).astype(jnp.int32)
    column = np.arange(degree)
    replica = jnp.full((ranks, replica_slots), EMPTY, jnp.int32).at[edges, column].set(source)
    quota = jnp.zeros((ranks, replica_slots), load.dtype).at[edges, column].set(sent)
    return merge_copies(replica, jnp.concatenate([at_home, quota], -1))
