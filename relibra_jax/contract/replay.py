"""The load of a routing replay, and the check of its values.

In reinforcement learning the rollout engine has routed every token before training starts, so the load of each
expert is counted, not predicted (ReLibra; rollout routing replay, arXiv:2510.11370). The count is a histogram of
the expert ids of real tokens. `check_replay` checks the values once, on the host; all later code relies on that.
"""

import math
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int, Integer

from relibra_jax.contract.types import Array, Assignment, RoutingReplay
from relibra_jax.support.argument_types import checks_arguments
from relibra_jax.support.limits import INT32_MAX, check_integer

IMPLAUSIBLE_BITS: Final = 30
"""Negative log2 of the probability below which zeros count as a gap in the recording. With top-1 routing a row of zeros
is legal; it is rejected if uniform routing would produce it less often than once in 2**30."""


def id_dtype(num_experts: int) -> np.dtype:
    """Return the smallest dtype for expert ids: uint8 up to 256 experts, uint16 up to 65536, else int32.

    Args:
        num_experts: E, the number of logical experts of a layer.

    Raises:
        ValueError: if ``num_experts`` is not an integer from 1 to the maximum of int32.

    >>> id_dtype(256), id_dtype(257)
    (dtype('uint8'), dtype('uint16'))
    """
    check_integer("num_experts", num_experts, least=1)
    return np.dtype(np.uint8 if num_experts <= 1 << 8 else np.uint16 if num_experts <= 1 << 16 else np.int32)


@checks_arguments
def sample_load(replay: RoutingReplay, *, num_experts: int) -> Int[Array, "B L E"]:
    """Count the token copies that every sample sends to every expert.

    Counting goes sample by sample and layer by layer in the dtype of the ids, so it needs memory for the counts and for
    one sample, also if the ids are a memory-mapped array. It uses NumPy, and works under jit.

    Args:
        replay: a replay that `check_replay` accepts. Ids outside ``0..E-1`` are not counted.
        num_experts: E, the number of logical experts of a layer.

    Returns:
        The load, int32, in token copies. Its sum over E is the number of real tokens of the sample times K.

    Raises:
        ValueError: if the arrays are not those of a replay (`check_arrays`), or an expert of a sample has more token
            copies than int32 holds.

    >>> replay = RoutingReplay(np.array([[[[0, 2]], [[1, 2]]]]), np.array([[True, True]]))
    >>> sample_load(replay, num_experts=4).tolist()
    [[[1, 1, 2, 0]]]
    """
    return load_by_part(replay, num_experts=num_experts)


