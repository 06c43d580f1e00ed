"""Residents: copies of experts that stay for a whole optimizer update, pushed before it, their gradients returned after
it.

Weights do not change between two optimizer steps, so a copy that a rank needs in every micro-batch crosses the slow
network once an update, not once a micro-batch, and so does the sum of its gradients::

    residents = push_residents(experts, plan, parallel, dtype=...)            before the first micro-batch
    gradients of experts and of residents, separate inputs, summed in float32   each micro-batch
    gradients += return_gradients(sum of the residents' gradients, plan, ...)   after the last one
    divide, clip, step                                                          residents are no parameters

The way is that of `relibra_jax.resident_push`. `return_gradients` is the push's transpose, as JAX takes it, in the
dtype of the accumulated gradients. Residents have no optimizer state and are in no checkpoint.

Residents are sharded along an FSDP axis as homes are. Over data-parallel axes every copy of the group holds its own, so
that gradients are summed over them once an update, when they return.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import DTypeLike, Float, Int, Integer, PyTree

from relibra_jax.execution.expert_pieces import assemble, scatter_pieces
from relibra_jax.execution.gather import gather_rows, inverse_index
from relibra_jax.execution.mesh import LOCAL, NODE, RANKS, vary_over, varying_axes
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.plan_guard import one_or_nan
from relibra_jax.plan import resident_experts
from relibra_jax.resident_push import PushSizes, PushTables, push_fits, push_tables
from relibra_jax.types import EMPTY, Array, Plan, Topology, check_shape

CHUNK_BYTES = 1 << 30
"""Bytes of resident slots that one exchange fills: further ones follow in further chunks of every expert."""


class Residents(NamedTuple):
    """Residents of one optimizer update, for loops that push by themselves; `check_residents` refuses old ones."""

    weights: Float[Array, "L *copies N G B three D F"]
    """As `push_residents` returns them."""
    step: Int[Array, ""]
    """The optimizer's step at which they were pushed."""


