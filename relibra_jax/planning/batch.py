"""What is known of a batch before it runs: token counts of each sample, and the routes of sampled tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Integer, Num

from relibra_jax.contract.check import check_load
from relibra_jax.contract.planner import Planner, Transitions
from relibra_jax.contract.replay import sample_load
from relibra_jax.contract.types import EMPTY, Array, Assignment, Price, RoutingReplay, Topology, check_shape
from relibra_jax.planning.routes import Routes, sample_routes
from relibra_jax.planning.transitions import count_transitions
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.limits import INT32_MAX


class Batch(NamedTuple):
    """The samples of a batch, as planning sees them. Integers may have any integer dtype."""

    sample_load: Integer[Array, "B L E"]
    """The number of token copies of each sample for each expert, from `relibra_jax.sample_counts` in rollout workers or
    from `relibra_jax.sample_load`."""
    lengths: Integer[Array, " B"]
    """The number of real tokens of each sample."""
    routes: Routes | None = None
    """Sampled tokens with their experts. Without them homes are searched for balance, and crossings are counted in
    token copies instead of tokens. On one node the same holds for the rows between its ranks."""
    transitions: Transitions | None = None
    """Transition counts, for planners with ``uses_transitions``."""
    sequence_length: Float[Array, ""] | float | None = None
    """T, the number of token positions of a sample in the replay, to which sequences that are not packed are padded.
    None for the longest sample."""
    predicted_load: Num[Array, "B L E"] | None = None
    """The token copies of each sample for each expert that a predictor expects, for planners with ``uses_predictions``.
    The plan is made from them, and its quotas fit ``sample_load``. None plans from the true loads."""


@checks_arguments
def count_batch(
    replay: RoutingReplay, topology: Topology, *, with_routes: bool = True, with_transitions: bool = False
) -> Batch:
    """Count what planning needs from the routing replay of a batch.

    Routes are counted sample by sample in their own dtype, so that this takes little more memory than the counts, even
    if the ids are a memory-mapped array. The function works under jit.

    Args:
        replay: the routing of all samples of the batch, which `relibra_jax.contract.replay.check_replay` accepts.
        topology: the expert-parallel group.
        with_routes: whether to sample routes. They are needed if the price has crossings.
        with_transitions: whether to count transitions, for planners with ``uses_transitions``.

    Returns:
        The batch.

    >>> topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=0)
    >>> replay = RoutingReplay(np.zeros((2, 8, 3, 1), np.uint8), np.arange(8) < np.array([[8], [5]]))
    >>> batch = count_batch(replay, topology)
    >>> batch.sample_load[:, 0].tolist(), batch.lengths.tolist()
    ([[8, 0, 0, 0], [5, 0, 0, 0]], [8, 5])
    """
    mask = replay.mask
    return Batch(
        sample_load(replay, num_experts=topology.num_experts),
        mask.sum(1, dtype=np.int32),
        sample_routes(replay) if with_routes else None,
        count_transitions(replay, num_experts=topology.num_experts) if with_transitions else None,
        sequence_length=float(mask.shape[1]),
    )


@checks_arguments
def join_batches(parts: Sequence[Batch]) -> Batch:
    """Join the counts of several workers to those of the whole batch, whose samples follow one another.

    Args:
        parts: the counts of each worker, ``Batch(*sample_counts(...))`` of `relibra_jax.sample_counts`, in the order of
            the samples in the batch. Either all of them have routes, or none.

    Returns:
        The counts of the whole batch, as NumPy arrays, with the routes numbered by its samples.

    Raises:
        ValueError: if there are no parts, if their numbers of layers or experts differ, if only some have routes, or if
            the routes of a part do not belong to its counts (`check_routes`).

    >>> routes = Routes(np.array([[[1]]]), np.array([0]))
    >>> part = Batch(np.array([[[0, 3]]], np.uint8), np.array([3]), routes)
    >>> batch = join_batches([part, part])
    >>> batch.sample_load.tolist(), batch.lengths.tolist(), batch.routes.sample.tolist()
    ([[[0, 3]], [[0, 3]]], [3, 3], [0, 1])
    """
    if not parts:
        raise ValueError("parts must have at least one batch")
    for number, part in enumerate(parts):
        samples = len(part.lengths)
        check_shape(
            f"parts[{number}]: sample_load",
            part.sample_load.shape,
            (samples, *parts[0].sample_load.shape[1:]),
        )
        if (part.routes is None) != (parts[0].routes is None):
            raise ValueError(
                f"parts[0] and parts[{number}]: only one of them has routes; sample all workers or none"
            )
        check_routes(part)
    starts = np.cumsum([0, *(len(part.lengths) for part in parts)])
    routes = [
        Routes(
            np.asarray(part.routes.expert_ids),
            np.where(part.routes.sample == EMPTY, EMPTY, part.routes.sample + start),
        )
        for part, start in zip(parts, starts[:-1], strict=True)
        if part.routes is not None
    ]
    transitions = [part.transitions for part in parts if part.transitions is not None]
    lengths = [part.sequence_length for part in parts if part.sequence_length is not None]
    return Batch(
        np.concatenate([part.sample_load for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        jax.tree.map(lambda *leaves: np.concatenate(leaves), *routes) if routes else None,
        jax.tree.map(lambda *leaves: sum(leaves), *transitions) if len(transitions) == len(parts) else None,
        max(map(float, lengths)) if len(lengths) == len(parts) else None,
    )


def count_for_planner(
    replay: RoutingReplay, planner: Planner, topology: Topology, prices: Sequence[Price]
) -> Batch:
    """Count what a planner needs to plan for some prices, as `count_batch` does, and nothing else.

    Args:
        replay: the routing of all samples of the batch.
        planner: the planner, which decides whether transitions are counted.
        topology: the expert-parallel group.
        prices: the price of each stage. Routes are sampled if any of them may pay for crossings.

    Returns:
        The batch.
    """
    paid = any(may_be_positive(price.visit(topology)) for price in prices)
    return count_batch(replay, topology, with_routes=paid, with_transitions=planner.uses_transitions)


def may_be_positive(value: Array | float) -> bool:
    """Return whether a price is positive, or traced and therefore unknown."""
    return isinstance(value, jax.core.Tracer) or float(value) > 0


def widen_counts(batch: Batch, topology: Topology) -> Batch:
    """Convert counts to int32, so that sums over samples do not overflow the small integers that workers send.

    Args:
        batch: the batch, with counts in any integer dtypes.
        topology: the expert-parallel group.

    Returns:
        The batch with counts in int32.

    Raises:
        ValueError: if ``sample_load`` is not ``[B, L, E]`` with B the length of ``lengths`` and E the experts of the
            topology, if ``predicted_load`` has another shape, or if int32 cannot hold a count.
    """
    load, lengths = _to_int32("sample_load", batch.sample_load), _to_int32("lengths", batch.lengths)
    check_shape("sample_load", load.shape, (len(lengths), *load.shape[1:2], topology.num_experts))
    if batch.predicted_load is not None:
        check_shape("predicted_load", batch.predicted_load.shape, load.shape)
    return batch._replace(sample_load=load, lengths=lengths)


def _to_int32(name: str, counts: Num[Array, "*counts"]) -> Int[jax.Array, "*counts"]:
    if not jnp.issubdtype(counts.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, not {counts.dtype}{list(counts.shape)}")
    if counts.size and not isinstance(counts, jax.core.Tracer) and jnp.iinfo(counts.dtype).max > INT32_MAX:
        place = np.unravel_index(np.argmax(counts), counts.shape)
        if counts[place] > INT32_MAX:
            raise ValueError(
                f"{name}{list(map(int, place))} is {counts[place]}, but a count of a sample must be at most {INT32_MAX}"
                " (int32)"
            )
    return jnp.asarray(counts, jnp.int32)


def check_routes(batch: Batch) -> None:
    """Raise ValueError unless the sampled routes of a batch can be of the samples that it counts.

    A sampled token is one of the tokens of its sample, so the counts of that sample have a token copy for each of its
    experts. Of many tokens, about 2,048 at even distances are compared with the counts: on recorded routing, 0.4% of
    the ids of a token have no copy in another sample. Traced values are not checked.

    Args:
        batch: the batch.

    Raises:
        ValueError: if the routes have another number of layers than the counts, if a sample or an expert does not
            exist, or if a token uses an expert of which its sample has no token copy.

    >>> check_routes(Batch(np.array([[[0, 3]]]), np.array([3]), Routes(np.array([[[0]]]), np.array([0]))))
    Traceback (most recent call last):
    ValueError: routes, token 0 of 1: it is of sample 0 and uses expert 0 in layer 0, where that sample has no token \