def load_by_part(
    replay: RoutingReplay,
    *,
    num_experts: int,
    part: Integer[np.ndarray, " T"] | None = None,
    parts: int = 1,
) -> Int[Array, "B L parts_E"]:
    """Count the token copies that every sample sends to every expert from each part of its positions.

    Args:
        replay: the replay, as for `sample_load`.
        num_experts: E, the number of logical experts of a layer.
        part: the part of each token position, ``0..parts-1``. None for a single part.
        parts: the number of parts.

    Returns:
        The load, int32, in token copies, by part and expert.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in replay):
        part = np.zeros(replay.mask.shape[1], np.int32) if part is None else part
        traced = RoutingReplay(*map(jnp.asarray, replay))
        return _traced_load(traced, part, parts=parts, num_experts=num_experts)
    ids, mask = check_arrays(replay)
    load = np.empty((len(ids), ids.shape[2], parts * num_experts), np.int32)
    for sample, real in enumerate(mask):
        of_tokens = None if part is None else part[real]
        load[sample] = count_copies(ids[sample][real], num_experts=num_experts, part=of_tokens, parts=parts)
    return load


def count_copies(
    rows: Integer[np.ndarray, "t L K"],
    *,
    num_experts: int,
    part: Integer[np.ndarray, " t"] | None = None,
    parts: int = 1,
) -> Int[np.ndarray, "L parts_E"]:
    """Count the token copies of the routes of some tokens, by the part that each token belongs to.

    Args:
        rows: the routes, in any integer dtype. Only one layer of them is ever widened.
        num_experts: E, the number of logical experts of a layer. Ids outside ``0..E-1`` are not counted.
        part: the part of each token, ``0..parts-1``. None for a single part.
        parts: the number of parts.

    Returns:
        int32 token copies of each layer, by part and expert.

    Raises:
        ValueError: if int32 cannot count the tokens.
    """
    tokens, layers, _ = rows.shape
    if tokens > INT32_MAX:
        raise ValueError(f"{tokens} tokens of a sample are more than the {INT32_MAX} that int32 can count")
    load = np.empty((layers, parts * num_experts), np.int32)
    has_others = rows.size > 0 and (rows.min() < 0 or rows.max() >= num_experts)
    # A histogram per layer is 20 times as fast as np.add.at, and widens the ids of one layer at a time.
    for layer in range(layers):
        ids = rows[:, layer]
        index = ids if part is None else ids + part[:, None].astype(np.int64) * num_experts
        counted = index[(ids >= 0) & (ids < num_experts)] if has_others else index.ravel()
        load[layer] = np.bincount(counted, minlength=load.shape[1])
    return load


def _traced_load(
    replay: RoutingReplay, part: Integer[np.ndarray, " T"], *, parts: int, num_experts: int
) -> Int[Array, "B L parts_E"]:
    """Count as `load_by_part` does, under jit: one layer of one sample after another."""
    offset = num_experts * jnp.asarray(part, jnp.int32)[:, None]

    def one_sample(inputs):
        ids, mask = inputs

        def one_layer(ids: Integer[Array, "T K"]) -> Int[Array, "parts_E"]:
            ids = ids.astype(jnp.int32)
            counted = mask[:, None] & (ids >= 0) & (ids < num_experts)
            load = jnp.zeros(parts * num_experts, jnp.int32)
            return load.at[jnp.where(counted, ids + offset, load.size)].add(1, mode="drop")

        return jax.lax.map(one_layer, jnp.moveaxis(ids, 1, 0))

    return jax.lax.map(one_sample, tuple(replay))


@checks_arguments
def expert_load(
    replay: RoutingReplay, assignment: Assignment, *, num_experts: int
) -> Int[Array, "M L N G E"]:
    """Count the token copies that every rank sends to every expert in every micro-batch.

    Works under jit. Planners take this load, unless layers are striped (`relibra_jax.routing.striping`). Its axes N and
    G are the rank that holds a token.

    Args:
        replay: a replay that `check_replay` accepts.
        assignment: the samples of each rank in each micro-batch.
        num_experts: E, the number of logical experts of a layer.

    Returns:
        The load, int32, in token copies. If every sample is assigned once, the sum of each layer is the number of real
        tokens of the batch times K.

    >>> replay = RoutingReplay(np.array([[[[0]]], [[[2]]]]), np.array([[True], [True]]))
    >>> expert_load(replay, Assignment(np.array([[[[1, 0], [-1, -1]]]])), num_experts=3).tolist()
    [[[[[1, 0, 1], [0, 0, 0]]]]]
    """
    return assigned_load(sample_load(replay, num_experts=num_experts), assignment)


@jax.jit
def assigned_load(sample_load: Int[Array, "B L E"], assignment: Assignment) -> Int[Array, "M L N G E"]:
    """Sum the loads of the samples that every rank holds in every micro-batch.

    The result is that of `expert_load`, for a caller that already has the load of each sample. It takes no more memory
    than its argument and its result, however many samples a rank may hold.

    Args:
        sample_load: the token copies of each sample, as `sample_load` returns them.
        assignment: the samples of each rank in each micro-batch. EMPTY and indices outside of B add nothing.

    Returns:
        The load, int32, in token copies.
    """
    loads = jnp.asarray(sample_load, jnp.int32)
    samples, layers, experts = loads.shape
    micro_batches, nodes, local, room = assignment.sample.shape
    ranks = nodes * local
    sample = jnp.asarray(assignment.sample, jnp.int32).ravel()
    assigned = (sample >= 0) & (sample < samples)
    order = jnp.argsort(~assigned, stable=True)

    # On a CPU, adding one sample at a time is as fast as a gather with a sum over b, and it stores only the sums.
    def add(number, load):
        position = order[number]
        micro_batch, rank = jnp.divmod(position // room, ranks)
        return load.at[micro_batch, :, rank].add(loads[sample[position]])

    zeros = jnp.zeros((micro_batches, layers, ranks, experts), jnp.int32)
    load = jax.lax.fori_loop(0, assigned.sum(), add, zeros)
    return load.reshape(micro_batches, layers, nodes, local, experts)


def rank_tokens(assignment: Assignment, lengths: Integer[Array, " B"]) -> Int[np.ndarray, "M N G"]:
    """Count the tokens that every rank holds in every micro-batch, on the host.

    Args:
        assignment: the samples of each rank in each micro-batch; EMPTY adds nothing.
        lengths: the number of tokens of each sample.

    >>> rank_tokens(Assignment(np.array([[[[0, 1], [2, -1]]]])), np.array([3, 2, 4])).tolist()
    [[[5, 4]]]
    """
    tokens = np.append(np.asarray(lengths, np.int64), 0)  # EMPTY is the last position
    return tokens[np.asarray(assignment.sample)].sum(-1)


def check_replay(replay: RoutingReplay, *, num_experts: int) -> None:
    """Raise ValueError unless a replay is valid. Runs on the host; all other code relies on this check.

    Args:
        replay: the replay to check. The ids of padding tokens are not read.
        num_experts: E, the number of logical experts of a layer.

    Raises:
        ValueError: if the axes disagree with each other or with ``num_experts``, if the dtype cannot hold every id, or
            if the route of a real token is not K different experts in ``0..E-1``; the message names the sample, the
            token and the layer. A layer or a token that has only zeros is rejected as well: an unmerged pipeline
            stage and a prefix-cached token look like that. With K = 1 zeros are a legal route, and are rejected only
            if chance does not explain them (`IMPLAUSIBLE_BITS`).

    >>> check_replay(RoutingReplay(np.array([[[[3, 3]]]]), np.array([[True]])), num_experts=4)
    Traceback (most recent call last):
    ValueError: sample 0, token 0, layer 0: expert 3 appears twice in [3, 3]
    """
    ids, mask = check_arrays(replay)
    if min(ids.shape[2:]) < 1 or ids.shape[3] > num_experts:
        raise ValueError(
            f"expert_ids has {ids.shape[2]} layers of top-{ids.shape[3]}, but needs at least 1 layer and a"
            f" top-k from 1 to num_experts={num_experts}"
        )
    if np.iinfo(ids.dtype).max < num_experts - 1:
        raise ValueError(f"expert_ids of {ids.dtype} cannot hold the ids of num_experts={num_experts}")
    tokens, used = 0, np.zeros(ids.shape[2], bool)
    for sample, real in enumerate(mask):
        rows = ids[sample][real]
        _check_rows(rows, sample, real, num_experts=num_experts)
        if ids.shape[3] == 1:  # with more experts of a token, a layer of zeros is a fault of any sample
            tokens, used = tokens + len(rows), used | rows.any(axis=(0, 2))
    if unused := find_unused_layer(used, tokens, num_experts=num_experts):
        layer, problem = unused
        sample, token = locate(mask, 0)
        raise ValueError(f"sample {sample}, token {token}, layer {layer}: {problem}")


def check_arrays(replay: RoutingReplay) -> tuple[np.ndarray, np.ndarray]:
    """Return the arrays of a replay on the host; raise ValueError unless their dtypes and axes are those of one.

    >>> check_arrays(RoutingReplay(np.zeros((2, 3, 1, 1), np.uint8), np.ones((2, 3), int)))
    Traceback (most recent call last):
    ValueError: mask must be bool[2, 3] like expert_ids, not int64[2, 3]
    """
    ids, mask = np.asarray(replay.expert_ids), np.asarray(replay.mask)
    if ids.ndim != 4 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"expert_ids must be integers [B, T, L, K], not {ids.dtype}{list(ids.shape)}")
    if mask.dtype != np.bool_ or mask.shape != ids.shape[:2]:
        raise ValueError(
            f"mask must be bool{list(ids.shape[:2])} like expert_ids, not {mask.dtype}{list(mask.shape)}"
        )
    return ids, mask


def check_counted(
    replay: RoutingReplay, load: Integer[Array, "B L E"], lengths: Integer[Array, " B"]
) -> None:
    """Raise ValueError if a route of a replay has an expert that was not counted, because it does not exist.

    Args:
        replay: the replay.
        load: its token copies, from `sample_load`.
        lengths: the number of real tokens of each sample.
    """
    ids, mask = check_arrays(replay)
    copies, num_experts = np.asarray(load).sum(-1, dtype=np.int64), load.shape[-1]
    short = copies != np.asarray(lengths, np.int64)[:, None] * ids.shape[3]
    for sample in np.flatnonzero(short.any(1))[:1].tolist():
        _check_rows(ids[sample][mask[sample]], sample, mask[sample], num_experts=num_experts)


def _check_rows(rows: np.ndarray, sample: int, real: np.ndarray, *, num_experts: int) -> None:
    """Raise ValueError for the first fault in the routes of a sample's real tokens (`find_fault`)."""
    if fault := find_fault(rows, num_experts=num_experts):
        row, layer, problem = fault
        raise ValueError(f"sample {sample}, token {np.flatnonzero(real)[row]}, layer {layer}: {problem}")


