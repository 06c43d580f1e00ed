"""The variable types of a mixture-of-experts layer: expert weights, correction bias and homes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from flax import nnx
from jax.sharding import PartitionSpec

from relibra_jax.contract.types import Array
from relibra_jax.execution.mesh import NODE, RANKS

AXES = 6
"""Axes of one layer's expert weights: ``[N, G, H, 3, D, F]``."""


class ExpertParam(nnx.Param):
    """Expert weights in home slots, ``[N, G, H, 3, D, F]``, or ``[L, N, G, H, 3, D, F]`` where layers are stacked.

    They carry Flax's sharding metadata: ``nnx.get_partition_spec`` returns ``P('node', 'local')``, with the FSDP axis
    on D if there is one. Stacked layers have a leading None, whether or not the transformation that stacked them had
    ``transform_metadata``.
    """

    def get_metadata(self, name: str | None = None, *default: Any, **options: Any) -> Any:
        """Return the metadata as every variable does, with ``out_sharding`` adapted to the value's number of axes."""
        if name is None:
            metadata = super().get_metadata(**options)
            if metadata.get("out_sharding"):
                metadata["out_sharding"] = self._spec(metadata["out_sharding"])
            return metadata
        value = super().get_metadata(name, *default, **options)
        return self._spec(value) if name == "out_sharding" and value else value

    def _spec(self, sharding: tuple[str | None, ...]) -> tuple[str | None, ...]:
        layer_spec = tuple(sharding)[tuple(sharding).index(NODE) :]
        leading_axes = getattr(self.get_raw_value(), "ndim", AXES) - AXES
        return (None,) * leading_axes + layer_spec


class WithTotal(NamedTuple):
    """The value of a parameter, with the total of its gradients over earlier micro-batches.

    `relibra_jax.nnx.accumulate_gradients` gives it to parameters with the metadata ``adds_gradients``, whose model adds
    their gradients to the total (`relibra_jax.models.layer_scan`).
    """

    value: Array
    """The value."""
    total: Array
    """The total, in float32 or wider. It may have axes of groups after the axis of layers
    (`relibra_jax.nnx.group_totals`)."""
    runs: Array
    """0. Its gradient is the number of runs that added to the total, which must be one."""


class CorrectionBias(nnx.Variable):
    """The bias that expert selection adds to the sigmoid scores. Gradients do not train it."""


class Homes(nnx.Variable):
    """Flat home slot of each expert, ``[E]`` int32: the layout of the layer's expert weights."""


def is_variable(leaf: Any) -> bool:
    """Return whether a leaf is a variable."""
    return isinstance(leaf, nnx.Variable)


def expert_fsdp_axis(spec: Sequence[str | None], ndim: int) -> str | None:
    """Return the mesh axis over which experts are sharded along D.

    Args:
        spec: the sharding spec of their weights.
        ndim: the number of axes of their weights, whose last ones are D and F.

    >>> expert_fsdp_axis((None, "node", "local", None, None, "fsdp"), 7)
    'fsdp'
    """
    return spec[ndim - 2] if len(spec) > ndim - 2 else None


def fsdp_axis_of(experts: nnx.Variable) -> str | None:
    """Return the mesh axis over which expert weights are sharded along D, from their metadata."""
    return expert_fsdp_axis(tuple(experts.get_metadata("out_sharding", None) or ()), len(experts.shape))


def expert_spec(fsdp_axis: str | None = None) -> PartitionSpec:
    """Return the sharding of expert weights ``[N, G, H, 3, D, F]``: over the ranks, and along D over an FSDP axis.

    >>> expert_spec("fsdp")
    P('node', 'local', None, None, 'fsdp')
    """
    return PartitionSpec(*RANKS) if fsdp_axis is None else PartitionSpec(*RANKS, None, None, fsdp_axis)
