"""Responses on the host: every process has their tokens, and the routes of its own samples alone.

Routes are most of a batch's bytes. Each process keeps those that its ranks have sampled, or that it got from an engine,
until `relibra_jax.nnx.PreparedBatch.to_ranks` brings them to the ranks that train on them. With one process, it has
all.
"""

from collections.abc import Sequence
from typing import Final

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int, Shaped

from experiments.rl.generation import Responses
from experiments.rl.processes import on_every_host, process_count
from relibra_jax.contract.types import EMPTY, Array
from relibra_jax.execution.plan_agreement import add_up

CHUNK_BYTES: Final = 1 << 26
"""The bytes of routes that `whole_routes` sends at once, of all samples together."""


def own_samples(samples: int, mesh: Mesh) -> Int[np.ndarray, " b"] | None:
    """Return the numbers of the samples that this process has: an equal part for each of its ranks.

    None for all samples, with one process.
    """
    if process_count() == 1:
        return None
    ranks = [device.process_index == jax.process_index() for device in mesh.devices.ravel()]
    return np.flatnonzero(np.repeat(ranks, -(-samples // len(ranks)))[:samples])


def to_hosts(responses: Responses, mesh: Mesh) -> Responses:
    """Copy responses from the ranks to the hosts, the routes of samples to the process of their rank alone."""
    ids = responses.expert_ids
    own = own_samples(len(ids), mesh)
    if own is None:
        return jax.device_get(responses)
    assert isinstance(ids, jax.Array)
    shards = {shard.index[0].start or 0: shard for shard in ids.addressable_shards}
    rows = np.concatenate([np.asarray(shards[start].data) for start in sorted(shards)])
    rest = on_every_host(responses._replace(expert_ids=responses.ended), mesh)
    return rest._replace(expert_ids=rows, own=own)


def join_responses(parts: Sequence[Responses]) -> Responses:
    """Join successive parts of a batch."""
    first = np.cumsum([0, *(len(part.tokens) for part in parts)])
    owns = [part.own + start for part, start in zip(parts, first, strict=False) if part.own is not None]
    joined = jax.tree.map(
        lambda *leaves: np.concatenate(leaves), *(part._replace(own=None) for part in parts)
    )
    return joined._replace(own=np.concatenate(owns) if owns else None)


def choose_samples(responses: Responses, samples: Int[Array, " b"]) -> Responses:
    """Return some samples, in this order."""
    own, rows = responses.own, np.asarray(samples)
    if own is not None:
        row = np.full(len(responses.tokens), EMPTY)
        row[own] = np.arange(len(own))
        own, rows = np.flatnonzero(row[samples] != EMPTY), row[samples][row[samples] != EMPTY]
    ids = responses.expert_ids[rows]
    chosen = jax.tree.map(
        lambda leaf: leaf[samples], responses._replace(expert_ids=responses.ended, own=None)
    )
    return chosen._replace(expert_ids=ids, own=own)


def whole_routes(responses: Responses) -> Shaped[np.ndarray, "B T L K"]:
    """Return the routes of all samples. All processes call it; each then has them in the memory of its host."""
    ids, own = np.asarray(responses.expert_ids), responses.own
    if own is None:
        return ids
    whole = np.zeros((len(responses.tokens), *ids.shape[1:]), ids.dtype)
    whole[own] = ids
    step = max(CHUNK_BYTES // max(whole[:1].nbytes, 1), 1)
    return np.concatenate([add_up(whole[first : first + step]) for first in range(0, len(whole), step)])
