"""Residents: copies of experts that stay for a whole optimizer update, pushed before it, their gradients returned after
it.

Weights do not change between two optimizer steps, so a copy that a rank needs in every micro-batch crosses the slow
network once an update, not once a micro-batch, and so does the sum of its gradients::

    residents = push_residents(experts, plan, parallel, dtype=...)            before the first micro-batch
    gradients of experts and of residents, separate inputs, summed in float32   each micro-batch
    gradients = return_gradients(sum of the residents' gradients, gradients, plan, ...)   after the last one
    divide, clip, step                                                          residents are no parameters

The way is that of `relibra_jax.resident_push`. `return_gradients` is the push's transpose, as JAX takes it, in the
dtype of the accumulated gradients. Residents have no optimizer state and are in no checkpoint.

Residents are sharded along an FSDP axis as homes are. Over data-parallel axes every copy of the group holds its own, so
that gradients are summed over them once an update, when they return.
"""

import functools
import math
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import DTypeLike, Float, Int, Integer, PyTree

from relibra_jax.execution.mesh import RANKS, vary_over, varying_axes
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.plan_guard import one_or_nan
from relibra_jax.execution.resident_exchange import exchange_residents, in_chunks
from relibra_jax.plan import resident_experts
from relibra_jax.resident_push import PushSizes, push_fits, push_tables
from relibra_jax.types import Array, Plan, Topology, check_shape

CHUNK_BYTES: Final = 1 << 30
"""Bytes that one exchange of a push fills on a rank; what is more follows in further ones."""


class Residents(NamedTuple):
    """Residents of one optimizer update, for loops that push by themselves; `check_residents` refuses old ones."""

    weights: Float[Array, "L *copies N G B three D F"]
    """As `push_residents` returns them."""
    step: Int[Array, ""]
    """The optimizer's step at which they were pushed."""
    experts: Int[Array, "L N G B"]
    """The expert in each slot; EMPTY for none."""


def check_residents(
    residents: Residents, step: Integer[Array, ""] | int, plan: Plan, topology: Topology
) -> None:
    """Raise unless residents are those of a plan and of the step that the optimizer is at. Runs on the host.

    Args:
        residents: the residents that a step is about to use.
        step: the optimizer's step now, ``optimizer.step`` with Flax.
        plan: the plan of the batch.
        topology: the expert-parallel group.

    Raises:
        ValueError: if they are of another step, with both; or a slot holds another expert, with both.
    """
    pushed, now = int(residents.step), int(step)
    if pushed != now:
        raise ValueError(
            f"residents were pushed at optimizer step {pushed}, the optimizer is at step {now}: push them again, since"
            " the weights at home have changed"
        )
    held, wanted = np.asarray(residents.experts), np.asarray(resident_experts(plan, topology))
    check_shape("residents.experts", held.shape, wanted.shape)
    if (held != wanted).any():
        place = tuple(np.argwhere(held != wanted)[0].tolist())
        raise ValueError(
            "layer {}, node {}, local rank {}, resident slot {}".format(*place)
            + f": holds expert {held[place]}, the plan has {wanted[place]} there: push residents of this plan"
        )


