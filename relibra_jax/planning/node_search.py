"""Simulated annealing that assigns experts to nodes to minimise modelled time.

The time of a batch, for one layer, up to constants and in units of its balanced compute, is

    sum_m max_n load[n, m]  +  crossing * (N - 1) * sum_m lane[m]  +  sum_e moves[e, node of e],

where ``load`` is a multiple of the mean node's load in the batch, and ``lane`` is the mean of
`relibra_jax.planning.lane_mean`, over pairs of nodes, of the distinct tokens that cross from one to the other, as
multiples of a node's tokens (`relibra_jax.planning.token_bits`). Every micro-batch waits for its fullest node, and for
the pair of nodes with the longest lanes.

The search is annealing over swaps (`relibra_jax.planning.annealing`). A step prices the swap of one expert with a few
experts of one other node. Bit planes keep the number of experts that each token has
on each node, so adding or removing an expert is a few operations on words of 32 tokens.
"""

import functools
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, PRNGKeyArray, UInt32

from relibra_jax.contract.plan import inverse_permutation
from relibra_jax.planning.annealing import anneal, cooling, draw_bits, integers, scaled_noise
from relibra_jax.planning.lane_mean import fourth_power, waited_rows
from relibra_jax.planning.token_bits import TokenBits

HOTTEST: Final = 3e-3
COLDEST: Final = 2e-4
"""The initial and final temperature, in units of the balanced compute of a batch."""
CANDIDATES: Final = 8
"""The number of experts of the other node that a step prices."""


class NodeProblem(NamedTuple):
    """The inputs of the search over nodes. Layers are the last axis."""

    share: Float[jax.Array, "E M L"]
    """The load of each expert at its home, as a multiple of the mean node's load in the batch."""
    offset: Float[jax.Array, "N M L"]
    """The load of each node's residents, which does not depend on homes."""
    tokens: TokenBits
    """The tokens that use each expert at its home; tokens whose node has the expert as a resident are left out."""
    crossing: Float[jax.Array, ""]
    """The time in which all tokens of a node cross, relative to that of its balanced compute."""
    moves: Float[jax.Array, "E N L"]
    """The time of moving each expert to each node, relative to a layer's balanced compute in the batch; 0 for its node
    before the batch."""
    judge: TokenBits | None = None
    """Other tokens, by which the result is compared with the start, because part of the gain on the tokens of the
    search is overfitting. None compares by the same tokens."""

    @property
    def num_nodes(self) -> int:
        """N, the number of nodes."""
        return len(self.offset)


class _State(NamedTuple):
    """Experts in order of position; node ``n`` is positions ``n * size`` to ``(n + 1) * size - 1``."""

    expert: Int[jax.Array, "E L"]
    share: Float[jax.Array, "E M L"]
    bits: UInt32[jax.Array, "E groups N words L"]
    moves: Float[jax.Array, "E N L"]
    load: Float[jax.Array, "N M L"]
    planes: UInt32[jax.Array, "N planes groups N words L"]
    """The number of experts that each token has on each node, in binary."""
    visits: Float[jax.Array, "N groups N L"]
    """The tokens that visit each node, by the node that holds them; 0 for the node itself."""
    time: Float[jax.Array, " L"]
    """The objective without moves."""


def move_times(
    old_node: Int[jax.Array, "E L"], move: Float[jax.Array, ""] | float, *, num_nodes: int
) -> Float[jax.Array, "E N L"]:
    """Return the time of moving each expert to each node, if every move to another node takes equally long.

    Args:
        old_node: the node of each expert before the batch.
        move: the time of one move.
        num_nodes: N, the number of nodes.

    >>> move_times(jnp.array([[0], [1]]), 0.5, num_nodes=2)[..., 0].tolist()
    [[0.0, 0.5], [0.5, 0.0]]
    """
    return jnp.where(old_node[:, None] == jnp.arange(num_nodes)[None, :, None], 0, jnp.float32(move))


