"""From what an engine recorded to a complete `RoutingReplay`, or to an error that says where it is not one.

Real systems have fallen into every one of these: the last token has no route; dense layers may have rows;
ids may be slots of a balanced engine; zero padding looks like an overload of expert 0; prefix-cached tokens
may be zeros; pipeline stages may not be merged; uint8 may have wrapped; an expert may come twice; left
padding shifts rows; an engine that was asked to skip tokens does not say so. So the caller names the layout,
the mask and where rows start, rows go to the mask's real tokens in order, and nothing is repaired: what is
missing is an error, or filled by a live forward pass of the caller's.
"""

import difflib
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from relibra_jax.replay import IMPLAUSIBLE_BITS, find_fault, id_dtype, locate, outside
from relibra_jax.rollout.layouts import LAYOUTS
from relibra_jax.rollout.payload import ASK_FOR_START, Expected, Recorded
from relibra_jax.types import EMPTY, Array, RoutingReplay


def replay_from_rollout(
    source: Any,
    *,
    layout: str,
    mask: Bool[Array, "B T"],
    num_experts: int,
    top_k: int,
    num_layers: int,
    moe_layers: Sequence[int] | None = None,
    start: int | Sequence[int] | Int[Array, "B"] | None = None,
    live_routing: Callable[[np.ndarray], Array] | None = None,
) -> RoutingReplay:
    """Read the routed experts of a batch.

    Args:
        source: what the layout takes, see `relibra_jax.rollout.layouts`.
        layout: a name in `LAYOUTS`.
        mask: ``[B, T]``, True where training has a real token. Recorded rows belong to these, in order,
            wherever they stand. Where a layout gives a sample's rows without their positions, the mask may leave
            out no token of the engine's sequence but the last.
        num_experts: E, logical experts of a layer.
        top_k: K, experts of a token; their order is kept.
        num_layers: hidden layers of the model, dense ones included.
        moe_layers: which of them have experts, ascending; all by default. A recording with rows of all
            layers is cut down to these; one with rows of the MoE layers alone is taken as it is.
        start: the token of a sample's first row, one integer for all samples or one for each, counted in the
            mask's real tokens: how many of them the engine was asked to skip (vLLM's
            ``routed_experts_prompt_start`` and SGLang's ``routed_experts_start_len``, which their answers do
            not repeat). Tokens before it have no route. It must be given, be it 0, for a sample with fewer rows
            than real tokens, unless the recording says where they start: a skipped first token leaves as many
            rows as a last token that was not routed.
        live_routing: for tokens without a route, ``missing -> expert_ids``: a bool ``[B, T]`` of these tokens
            to integer ``[B, T, L, K]``, read only where a route is missing. Called only if one is.

    Returns:
        expert_ids ``[B, T, L, K]`` in the smallest dtype, zeros at padding; L the MoE layers; and the mask.

    Raises:
        ValueError: if there is no such layout, the source cannot be read, axes do not fit, nothing says where a
            sample's rows start, the recording says otherwise than ``start``, a real token has no route, or a row
            is not K different logical experts: one line with the layout and, where they apply, sample, token
            (position in T) and layer (of the model).

    >>> rows = np.array([[[0, 1]], [[3, 2]]])  # 2 tokens, 1 layer, top-2
    >>> model = {"num_experts": 4, "top_k": 2, "num_layers": 1}
    >>> mask = np.array([[False, True, True]])
    >>> replay = replay_from_rollout([rows], layout="vllm", mask=mask, **model)
    >>> replay.expert_ids.dtype, replay.expert_ids[0, :, 0].tolist()
    (dtype('uint8'), [[0, 0], [0, 1], [3, 2]])
    >>> replay_from_rollout([rows], layout="vllm", mask=~np.zeros((1, 3), bool), start=0, **model)
    Traceback (most recent call last):
    ValueError: layout 'vllm': sample 0, token 2, layer 0: no route (engines do not route the last token), \
as for 1 of 3 tokens; live_routing would fill them
    """
    if layout not in LAYOUTS:
        near = difflib.get_close_matches(layout, LAYOUTS, n=1, cutoff=0)[0]
        raise ValueError(f"layout {layout!r} is none of {', '.join(LAYOUTS)}; the nearest is {near!r}")
    expected = _expected(np.asarray(mask), num_experts, top_k, num_layers, moe_layers, start)
    try:
        decode, moe_only = LAYOUTS[layout]
        rows = _gather(decode(source, expected), expected, moe_only=moe_only)
        missing = _missing(rows, expected)
        _check_rows(rows, ~missing.any(axis=1), expected)
        if live_routing is None:
            _check_complete(rows, missing, expected)
    except ValueError as error:
        raise ValueError(f"layout {layout!r}: {error}") from error
    if live_routing is not None and missing.any():
        rows = _fill(rows, missing, expected, live_routing)
    ids = np.zeros((*expected.mask.shape, *rows.shape[1:]), id_dtype(num_experts))
    ids[expected.mask] = rows
    return RoutingReplay(ids, expected.mask)


