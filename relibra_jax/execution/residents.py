"""Residents: copies of experts for a whole optimizer update, pushed before it; their gradients return after it.

Weights do not change between two optimizer steps. A copy that a rank needs in every micro-batch therefore crosses the
slow network once per update instead of once per micro-batch, and so does the sum of its gradients::

    residents = push_residents(experts, plan, parallel, dtype=...)            before the first micro-batch
    gradients of experts and of residents, separate inputs, summed in float32   each micro-batch
    gradients = return_gradients(sum of the residents' gradients, gradients, plan, ...)   after the last one
    divide, clip, step                                                          residents are not parameters

`relibra_jax.routing.resident_push` describes the route of a push. `return_gradients` is the push transposed by JAX, in
the dtype of the accumulated gradients. Residents have no optimizer state, and checkpoints do not contain them.

Residents are sharded along an FSDP axis like homes. Along the data axes every group has residents
of its own, so that their gradients are summed over the groups only once per update, when they return.
"""

import functools
import math
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import DTypeLike, Float, Int, Integer, PyTree

from relibra_jax.contract.plan import resident_experts
from relibra_jax.contract.types import EMPTY, Array, Plan, Topology, check_shape
from relibra_jax.execution.expert_pieces import exchange_residents, in_chunks
from relibra_jax.execution.mesh import RANKS, vary_over, varying_axes
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.plan_guard import one_or_nan
from relibra_jax.routing.resident_push import PushSizes, push_fits, push_tables
from relibra_jax.support.argument_types import checks_arguments

CHUNK_BYTES: Final = 1 << 30
"""The bytes that one exchange of a push fills on a rank. Larger pushes take several exchanges."""


class Residents(NamedTuple):
    """The residents of one optimizer update: their weights, and what these are copies of.

    A layer whose plan has other residents gives NaN. `check_residents` says on the host what is wrong.
    """

    weights: Float[Array, "*L_data N G B three D F"]
    """The weights in the resident slots, ``[L, *data, N, G, B, 3, D, F]``; for one layer without L."""
    experts: Int[Array, "*L N G B"]
    """The expert in each resident slot, ``[L, N, G, B]``; EMPTY for none."""
    step: Int[Array, ""] | None = None
    """The optimizer's step number at the time of the push; None if the push did not record it."""

    def at(self, step: Integer[Array, ""] | int) -> "Residents":
        """Return the residents for the layers of a step of the optimizer: with other weights they give NaN.

        Raises:
            ValueError: if the push did not record the step.
        """
        experts = jnp.where(_push_step(self) == jnp.asarray(step), self.experts, _OUTDATED)
        return Residents(self.weights, experts)

    def layer(self, index: Any) -> "Residents":
        """Return the residents of one layer, if they are for layers without a check of the step (`at`)."""
        if self.step is not None:
            raise ValueError(
                "residents with a step number: take those of a step with residents.at(step) first"
            )
        return Residents(self.weights[index], self.experts[index])


_OUTDATED: Final = EMPTY - 1
"""What stands for the expert of an outdated resident. No plan has it."""


def _push_step(residents: Residents) -> Array:
    """Return the step at which residents were pushed, or raise ValueError if the push did not record it."""
    if residents.step is None:
        raise ValueError(
            "the residents do not say when they were pushed: push them with step=, or with prepare_residents"
        )
    return residents.step