def take_experts(order: Int[jax.Array, "E L"], array: jax.Array) -> jax.Array:
    """Put the rows of an array ``[E ... L]`` in an order of each layer's experts.

    Args:
        order: the experts of each layer in their order.
        array: the array; experts are the first axis and layers the last.
    """
    return jnp.take_along_axis(array, _aligned(order, array.ndim), axis=0)


def search_nodes(
    problem: NodeProblem,
    start: Int[jax.Array, "E L"],
    key: PRNGKeyArray,
    *,
    top_k: int,
    steps: int,
    hottest: Float[jax.Array, "*L"] | float = HOTTEST,
) -> Int[jax.Array, "E L"]:
    """Search for the assignment of experts to nodes that minimises modelled time; at least as good as the start.

    Source: ReLibra (arXiv 2605.08639) searches by simulated annealing for load and communication; the module docstring
    states our objective.

    Args:
        problem: the inputs of the search.
        start: the node of each expert from which the search starts, with the same number of experts on each node.
        key: random key, consumed; the same key gives the same result.
        top_k: K, the number of experts of a token.
        steps: the number of annealing steps. The last tenth accepts only improvements.
        hottest: the temperature of the first step, of all layers or of each.

    Returns:
        The node of each expert, in every layer from the better of the search's result and the start.
    """
    result = anneal_nodes(problem, start, key, top_k=top_k, steps=steps, hottest=hottest)
    return better_nodes(problem, start, result, top_k=top_k)


def anneal_nodes(
    problem: NodeProblem,
    start: Int[jax.Array, "E L"],
    key: PRNGKeyArray,
    *,
    top_k: int,
    steps: int,
    hottest: Float[jax.Array, "*L"] | float = HOTTEST,
) -> Int[jax.Array, "E L"]:
    """Search as `search_nodes` does, and return the last assignment, even if it is worse than the start."""
    state = _anneal(problem, _initial_state(problem, start, top_k), key, steps, hottest)
    return jax.vmap(inverse_permutation, 1, 1)(state.expert) // (len(start) // problem.num_nodes)


def better_nodes(
    problem: NodeProblem,
    start: Int[jax.Array, "E L"],
    result: Int[jax.Array, "E L"],
    *,
    top_k: int,
) -> Int[jax.Array, "E L"]:
    """Return the nodes of each layer's experts from the better of two assignments, of equal ones the first.

    Args:
        problem: the inputs of the search. Its judge, if there is one, decides.
        start: the node of each expert.
        result: another node of each expert.
        top_k: K, the number of experts of a token.
    """
    if problem.judge is not None:
        problem = problem._replace(tokens=problem.judge)
    objective = functools.partial(node_objective, problem, top_k=top_k)
    old_objective, new_objective = jax.lax.map(objective, jnp.stack([start, result]))
    return jnp.where((new_objective < old_objective)[None], result, start)


def node_objective(
    problem: NodeProblem, node: Int[jax.Array, "E L"], *, top_k: int
) -> Float[jax.Array, " L"]:
    """Return what the search minimises, for each layer.

    Args:
        problem: the inputs of the search.
        node: the node of each expert.
        top_k: K, the number of experts of a token.
    """
    return _objective(problem, _initial_state(problem, node, top_k))


def _initial_state(problem: NodeProblem, node, top_k: int) -> _State:
    num_nodes, order = problem.num_nodes, jnp.argsort(node, axis=0, stable=True).astype(jnp.int32)
    ordered = functools.partial(take_experts, order)
    share, bits = ordered(problem.share), ordered(problem.tokens.bits)
    by_node = bits.reshape(num_nodes, -1, *bits.shape[1:]).swapaxes(0, 1)
    planes = jnp.zeros((top_k.bit_length(), *by_node.shape[1:]), jnp.uint32)
    planes, _ = jax.lax.scan(lambda planes, bits: (_add(planes, bits), None), planes, by_node)
    other = ~jnp.eye(num_nodes, dtype=bool)[:, None, :, None]
    load = problem.offset + share.reshape(num_nodes, -1, *share.shape[1:]).sum(1)
    visits = jnp.where(other, problem.tokens.weigh(_any(planes)), 0)
    waits = waited_rows(fourth_power(visits).sum((0, 2)), senders=num_nodes, nodes=num_nodes)
    time = load.max(0).sum(0) + problem.crossing * waits.sum(0)
    return _State(order, share, bits, ordered(problem.moves), load, planes.swapaxes(0, 1), visits, time)