copy: the routes are of other samples or layers than the counts
    """
    if batch.routes is None or any(
        isinstance(leaf, jax.core.Tracer) for leaf in (batch.sample_load, *batch.routes)
    ):
        return
    load, ids, sample = map(np.asarray, (batch.sample_load, *batch.routes))
    samples, layers, experts = load.shape
    check_shape("routes.expert_ids", ids.shape, (len(sample), layers, *ids.shape[2:]))
    for name, values, least, most in (("sample", sample, EMPTY, samples), ("expert_ids", ids, 0, experts)):
        wrong = (values < least) | (values >= most)
        if wrong.any():
            place = tuple(np.argwhere(wrong)[0].tolist())
            raise ValueError(
                f"routes.{name}{list(place)} is {values[place]}, but must be in {least}..{most - 1}"
            )
    token = np.flatnonzero(sample != EMPTY)
    token = token[:: -(-len(token) // 2048) or 1]
    for layer in range(layers):
        used = ids[token, layer]
        missing = load[sample[token][:, None], layer, used] == 0
        if missing.any():
            row, k = np.argwhere(missing)[0].tolist()
            raise ValueError(
                f"routes, token {token[row]} of {len(sample)}: it is of sample {sample[token[row]]} and uses expert"
                f" {used[row, k]} in layer {layer}, where that sample has no token copy: the routes are of other"
                " samples or layers than the counts"
            )


def check_counts(batch: Batch, starts: Sequence[Assignment], topology: Topology) -> None:
    """Raise ValueError unless planners can use the loads of the first assignments. Traced values are not checked.

    Args:
        batch: the batch.
        starts: the first assignment of every stage.
        topology: the expert-parallel group.

    Raises:
        ValueError: under the conditions of `relibra_jax.contract.check.check_load`.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((batch.sample_load, starts))):
        return
    load = np.asarray(batch.sample_load)
    if load.min(initial=0) >= 0 and load.sum((0, 2), dtype=np.int64).max(initial=0) < 2**31:
        return
    load = np.concatenate([load, np.zeros_like(load[:1])])  # an EMPTY position takes the last row
    for start in starts:
        by_rank = np.stack([load[ranks].sum(2) for ranks in np.asarray(start.sample)])
        check_load(np.moveaxis(by_rank, 3, 1), topology)


