"""From a routing replay to load, and a replay's own file.

In reinforcement learning the rollout engine has routed every token before training starts, so the load of
each expert is counted, not predicted (ReLibra; rollout routing replay, arXiv:2510.11370). Counting is a
histogram of the ids of real tokens. Values are checked here, on the host and once: what counts and plans
later trusts them.
"""

import math
import os
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from relibra_jax.atomic_write import write_atomically
from relibra_jax.types import Array, Assignment, RoutingReplay

# With top-1 routing a row of zeros is a legal row. It is taken for a hole in the recording once uniform
# routing would produce it less than once in 2**30.
IMPLAUSIBLE_BITS: Final = 30


def id_dtype(num_experts: int) -> np.dtype:
    """The smallest dtype of a replay's expert ids: uint8 up to 256 experts, uint16 up to 65536, else int32.

    >>> id_dtype(256), id_dtype(257)
    (dtype('uint8'), dtype('uint16'))
    """
    return np.dtype(np.uint8 if num_experts <= 1 << 8 else np.uint16 if num_experts <= 1 << 16 else np.int32)


def sample_load(replay: RoutingReplay, *, num_experts: int) -> Int[Array, "B L E"]:
    """Count the token copies that every sample sends to every expert.

    Works under jit. The replay is one that `check_replay` accepts; ids outside ``0..E-1`` count nothing.

    Args:
        replay: expert_ids ``[B, T, L, K]`` of any integer dtype, mask ``[B, T]`` bool.
        num_experts: E, logical experts of a layer.

    Returns:
        int32 ``[B, L, E]``, token copies; over E they sum to the sample's real tokens times K.

    >>> replay = RoutingReplay(np.array([[[[0, 2]], [[1, 2]]]]), np.array([[True, True]]))
    >>> sample_load(replay, num_experts=4).tolist()
    [[[1, 1, 2, 0]]]
    """

    def count(ids: Int[Array, "T K"], mask: Array) -> Int[Array, "E"]:
        ids = jnp.where(mask[:, None], ids, num_experts)
        return jnp.zeros(num_experts, jnp.int32).at[ids].add(1, mode="drop", wrap_negative_indices=False)

    layers = jax.vmap(count, in_axes=(1, None))
    return jax.vmap(layers)(jnp.asarray(replay.expert_ids, jnp.int32), jnp.asarray(replay.mask))


def expert_load(
    replay: RoutingReplay, assignment: Assignment, *, num_experts: int
) -> Int[Array, "M L N G E"]:
    """Count the token copies that every rank sends to every expert in every micro-batch.

    Works under jit. This is the load that planners take: N and G say where the tokens lie, before dispatch.

    Args:
        replay: expert_ids ``[B, T, L, K]`` of any integer dtype, mask ``[B, T]`` bool.
        assignment: sample ``[M, N, G, b]`` integer, indices into B; EMPTY counts nothing.
        num_experts: E, logical experts of a layer.

    Returns:
        int32 ``[M, L, N, G, E]``, token copies. If every sample is assigned once they sum, in each layer, to
        the real tokens of the batch times K.

    >>> replay = RoutingReplay(np.array([[[[0]]], [[[2]]]]), np.array([[True], [True]]))
    >>> expert_load(replay, Assignment(np.array([[[[1, 0], [-1, -1]]]])), num_experts=3).tolist()
    [[[[[1, 0, 1], [0, 0, 0]]]]]
    """
    return assigned_load(sample_load(replay, num_experts=num_experts), assignment)


def assigned_load(sample_load: Int[Array, "B L E"], assignment: Assignment) -> Int[Array, "M L N G E"]:
    """Sum the loads of the samples that every rank holds in every micro-batch; `expert_load`, already counted.

    Args:
        sample_load: from `sample_load`.
        assignment: sample ``[M, N, G, b]`` integer, indices into B; EMPTY counts nothing.

    Returns:
        int32 ``[M, L, N, G, E]``, token copies.
    """
    loads = jnp.asarray(sample_load)
    sample = jnp.asarray(assignment.sample, jnp.int32)
    held = loads.at[sample].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return jnp.moveaxis(held.sum(axis=3, dtype=jnp.int32), 3, 1)


