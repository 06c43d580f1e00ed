"""Counts of the responses that have ended, which planning needs while the others are still being sampled.

The counts of a sample are small, however long it is. With them goes a sample of the routes, as many as the plan of the
whole batch reads, so that both searches are the same compiled program. The routes themselves stay where they are.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Int, Integer

from experiments.rl.processes import on_every_host
from relibra_jax import Batch
from relibra_jax.contract.planner import Routes
from relibra_jax.contract.replay import sample_load
from relibra_jax.contract.types import EMPTY, Array, RoutingReplay
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.planning.routes import TOKENS, token_places


def count_on_ranks(replay: RoutingReplay, ended: Bool[np.ndarray, " B"], parallel: ExpertParallel) -> Batch:
    """Count what every rank has of the samples that have ended; the others count 0.

    Args:
        replay: the routing of the samples so far, sharded over the ranks, with the tokens of a sample at its front.
        ended: True for samples that have ended, equal on all processes.
        parallel: the mesh over whose ranks samples are sharded.

    Returns:
        The counts with a sample of the routes, on the host of every process.
    """
    counted = _count(*replay, jnp.asarray(ended), parallel=parallel)
    load, lengths = on_every_host(counted, parallel.mesh)
    sample, number = token_places(lengths, TOKENS)
    taken = _take(replay.expert_ids, jnp.asarray(sample), jnp.asarray(number, jnp.int32), parallel=parallel)
    routes = Routes(np.asarray(on_every_host(taken, parallel.mesh)), sample)
    return Batch(load, lengths, routes, sequence_length=float(replay.mask.shape[1]))


def join_counts(parts: Sequence[Batch], samples: int) -> Batch:
    """Join the counts of successive parts of a batch, whose further samples have not ended yet.

    Args:
        parts: the counts of each part.
        samples: B, the number of samples of the batch. Those beyond it fill up the last part, and are left out.

    Returns:
        The counts of the batch, with as many sampled routes as each part has.
    """
    first = np.cumsum([0, *(len(part.lengths) for part in parts)])
    load, lengths = (
        _fill(np.concatenate(leaves), samples)
        for leaves in zip(*((part.sample_load, part.lengths) for part in parts), strict=True)
    )
    # Every token of the batch is taken from the part that has it. A part samples as many tokens as the batch.
    tokens = np.array([part.lengths.sum() for part in parts])
    number, token = token_places(tokens, TOKENS)
    ids, sample = [], []
    for part in np.unique(number):
        routes = parts[part].routes
        assert routes is not None
        # The part's sampled route from the interval that this token of the part is in.
        chosen = ((token[number == part] + 1) * TOKENS - 1) // max(tokens[part], 1)
        ids.append(routes.expert_ids[chosen])
        of_part = routes.sample[chosen]
        sample.append(np.where(of_part == EMPTY, EMPTY, of_part + first[part]).astype(np.int32))
    routes = Routes(np.concatenate(ids), np.concatenate(sample))
    return Batch(load, lengths, routes, sequence_length=parts[0].sequence_length)


def _fill(array: np.ndarray, samples: int) -> np.ndarray:
    """Cut an array ``[b, ...]`` to ``samples`` rows, or fill it up with zeros."""
    missing = max(samples - len(array), 0)
    return np.concatenate([array[:samples], np.zeros((missing, *array.shape[1:]), array.dtype)])


@functools.partial(jax.jit, static_argnames="parallel")
def _count(
    ids: Integer[Array, "B T L K"],
    mask: Bool[Array, "B T"],
    ended: Bool[Array, " B"],
    *,
    parallel: ExpertParallel,
) -> tuple[Int[jax.Array, "B L E"], Int[jax.Array, " B"]]:
    spec = parallel.token_spec

    @functools.partial(jax.shard_map, mesh=parallel.mesh, in_specs=(spec,) * 3, out_specs=(spec, spec))
    def on_rank(ids, mask, ended):
        mask = mask & ended[:, None]
        load = sample_load(RoutingReplay(ids, mask), num_experts=parallel.topology.num_experts)
        return load, mask.sum(1, dtype=jnp.int32)

    return on_rank(ids, mask, ended)


@functools.partial(jax.jit, static_argnames="parallel")
def _take(
    ids: Integer[Array, "B T L K"],
    sample: Int[Array, " Q"],
    number: Int[Array, " Q"],
    *,
    parallel: ExpertParallel,
) -> Integer[jax.Array, "Q L K"]:
    """Take the routes of some tokens, each from the rank that has its sample; zeros for EMPTY."""

    @functools.partial(
        jax.shard_map,
        mesh=parallel.mesh,
        in_specs=(parallel.token_spec, PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(),
    )
    def on_rank(ids, sample, number):
        axes = parallel.token_spec[0]
        row = sample - jax.lax.axis_index(axes) * len(ids)
        is_mine = (sample != EMPTY) & (row >= 0) & (row < len(ids))
        routes = ids[jnp.clip(row, 0, len(ids) - 1), number].astype(jnp.int32)
        return jax.lax.psum(jnp.where(is_mine[:, None, None], routes, 0), axes).astype(ids.dtype)

    return on_rank(ids, sample, number)