@checks_arguments
def fill_unfinished(batch: Batch, finished: Bool[Array, " B"]) -> Batch:
    """Replace the counts of unfinished samples of a batch by those of finished samples. Works under jit.

    An unfinished sample gets the counts of the finished sample nearest to it in the batch; of two equally near ones,
    the earlier. Responses to one prompt are neighbours in the batch, and their routing is similar. Single samples are
    used instead of a mean so that micro-batches are as uneven as they will be.

    Args:
        batch: the batch whose rollout still runs. Entries of unfinished samples are not read.
        finished: whether each sample has finished. If none has, all counts are 0.

    Returns:
        The batch with the counts and lengths of all samples, int32. Use the homes and residents of its plan as the
        ``start`` of the plan from the complete batch.

    Raises:
        ValueError: if the arrays have different numbers of samples.

    >>> batch = Batch(jnp.array([[[9, 1]], [[0, 0]], [[0, 0]], [[2, 6]]]), jnp.array([5, 0, 0, 4]))
    >>> batch = fill_unfinished(batch, jnp.array([True, False, False, True]))
    >>> batch.sample_load[:, 0].tolist(), batch.lengths.tolist()
    ([[9, 1], [9, 1], [2, 6], [2, 6]], [5, 5, 4, 4])
    """
    check_shape("lengths", batch.lengths.shape, batch.sample_load.shape[:1])
    check_shape("finished", finished.shape, batch.sample_load.shape[:1])
    index = jnp.arange(len(batch.lengths), dtype=jnp.int32)
    beyond = 2 * len(index)
    earlier = jax.lax.cummax(jnp.where(finished, index, -beyond))
    later = jax.lax.cummin(jnp.where(finished, index, beyond), reverse=True)
    nearest = jnp.where(index - earlier <= later - index, earlier, later)
    nearest = jnp.where(jnp.asarray(finished).any(), nearest, EMPTY)

    def of_nearest(counts: Array) -> Int[jax.Array, "B ..."]:
        counts = jnp.asarray(counts, jnp.int32)
        return counts.at[nearest].get(mode="fill", fill_value=0, wrap_negative_indices=False)

    return batch._replace(sample_load=of_nearest(batch.sample_load), lengths=of_nearest(batch.lengths))