def _expected(
    mask: np.ndarray,
    num_experts: int,
    top_k: int,
    num_layers: int,
    moe_layers: Sequence[int] | None,
    start: int | Sequence[int] | Array | None,
) -> Expected:
    layers = tuple(range(num_layers)) if moe_layers is None else tuple(moe_layers)
    if mask.dtype != np.bool_ or mask.ndim != 2:
        raise ValueError(f"mask must be bool [B, T], not {mask.dtype}{list(mask.shape)}")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k} must be in 1..num_experts={num_experts}")
    if not layers or min(layers) < 0 or max(layers) >= num_layers or any(a >= b for a, b in pairwise(layers)):
        raise ValueError(f"moe_layers={list(layers)} must be ascending layers in 0..{num_layers - 1}")
    tokens = tuple(mask.sum(axis=1).tolist())
    return Expected(mask, num_experts, top_k, num_layers, layers, tokens, _starts(start, tokens))


def _starts(start: int | Sequence[int] | Array | None, tokens: tuple[int, ...]) -> tuple[int | None, ...]:
    if start is None:
        return (None,) * len(tokens)
    try:
        starts = np.asarray(start)
    except ValueError:  # ragged
        starts = np.empty(0, object)
    starts = starts if starts.size else starts.astype(np.int64)
    if starts.dtype.kind not in "iu" or starts.shape not in ((), (len(tokens),)):
        found = f"{starts.dtype}{list(starts.shape)}" if starts.size else repr(start)
        raise ValueError(
            f"start must be an integer that int64 holds, or {len(tokens)} of them, one for each sample, not {found}"
        )
    first_tokens = tuple(np.broadcast_to(starts, len(tokens)).tolist())
    for sample, (first, real) in enumerate(zip(first_tokens, tokens, strict=True)):
        if not 0 <= first <= real:
            raise ValueError(f"sample {sample}: start={first} is outside its {real} real tokens")
    return first_tokens


def _gather(recorded: list[Recorded], expected: Expected, *, moe_only: bool) -> np.ndarray:
    """Rows of all real tokens, ``[tokens, L, K]`` in a signed dtype; EMPTY where nothing is recorded."""
    # A dtype with room for EMPTY. Values are compared in the dtype they came in, so that nothing can wrap.
    dtype = np.int16 if expected.num_experts <= 1 << 15 else np.int64
    gathered = np.full((sum(expected.tokens), len(expected.moe_layers), expected.top_k), EMPTY, dtype)
    first = 0
    for sample, (recording, tokens) in enumerate(zip(recorded, expected.tokens, strict=True)):
        start = _first_token(recording, sample, expected)
        if len(recording.rows):
            rows = _moe_rows(recording.rows, sample, expected, moe_only=moe_only)
            if rows.min() < EMPTY or rows.max() >= expected.num_experts:
                row, layer, k = np.argwhere((rows < EMPTY) | (rows >= expected.num_experts))[0].tolist()
                problem = outside(int(rows[row, layer, k]), expected.num_experts)
                raise ValueError(f"{_where(first + start + row, layer, expected)}: {problem}")
            gathered[first + start : first + start + len(rows)] = rows
        first += tokens
    return gathered


def _first_token(recording: Recorded, sample: int, expected: Expected) -> int:
    """The real token of a sample's first row: as recorded, as the caller says, or 0 if every token has a row."""
    rows, tokens, caller_start = len(recording.rows), expected.tokens[sample], expected.start[sample]
    start = caller_start if recording.start is None else recording.start
    if caller_start not in (None, start):
        raise ValueError(
            f"sample {sample}: start={caller_start}, but as recorded its rows start at token {start}"
        )
    if start is None and 0 < rows < tokens:
        raise ValueError(
            f"sample {sample}: found {rows} rows, expected {tokens}, one for each real token{ASK_FOR_START}"
        )
    start = start or 0
    if start + rows > tokens:
        raise ValueError(f"sample {sample}: rows {start}..{start + rows - 1} for {tokens} real tokens")
    return start


