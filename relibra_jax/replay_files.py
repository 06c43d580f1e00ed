"""Routing replays as ``.npz`` files: what the command line calls a trace."""

import contextlib
import os
import zipfile
from collections.abc import Iterable, Iterator

import numpy as np

from relibra_jax.atomic_write import write_atomically
from relibra_jax.limits import check_memory
from relibra_jax.replay import check_replay, id_dtype
from relibra_jax.types import RoutingReplay


def save_replay(path: str | os.PathLike[str], replay: RoutingReplay, *, num_experts: int) -> None:
    """Write a replay as ``.npz``, whole or not at all.

    The arrays are ``routed_experts [tokens, L, K]`` (real tokens, sample after sample, smallest dtype),
    ``lengths [B]`` and ``num_experts []``. Padding is not kept: `load_replay` aligns samples to the left.

    Args:
        path: the file to write; the name is taken as it is.
        replay: a replay that `check_replay` accepts.
        num_experts: E, logical experts of a layer.

    Raises:
        ValueError: if `check_replay` refuses the replay; no file is touched.

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
    # The optional array comes first: a damaged entry of the archive's directory hides only what follows it.
    arrays = {
        "num_experts": np.int32(num_experts),
        "routed_experts": np.asarray(replay.expert_ids)[mask].astype(id_dtype(num_experts)),
        "lengths": mask.sum(axis=1, dtype=np.int32),
    }
    with write_atomically(path) as part, part.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load_replay(path: str | os.PathLike[str]) -> tuple[RoutingReplay, int]:
    """Read a replay that `save_replay`, or anything else that keeps its layout, has written.

    Args:
        path: an ``.npz`` with ``routed_experts [tokens, L, K]``, ``lengths [B]`` and, optionally,
            ``num_experts []``. Other arrays are ignored, nothing is unpickled.

    Returns:
        The replay, expert_ids ``[B, T, L, K]`` in the smallest dtype, aligned to the left and padded to the
        longest sample; and E. Where the file does not say, E is its largest id + 1, too small if the last
        experts were never used: `stored_num_experts` tells the two cases apart.

    Raises:
        ValueError: if the file is truncated, corrupt, or holds something that `check_replay` refuses, or if its arrays
            or the padded ones do not fit this machine's memory.
        OSError: if there is no such file, or it cannot be opened.
    """
    arrays = read_arrays(path)
    rows, lengths, stored = arrays["routed_experts"], arrays["lengths"], arrays.get("num_experts")
    if stored is None and not rows.size:
        raise ValueError(f"{os.fspath(path)}: neither num_experts nor an id to infer it from")
    num_experts = int(rows.max()) + 1 if stored is None else int(stored)
    try:
        dtype = id_dtype(num_experts)
        replay = _pad(rows, lengths)
        check_replay(replay, num_experts=num_experts)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error
    return replay._replace(expert_ids=replay.expert_ids.astype(dtype, copy=False)), num_experts


def _pad(rows: np.ndarray, lengths: np.ndarray) -> RoutingReplay:
    """The rows of every sample, aligned to the left."""
    samples, longest = len(lengths), int(lengths.max(initial=0))
    row_bytes = rows.itemsize * rows.shape[1] * rows.shape[2]
    check_memory(f"padding {samples} samples to {longest} tokens", samples * longest * (1 + row_bytes))
    mask = np.arange(longest)[None, :] < lengths[:, None]
    ids = np.zeros((*mask.shape, *rows.shape[1:]), rows.dtype)
    ids[mask] = rows
    return RoutingReplay(ids, mask)


def stored_num_experts(path: str | os.PathLike[str]) -> int | None:
    """The ``num_experts`` that a replay's file states, None where `load_replay` infers it.

    Raises:
        ValueError, OSError: as `load_replay`, save for the values of the ids.
    """
    stored = read_arrays(path).get("num_experts")
    return None if stored is None else int(stored)


def read_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Read ``routed_experts``, ``lengths`` and, where present, ``num_experts`` of a replay's file.

    Raises:
        ValueError: if the file is truncated or corrupt, an array is missing or has the wrong shape or dtype, a length
            is out of range, or the arrays do not fit this machine's memory.
        OSError: if there is no such file, or it cannot be opened.
    """
    name, axes = os.fspath(path), {"routed_experts": 3, "lengths": 1, "num_experts": 0}
    arrays = _unpack(path, axes)
    for key, found in arrays.items():
        if found.ndim != axes[key] or found.dtype.kind not in "iu":
            raise ValueError(
                f"{name}: {key} must be integers of {axes[key]} axes, not {found.dtype}{list(found.shape)}"
            )
    if missing := {"routed_experts", "lengths"} - arrays.keys():
        raise ValueError(f"{name}: there is no array {' and no array '.join(sorted(missing))}")
    try:
        _check_sizes(arrays["routed_experts"].shape, arrays["lengths"])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return arrays


def read_labels(path: str | os.PathLike[str], names: Iterable[str], *, samples: int) -> dict[str, np.ndarray]:
    """Read what a replay's file says of its samples in words.

    Args:
        path: the file.
        names: the arrays to read, strings ``[B]``.
        samples: the number of samples B.

    Returns:
        Those of the arrays that are there, in the order of ``names``.

    Raises:
        ValueError: if the file is truncated or corrupt, or an array has the wrong shape or dtype.
        OSError: if there is no such file, or it cannot be opened.
    """
    labels = _unpack(path, names)
    for key, found in labels.items():
        if found.dtype.kind != "U" or found.shape != (samples,):
            raise ValueError(
                f"{os.fspath(path)}: {key} must be strings [{samples}], not {found.dtype}{list(found.shape)}"
            )
    return labels


def _unpack(path: str | os.PathLike[str], names: Iterable[str]) -> dict[str, np.ndarray]:
    """The arrays of these names that a whole ``.npz`` file has, in the order of the names."""
    name = os.fspath(path)
    with open(path, "rb") as file:
        with _refuse_damage(name), zipfile.ZipFile(file) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        # Zeros pack a thousandfold: a small file may hold more than there is room for.
        check_memory(f"{name}: unpacking it", unpacked)
        file.seek(0)
        with _refuse_damage(name), np.load(file, allow_pickle=False) as data:
            # An array whose name is damaged would otherwise pass for one that is not there.
            if damaged := data.zip.testzip():
                raise ValueError(f"{damaged} is damaged")
            return {key: np.asarray(data[key]) for key in names if key in data.files}


def _check_sizes(shape: tuple[int, ...], lengths: np.ndarray) -> None:
    """Raise unless rows of this shape have experts, and the lengths fit them, each alone and all together."""
    tokens, layers, top_k = shape
    if min(layers, top_k) < 1:
        raise ValueError(f"routed_experts has {layers} layers of top-{top_k}, and needs at least 1 of both")
    # Each alone before their sum, which could wrap around.
    outside = np.flatnonzero((lengths < 0) | (lengths > tokens))
    if outside.size:
        sample = int(outside[0])
        raise ValueError(f"sample {sample} has length {lengths[sample]}, routed_experts has {tokens} rows")
    total = int(lengths.sum(dtype=np.int64))
    if total != tokens:
        raise ValueError(f"lengths sum to {total}, routed_experts has {tokens} rows")


@contextlib.contextmanager
def _refuse_damage(name: str) -> Iterator[None]:
    """A damaged zip archive raises whatever its damaged bytes happen to mean; here it is one kind of error."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{name}: not a whole .npz file ({error})") from error