def _anneal(problem: NodeProblem, state: _State, key, steps: int, hottest) -> _State:
    nodes = len(state.load)
    size = len(state.expert) // nodes
    options = min(CANDIDATES, size)
    bits = draw_bits(key, (3, steps), (steps, options + 1, 1))
    first = integers(bits[0][0], nodes * size)
    other = (first // size + 1 + integers(bits[0][1], max(nodes - 1, 1))) % nodes
    others = other * size + integers(bits[0][2], size - options + 1)
    noise = scaled_noise(bits[1], cooling(hottest, COLDEST, steps))
    propose = functools.partial(_propose, problem)
    return anneal(state, (first, others), noise, propose=propose, apply=_apply)


class _Swaps(NamedTuple):
    """The swaps of one expert of node p with candidates of node q, and what the nodes would be after each."""

    item: list[jax.Array]
    candidates: list[jax.Array]
    rest_p: UInt32[jax.Array, "planes groups N words L"]
    """The planes of p without the expert."""
    planes_q: UInt32[jax.Array, "planes groups N words L"]
    load_p: Float[jax.Array, "C M L"]
    load_q: Float[jax.Array, "C M L"]
    visits_p: Float[jax.Array, "C groups N L"]
    visits_q: Float[jax.Array, "C groups N L"]
    time: Float[jax.Array, "C L"]


def _propose(problem: NodeProblem, state: _State, draw):
    i, j = draw
    size = len(state.expert) // len(state.load)
    p, q, options = i // size, j // size, min(CANDIDATES, size)
    # The barrier makes all reads come before the writes. Otherwise XLA:CPU would copy the whole state.
    item, candidates, planes_p, planes_q = jax.lax.optimization_barrier(
        (_items(state, i, 1), _items(state, j, options), state.planes[p], state.planes[q])
    )
    rest_p = _subtract(planes_p, item[2][0])
    visits_p = _zero_own_node(p, problem.tokens.weigh(_any(rest_p)[None] | candidates[2]))
    one, several = planes_q[0], _any(planes_q[1:])
    stays_q = several[None] | (one[None] & ~candidates[2])
    visits_q = _zero_own_node(q, problem.tokens.weigh(stays_q | item[2]))
    gain = candidates[1] - item[1]
    load_p, load_q = state.load[p][None] + gain, state.load[q][None] - gain
    moves = candidates[3][:, p] + item[3][:, q] - candidates[3][:, q] - item[3][:, p]
    time = _time(problem, state, p, q, load_p, load_q, visits_p, visits_q)
    swaps = _Swaps(item, candidates, rest_p, planes_q, load_p, load_q, visits_p, visits_q, time)
    return jnp.concatenate([state.time[None], time + moves]), swaps


def _apply(state: _State, draw, swaps: _Swaps, choice: Int[jax.Array, " L"]) -> _State:
    i, j = draw
    size = len(state.expert) // len(state.load)
    p, q, options = i // size, j // size, len(swaps.load_p)

    def swap(array, item, candidates):
        index = _aligned(choice[None], array.ndim)
        partner = jnp.take_along_axis(candidates, jnp.maximum(index, 0), axis=0)
        is_chosen = index == jnp.arange(options).reshape(-1, *[1] * (array.ndim - 1))
        array = jax.lax.dynamic_update_slice_in_dim(array, jnp.where(is_chosen, item, candidates), j, axis=0)
        return jax.lax.dynamic_update_slice_in_dim(array, jnp.where(index < 0, item, partner), i, axis=0)

    def select(candidates, old):
        partner = jnp.maximum(_aligned(choice[None], candidates.ndim), 0)
        partner = jnp.take_along_axis(candidates, partner, axis=0)[0]
        return jnp.where(_aligned(choice, old.ndim) < 0, old, partner)

    expert, share, bits, moves = map(swap, state[:4], swaps.item, swaps.candidates)
    # Without a swap, the incoming item is the item itself. Subtracting it from q and adding it again changes nothing,
    # because planes count modulo a power of two.
    leaving = swaps.item[2][0]
    incoming = select(swaps.candidates[2], leaving)
    planes_p, planes_q = _add(swaps.rest_p, incoming), _add(_subtract(swaps.planes_q, incoming), leaving)
    planes = state.planes.at[p].set(planes_p).at[q].set(planes_q)
    load = (
        state.load.at[p]
        .set(select(swaps.load_p, state.load[p]))
        .at[q]
        .set(select(swaps.load_q, state.load[q]))
    )
    visits = state.visits.at[p].set(select(swaps.visits_p, state.visits[p]))
    visits = visits.at[q].set(select(swaps.visits_q, state.visits[q]))
    return _State(expert, share, bits, moves, load, planes, visits, select(swaps.time, state.time))


def _items(state: _State, first, count: int):
    """Return the items at ``count`` positions from ``first``."""
    return [jax.lax.dynamic_slice_in_dim(array, first, count, axis=0) for array in state[:4]]


def _objective(problem: NodeProblem, state: _State) -> Float[jax.Array, " L"]:
    nodes = len(state.load)
    moves = jnp.trace(state.moves.reshape(nodes, -1, *state.moves.shape[1:]).sum(1))
    return state.time + moves


def _time(
    problem: NodeProblem,
    state: _State,
    p: Int[jax.Array, ""],
    q: Int[jax.Array, ""],
    load_p: Float[jax.Array, "C M L"],
    load_q: Float[jax.Array, "C M L"],
    visits_p: Float[jax.Array, "C groups N L"],
    visits_q: Float[jax.Array, "C groups N L"],
) -> Float[jax.Array, "C L"]:
    """Return the time with new loads and visits for the nodes p and q."""
    nodes = len(state.load)
    index = jnp.arange(nodes)[:, None, None]
    others = (index != p) & (index != q)
    rest_load = jnp.where(others, state.load, 0).max(0)
    # The barriers keep the sums out of the fusions, in which XLA:CPU would not vectorise them.
    largest = jax.lax.optimization_barrier(jnp.maximum(jnp.maximum(load_p, load_q), rest_load[None]))
    rest = fourth_power(jnp.where(others[..., None], state.visits, 0)).sum((0, 2))
    crossings = rest[None] + fourth_power(visits_p).sum(2) + fourth_power(visits_q).sum(2)
    waits = jax.lax.optimization_barrier(waited_rows(crossings, senders=nodes, nodes=nodes))
    return largest.sum(1) + problem.crossing * waits.sum(1)


def _zero_own_node(node, visits: Float[jax.Array, "C groups N L"]):
    """Set the visits of tokens on the node itself to 0, because they do not cross."""
    is_node = jnp.arange(visits.shape[2]) == node
    return jnp.where(is_node[None, None, :, None], 0, visits)


def _aligned(array, ndim: int):
    """Insert axes of length 1 before the last axis until the array has ``ndim`` axes."""
    return array.reshape(*array.shape[:-1], *[1] * (ndim - array.ndim), array.shape[-1])


def _any(planes: UInt32[jax.Array, "planes ..."]) -> UInt32[jax.Array, "..."]:
    """Return the tokens whose count is not 0."""
    return jax.lax.reduce(planes, jnp.uint32(0), jax.lax.bitwise_or, (0,))


def _add(planes, bits):
    """Add 1 to the counts of the tokens in ``bits``."""
    result = []
    for plane in planes:
        result.append(plane ^ bits)
        bits = plane & bits
    return jnp.stack(result)


def _subtract(planes, bits):
    """Subtract 1 from the counts of the tokens in ``bits``, which must be at least 1."""
    result = []
    for plane in planes:
        result.append(plane ^ bits)
        bits = ~plane & bits
    return jnp.stack(result)
