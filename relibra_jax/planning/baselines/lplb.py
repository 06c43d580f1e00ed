"""LPLB, DeepSeek's linear-programming load balancer (github.com/deepseek-ai/LPLB), as a planner.

Every rank copies its heaviest experts along the edges of a fixed graph between ranks; each micro-batch, a linear
program decides how many tokens take each edge. With ``w`` the rank loads, ``f`` the tokens on the edges and ``c``
the loads of the copied experts:

    minimise t   subject to   w_p - sum_{e leaves p} f_e + sum_{e enters p} f_e <= t,   0 <= f <= c.

The program is solved by a primal-dual interior-point method that starts strictly feasible and runs a fixed
number of steps: its cost does not depend on the data. Every step is one Cholesky solve with as many unknowns as
the domain has ranks.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Num

from relibra_jax.planning.baselines.eplb import pack_homes
from relibra_jax.planning.baselines.forecasts import plan_expected
from relibra_jax.planning.baselines.graphs import graph_edges
from relibra_jax.planning.per_node import merge_copies, plan_per_node
from relibra_jax.types import EMPTY, Array, Plan, Planner, Topology

STEPS = 14  # the largest rank load is then within 0.1% of the optimum (tests/test_lplb.py)


def split_over_edges(
    load: Float[jax.Array, " P"], capacity: Float[jax.Array, "P d"], edges: Int[np.ndarray, "P d"]
) -> Float[jax.Array, "P d"]:
    """How many tokens leave each rank on each edge, so that the largest rank load is least.

    Args:
        load: tokens of each rank before the split.
        capacity: tokens that each edge can carry.
        edges: the rank at the end of each edge, from `graph_edges`.

    Returns:
        Tokens on each edge, between 0 and ``capacity``.

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
        # Near the optimum float32 runs out of digits: keep the best flow seen, not the last.
        flow = jnp.clip(flows(x), 0, c) * usable
        top = jnp.max(w + flow_matrix @ flow)
        best_flow, best_top = best
        better = top < best_top
        return (x, v, z, q, (jnp.where(better, flow, best_flow), jnp.where(better, top, best_top))), None

    half = c / 2
    before = w + flow_matrix @ half
    top = before.max() + 0.1
    x = jnp.concatenate([half, top - before, top[None]])
    z = jnp.full_like(x, 0.5 / ranks).at[-1].set(0.5)
    q = jnp.full_like(c, 0.5 / ranks)
    start = (x, half, z, q, (jnp.zeros_like(c), w.max()))
    (*_, (flow, _)), _ = jax.lax.scan(step, start, length=STEPS)
    return flow.reshape(edges.shape) * mean


def lplb(
    *,
    graph: str | None = None,
    loads: str = "true",
    scope: str = "micro_batch",
    across_nodes: bool = False,
    keep_homes: bool = False,
) -> Planner:
    """LPLB as a planner: homes by EPLB's packing, copies along a fixed graph, a linear program for the split.

    Source: github.com/deepseek-ai/LPLB; with true loads it is the LPLB+ of ReLibra (arXiv 2605.08639). The
    split of each micro-batch always sees its true loads, as LPLB's does.

    Args:
        graph: a key of GRAPHS; None takes the default for the number of ranks, see `default_graph`. Of a
            graph with more edges a rank than replica slots, the first so many are used.
        loads: the loads by which homes and copied experts are chosen: the batch's ``true`` ones, or what another of
            `relibra_jax.planning.baselines.forecasts.FORECASTS` expects, for example ``history``.
        scope: how often the copied experts are chosen: once a ``batch``, or anew for every ``micro_batch``.
        across_nodes: whether one graph joins all ranks, instead of one in each node.
        keep_homes: whether homes stay where the first batch has put them. Packing moves nearly every expert; it pays
            only where loads change more from batch to batch than within one.

    Returns:
        A Planner whose state is a PlacedState.

    Raises:
        ValueError: if an option is unknown, or the graph is for another number of ranks.
    """

    def pack(for_homes, topology: Topology) -> Array:
        return pack_homes(for_homes, topology, num_groups=topology.num_experts, num_nodes=topology.num_nodes)

    def fill(load, expected, home, topology: Topology) -> Plan:
        # Under vmap a loop: linear algebra over more batches sums in another order, and a last digit can move a token.
        # Processes that plan together and alone would disagree.
        split = functools.partial(_split, topology=topology, graph=graph, across_nodes=across_nodes)
        return jax.custom_batching.sequential_vmap(split)(load, expected, home)

    return plan_expected(pack, fill, loads=loads, scope=scope, keep_homes=keep_homes)


@functools.partial(jax.jit, static_argnames=("topology", "graph", "across_nodes"))
def _split(load, known, home, *, topology: Topology, graph: str | None, across_nodes: bool) -> Plan:
    """The plan for given homes. Compiled also where the planner is not, so that both round alike."""
    domains = 1 if across_nodes else topology.num_nodes
    edges = graph_edges(graph, topology.num_ranks // domains, topology.replica_slots)
    rule = functools.partial(_copy_along, edges=edges, replica_slots=topology.replica_slots)
    return plan_per_node(rule, load, known, home, topology, across_nodes=across_nodes)


def _copy_along(
    load: Num[jax.Array, "P H"],
    known: Num[jax.Array, "P H"],
    *,
    edges: Int[np.ndarray, "P d"],
    replica_slots: int,
) -> tuple[Int[jax.Array, "P R"], Int[jax.Array, "P S"]]:
    """Copy each rank's heaviest experts along its edges in one domain, and split by linear program."""
    ranks, homes = load.shape
    degree = min(edges.shape[1], homes)
    edges = edges[:, :degree]
    heaviest = jnp.argsort(-known, axis=-1, stable=True)[:, :degree]
    if not degree:
        return jnp.full((ranks, replica_slots), EMPTY, jnp.int32), jnp.pad(load, ((0, 0), (0, replica_slots)))
    capacity = jnp.take_along_axis(load, heaviest, -1)
    to_self = edges == np.arange(ranks)[:, None]
    flow = split_over_edges(
        load.sum(-1).astype(jnp.float32), jnp.where(to_self, 0, capacity).astype(jnp.float32), edges
    )
    sent = jnp.minimum(jnp.round(flow).astype(load.dtype), capacity)
    change = jnp.zeros(ranks, load.dtype).at[edges].add(sent) - sent.sum(-1)
    before = load.sum(-1)
    sent = jnp.where((before + change).max() <= before.max(), sent, 0)  # rounding must not make it worse

    at_home = load - jnp.zeros_like(load).at[jnp.arange(ranks)[:, None], heaviest].set(sent)
    source = (jnp.arange(ranks)[:, None] * homes + heaviest).astype(jnp.int32)
    column = np.arange(degree)
    replica = jnp.full((ranks, replica_slots), EMPTY, jnp.int32).at[edges, column].set(source)
    quota = jnp.zeros((ranks, replica_slots), load.dtype).at[edges, column].set(sent)
    return merge_copies(replica, jnp.concatenate([at_home, quota], -1))