def check_replay(replay: RoutingReplay, *, num_experts: int) -> None:
    """Check on the host every value that the rest of the library relies on.

    Args:
        replay: expert_ids ``[B, T, L, K]`` integer, mask ``[B, T]`` bool; rows of padding are not read.
        num_experts: E, logical experts of a layer.

    Raises:
        ValueError: the axes disagree with each other or with ``num_experts``, the dtype cannot hold every id,
            or a row is not K different experts in ``0..E-1``: the message names sample, token and layer. So
            are a layer and a token that have only zeros, which is how an unmerged pipeline stage and a
            prefix-cached token look. With K = 1 zeros are a legal route, reported only where chance
            does not explain them (`IMPLAUSIBLE_BITS`).

    >>> check_replay(RoutingReplay(np.array([[[[3, 3]]]]), np.array([[True]])), num_experts=4)
    Traceback (most recent call last):
    ValueError: sample 0, token 0, layer 0: expert 3 appears twice in [3, 3]
    """
    ids, mask = np.asarray(replay.expert_ids), np.asarray(replay.mask)
    if ids.ndim != 4 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"expert_ids must be integers [B, T, L, K], not {ids.dtype}{list(ids.shape)}")
    if mask.dtype != np.bool_ or mask.shape != ids.shape[:2]:
        raise ValueError(
            f"mask must be bool{list(ids.shape[:2])} like expert_ids, not {mask.dtype}{list(mask.shape)}"
        )
    if min(ids.shape[2:]) < 1 or ids.shape[3] > num_experts:
        raise ValueError(
            f"{ids.shape[2]} layers of top-{ids.shape[3]} cannot route to num_experts={num_experts}"
        )
    if np.iinfo(ids.dtype).max < num_experts - 1:
        raise ValueError(f"{ids.dtype} cannot hold the ids of num_experts={num_experts}")
    if fault := find_fault(ids[mask], num_experts=num_experts):
        row, layer, problem = fault
        sample, token = locate(mask, row)
        raise ValueError(f"sample {sample}, token {token}, layer {layer}: {problem}")


def locate(mask: np.ndarray, row: int) -> tuple[int, int]:
    """Sample and token of the ``row``-th True of a mask ``[B, T]``.

    >>> locate(np.array([[False, True], [True, True]]), 1)
    (1, 0)
    """
    sample, token = np.unravel_index(np.flatnonzero(mask)[row], mask.shape)
    return int(sample), int(token)


def find_fault(rows: np.ndarray, *, num_experts: int) -> tuple[int, int, str] | None:
    """Find the first row, if any, that is not K different experts: its index, its layer, and what is wrong.

    Args:
        rows: ``[tokens, L, K]`` integer, real tokens only.
        num_experts: E, logical experts of a layer.

    >>> find_fault(np.array([[[0, 1]], [[2, 4]]]), num_experts=4)
    (1, 0, 'expert id 4 is outside 0..3 (a physical slot of a balanced engine?)')
    """
    if not rows.size:
        return None
    if rows.min() < 0 or rows.max() >= num_experts:
        row, layer, k = np.argwhere((rows < 0) | (rows >= num_experts))[0].tolist()
        return row, layer, outside(int(rows[row, layer, k]), num_experts)
    tokens, layers, top_k = rows.shape
    zero = ~rows.any(axis=-1)
    if top_k > 1 or tokens * math.log2(num_experts) > IMPLAUSIBLE_BITS:
        for layer in np.flatnonzero(zero.all(axis=0)).tolist():
            return 0, layer, "only zeros for every token (an unmerged pipeline stage, or a dense layer?)"
    if top_k > 1 or layers * math.log2(num_experts) > IMPLAUSIBLE_BITS:
        for row in np.flatnonzero(zero.all(axis=1)).tolist():
            return row, 0, "only zeros in every layer (a prefix-cached or padding token?)"
    repeats = np.zeros((tokens, layers), bool)
    for k in range(top_k):
        for earlier in range(k):
            repeats |= rows[..., k] == rows[..., earlier]
    for row, layer in np.argwhere(repeats).tolist():
        ids = rows[row, layer].tolist()
        return row, layer, f"expert {max(ids, key=ids.count)} appears twice in {ids}"
    return None


