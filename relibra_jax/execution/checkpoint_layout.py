"""The layout of a checkpoint, which describes its arrays to a restore.

It is JSON beside the arrays: the topology and the homes at the time of the save, and the name, dtype, shape and digest
of each array. A SHA-256 of the rest protects the layout itself against changes.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from relibra_jax.contract.types import Topology


class CheckpointLayout(NamedTuple):
    """The description of a checkpoint's arrays."""

    topology: Topology
    """The expert-parallel group that saved the checkpoint."""
    home: Int[np.ndarray, "L E"]
    """Flat home slot of each expert at the time of the save."""
    arrays: Mapping[str, list[Any]]
    """The dtype's name and the dimensions of each array, by the array's name."""
    digests: Mapping[str, str]
    """The digest of each array in logical expert order (`relibra_jax.execution.digests`), by the array's name."""


def layout_json(layout: CheckpointLayout) -> dict[str, Any]:
    """Convert a layout to the JSON content that a checkpoint stores, with its SHA-256."""
    content = {
        "topology": dataclasses.asdict(layout.topology),
        "home": layout.home.tolist(),
        "arrays": dict(layout.arrays),
        "digests": dict(layout.digests),
    }
    return content | {"sha256": _sha256(content)}


def parse_layout(content: Mapping[str, Any], *, verify: bool) -> CheckpointLayout:
    """Parse the JSON content of a layout.

    Args:
        content: the content that `layout_json` wrote, as read from disk.
        verify: whether to compare it with its SHA-256.

    Raises:
        ValueError: if ``verify`` is True, and the content has changed since it was written or has no SHA-256 or
            digests.
        KeyError: if a part is missing and ``verify`` is False.

    >>> topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=2, replica_slots=0)
    >>> content = layout_json(CheckpointLayout(topology, np.array([[1, 0], [0, 1]]), {}, {}))
    >>> parse_layout(content, verify=True).home.tolist()
    [[1, 0], [0, 1]]
    >>> parse_layout(content | {"home": [[0, 1], [0, 1]]}, verify=True)
    Traceback (most recent call last):
    ValueError: it has changed since it was saved
    """
    rest = {name: value for name, value in content.items() if name != "sha256"}
    if verify and not {"sha256", "digests"} & content.keys():
        raise ValueError(
            "it has no digests because an earlier version wrote it; use verify=False to restore it unchecked"
        )
    if verify and content.get("sha256") != _sha256(rest):
        raise ValueError("it has changed since it was saved")
    return CheckpointLayout(
        Topology(**content["topology"]),
        np.array(content["home"], np.int32),
        content["arrays"],
        content.get("digests", {}),
    )


def check_arrays(step: int, saved: Mapping[str, list[Any]], expected: Mapping[str, Any]) -> None:
    """Raise unless a checkpoint has exactly the arrays of the model.

    Args:
        step: the step number of the checkpoint, for the error.
        saved: the arrays of the checkpoint, ``CheckpointLayout.arrays``.
        expected: the arrays of the model, or their shapes and dtypes, by name.

    Raises:
        ValueError: if the checkpoint lacks an array, has an array that the model lacks, or has one with a different
            shape or dtype. The message has the first such array.
    """
    missing, foreign = sorted(expected.keys() - saved.keys()), sorted(saved.keys() - expected.keys())
    if missing:
        raise ValueError(f"step {step} lacks {len(missing)} arrays of the model; the first is {missing[0]!r}")
    if foreign:
        raise ValueError(
            f"step {step} has {len(foreign)} arrays that the model lacks; the first is {foreign[0]!r}"
        )
    for name, form in expected.items():
        entry = saved[name]
        if describe(form) != entry:
            model = f"{form.dtype.name}{list(form.shape)}"
            raise ValueError(
                f"step {step}: array {name!r} is {entry[0]}{entry[1:]}, but {model} in the model"
            )


def describe(array: Any) -> list[Any]:
    """Return the entry of an array in ``CheckpointLayout.arrays``: its dtype's name and its dimensions.

    >>> describe(np.zeros((2, 3), np.int8))
    ['int8', 2, 3]
    """
    return [array.dtype.name, *array.shape]


def _sha256(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
