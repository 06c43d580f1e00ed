"""The measured times of a layer of full size on one GPU, from the record of `experiments.gpu_day`."""

from pathlib import Path
from typing import Final, NamedTuple

from experiments.ladder.record import read_record
from relibra_jax.cost.models import Model

STEP: Final = "layer of full size"
"""The step whose results are read (`experiments.gpu_day.layer_profile.profile_layer`)."""


class MeasuredLayer(NamedTuple):
    """The measured milliseconds of a layer."""

    forward: float
    """The forward pass."""
    backward: float
    """The backward pass: the layer with gradients, less the forward pass."""
    experts_forward: float
    """The products of the experts alone, forward."""
    experts_backward: float
    """The same in the backward pass."""
    tables: float
    """The preparation of the layer."""
    scopes: dict[str, float]
    """The kernels of both passes, by the named scope in which they run; ``other`` for those without one."""


def read_profile(record: Path, *, tokens: int, model: Model) -> MeasuredLayer:
    """Read the last measured layer of a record.

    Args:
        record: the record, in JSON lines.
        tokens: the number of tokens that the layer must have.
        model: the sizes that the layer must have.

    Raises:
        ValueError: if there is no such file, it has no measured layer, or the layer has other sizes.
    """
    lines = [line for line in read_record(record) if line.get("step") == STEP and not line.get("rehearsal")]
    sizes = next((line for line in reversed(lines) if "milliseconds" in line and "tokens" in line), None)
    if sizes is None:
        raise ValueError(f"profile={record} has no results of the step {STEP!r} on a GPU")
    for name, wanted in (("tokens", tokens), ("top_k", model.top_k), ("width", model.width)):
        if sizes[name] != wanted:
            raise ValueError(f"profile={record} is of a layer with {name}={sizes[name]}, not {wanted}")
    parts = sizes["milliseconds"]
    scopes: dict[str, float] = next((line["scopes"] for line in reversed(lines) if "scopes" in line), {})
    return MeasuredLayer(
        forward=parts["layer"],
        backward=parts["layer with gradients"] - parts["layer"],
        experts_forward=parts["experts"],
        experts_backward=parts["experts with gradients"] - parts["experts"],
        tables=parts["tables"],
        scopes=scopes,
    )