def outside(expert: int, num_experts: int) -> str:
    """Say that an id is none of the logical experts, and what it then usually is."""
    hint = " (a physical slot of a balanced engine?)" if expert >= num_experts else ""
    return f"expert id {expert} is outside 0..{num_experts - 1}{hint}"


def save_replay(path: str | os.PathLike[str], replay: RoutingReplay, *, num_experts: int) -> None:
    """Write a replay as ``.npz``, whole or not at all.

    The arrays are ``routed_experts [tokens, L, K]`` (real tokens, sample after sample, smallest dtype),
    ``lengths [B]`` and ``num_experts []``. Padding is not kept: `load_replay` aligns samples to the left.

    Args:
        path: where the file goes; the name is taken as it is.
        replay: what `check_replay` accepts.
        num_experts: E, logical experts of a layer.

    Raises:
        ValueError: `check_replay` refuses the replay; no file is touched.

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
        ValueError: the file is truncated, corrupt, or holds something that `check_replay` refuses.
        OSError: there is no such file, or it cannot be opened.
    """
    arrays = read_arrays(path)
    rows, lengths, stored = arrays["routed_experts"], arrays["lengths"], arrays.get("num_experts")
    if stored is None and not rows.size:
        raise ValueError(f"{os.fspath(path)}: neither num_experts nor an id to infer it from")
    num_experts = int(rows.max()) + 1 if stored is None else int(stored)
    mask = np.arange(lengths.max(initial=0))[None, :] < lengths[:, None]
    ids = np.zeros((*mask.shape, *rows.shape[1:]), rows.dtype)
    ids[mask] = rows
    replay = RoutingReplay(ids, mask)
    try:
        check_replay(replay, num_experts=num_experts)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error
    return RoutingReplay(ids.astype(id_dtype(num_experts), copy=False), mask), num_experts


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
        ValueError: the file is truncated or corrupt, an array is missing or has the wrong shape or dtype.
        OSError: there is no such file, or it cannot be opened.
    """
    name, axes = os.fspath(path), {"routed_experts": 3, "lengths": 1, "num_experts": 0}
    with open(path, "rb") as file:
        try:
            with np.load(file, allow_pickle=False) as data:
                # An array whose name is damaged would otherwise pass for one that is not there.
                if damaged := data.zip.testzip():
                    raise ValueError(f"{damaged} is damaged")
                arrays = {key: data[key] for key in axes if key in data.files}
        # A damaged zip archive raises whatever its damaged bytes happen to mean.
        except Exception as error:
            raise ValueError(f"{name}: not a whole .npz file ({error})") from error
    for key, found in arrays.items():
        if found.ndim != axes[key] or found.dtype.kind not in "iu":
            raise ValueError(
                f"{name}: {key} must be integers of {axes[key]} axes, not {found.dtype}{list(found.shape)}"
            )
    if missing := {"routed_experts", "lengths"} - arrays.keys():
        raise ValueError(f"{name}: there is no array {' and no array '.join(sorted(missing))}")
    rows, lengths = arrays["routed_experts"], arrays["lengths"]
    if lengths.min(initial=0) < 0 or lengths.sum(dtype=np.int64) != len(rows):
        raise ValueError(f"{name}: lengths sum to {lengths.sum()}, routed_experts has {len(rows)} rows")
    return arrays