@checks_arguments
def check_residents(
    residents: Residents, step: Integer[Array, ""] | int, plan: Plan, topology: Topology
) -> None:
    """Raise unless residents belong to the plan and to the current optimizer step. Runs on the host.

    Args:
        residents: the residents for the next training step.
        step: the optimizer's current step number, ``optimizer.step`` with Flax.
        plan: the plan of the batch.
        topology: the expert-parallel group.

    Raises:
        ValueError: if the residents were pushed at another optimizer step, or a slot has a different expert than the
            plan.
    """
    push_step, current_step = int(_push_step(residents)), int(step)
    if push_step != current_step:
        raise ValueError(
            f"residents were pushed at optimizer step {push_step}, but the optimizer is at step {current_step}: push"
            " them again, since the weights at home have changed"
        )
    experts, expected = np.asarray(residents.experts), np.asarray(resident_experts(plan, topology))
    check_shape("residents.experts", experts.shape, expected.shape)
    if (experts != expected).any():
        place = tuple(np.argwhere(experts != expected)[0].tolist())
        raise ValueError(
            "layer {}, node {}, local rank {}, resident slot {}".format(*place)
            + f": has expert {experts[place]}, but the plan has {expected[place]}: push the residents of this plan"
        )


@checks_arguments
def push_residents(
    experts: PyTree,
    plan: Plan,
    parallel: ExpertParallel,
    *,
    dtype: DTypeLike | None = None,
    fsdp_axis: str | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    step: Integer[Array, ""] | int | None = None,
) -> Residents:
    """Copy experts from their homes to the resident slots of the plan, for all layers. Works under jit.

    Args:
        experts: the home experts of all L layers in order: any tree of arrays ``[N, G, H, 3, D, F]``, or
            ``[l, N, G, H, 3, D, F]`` for stacked layers.
        plan: the plan of the batch.
        parallel: the mesh, topology and buffer sizes of the push.
        dtype: the dtype of the residents and of their transfer. None takes that of the experts.
        fsdp_axis: the mesh axis over which the experts are sharded along D. None if there is none.
        chunk_bytes: the bytes of resident slots that one exchange fills on a rank, or the bytes of home slots if the
            layers are not one stacked array and must be concatenated. A larger push goes in chunks, each with some
            columns of every expert.
        step: the step number of the optimizer, for residents that outlast the program that pushes them: layers take
            `Residents.at` the step in which they run.

    Returns:
        The residents, with weights of zero in empty slots and one entry for each group. They are sharded over the
        ranks, and along D over the FSDP axis, unless ``parallel`` has ``gather_once``. They are NaN if the push does
        not fit the buffers.

    Raises:
        ValueError: if the topology has no resident slots, or the shapes do not fit it.
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
        if shapes.sizes.exports:  # collectives cannot send empty buffers
            weights = in_chunks(fill, weights, weights.shape[-1], width)
        fits = push_fits(home, resident, parallel.topology, shapes.sizes)
        weights = (weights * one_or_nan(fits, weights)).reshape(*shapes.on_rank, *weights.shape[1:])
        return vary_over(weights, shapes.summed_axes)

    resident = jnp.asarray(resident_experts(plan, parallel.topology))
    with jax.named_scope("push_residents"):
        weights = on_rank(leaves, jnp.asarray(plan.home), resident)
    if parallel.gather_once:
        whole = NamedSharding(parallel.mesh, shapes.gathered_spec)
        weights = jax.lax.with_sharding_constraint(weights, whole)
    return Residents(weights, resident, None if step is None else jnp.asarray(step, jnp.int32))


@checks_arguments
def return_gradients(
    gradients: Float[Array, "L *data N G B three D F"],
    totals: PyTree,
    plan: Plan,
    parallel: ExpertParallel,
    *,
    fsdp_axis: str | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> PyTree:
    """Send the gradients of residents, summed over all groups, to their experts' homes and add them there.

    This is the transpose of `push_residents`, in the dtype of ``gradients``. It works under jit, and in the memory of
    ``totals`` if the caller does not use them again.

    Args:
        gradients: the gradients of the residents' weights, summed over the micro-batches of an update. They may have an
            entry for each group along the FSDP axis too.
        totals: the gradients of the home experts, summed over the same micro-batches, as a tree with the structure that
            `push_residents` takes.
        plan: the plan of the batch.
        parallel: the mesh, topology and buffer sizes of the push.
        fsdp_axis: the mesh axis over which the experts are sharded along D. None if there is none.
        chunk_bytes: the bytes of a rank's home slots in all layers, in the dtype of ``gradients``, that one exchange
            fills. More bytes go in several chunks.

    Returns:
        ``totals`` with the gradients of the residents added.

    Raises:
        ValueError: under the conditions of `push_residents`, or if ``gradients`` has a different shape than the
            residents.
    """
    leaves, structure = jax.tree.flatten(totals)
    shapes = _Shapes(leaves, plan, parallel, fsdp_axis)
    if gradients.shape == shapes.of_groups:
        summed = gradients.sum(shapes.shared_axes, keepdims=True)
        part = NamedSharding(parallel.mesh, shapes.resident_spec)
        gradients = jax.lax.with_sharding_constraint(summed, part)
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
            if shapes.summed_axes:
                arrived = jax.lax.psum(arrived, shapes.summed_axes)
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
    """Add ``part`` to the columns of ``total`` that begin at ``start``."""
    part += jax.lax.dynamic_slice_in_dim(total, start, part.shape[-1], -1)
    return jax.lax.dynamic_update_slice_in_dim(total, part.astype(total.dtype), start, -1)


def _chunk_width(rows: int, like: jax.Array, chunk_bytes: int) -> int:
    """Return the number of columns of ``rows`` rows of ``like`` that fit in ``chunk_bytes``; at least one."""
    column_bytes = rows * math.prod(like.shape[1:-1]) * like.dtype.itemsize
    return max(chunk_bytes // column_bytes, 1)


class _Shapes:
    """Shapes and shardings of a push."""

    def __init__(self, leaves: list[Any], plan: Plan, parallel: ExpertParallel, fsdp_axis: str | None):
        topology, axes = parallel.topology, parallel.data_axes
        if not topology.resident_slots:
            raise ValueError(
                "resident_slots=0: there are no residents to push; plan with resident slots, or do not push residents"
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
            raise ValueError(f"experts has {layers} layers, but plan has {len(plan.home)}")
        self.homes, self.slots = layers * topology.home_slots, layers * topology.resident_slots
        self.sizes = _push_sizes(parallel, self.homes, self.slots)
        self.summed_axes = tuple(axis for axis in axes if axis != fsdp_axis)
        groups = tuple(parallel.mesh.shape[axis] if axis in self.summed_axes else 1 for axis in axes)
        self.resident = (layers, *groups, *parallel.ranks, topology.resident_slots, *matrices)
        self.on_rank = (layers, *(1,) * len(axes), 1, 1, topology.resident_slots)
        self.of_groups = (layers, *parallel.data_shape, *self.resident[1 + len(axes) :])
        self.shared_axes = tuple(1 + place for place, axis in enumerate(axes) if axis == fsdp_axis)
        names = tuple(axis if axis in self.summed_axes else None for axis in axes)
        self.gathered_spec = PartitionSpec(None, *names, *RANKS)
        self.resident_spec = PartitionSpec(*self.gathered_spec, None, None, fsdp_axis)
        self.expert_specs = [
            PartitionSpec(*(None for _ in lead), *RANKS, None, None, fsdp_axis) for lead in self._lead
        ]

    def split(self, homes: jax.Array) -> list[jax.Array]:
        """Split the rows of all home slots of a rank into its parts of the experts' arrays."""
        counts = [math.prod(lead) * self._home_slots for lead in self._lead]
        parts = jnp.split(homes, np.cumsum(counts)[:-1].tolist())
        return [
            part.reshape(*lead, 1, 1, self._home_slots, *part.shape[1:])
            for part, lead in zip(parts, self._lead, strict=True)
        ]


def _push_sizes(parallel: ExpertParallel, homes: int, slots: int) -> PushSizes:
    """Return the buffer sizes in the capacities, or else the worst case."""
    if parallel.capacities is not None and parallel.capacities.push is not None:
        return parallel.capacities.push
    pair = min(slots, homes) * parallel.topology.ranks_per_node
    return PushSizes(exports=homes, pair=pair, own=pair)
