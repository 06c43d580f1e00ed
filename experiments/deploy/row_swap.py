"""The exchange between M attention ranks and N expert ranks on disjoint devices, over the mesh that has them all.

Source: the transfers of MegaScale-Infer (arXiv 2504.02263), which send from M attention devices to N expert devices and
back. Attention and experts run programs of their own, each on the mesh of its devices. A *swap* is a third program, on
the joint mesh of M + N ranks: every attention rank sends rows to every expert rank, while every expert rank sends
results to every attention rank. The programs share their arrays, so nothing is copied in between.

A swap takes max(M, N) rounds. In round r, attention rank i is the peer of expert rank (i + r) mod max(M, N), if there
is one: its rows and the results of that rank travel at the same time, and no other pair uses their links.
"""

import functools
from collections.abc import Sequence
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from relibra_jax.contract.types import Topology
from relibra_jax.execution.mesh import expert_mesh
from relibra_jax.support.limits import check_integer

RANK: Final = "rank"
"""The axis of the mesh of the experts and of the joint mesh."""


class Meshes(NamedTuple):
    """The meshes of the attention ranks, of the expert ranks, and of both, attention first."""

    attention: Mesh
    experts: Mesh
    joint: Mesh


def split_devices(devices: Sequence[jax.Device], *, attention_ranks: int) -> Meshes:
    """Make the meshes of attention and experts on disjoint devices.

    Args:
        devices: the devices, those of attention first.
        attention_ranks: M, the number of attention ranks. All other devices are expert ranks.

    Raises:
        ValueError: if one of the two sides would have no device.
    """
    check_integer("attention_ranks", attention_ranks, least=1, most=len(devices) - 1)
    experts, joint = (
        Mesh(np.asarray(part, dtype=object), RANK, axis_types=(AxisType.Auto,))
        for part in (devices[attention_ranks:], devices)
    )
    return Meshes(
        expert_mesh(attention_topology(attention_ranks), devices=devices[:attention_ranks]), experts, joint
    )


def attention_topology(ranks: int) -> Topology:
    """Return the topology of attention ranks, which hold no experts of the model; it has an expert for each rank."""
    return Topology(num_nodes=1, ranks_per_node=ranks, num_experts=ranks, replica_slots=0)


def by_rank(mesh: Mesh) -> NamedSharding:
    """Return the sharding of arrays whose first axis is that of the ranks of a mesh."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


@functools.cache
def blank(mesh: Mesh, *shape: int, dtype: np.dtype) -> jax.Array:
    """Return zeros ``[ranks, *shape]``, for a side that has nothing to send. They are made once and never written."""
    return jnp.zeros((mesh.size, *shape), dtype, device=by_rank(mesh))


def swap(rows: PyTree[jax.Array], results: jax.Array, meshes: Meshes) -> tuple[PyTree[jax.Array], jax.Array]:
    """Send rows from attention to experts, and results from experts to attention, at the same time.

    The call does not wait for the devices.

    Args:
        rows: arrays ``[M, N, ...]`` on the mesh of attention, sharded along M: the rows of each attention rank for each
            expert rank.
        results: an array ``[N, M, ...]`` on the mesh of the experts, sharded along N, likewise.
        meshes: the meshes.

    Returns:
        The rows as arrays ``[N, M, ...]`` on the mesh of the experts, and the results as an array ``[M, N, ...]`` on
        that of attention, both sharded along their first axis.
    """
    joined = jax.tree.map(lambda sent: _join(sent, _blank_like(sent, meshes.experts), meshes.joint), rows)
    back = _join(_blank_like(results, meshes.attention), results, meshes.joint)
    received, returned = _swap(joined, back, mesh=meshes.joint, attention_ranks=meshes.attention.size)
    return jax.tree.map(lambda array: _part(array, meshes.experts), received), _part(
        returned, meshes.attention
    )


def _blank_like(array: jax.Array, mesh: Mesh) -> jax.Array:
    return blank(mesh, *array.shape[1:], dtype=array.dtype)


def _join(attention: jax.Array, experts: jax.Array, mesh: Mesh) -> jax.Array:
    """Return the array of all ranks whose parts are those of two meshes."""
    shape = (mesh.size, *attention.shape[1:])
    parts = [shard.data for array in (attention, experts) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, by_rank(mesh), parts)


def _part(array: jax.Array, mesh: Mesh) -> jax.Array:
    """Return the part of an array of all ranks that is on one of the two meshes."""
    devices = set(mesh.devices.flat)
    parts = [shard.data for shard in array.addressable_shards if shard.device in devices]
    return jax.make_array_from_single_device_arrays((mesh.size, *array.shape[1:]), by_rank(mesh), parts)


@functools.partial(jax.jit, static_argnames=("mesh", "attention_ranks"))
def _swap(
    rows: PyTree[jax.Array], results: jax.Array, *, mesh: Mesh, attention_ranks: int
) -> tuple[PyTree[jax.Array], jax.Array]:
    """Swap on the joint mesh. The rows of expert ranks and the results of attention ranks are blank and stay there."""
    expert_ranks = mesh.size - attention_ranks
    rounds = max(attention_ranks, expert_ranks)

    def on_rank(rows: PyTree[jax.Array], results: jax.Array) -> tuple[PyTree[jax.Array], jax.Array]:
        rank = jax.lax.axis_index(RANK)
        received = jax.tree.map(lambda sent: _room(sent, attention_ranks), rows)
        returned = _room(results, expert_ranks)
        for shift in range(rounds):
            pairs = [
                (one, attention_ranks + peer)
                for one in range(attention_ranks)
                if (peer := (one + shift) % rounds) < expert_ranks
            ]
            # The peer of this rank, where it has one; other ranks neither send nor receive.
            expert, attention = (rank + shift) % rounds, (rank - attention_ranks - shift) % rounds
            received = jax.tree.map(
                functools.partial(_send, to=expert, pairs=pairs, at=attention), rows, received
            )
            back = [pair[::-1] for pair in pairs]
            returned = _send(results, returned, to=attention, pairs=back, at=expert)
        return received, returned

    spec = PartitionSpec(RANK)
    return jax.shard_map(on_rank, mesh=mesh, in_specs=spec, out_specs=spec)(rows, results)


def _room(sent: jax.Array, peers: int) -> jax.Array:
    return jax.lax.pcast(jnp.zeros((1, peers, *sent.shape[2:]), sent.dtype), RANK, to="varying")


def _send(
    sent: jax.Array,
    received: jax.Array,
    *,
    to: jax.Array,
    pairs: list[tuple[int, int]],
    at: jax.Array,
) -> jax.Array:
    """Send the part ``to`` of a rank to its peer among ``pairs``, and write what comes at place ``at``, if there is."""
    part = jax.lax.dynamic_index_in_dim(sent, to, axis=1, keepdims=False)
    arrived = jax.lax.ppermute(part, RANK, pairs)
    return received.at[:, at].set(arrived, mode="drop")
