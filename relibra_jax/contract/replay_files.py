"""Routing replays saved as ``.npz`` files, which the command line calls traces."""

import contextlib
import os
import zipfile
from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Bool, Integer

from relibra_jax.contract.recording import (
    RECORDED_ARRAYS,
    Recording,
    recording_from_arrays,
    recording_to_arrays,
)
from relibra_jax.contract.replay import check_replay, id_dtype
from relibra_jax.contract.types import RoutingReplay
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.atomic_write import write_atomically
from relibra_jax.support.limits import check_memory


@checks_arguments
def save_replay(
    path: str | os.PathLike[str],
    replay: RoutingReplay,
    *,
    num_experts: int,
    recording: Recording = Recording(),  # noqa: B008
) -> None:
    """Save a replay as an ``.npz`` file, atomically.

    The file has the arrays ``routed_experts [tokens, L, K]`` (the real tokens, sample after sample, in the smallest
    dtype), ``lengths [B]`` and ``num_experts []``. It does not contain padding: `load_replay` aligns the samples to the
    left.

    Args:
        path: the file to write or replace. No suffix is added to the name.
        replay: a replay that `check_replay` accepts.
        num_experts: E, the number of logical experts of a layer.
        recording: what a run recorded of the samples. Its parts become further arrays
            (`relibra_jax.contract.recording.recording_to_arrays`), which `read_recording` reads.

    Raises:
        ValueError: if `check_replay` rejects the replay, or the recording does not fit it. No file is written then.

    >>> import tempfile
    >>> from pathlib import Path
    >>> replay = RoutingReplay(np.array([[[[0, 3]], [[1, 2]]]]), np.array([[False, True]]))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_replay(Path(folder) / "batch.npz", replay, num_experts=4)
    ...     loaded, num_experts = load_replay(Path(folder) / "batch.npz")
    >>> loaded.expert_ids.tolist(), loaded.mask.tolist(), num_experts
    ([[[[1, 2]]]], [[True]], 4)
    """
    check_replay(replay, num_experts=num_experts)
    mask = np.asarray(replay.mask)
    # Optional arrays come first, because a damaged entry of the archive's directory hides the entries behind it.
    arrays = {
        **recording_to_arrays(recording, mask),
        "num_experts": np.int32(num_experts),
        "routed_experts": np.asarray(replay.expert_ids)[mask].astype(id_dtype(num_experts)),
        "lengths": mask.sum(axis=1, dtype=np.int32),
    }
    with write_atomically(path) as part, part.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


@checks_arguments
def load_replay(path: str | os.PathLike[str]) -> tuple[RoutingReplay, int]:
    """Load a replay that `save_replay`, or another program that uses its format, wrote.

    Args:
        path: an ``.npz`` file with ``routed_experts [tokens, L, K]``, ``lengths [B]`` and, optionally,
            ``num_experts []``. Other arrays are ignored. Nothing is unpickled.

    Returns:
        The replay, whose ids have the smallest dtype and whose samples are aligned to the left and padded to the
        longest one; and E. If the file does not state E, it is the largest id + 1, which is too small if the last
        experts were never used; `stored_num_experts` tells whether the file states E.

    Raises:
        ValueError: if the file is truncated or corrupt, if `check_replay` rejects the replay, or if the arrays, or the
            padded arrays, do not fit into the memory of this machine.
        OSError: if the file does not exist or cannot be opened.
    """
    arrays = read_arrays(path)
    rows, lengths, stored = arrays["routed_experts"], arrays["lengths"], arrays.get("num_experts")
    if stored is None and not rows.size:
        raise ValueError(f"{os.fspath(path)}: it has neither num_experts nor an id to infer it from")
    num_experts = int(rows.max()) + 1 if stored is None else int(stored)
    try:
        dtype = id_dtype(num_experts)
        replay = _pad(rows, lengths)
        check_replay(replay, num_experts=num_experts)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error
    return replay._replace(expert_ids=replay.expert_ids.astype(dtype, copy=False)), num_experts


def _pad(rows: np.ndarray, lengths: np.ndarray) -> RoutingReplay:
    """Align the rows of every sample to the left and pad them to the longest sample."""
    samples, longest = len(lengths), int(lengths.max(initial=0))
    row_bytes = rows.itemsize * rows.shape[1] * rows.shape[2]
    check_memory(f"padding {samples} samples to {longest} tokens", samples * longest * (1 + row_bytes))
    mask = np.arange(longest)[None, :] < lengths[:, None]
    ids = np.zeros((*mask.shape, *rows.shape[1:]), rows.dtype)
    ids[mask] = rows
    return RoutingReplay(ids, mask)


def stored_num_experts(path: str | os.PathLike[str]) -> int | None:
    """Return the ``num_experts`` that a replay file states; None if `load_replay` has to infer it.

    Raises:
        ValueError, OSError: under the conditions of `read_arrays`.
    """
    stored = read_arrays(path).get("num_experts")
    return None if stored is None else int(stored)


