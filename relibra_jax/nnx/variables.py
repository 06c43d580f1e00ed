"""The variables of a mixture-of-experts layer that differ from a dense model's: their types say which is which."""

from typing import Any

from flax import nnx
from jax.sharding import PartitionSpec

from relibra_jax.execution.mesh import NODE, RANKS

AXES = 6
"""Axes of one layer's expert weights: ``[N, G, H, 3, D, F]``."""


class ExpertParam(nnx.Param):
    """Expert weights in home slots, ``[N, G, H, 3, D, F]``, or ``[L, N, G, H, 3, D, F]`` where layers are stacked.

    They carry Flax's sharding metadata: ``nnx.get_partition_spec`` says ``P('node', 'local')``, the FSDP axis on D if
    there is one, and a leading None where layers are stacked, whether or not the transformation that stacked them was
    given ``transform_metadata``.
    """

    def get_metadata(self, name: str | None = None, *default: Any, **options: Any) -> Any:
        """As of every variable, with ``out_sharding`` for as many axes as the value has now."""
        if name is None:
            metadata = super().get_metadata(**options)
            if metadata.get("out_sharding"):
                metadata["out_sharding"] = self._spec(metadata["out_sharding"])
            return metadata
        value = super().get_metadata(name, *default, **options)
        return self._spec(value) if name == "out_sharding" and value else value

    def _spec(self, sharding: tuple[str | None, ...]) -> tuple[str | None, ...]:
        own = tuple(sharding)[tuple(sharding).index(NODE) :]
        stacked = getattr(self.get_raw_value(), "ndim", AXES) - AXES
        return (None,) * stacked + own


class CorrectionBias(nnx.Variable):
    """The bias that is added to sigmoid scores when experts are selected. The gradient does not train it."""


class Homes(nnx.Variable):
    """Flat home slot of each expert, ``[E]`` int32: the layout of the expert weights beside it."""


def expert_spec(fsdp_axis: str | None = None) -> PartitionSpec:
    """How expert weights ``[N, G, H, 3, D, F]`` are sharded: over the ranks, and over an FSDP axis along D.

    >>> expert_spec("fsdp")
    P('node', 'local', None, None, 'fsdp')
    """
    return PartitionSpec(*RANKS) if fsdp_axis is None else PartitionSpec(*RANKS, None, None, fsdp_axis)
