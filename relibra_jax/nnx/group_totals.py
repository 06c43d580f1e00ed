"""Totals of the experts' gradients, one for each data-parallel group, which are summed once an update.

Groups have the same experts, so their gradients must be summed. A sum in every micro-batch would send the gradients of
all experts of a rank as often, in the dtype of the computation: 14 GB for Qwen3-235B-A22B over 4 x 8 ranks. So the
backward pass adds a group's gradients to a total of its own, which takes no more memory, and one sum in float32 follows
the last micro-batch. It sends as many bytes as two sums in bfloat16, so an update of one micro-batch sends more.

The gradients of all other parameters are summed as they come (`relibra_jax.nnx.dense_sharding`). So are those of
experts over the FSDP axis, because a rank stores only its part of their total.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from relibra_jax.execution.mesh import RANKS
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.nnx.variables import AXES, ExpertParam, fsdp_axis_of


def total_of_groups(variable: nnx.Variable, parallel: ExpertParallel) -> jax.Array:
    """Return the total of a parameter's gradients before the first micro-batch.

    Args:
        variable: the parameter, with the zeros of a total as its value.
        parallel: the mesh with its groups.

    Returns:
        The value. For experts ``[L, N, G, ...]``, if there are several groups, zeros ``[L, *groups, N, G, ...]``, with
        an entry for each data-parallel group.
    """
    value, names = variable.get_raw_value(), _summed_axes(variable, parallel)
    if not any(names):
        return value
    lead = value.ndim - AXES
    groups = (1 if name is None else parallel.mesh.shape[name] for name in names)
    zeros = jnp.zeros((*value.shape[:lead], *groups, *value.shape[lead:]), value.dtype)
    spec = PartitionSpec(*(None,) * lead, *names, *RANKS, None, None, fsdp_axis_of(variable))
    return jax.lax.with_sharding_constraint(zeros, NamedSharding(parallel.mesh, spec))


def sum_groups(total: jax.Array, variable: nnx.Variable, parallel: ExpertParallel) -> jax.Array:
    """Sum a parameter's total over groups.

    Args:
        total: the total that began as `total_of_groups`, or one of another parameter, which is returned.
        variable: the parameter.
        parallel: the mesh with its groups.
    """
    lead = variable.get_raw_value().ndim - AXES
    groups = range(lead, lead + total.ndim - variable.get_raw_value().ndim)
    if not groups:
        return total
    spec = PartitionSpec(*(None,) * lead, *RANKS, None, None, fsdp_axis_of(variable))
    return jax.lax.with_sharding_constraint(total.sum(tuple(groups)), NamedSharding(parallel.mesh, spec))


def _summed_axes(variable: nnx.Variable, parallel: ExpertParallel) -> tuple[str | None, ...]:
    """Return the data axes, with None for those over which experts have no totals of their own; none for others."""
    if not isinstance(variable, ExpertParam):
        return ()
    own = [axis != fsdp_axis_of(variable) and parallel.mesh.shape[axis] > 1 for axis in parallel.data_axes]
    return tuple(axis if each else None for axis, each in zip(parallel.data_axes, own, strict=True))