def read_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read the arrays ``routed_experts``, ``lengths`` and, if present, ``num_experts`` of a replay file.

    Raises:
        ValueError: if the file is truncated or corrupt, if an array is missing or has the wrong shape or dtype, if a
            length is out of range, or if the arrays do not fit into the memory of this machine.
        OSError: if the file does not exist or cannot be opened.
    """
    name, axes = os.fspath(path), {"routed_experts": 3, "lengths": 1, "num_experts": 0}
    arrays = _unpack(path, axes)
    for key, array in arrays.items():
        if array.ndim != axes[key] or array.dtype.kind not in "iu":
            raise ValueError(
                f"{name}: {key} must be integers of {axes[key]} axes, not {array.dtype}{list(array.shape)}"
            )
    if missing := {"routed_experts", "lengths"} - arrays.keys():
        raise ValueError(f"{name}: there is no array {' and no array '.join(sorted(missing))}")
    try:
        _check_sizes(arrays["routed_experts"].shape, arrays["lengths"])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return arrays


def read_labels(path: str | os.PathLike[str], names: Iterable[str], *, samples: int) -> dict[str, np.ndarray]:
    """Read arrays of strings that label the samples of a replay file, for example with their data set.

    Args:
        path: the file to read.
        names: the names of the arrays, which hold strings ``[B]``.
        samples: B, the number of samples.

    Returns:
        The arrays that the file has, by name, in the order of ``names``.

    Raises:
        ValueError: if the file is truncated or corrupt, or if an array has the wrong shape or dtype.
        OSError: if the file does not exist or cannot be opened.
    """
    labels = _unpack(path, names)
    for key, array in labels.items():
        if array.dtype.kind != "U" or array.shape != (samples,):
            raise ValueError(
                f"{os.fspath(path)}: {key} must be strings [{samples}], not {array.dtype}{list(array.shape)}"
            )
    return labels


def read_token_ids(
    path: str | os.PathLike[str], mask: Bool[np.ndarray, "B T"]
) -> Integer[np.ndarray, "B T"] | None:
    """Read the optional array ``token_ids [tokens]`` of a replay file: the vocabulary id of every real token.

    Args:
        path: the file to read.
        mask: the mask of its replay, as `load_replay` returns it.

    Returns:
        The ids, aligned with the replay and 0 at padding; None if the file has none.

    Raises:
        ValueError: if the file is truncated or corrupt, or if the array has the wrong shape or dtype.
        OSError: if the file does not exist or cannot be opened.
    """
    rows = _unpack(path, ["token_ids"]).get("token_ids")
    if rows is None:
        return None
    if rows.dtype.kind not in "iu" or rows.shape != (mask.sum(),):
        raise ValueError(
            f"{os.fspath(path)}: token_ids must be integers [{mask.sum()}], not {rows.dtype}{list(rows.shape)}"
        )
    ids = np.zeros(mask.shape, rows.dtype)
    ids[mask] = rows
    return ids


def read_recording(path: str | os.PathLike[str], mask: Bool[np.ndarray, "B T"]) -> Recording:
    """Read what a run recorded of the samples of a replay file.

    Args:
        path: the file to read.
        mask: the mask of its replay, as `load_replay` returns it.

    Returns:
        The recording, whose parts are None for arrays that the file does not have.

    Raises:
        ValueError: if the file is truncated or corrupt, or if
            `relibra_jax.contract.recording.recording_from_arrays` rejects an array; the message names the file.
        OSError: if the file does not exist or cannot be opened.
    """
    arrays = _unpack(path, RECORDED_ARRAYS)
    try:
        return recording_from_arrays(arrays, mask)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error


def _unpack(path: str | os.PathLike[str], names: Iterable[str]) -> dict[str, np.ndarray]:
    """Read the named arrays that an ``.npz`` file has, in the order of the names, and raise if the file is damaged."""
    name = os.fspath(path)
    with open(path, "rb") as file:
        with _reject_damage(name), zipfile.ZipFile(file) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        # Zeros are compressed a thousandfold, so a small file may not fit into memory.
        check_memory(f"{name}: unpacking it", unpacked)
        file.seek(0)
        with _reject_damage(name), np.load(file, allow_pickle=False) as data:
            # Without this test, an array whose name is damaged would look like a missing one.
            if damaged := data.zip.testzip():
                raise ValueError(f"{damaged} is damaged")
            return {key: np.asarray(data[key]) for key in names if key in data.files}


def _check_sizes(shape: tuple[int, ...], lengths: np.ndarray) -> None:
    """Raise ValueError unless ``routed_experts`` has layers and experts, and the lengths sum to its rows."""
    tokens, layers, top_k = shape
    if min(layers, top_k) < 1:
        raise ValueError(f"routed_experts has {layers} layers of top-{top_k}, but needs at least 1 of both")
    # Each length is checked before the sum, because the sum could overflow.
    outside = np.flatnonzero((lengths < 0) | (lengths > tokens))
    if outside.size:
        sample = int(outside[0])
        raise ValueError(
            f"sample {sample} has length {lengths[sample]}, but routed_experts has {tokens} rows"
        )
    total = int(lengths.sum(dtype=np.int64))
    if total != tokens:
        raise ValueError(f"lengths sum to {total}, but routed_experts has {tokens} rows")


@contextlib.contextmanager
def _reject_damage(name: str) -> Iterator[None]:
    """Turn the many kinds of errors that a damaged zip archive can raise into a ValueError."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{name}: not a whole .npz file ({error})") from error
