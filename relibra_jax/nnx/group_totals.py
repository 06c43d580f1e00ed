"""What data-parallel groups exchange once an update instead of in every micro-batch: gradients of experts, and weights.

Groups have the same experts, so their gradients must be summed. A sum in every micro-batch would send the gradients of
all experts of a rank as often, in the dtype of the computation: 14 GB for Qwen3-235B-A22B over 4 x 8 ranks. So the
backward pass adds a group's gradients to a total of its own, which takes no more memory, and one sum in float32 follows
the last micro-batch. It sends as many bytes as two sums in bfloat16, so an update of one micro-batch sends more.

The gradients of all other parameters are summed as they come (`relibra_jax.nnx.dense_sharding`).

Experts may also be sharded over groups, along an FSDP axis. Then every layer gathers them in every micro-batch, and
their gradients are scattered as they come, because a rank stores only its part of their total: three exchanges in the
dtype of the computation. With ``ExpertParallel(gather_once=True)`` they are gathered before the first micro-batch.
Groups then have whole weights and totals of their own, 6 bytes for each parameter in bfloat16, and the sum over groups
leaves each with its part. Residents, which are sharded like the experts that they copy, are gathered where they are
pushed (`relibra_jax.execution.residents`).

Source: ZeRO (S. Rajbhandari et al., arXiv:1910.02054), whose third stage gathers parameters where they are used, and
whose first stage shards only the state of the optimizer.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from relibra_jax.contract.types import Array
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.nnx.variables import AXES, ExpertParam, expert_spec, fsdp_axis_of, is_variable


def gather_experts[T](state: T, parallel: ExpertParallel) -> T:
    """Gather the experts that are sharded over an FSDP axis, in the dtype of the computation.

    Args:
        state: a tree of variables, such as the state of a module.
        parallel: the execution settings. Without ``gather_once`` the tree stays as it is.

    Returns:
        The tree with whole experts, whose metadata have no FSDP axis. Other variables are as they were.

    Raises:
        ValueError: if no experts are sharded over an FSDP axis.
    """
    if not parallel.gather_once:
        return state
    variables = jax.tree.leaves(state, is_leaf=is_variable)
    if not any(isinstance(each, ExpertParam) and fsdp_axis_of(each) is not None for each in variables):
        raise ValueError(
            "gather_once=True, but no experts are sharded over an FSDP axis: pass fsdp_axis to the layers, or to"
            " make_model"
        )

    def gather(variable: nnx.Variable) -> nnx.Variable:
        if not isinstance(variable, ExpertParam) or fsdp_axis_of(variable) is None:
            return variable
        value, dtype = variable.get_raw_value(), variable.get_metadata("compute_dtype", None)
        value = value if dtype is None else value.astype(dtype)
        stored = _sharding(parallel.mesh, value.ndim - AXES, fsdp_axis=fsdp_axis_of(variable))
        whole = _sharding(parallel.mesh, value.ndim - AXES)
        value = jax.lax.with_sharding_constraint(value, stored)  # the cast stays before the exchange
        value = jax.lax.with_sharding_constraint(value, whole)
        return variable.replace(value, out_sharding=tuple(whole.spec))

    return jax.tree.map(gather, state, is_leaf=is_variable)


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
    sharding = _sharding(parallel.mesh, lead, *names, fsdp_axis=fsdp_axis_of(variable))
    return jax.lax.with_sharding_constraint(zeros, sharding)


def total_of_residents(
    zeros: Float[Array, "L *data N G B three D F"], parallel: ExpertParallel
) -> Float[Array, "L *groups N G B three D F"]:
    """Return the total of the residents' gradients before the first micro-batch, for each group if they are gathered.

    Args:
        zeros: the zeros of a total in the shape of the residents' weights, which groups along an FSDP axis share.
        parallel: the mesh with its groups.
    """
    if not parallel.gather_once:
        return zeros
    shape = (len(zeros), *parallel.data_shape, *zeros.shape[1 + len(parallel.data_axes) :])
    sharding = _sharding(parallel.mesh, 1, *parallel.data_axes)
    return jax.lax.with_sharding_constraint(jnp.zeros(shape, zeros.dtype), sharding)


def sum_groups(total: jax.Array, variable: nnx.Variable, parallel: ExpertParallel) -> jax.Array:
    """Sum a parameter's total over groups.

    Args:
        total: the total that began as `total_of_groups`, or one of another parameter, which is returned.
        variable: the parameter as it is stored, over whose FSDP axis the sum is scattered.
        parallel: the mesh with its groups.
    """
    lead = variable.get_raw_value().ndim - AXES
    groups = range(lead, lead + total.ndim - variable.get_raw_value().ndim)
    if not groups:
        return total
    fsdp_axis = fsdp_axis_of(variable)
    others = tuple(None if axis == fsdp_axis else axis for axis in parallel.data_axes)
    # The sum over the FSDP axis comes first and scatters the total. One sum over all axes would send it whole.
    shared = tuple(axis for axis, name in zip(groups, others, strict=True) if name is None)
    parts = _sharding(parallel.mesh, lead, *others, fsdp_axis=fsdp_axis)
    total = jax.lax.with_sharding_constraint(total.sum(shared, keepdims=True), parts)
    whole = _sharding(parallel.mesh, lead, fsdp_axis=fsdp_axis)
    return jax.lax.with_sharding_constraint(total.sum(tuple(groups)), whole)


def _sharding(mesh: Mesh, lead: int, *groups: str | None, fsdp_axis: str | None = None) -> NamedSharding:
    """Return the sharding of expert weights or totals, with ``lead`` axes that are not sharded before the groups."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * lead, *groups, *expert_spec(fsdp_axis)))


def _summed_axes(variable: nnx.Variable, parallel: ExpertParallel) -> tuple[str | None, ...]:
    """Return the data axes, with None for those over which experts have no totals of their own; none for others."""
    if not isinstance(variable, ExpertParam):
        return ()
    own = [axis != fsdp_axis_of(variable) and parallel.mesh.shape[axis] > 1 for axis in parallel.data_axes]
    return tuple(axis if each else None for axis, each in zip(parallel.data_axes, own, strict=True))