def push_residents(
    experts: PyTree,
    plan: Plan,
    parallel: ExpertParallel,
    *,
    dtype: DTypeLike | None = None,
    fsdp_axis: str | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Float[jax.Array, "L *copies N G B three D F"]:
    """Bring experts from their homes to the resident slots of all layers, exactly those that the plan names. Works
    under jit.

    Args:
        experts: the home experts of all L layers in order: any tree of arrays ``[N, G, H, 3, D, F]``, or
            ``[l, N, G, H, 3, D, F]`` where layers are stacked.
        plan: the plan of the batch.
        parallel: how plans are run; its capacities say how large the buffers are.
        dtype: the dtype in which weights travel and are held, that of the computation; that of the experts when None.
        fsdp_axis: the mesh axis over which the experts are sharded along D; None for none.
        chunk_bytes: the bytes of resident slots that one exchange fills on a rank (of homes, where layers are not
            stacked and have to be laid together); larger pushes go in chunks, some columns of every expert in each.

    Returns:
        Weights, zeros in empty slots; NaN if the buffers do not hold the push. One entry for each data-parallel copy;
        sharded over the ranks, and over the FSDP axis along D.

    Raises:
        ValueError: if the topology has no resident slots, or shapes do not fit it.
    """
    leaves = jax.tree.leaves(experts)
    shapes = _Shapes(leaves, plan, parallel, fsdp_axis)
    dtype = leaves[0].dtype if dtype is None else dtype

    @functools.partial(
        jax.shard_map,
        mesh=parallel.mesh,
        in_specs=(shapes.expert_specs, PartitionSpec(), PartitionSpec()),
        out_specs=shapes.resident_spec,
    )
    def on_rank(leaves, home, resident):
        tables = push_tables(home, resident, parallel.topology, shapes.sizes)

        def fill(start, width, weights):
            columns = [jax.lax.dynamic_slice_in_dim(leaf, start, width, -1) for leaf in leaves]
            homes = [part.reshape(-1, *part.shape[-3:]) for part in columns]
            rows = homes[0] if len(homes) == 1 else jnp.concatenate(homes)
            arrived = exchange_residents(rows.astype(dtype), tables, parallel.topology, shapes.sizes)
            return jax.lax.dynamic_update_slice_in_dim(weights, arrived, start, -1)

        weights = jnp.zeros((shapes.slots, *leaves[0].shape[-3:]), dtype)
        weights = vary_over(weights, varying_axes(leaves[0]))
        rows = shapes.slots if len(leaves) == 1 else shapes.homes
        width = _chunk_width(rows, weights, chunk_bytes)
        if shapes.sizes.exports:  # buffers of nothing cannot be sent
            weights = in_chunks(fill, weights, weights.shape[-1], width)
        fits = push_fits(home, resident, parallel.topology, shapes.sizes)
        weights = (weights * one_or_nan(fits, weights)).reshape(*shapes.on_rank, *weights.shape[1:])
        return vary_over(weights, shapes.copied_over)

    with jax.named_scope("push_residents"):
        return on_rank(leaves, jnp.asarray(plan.home), resident_experts(plan, parallel.topology))


def return_gradients(
    gradients: Float[Array, "L *copies N G B three D F"],
    totals: PyTree,
    plan: Plan,
    parallel: ExpertParallel,
    *,
    fsdp_axis: str | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> PyTree:
    """Bring the gradients of residents to the homes of their experts, over all copies of the group, and add them there.

    The transpose of `push_residents` in the dtype of ``gradients``. Works under jit, and in the place of ``totals``
    where they are not used again.

    Args:
        gradients: the gradients of the residents' weights, summed over the micro-batches of an update.
        totals: the gradients of the home experts, summed alike: a tree as `push_residents` takes it.
        plan: the plan of the batch.
        parallel: how plans are run.
        fsdp_axis: as for `push_residents`.
        chunk_bytes: the bytes of a rank's home slots in all layers, in the dtype of ``gradients``, that one exchange
            serves; more go in chunks.

    Returns:
        ``totals`` with the residents' gradients added.

    Raises:
        ValueError: as `push_residents`, or if the gradients are of another shape than the residents.
    """
    leaves, structure = jax.tree.flatten(totals)
    shapes = _Shapes(leaves, plan, parallel, fsdp_axis)
    check_shape("gradients", gradients.shape, shapes.resident)
    if not shapes.sizes.exports:
        return totals

    @functools.partial(
        jax.shard_map,
        mesh=parallel.mesh,
        in_specs=(shapes.resident_spec, shapes.expert_specs, PartitionSpec(), PartitionSpec()),
        out_specs=shapes.expert_specs,
    )
    def on_rank(gradients, totals, home, resident):
        tables = push_tables(home, resident, parallel.topology, shapes.sizes)
        push = functools.partial(
            exchange_residents, tables=tables, topology=parallel.topology, sizes=shapes.sizes
        )
        gradients = gradients.reshape(-1, *gradients.shape[-3:])

        def fill(start, width, totals):
            arrived = jax.lax.dynamic_slice_in_dim(gradients, start, width, -1)
            if shapes.copied_over:
                arrived = jax.lax.psum(arrived, shapes.copied_over)
            homes = jnp.zeros((shapes.homes, *arrived.shape[1:]), arrived.dtype)
            _, transposed = jax.vjp(push, vary_over(homes, varying_axes(arrived)))
            return [
                _add_columns(total, part, start)
                for total, part in zip(totals, shapes.split(transposed(arrived)[0]), strict=True)
            ]

        width = _chunk_width(shapes.homes, gradients, chunk_bytes)
        return in_chunks(fill, totals, gradients.shape[-1], width)

    with jax.named_scope("return_gradients"):
        resident = resident_experts(plan, parallel.topology)
        return jax.tree.unflatten(structure, on_rank(gradients, leaves, jnp.asarray(plan.home), resident))


def _add_columns(total, part, start):
    """``total`` with ``part`` added to its columns from ``start``."""
    part += jax.lax.dynamic_slice_in_dim(total, start, part.shape[-1], -1)
    return jax.lax.dynamic_update_slice_in_dim(total, part.astype(total.dtype), start, -1)


def _chunk_width(rows: int, like: jax.Array, chunk_bytes: int) -> int:
    """The columns of as many rows of ``like`` that have so many bytes; at least one."""
    column = rows * math.prod(like.shape[1:-1]) * like.dtype.itemsize
    return max(chunk_bytes // column, 1)


class _Shapes:
    """Shapes and shardings of a push."""

    def __init__(self, leaves: list[Any], plan: Plan, parallel: ExpertParallel, fsdp_axis: str | None):
        topology, axes = parallel.topology, parallel.copies_over
        if not topology.resident_slots:
            raise ValueError(
                "resident_slots=0: there are no residents to push; run without them, or plan with resident_slots"
            )
        matrices = leaves[0].shape[-3:]
        for leaf in leaves:
            lead = leaf.shape[:-6][:1]
            check_shape(
                "experts", leaf.shape, (*lead, *parallel.ranks, topology.home_slots, 3, *matrices[1:])
            )
        self._lead = [leaf.shape[:-6] for leaf in leaves]
        self._home_slots = topology.home_slots
        layers = sum(math.prod(lead) for lead in self._lead)
        if len(plan.home) != layers:
            raise ValueError(f"experts of {layers} layers, plan of {len(plan.home)}")
        self.homes, self.slots = layers * topology.home_slots, layers * topology.resident_slots
        self.sizes = _push_sizes(parallel, self.homes, self.slots)
        self.copied_over = tuple(axis for axis in axes if axis != fsdp_axis)
        copies = tuple(parallel.mesh.shape[axis] if axis in self.copied_over else 1 for axis in axes)
        self.resident = (layers, *copies, *parallel.ranks, topology.resident_slots, *matrices)
        self.on_rank = (layers, *(1,) * len(axes), 1, 1, topology.resident_slots)
        names = (axis if axis in self.copied_over else None for axis in axes)
        self.resident_spec = PartitionSpec(None, *names, *RANKS, None, None, fsdp_axis)
        self.expert_specs = [
            PartitionSpec(*(None for _ in lead), *RANKS, None, None, fsdp_axis) for lead in self._lead
        ]

    def split(self, homes: jax.Array) -> list[jax.Array]:
        """Rows of all home slots of a rank as its parts of the experts' arrays."""
        counts = [math.prod(lead) * self._home_slots for lead in self._lead]
        parts = jnp.split(homes, np.cumsum(counts)[:-1].tolist())
        return [
            part.reshape(*lead, 1, 1, self._home_slots, *part.shape[1:])
            for part, lead in zip(parts, self._lead, strict=True)
        ]


def _push_sizes(parallel: ExpertParallel, homes: int, slots: int) -> PushSizes:
    """The sizes of the buffers as counted, or the worst case."""
    if parallel.capacities is not None and parallel.capacities.push is not None:
        return parallel.capacities.push
    most = min(slots, homes) * parallel.topology.ranks_per_node
    return PushSizes(exports=homes, pair=most, own=most)