def check_residents(residents: Residents, step: Integer[Array, ""] | int) -> None:
    """Raise unless residents were pushed at the step that the optimizer is at. Runs on the host, before a step.

    Args:
        residents: the residents that a step is about to use.
        step: the optimizer's step now, ``optimizer.step`` with Flax.

    Raises:
        ValueError: if they are of another step, with both.
    """
    pushed, now = int(residents.step), int(step)
    if pushed != now:
        raise ValueError(
            f"residents were pushed at optimizer step {pushed}, the optimizer is at step {now}: push them again, since"
            " the weights at home have changed"
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
        chunk_bytes: the bytes of resident slots that one exchange fills on a rank; larger pushes go in chunks.

    Returns:
        Weights, zeros in empty slots; NaN if the buffers do not hold the push. One entry for each data-parallel copy,
        sharded as `resident_spec` says.

    Raises:
        ValueError: if the topology has no resident slots, or shapes do not fit it.
    """
    leaves = jax.tree.leaves(experts)
    way = _Way(leaves, plan, parallel, fsdp_axis)
    dtype = leaves[0].dtype if dtype is None else dtype
    resident, home = resident_experts(plan, parallel.topology), plan.home

    @functools.partial(
        jax.shard_map,
        mesh=parallel.mesh,
        in_specs=(way.expert_specs, PartitionSpec(), PartitionSpec()),
        out_specs=way.resident_spec,
    )
    def on_rank(leaves, home, resident):
        tables = push_tables(home, resident, parallel.topology, way.sizes)
        fits = push_fits(home, resident, parallel.topology, way.sizes)
        move = functools.partial(_push_chunk, tables=tables, parallel=parallel, sizes=way.sizes)

        def chunk(start, width):
            rows = [_rows(jax.lax.dynamic_slice_in_dim(leaf, start, width, -1)) for leaf in leaves]
            return move(_joined(rows).astype(dtype))

        slots = math.prod(resident.shape[:1] + resident.shape[3:])
        weights = jnp.zeros((slots, *leaves[0].shape[-3:]), dtype)
        weights = _in_chunks(chunk, vary_over(weights, varying_axes(leaves[0])), chunk_bytes)
        weights = weights * one_or_nan(fits, weights)
        weights = weights.reshape(way.layers, *(1,) * way.lead, *resident.shape[3:], *weights.shape[1:])
        return vary_over(weights, way.copied_over)

    with jax.named_scope("push_residents"):
        return on_rank(leaves, home, resident)


def return_gradients(
    gradients: Float[Array, "L *copies N G B three D F"],
    experts: PyTree,
    plan: Plan,
    parallel: ExpertParallel,
    *,
    fsdp_axis: str | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> PyTree:
    """Bring the gradients of residents to the homes of their experts, and sum them there, over all copies of the group.

    The transpose of `push_residents` in the dtype of ``gradients``. Works under jit.

    Args:
        gradients: the gradients of the residents' weights, summed over the micro-batches of an update.
        experts: the home experts, of which structure and shapes are read.
        plan: the plan of the batch.
        parallel: how plans are run.
        fsdp_axis: as for `push_residents`.
        chunk_bytes: the bytes of a rank's home slots in all layers, in the dtype of ``gradients``, that one exchange
            serves; more go in chunks.

    Returns:
        A tree like ``experts``: what has to be added to the experts' own gradients.

    Raises:
        ValueError: as `push_residents`, or if the gradients are of another shape than the residents.
    """
    leaves, structure = jax.tree.flatten(experts)
    way = _Way(leaves, plan, parallel, fsdp_axis)
    check_shape("gradients", gradients.shape, way.resident_shape)
    resident, home = resident_experts(plan, parallel.topology), plan.home

    @functools.partial(
        jax.shard_map,
        mesh=parallel.mesh,
        in_specs=(way.resident_spec, PartitionSpec(), PartitionSpec()),
        out_specs=way.expert_specs,
    )
    def on_rank(gradients, home, resident):
        tables = push_tables(home, resident, parallel.topology, way.sizes)
        move = functools.partial(_push_chunk, tables=tables, parallel=parallel, sizes=way.sizes)
        gradients = gradients.reshape(-1, *gradients.shape[-3:])
        slots = way.layers * parallel.topology.home_slots

        def chunk(start, width):
            arrived = jax.lax.dynamic_slice_in_dim(gradients, start, width, -1)
            if way.copied_over:
                arrived = jax.lax.psum(arrived, way.copied_over)
            rows = jnp.zeros((slots, *arrived.shape[1:]), arrived.dtype)
            _, transposed = jax.vjp(move, vary_over(rows, varying_axes(arrived)))
            return transposed(arrived)[0]

        total = jnp.zeros((slots, *gradients.shape[1:]), gradients.dtype)
        varying = [axis for axis in varying_axes(gradients) if axis not in way.copied_over]
        total = _in_chunks(chunk, vary_over(total, varying), chunk_bytes)
        return way.split(total)

    with jax.named_scope("return_gradients"):
        return jax.tree.unflatten(structure, on_rank(gradients, home, resident))


class _Way:
    """Shapes and shardings of a push."""

    def __init__(self, leaves: list[Any], plan: Plan, parallel: ExpertParallel, fsdp_axis: str | None):
        topology = parallel.topology
        if not topology.resident_slots:
            raise ValueError("resident_slots=0: there are no residents to push")
        for leaf in leaves:
            matrices = (3, *leaf.shape[-2:])
            slots = (*parallel.ranks, topology.home_slots)
            lead = leaf.shape[:-6]
            check_shape("experts", leaf.shape, (*lead[:1], *slots, *matrices))
        self._rows = [leaf.shape[0] if leaf.ndim == 7 else None for leaf in leaves]
        self.layers = sum(1 if rows is None else rows for rows in self._rows)
        if len(plan.home) != self.layers:
            raise ValueError(f"experts of {self.layers} layers, plan of {len(plan.home)}")
        self.sizes = _sizes(parallel, self.layers)
        self.lead = len(parallel.copies_over) + 2
        self.copied_over = tuple(axis for axis in parallel.copies_over if axis != fsdp_axis)
        copies = tuple(1 if axis == fsdp_axis else parallel.mesh.shape[axis] for axis in parallel.copies_over)
        matrices = leaves[0].shape[-3:]
        ranks = (*parallel.ranks, topology.resident_slots)
        self.resident_shape = (self.layers, *copies, *ranks, *matrices)
        names = tuple(None if axis == fsdp_axis else axis for axis in parallel.copies_over)
        self.resident_spec = PartitionSpec(None, *names, *RANKS, None, None, fsdp_axis)
        self.expert_specs = [
            PartitionSpec(*(None,) * (leaf.ndim - 6), *RANKS, None, None, fsdp_axis) for leaf in leaves
        ]
        self._home_slots = topology.home_slots

    def split(self, rows: jax.Array) -> list[jax.Array]:
        """Rows of all home slots as the parts of the experts' arrays."""
        parts, first = [], 0
        for layers in self._rows:
            count = (1 if layers is None else layers) * self._home_slots
            part = rows[first : first + count]
            shape = () if layers is None else (layers,)
            parts.append(part.reshape(*shape, 1, 1, self._home_slots, *rows.shape[1:]))
            first += count
        return parts


def _sizes(parallel: ExpertParallel, layers: int) -> PushSizes:
    """The sizes of the buffers as counted, or the worst case."""
    topology = parallel.topology
    if parallel.capacities is not None and parallel.capacities.push is not None:
        return parallel.capacities.push
    exports = layers * topology.home_slots
    wanted = layers * topology.resident_slots * topology.ranks_per_node
    return PushSizes(exports=exports, pair=min(wanted, exports * topology.ranks_per_node))


def _push_chunk(
    rows: Float[jax.Array, "slots *chunk"], *, tables: PushTables, parallel: ExpertParallel, sizes: PushSizes
) -> Float[jax.Array, "wanted *chunk"]:
    """A chunk of every home expert of this rank, to a chunk of every resident of this rank."""
    nodes, local = parallel.ranks
    node, index = jax.lax.axis_index(NODE), jax.lax.axis_index(LOCAL)
    me, slots = node * local + index, len(rows)

    # Inside the home's node: from each rank its exports, a piece to each.
    place = tables.export[me]
    exports = gather_rows(rows, inverse_index(place, sizes.exports), place[:, None])
    pieces = scatter_pieces(exports, (LOCAL,), local)

    # To the nodes: a piece of each expert that they need.
    row = tables.export.reshape(nodes, local, slots)[node]
    row = jnp.where(row == EMPTY, EMPTY, jnp.arange(local, dtype=jnp.int32)[:, None] * sizes.exports + row)
    sent = tables.crossing[node]  # [to, slots of the node]
    lane = jnp.where(sent == EMPTY, EMPTY, jnp.arange(nodes, dtype=jnp.int32)[:, None] * sizes.pair + sent)
    source = _follow(inverse_index(lane.ravel(), nodes * sizes.pair), row.ravel())
    places = _follow(inverse_index(row.ravel(), local * sizes.exports), lane.T)
    crossing = gather_rows(pieces, source, places)
    if nodes > 1:
        crossing = jax.lax.all_to_all(crossing, NODE, 0, 0, tiled=True)

    # Inside this node: pieces to the ranks that hold the expert.
    wanted = tables.wanted.reshape(nodes, local, -1)[node]
    takers = jax.vmap(lambda rows: inverse_index(rows, nodes * sizes.pair))(wanted)
    before = jnp.arange(local, dtype=jnp.int32)[:, None] * wanted.shape[1]
    takers = jnp.where(takers == EMPTY, EMPTY, takers + before)
    taken = gather_rows(crossing, wanted.ravel(), takers.T)
    return assemble(taken, (LOCAL,), local, rows.shape[1:])


def _follow(index, table):
    """``table[index]``, EMPTY where the index is; rows of a table of lanes."""
    if table.ndim == 1:
        # The node's slots repeat for every node that a lane belongs to.
        return jnp.where(index == EMPTY, EMPTY, table[index % len(table)])
    return jnp.where((index == EMPTY)[:, None], EMPTY, table[index])


def _rows(leaf: jax.Array) -> jax.Array:
    """One row a home slot: ``[(l,) 1, 1, H, 3, D, F]`` to ``[l * H, 3, D, F]``."""
    return leaf.reshape(-1, *leaf.shape[-3:])


def _joined(rows: list[jax.Array]) -> jax.Array:
    return rows[0] if len(rows) == 1 else jnp.concatenate(rows)


def _in_chunks(chunk: Any, out: jax.Array, chunk_bytes: int) -> jax.Array:
    """``out`` filled by ``chunk(start, width)`` along its last axis."""
    axis = out.shape[-1]
    chunks = min(max(-(-out.size * out.dtype.itemsize // chunk_bytes), 1), axis)
    width = -(-axis // chunks)
    if width == axis:
        return chunk(0, axis)
    whole, rest = divmod(axis, width)

    def fill(start, out, width):
        return jax.lax.dynamic_update_slice_in_dim(out, chunk(start, width), start, -1)

    out = jax.lax.fori_loop(0, whole, lambda i, out: fill(i * width, out, width), out)
    return fill(whole * width, out, rest) if rest else out


def resident_spec(shape: tuple[int, ...], parallel: ExpertParallel) -> PartitionSpec:
    """How the residents of one layer, ``[*copies, N, G, B, ...]``, are sharded: over the copies that hold their own,
    and over the ranks."""
    names = (
        axis if size == parallel.mesh.shape[axis] else None
        for axis, size in zip(parallel.copies_over, shape, strict=False)
    )
    return PartitionSpec(*names, *RANKS)


def check_resident_weights(residents: Any, experts: Any, parallel: ExpertParallel) -> Any:
    """The residents of one layer, after a look at whether they are there if and only if the topology has slots for
    them.

    Raises:
        ValueError: if they are not, or of another shape.
    """
    topology: Topology = parallel.topology
    if residents is None:
        if topology.resident_slots:
            raise ValueError(
                f"resident_slots={topology.resident_slots}, but the layer has no residents' weights: give it what"
                " push_residents returned (PreparedLayer.residents)"
            )
        return None
    if not topology.resident_slots:
        raise ValueError(
            f"residents of shape {tuple(residents.shape)} for a topology with resident_slots=0: plan with the topology"
            " that they were pushed for"
        )
    found = residents.shape[: len(parallel.copies_over)]
    for axis, size in zip(parallel.copies_over, found, strict=True):
        if size not in (1, parallel.mesh.shape[axis]):
            raise ValueError(
                f"residents: {size} copies along {axis!r}, the mesh has {parallel.mesh.shape[axis]}"
            )
    slots = (*parallel.ranks, topology.resident_slots)
    check_shape("residents", residents.shape, (*found, *slots, *np.shape(experts)[-3:]))
    return residents
