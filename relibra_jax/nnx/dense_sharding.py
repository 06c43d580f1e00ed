"""Dense parameters sharded over the ranks, and gathered where a layer uses them.

Only experts belong to single ranks. All other parameters (attention, router, dense and shared MLPs, embedding, output
head) are the same for all ranks, and with AdamW they take 16 to 20 bytes for each value of the model on every rank.
Sharded, each rank stores and updates a part of them, as ZeRO does in its third stage (S. Rajbhandari et al.,
arXiv:1910.02054). A layer casts its part to the dtype of the computation and then gathers all parts, inside
`jax.checkpoint`, so the backward pass gathers them again. Gradients are scattered as they come: a sum once an update
would need fewer bytes, but a whole gradient on every rank.

Norms and biases stay on every rank: they are small, and each would cost an exchange of its own.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import DTypeLike

from relibra_jax.execution.mesh import RANKS, vary_over
from relibra_jax.nnx.variables import ExpertParam, is_variable

STACKS: Final = ("layers", "dense")
"""The modules of a model whose parameters are stacked along a leading axis of layers, which is never split."""
WHOLE: Final = ("bias",)
"""The parameters that stay on every rank although they are not vectors: biases of attention have an axis of heads."""
FLOAT32: Final = ("router",)
"""The parameters that are not cast before they are gathered, because routing is computed in float32."""


class DenseParam(nnx.Param):
    """A dense parameter that is sharded over ranks; its metadata ``out_sharding`` has as many entries as its axes."""


def axes_of_dense(mesh: Mesh | AbstractMesh, fsdp_axis: str | None = None) -> dict[str, int]:
    """Return the mesh axes over which dense parameters are sharded, with their sizes: FSDP, node and local.

    Args:
        mesh: the device mesh, from `relibra_jax.execution.mesh.expert_mesh`.
        fsdp_axis: the mesh axis over which experts are sharded as well. None if there is none.
    """
    names = RANKS if fsdp_axis is None else (fsdp_axis, *RANKS)
    return {name: mesh.shape[name] for name in names}


def dense_spec(shape: tuple[int, ...], axes: Mapping[str, int]) -> PartitionSpec | None:
    """Return the sharding of a dense parameter: over as many of the axes as one of its own axes divides over.

    Args:
        shape: the shape of the parameter, without an axis of layers.
        axes: the mesh axes with their sizes, slowest first. Leading ones are left out until an axis of the parameter
            divides.

    Returns:
        The spec, which splits the largest axis that divides. None for vectors, and if no axis divides.

    >>> axes = {"fsdp": 5, "node": 4, "local": 8}
    >>> dense_spec((4096, 64, 128), axes), dense_spec((151936, 4096), {"node": 4, "local": 8})
    (P(('node', 'local'), None, None), P(('node', 'local'), None))
    """
    names = tuple(axes)
    for first in range(len(names) if len(shape) > 1 else 0):
        ranks = math.prod(axes[name] for name in names[first:])
        if divisible := [axis for axis, size in enumerate(shape) if size % ranks == 0]:
            split = max(divisible, key=lambda axis: shape[axis])
            return PartitionSpec(*(names[first:] if axis == split else None for axis in range(len(shape))))
    return None


def mark_dense(model: nnx.Module, axes: Mapping[str, int], dtype: DTypeLike) -> None:
    """Give the dense parameters of a model their sharding metadata, in place.

    ``nnx.get_partition_spec`` then says where they belong, and `gather_dense` gathers them.

    Args:
        model: a `relibra_jax.models.LanguageModel`, or a module with the same names.
        axes: the mesh axes with their sizes, from `axes_of_dense`.
        dtype: the dtype of the computation, to which parameters are cast before they are gathered.
    """
    for path, module in list(nnx.iter_modules(model)):
        leading = 1 if path and path[0] in STACKS else 0
        for name, variable in list(vars(module).items()):
            if not isinstance(variable, nnx.Param) or isinstance(variable, ExpertParam) or name in WHOLE:
                continue
            value = variable.get_raw_value()
            spec = dense_spec(value.shape[leading:], axes)
            if spec is not None:
                marked = DenseParam(
                    value,
                    out_sharding=(*[None] * leading, *spec),
                    eager_sharding=False,
                    compute_dtype=None if name in FLOAT32 else dtype,
                )
                setattr(module, name, marked)


def mark_compute_dtype(model: nnx.Module, dtype: DTypeLike) -> None:
    """Give dense parameters that are not sharded the dtype of their computation, in place, for `nnx.host_state`.

    Args:
        model: a `relibra_jax.models.LanguageModel`, or a module with the same names.
        dtype: the dtype to which the model casts all dense parameters but vectors, biases and the router.
    """
    for path, module in nnx.iter_modules(model):
        leading = 1 if path and path[0] in STACKS else 0
        for name, variable in vars(module).items():
            if not isinstance(variable, nnx.Param) or isinstance(variable, ExpertParam):
                continue
            if name not in (*WHOLE, *FLOAT32) and variable.get_raw_value().ndim - leading > 1:
                variable.set_metadata(compute_dtype=dtype)


def gather_dense[T](state: T, mesh: Mesh) -> T:
    """Gather the sharded dense parameters among variables, for the computation of one layer.

    Args:
        state: a tree of variables: one, or the state of a module, with or without its axis of layers.
        mesh: the device mesh.

    Returns:
        The tree with whole parameters in the dtype of the computation. Other variables are as they were. Gradients come
        back sharded as the parameters are.
    """

    def gather(variable: Any) -> Any:
        sharding = dense_sharding(variable, mesh)
        if sharding is None:
            return variable
        value, dtype = variable.get_raw_value(), variable.get_metadata("compute_dtype")
        return variable.replace(_gather(value if dtype is None else value.astype(dtype), sharding))

    return jax.tree.map(gather, state, is_leaf=is_variable)


def dense_spec_of(variable: Any, mesh: Mesh) -> PartitionSpec:
    """Return the spec with which a dense parameter enters `jax.shard_map`; `gather_on_rank` gathers it there."""
    sharding = dense_sharding(variable, mesh)
    return PartitionSpec() if sharding is None else sharding.spec


def gather_on_rank(
    value: jax.Array, spec: PartitionSpec, dtype: DTypeLike, *, token_axes: Sequence[str]
) -> jax.Array:
    """Gather a dense parameter inside `jax.shard_map`, in the dtype of the computation.

    Its gradient is summed over the ranks and scattered in the same dtype, as those of layers are. Only then is each
    part summed over the copies of the group.

    Args:
        value: this rank's part, or the whole of a parameter that is not sharded.
        spec: the spec with which it entered, from `dense_spec_of`.
        dtype: the dtype of the computation.
        token_axes: the mesh axes over which tokens are sharded.
    """
    value = value.astype(dtype)
    if any(spec):
        value = vary_over(value, token_axes)
    for axis, names in enumerate(spec):
        if names is not None:
            value = jax.lax.all_gather(value, names, axis=axis, tiled=True)
    return value


def shard_like_dense[T](state: T, mesh: Mesh) -> T:
    """Constrain the arrays of dense parameters, or of their gradients, to the sharding that their metadata says.

    Args:
        state: a tree of variables.
        mesh: the device mesh.
    """

    def constrain(variable: Any) -> Any:
        sharding = dense_sharding(variable, mesh)
        if sharding is None:
            return variable
        return variable.replace(jax.lax.with_sharding_constraint(variable.get_raw_value(), sharding))

    return jax.tree.map(constrain, state, is_leaf=is_variable)


def dense_sharding(variable: Any, mesh: Mesh) -> NamedSharding | None:
    """Return the sharding of a `DenseParam`; None for all other variables.

    Args:
        variable: a variable, whose value may lack the axis of layers that its metadata has.
        mesh: the device mesh.
    """
    if not isinstance(variable, DenseParam):
        return None
    spec = tuple(variable.get_metadata("out_sharding"))
    return NamedSharding(mesh, PartitionSpec(*spec[len(spec) - variable.get_raw_value().ndim :]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(value: jax.Array, sharding: NamedSharding) -> jax.Array:
    value = jax.lax.with_sharding_constraint(value, sharding)  # the cast stays before the exchange
    return jax.lax.with_sharding_constraint(value, NamedSharding(sharding.mesh, PartitionSpec()))


def _gather_forward(value: jax.Array, sharding: NamedSharding) -> tuple[jax.Array, None]:
    return _gather(value, sharding), None


def _scatter_gradient(sharding: NamedSharding, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(gradient, sharding),)


_gather.defvjp(_gather_forward, _scatter_gradient)