def _moe_rows(rows: np.ndarray, sample: int, expected: Expected, *, moe_only: bool) -> np.ndarray:
    (_, layers, top_k), moe_layers = rows.shape, expected.moe_layers
    if top_k != expected.top_k:
        raise ValueError(f"sample {sample}: rows have top-{top_k}, the model has top-{expected.top_k}")
    if np.iinfo(rows.dtype).max < expected.num_experts - 1:
        raise ValueError(
            f"sample {sample}: {rows.dtype} cannot hold the ids of {expected.num_experts} experts"
        )
    if layers == len(moe_layers):
        return rows
    if layers != expected.num_layers or moe_only:
        model = "" if moe_only else f"{expected.num_layers} layers, "
        raise ValueError(
            f"sample {sample}: rows have {layers} layers, the model has {model}{len(moe_layers)} MoE layers"
        )
    return rows[:, list(moe_layers)]


def _missing(rows: np.ndarray, expected: Expected) -> np.ndarray:
    """Where there is no route, ``[tokens, L]``: rows of EMPTY, and tokens with zeros in every layer.

    Such a token repeats expert 0 if K > 1; if K = 1 it is a route only where chance would produce it.
    """
    empty = rows == EMPTY
    missing = empty.all(axis=-1)
    for row, layer in np.argwhere(empty.any(axis=-1) & ~missing).tolist():
        raise ValueError(f"{_where(row, layer, expected)}: expert id {EMPTY} in {rows[row, layer].tolist()}")
    recorded = ~missing.all(axis=1)
    for layer in np.flatnonzero(missing[recorded].all(axis=0) & recorded.any()).tolist():
        row = int(np.flatnonzero(recorded)[0])
        raise ValueError(
            f"{_where(row, layer, expected)}: no route for every token (an unmerged pipeline stage?)"
        )
    if expected.top_k > 1 or rows.shape[1] * math.log2(expected.num_experts) > IMPLAUSIBLE_BITS:
        missing |= ~rows.any(axis=(1, 2))[:, None]
    return missing


def _check_rows(rows: np.ndarray, chosen: np.ndarray, expected: Expected) -> None:
    if fault := find_fault(rows if chosen.all() else rows[chosen], num_experts=expected.num_experts):
        row, layer, problem = fault
        raise ValueError(f"{_where(int(np.flatnonzero(chosen)[row]), layer, expected)}: {problem}")


def _check_complete(rows: np.ndarray, missing: np.ndarray, expected: Expected) -> None:
    for row, layer in np.argwhere(missing)[:1].tolist():
        sample, token = locate(expected.mask, row)
        if not rows[row].any():
            reason = "only zeros: a prefix-cached or padding token?"
        elif token == np.flatnonzero(expected.mask[sample])[-1]:
            reason = "engines do not route the last token"
        else:
            reason = "not recorded"
        tokens = int(missing.any(axis=1).sum())
        raise ValueError(
            f"{_where(row, layer, expected)}: no route ({reason}), as for {tokens} of {len(rows)} tokens;"
            " live_routing would fill them"
        )


def _fill(
    rows: np.ndarray, missing: np.ndarray, expected: Expected, live_routing: Callable[[np.ndarray], Array]
) -> np.ndarray:
    tokens = np.zeros_like(expected.mask)
    tokens[expected.mask] = missing.any(axis=1)
    live, shape = np.asarray(live_routing(tokens)), (*expected.mask.shape, *rows.shape[1:])
    if live.shape != shape or live.dtype.kind not in "iu":
        raise ValueError(
            f"live_routing: expected integers {list(shape)}, found {live.dtype}{list(live.shape)}"
        )
    chosen = live[expected.mask]
    bad = missing[..., None] & ((chosen < 0) | (chosen >= expected.num_experts))
    for row, layer, k in np.argwhere(bad)[:1].tolist():
        problem = outside(int(chosen[row, layer, k]), expected.num_experts)
        raise ValueError(f"live_routing: {_where(row, layer, expected)}: {problem}")
    filled = np.where(missing[..., None], chosen.astype(rows.dtype), rows)
    try:
        _check_rows(filled, missing.any(axis=1), expected)
    except ValueError as error:
        raise ValueError(f"live_routing: {error}") from error
    return filled


def _where(row: int, layer: int, expected: Expected) -> str:
    sample, token = locate(expected.mask, row)
    return f"sample {sample}, token {token}, layer {expected.moe_layers[layer]}"
