"""The layout of a checkpoint: what its arrays are and were, so that a restore knows what it reads.

JSON beside the arrays: the topology and the homes they were saved under; the name, dtype, shape and digest of each. A
SHA-256 of the rest says that the layout itself is as it was written.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from relibra_jax.types import Topology


class Layout(NamedTuple):
    """What a checkpoint says of itself."""

    topology: Topology
    """The expert-parallel group that it was saved from."""
    home: Int[np.ndarray, "L E"]
    """Flat home slot of each expert when it was saved."""
    arrays: Mapping[str, list[Any]]
    """The dtype's name and the dimensions of each array by its name."""
    digests: Mapping[str, str]
    """The digest of each array in logical order, see `relibra_jax.execution.digests`."""


def layout_json(layout: Layout) -> dict[str, Any]:
    """A layout as it is written, with its SHA-256."""
    content = {
        "topology": dataclasses.asdict(layout.topology),
        "home": layout.home.tolist(),
        "arrays": dict(layout.arrays),
        "digests": dict(layout.digests),
    }
    return content | {"sha256": _sha256(content)}


def parse_layout(content: Mapping[str, Any], *, verify: bool) -> Layout:
    """A layout as it was read.

    Args:
        content: what `layout_json` gave, or what has become of it.
        verify: whether to compare it with its SHA-256.

    Raises:
        ValueError: if it is not as it was written, or nothing is there that could say so.
        KeyError: if a part is missing and ``verify`` is False.

    >>> topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=2, replica_slots=0)
    >>> content = layout_json(Layout(topology, np.array([[1, 0], [0, 1]]), {}, {}))
    >>> parse_layout(content, verify=True).home.tolist()
    [[1, 0], [0, 1]]
    >>> parse_layout(content | {"home": [[0, 1], [0, 1]]}, verify=True)
    Traceback (most recent call last):
    ValueError: it is not what was saved
    """
    rest = {name: value for name, value in content.items() if name != "sha256"}
    if verify and not {"sha256", "digests"} & content.keys():
        raise ValueError("it has no digests, an earlier version wrote it; verify=False takes it as it is")
    if verify and content.get("sha256") != _sha256(rest):
        raise ValueError("it is not what was saved")
    return Layout(
        Topology(**content["topology"]),
        np.array(content["home"], np.int32),
        content["arrays"],
        content.get("digests", {}),
    )


def check_arrays(step: int, saved: Mapping[str, list[Any]], wanted: Mapping[str, Any]) -> None:
    """Raise unless a checkpoint has exactly the wanted arrays.

    Args:
        step: the number of the checkpoint, for the error.
        saved: ``Layout.arrays``.
        wanted: arrays of the model by their names, or their shapes.

    Raises:
        ValueError: if an array is missing, foreign, or of another shape or dtype; names the first.
    """
    missing, foreign = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
    if missing:
        raise ValueError(f"step {step} lacks {len(missing)} arrays of the model, {missing[0]!r} first")
    if foreign:
        raise ValueError(f"step {step} has {len(foreign)} arrays that the model lacks, {foreign[0]!r} first")
    for name, form in wanted.items():
        found = saved[name]
        if describe(form) != found:
            model = f"{form.dtype.name}{list(form.shape)}"
            raise ValueError(f"step {step}, {name!r}: {found[0]}{found[1:]}, in the model {model}")


def describe(array: Any) -> list[Any]:
    """The entry of an array in ``Layout.arrays``.

    >>> describe(np.zeros((2, 3), np.int8))
    ['int8', 2, 3]
    """
    return [array.dtype.name, *array.shape]


def _sha256(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