def locate(mask: np.ndarray, row: int) -> tuple[int, int]:
    """Return the sample and the token position of the ``row``-th real token of a mask ``[B, T]``.

    >>> locate(np.array([[False, True], [True, True]]), 1)
    (1, 0)
    """
    sample, token = np.unravel_index(np.flatnonzero(mask)[row], mask.shape)
    return int(sample), int(token)


def find_fault(rows: np.ndarray, *, num_experts: int) -> tuple[int, int, str] | None:
    """Find the first route that is not K different experts, among those of all or some tokens of a batch.

    Args:
        rows: ``[tokens, L, K]`` integers, the routes of real tokens.
        num_experts: E, the number of logical experts of a layer.

    Returns:
        The index of the token, the layer, and a description of the fault; None if all routes are valid. Layers of
        zeros under top-1 are a fault of a whole batch (`find_unused_layer`).

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
    if top_k > 1:
        for layer in np.flatnonzero(zero.all(axis=0)).tolist():
            return 0, layer, _NO_LAYER
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


_NO_LAYER: Final = "only zeros for every token (an unmerged pipeline stage, or a dense layer?)"


def find_unused_layer(
    used: Bool[np.ndarray, " L"], tokens: int, *, num_experts: int
) -> tuple[int, str] | None:
    """Find the first layer in which all tokens of a batch have zeros, unless so few tokens may do so by chance.

    Args:
        used: whether any token of the batch has an id above 0 in a layer.
        tokens: the number of tokens.
        num_experts: E, the number of logical experts of a layer.

    Returns:
        The layer, and a description of the fault; None if there is no such layer.
    """
    if tokens * math.log2(num_experts) > IMPLAUSIBLE_BITS:
        for layer in np.flatnonzero(~used).tolist():
            return layer, _NO_LAYER
    return None


def outside(expert: int, num_experts: int) -> str:
    """Describe an expert id that is out of range, for an error message, with its most likely cause."""
    hint = " (a physical slot of a balanced engine?)" if expert >= num_experts else ""
    return f"expert id {expert} is outside 0..{num_experts - 1}{hint}"
