"""What a training run records of its samples beside their routes: steps, prompts, rewards, versions and provenance."""

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Integer, Shaped

from relibra_jax.support.json_text import parse_json
from relibra_jax.support.limits import INT32_MAX

UNKNOWN: Final = -1
"""The version of tokens that no policy sampled, such as prompts, or whose version is not known."""


class Recording(NamedTuple):
    """What a run recorded of the samples of a replay. Every part is optional, and None if it was not recorded."""

    step: Integer[np.ndarray, " B"] | None = None
    """The step of the run that learned from each sample, from 0."""
    prompt: Integer[np.ndarray, " B"] | None = None
    """The number of each sample's prompt within its step, from 0: responses to the same prompt use similar experts."""
    rewards: Float[np.ndarray, " B"] | None = None
    """The reward that the step learned from, NaN for samples without one."""
    versions: Integer[np.ndarray, "B T"] | None = None
    """The number of updates that made the weights that sampled each token; `UNKNOWN` for others."""
    provenance: dict[str, Any] | None = None
    """Where the samples are from, as JSON has it: the model and its sizes, the task, the seed, versions of packages."""


RECORDED_ARRAYS: Final = tuple(Recording._fields)
"""The names of the arrays of a replay file that hold a recording."""
INTEGERS: Final = ("step", "prompt", "versions")
"""The names of those that are stored as int32."""


def recording_to_arrays(
    recording: Recording, mask: Bool[np.ndarray, "B T"]
) -> dict[str, Shaped[np.ndarray, "..."]]:
    """Return the arrays of a replay file that hold a recording.

    They are ``step [B]``, ``prompt [B]``, ``rewards [B]``, ``versions [tokens]`` and ``provenance []``, a JSON text.

    Args:
        recording: the recording.
        mask: the mask of its replay.

    Raises:
        ValueError: if `recording_from_arrays` would reject the arrays.

    >>> arrays = recording_to_arrays(Recording(step=np.array([7, 8])), np.ones((2, 3), bool))
    >>> {name: array.tolist() for name, array in arrays.items()}
    {'step': [7, 8]}
    """
    arrays: dict[str, np.ndarray] = {}
    if recording.provenance is not None:
        arrays["provenance"] = np.array(json.dumps(recording.provenance))
    for name, dtype in (("step", None), ("prompt", None), ("rewards", np.float32)):
        if (array := getattr(recording, name)) is not None:
            arrays[name] = np.asarray(array, dtype)
    if recording.versions is not None:
        if np.shape(recording.versions) != mask.shape:
            raise ValueError(f"versions must be {list(mask.shape)}, not {list(np.shape(recording.versions))}")
        arrays["versions"] = np.asarray(recording.versions)[mask]
    # Before the cast, which would cut fractions and wrap what int32 cannot hold.
    recording_from_arrays(arrays, mask)
    return {name: array.astype(np.int32) if name in INTEGERS else array for name, array in arrays.items()}


def recording_from_arrays(
    arrays: Mapping[str, Shaped[np.ndarray, "..."]], mask: Bool[np.ndarray, "B T"]
) -> Recording:
    """Check the arrays of a replay file that hold a recording, and return it.

    Args:
        arrays: those of `RECORDED_ARRAYS` that the file has, by name.
        mask: the mask of its replay. The versions of padding are `UNKNOWN`.

    Raises:
        ValueError: if an array has the wrong shape or dtype, a number is out of range, or the provenance is not a JSON
            object. The message names the array.

    >>> mask = np.ones((2, 3), bool)
    >>> recording_from_arrays({"step": np.array([7, 8])}, mask).step.tolist()
    [7, 8]
    >>> recording_from_arrays({"step": np.array([7])}, mask)
    Traceback (most recent call last):
    ValueError: step must be integers [2], not int64[1]
    """
    samples, tokens = len(mask), int(mask.sum())
    for name, size, least in (("step", samples, 0), ("prompt", samples, 0), ("versions", tokens, UNKNOWN)):
        if name in arrays:
            _check_integers(name, arrays[name], size, least)
    if "rewards" in arrays:
        _check_rewards(arrays["rewards"], samples)
    versions = None
    if (rows := arrays.get("versions")) is not None:
        versions = np.full(mask.shape, UNKNOWN, np.int32)
        versions[mask] = rows
    return Recording(
        step=arrays.get("step"),
        prompt=arrays.get("prompt"),
        rewards=arrays.get("rewards"),
        versions=versions,
        provenance=_provenance(arrays["provenance"]) if "provenance" in arrays else None,
    )


def _check_integers(name: str, array: np.ndarray, size: int, least: int) -> None:
    if array.dtype.kind not in "iu" or array.shape != (size,):
        raise ValueError(f"{name} must be integers [{size}], not {array.dtype}{list(array.shape)}")
    for position in np.flatnonzero((array < least) | (array > INT32_MAX))[:1].tolist():
        bound = f"at least {least}" if array[position] < least else f"at most {INT32_MAX}"
        raise ValueError(f"{name}[{position}] is {array[position]}, but must be {bound}")


def _check_rewards(rewards: np.ndarray, size: int) -> None:
    if rewards.dtype.kind != "f" or rewards.shape != (size,):
        raise ValueError(f"rewards must be floats [{size}], not {rewards.dtype}{list(rewards.shape)}")
    for position in np.flatnonzero(np.isinf(rewards))[:1].tolist():
        raise ValueError(f"rewards[{position}] is {rewards[position]}, but must be finite, or NaN for none")


def _provenance(array: np.ndarray) -> dict[str, Any]:
    if array.dtype.kind != "U" or array.ndim:
        raise ValueError(f"provenance must be one text, not {array.dtype}{list(array.shape)}")
    try:
        provenance = parse_json(str(array))
    except ValueError as error:
        raise ValueError(f"provenance is not JSON ({error})") from error
    if not isinstance(provenance, dict):
        raise ValueError(f"provenance must be a JSON object, not {str(array)[:40]!r}")
    return provenance
