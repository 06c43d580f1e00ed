"""Assignment of decoded rows to the real tokens of a batch, with checks and optional filling of missing routes.

Nothing is repaired. A missing route is an error, unless the caller provides a live forward pass that fills it; then a
warning is logged.
"""

import difflib
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from relibra_jax.contract.replay import IMPLAUSIBLE_BITS, find_fault, locate, outside
from relibra_jax.contract.types import EMPTY, Array
from relibra_jax.rollout.expected import Expected
from relibra_jax.rollout.layouts import LAYOUTS
from relibra_jax.rollout.payload import ASK_FOR_START, Recorded

LOGGER = logging.getLogger("relibra_jax")


def read_rows(
    source: Any,
    expected: Expected,
    *,
    layout: str,
    fill: str | None,
    live_routing: Callable[[np.ndarray], Array] | None,
) -> np.ndarray:
    """Read the routes of all real tokens; the arguments are those of `replay_from_rollout`.

    Args:
        source: the recording, in the form of the layout.
        expected: the batch and its model.
        layout: the name of the layout, a key of `LAYOUTS`.
        fill: "live" to fill missing routes, None to raise for them.
        live_routing: the function that returns missing routes, for ``fill="live"`` alone.

    Returns:
        ``[tokens, L, K]`` integers, sample after sample; every row is K different logical experts.

    Raises:
        ValueError: under the conditions of `replay_from_rollout`.
    """
    if layout not in LAYOUTS:
        nearest = difflib.get_close_matches(layout, LAYOUTS, n=1, cutoff=0)[0]
        raise ValueError(f"layout {layout!r} must be one of {', '.join(LAYOUTS)}; the nearest is {nearest!r}")
    if fill not in (None, "live"):
        raise ValueError(f"fill={fill!r} must be 'live' or None")
    if (fill is None) != (live_routing is None):
        present, lacking = ("fill='live'", "live_routing") if fill else ("live_routing", "fill='live'")
        raise ValueError(f"{present} is given without {lacking}, but filling missing routes needs both")
    try:
        decode, moe_only = LAYOUTS[layout]
        rows = _gather(decode(source, expected), expected, moe_only=moe_only)
        missing = _missing(rows, expected)
        _check_rows(rows, ~missing.any(axis=1), expected)
        if live_routing is None:
            _check_complete(rows, missing, expected)
    except ValueError as error:
        raise ValueError(f"layout {layout!r}: {error}") from error
    if live_routing is None or not missing.any():
        return rows
    rows = _fill(rows, missing, expected, live_routing)
    _warn_of_filled_tokens(missing.any(axis=1), expected, layout)
    return rows


def _gather(recorded: list[Recorded], expected: Expected, *, moe_only: bool) -> np.ndarray:
    """Collect the rows of all real tokens, ``[tokens, L, K]`` in a signed dtype; EMPTY for missing routes."""
    # A dtype that can hold EMPTY. Values are checked in the dtype of the recording, before a cast could overflow.
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
    """Return the real token of a sample's first row: as recorded, as the caller says, or 0 if every token has a row."""
    rows, tokens, caller_start = len(recording.rows), expected.tokens[sample], expected.start[sample]
    start = caller_start if recording.start is None else recording.start
    if caller_start not in (None, start):
        raise ValueError(
            f"sample {sample}: start={caller_start}, but the recording says that its rows start at token {start}"
        )
    if start is None and 0 < rows < tokens:
        raise ValueError(
            f"sample {sample}: found {rows} rows, expected {tokens}, one for each real token{ASK_FOR_START}"
        )
    start = start or 0
    if start + rows > tokens:
        raise ValueError(
            f"sample {sample}: it has rows {start}..{start + rows - 1}, but only {tokens} real tokens"
        )
    return start


def _moe_rows(rows: np.ndarray, sample: int, expected: Expected, *, moe_only: bool) -> np.ndarray:
    (_, layers, top_k), moe_layers = rows.shape, expected.moe_layers
    if top_k != expected.top_k:
        raise ValueError(f"sample {sample}: rows have top-{top_k}, but the model has top-{expected.top_k}")
    if np.iinfo(rows.dtype).max < expected.num_experts - 1:
        raise ValueError(
            f"sample {sample}: {rows.dtype} cannot hold the ids of {expected.num_experts} experts"
        )
    if layers == len(moe_layers):
        return rows
    if layers != expected.num_layers or moe_only:
        model = "" if moe_only else f"{expected.num_layers} layers, "
        raise ValueError(
            f"sample {sample}: rows have {layers} layers, but the model has {model}{len(moe_layers)} MoE layers"
        )
    return rows[:, list(moe_layers)]


def _missing(rows: np.ndarray, expected: Expected) -> np.ndarray:
    """Mark missing routes, ``[tokens, L]``: rows of EMPTY, and tokens with zeros in every layer.

    Zeros in every layer are not a route if K > 1, because they repeat expert 0. If K = 1 they count as missing unless
    chance explains them (`IMPLAUSIBLE_BITS`).
    """
    empty = rows == EMPTY
    missing = empty.all(axis=-1)
    for row, layer in np.argwhere(empty.any(axis=-1) & ~missing).tolist():
        raise ValueError(f"{_where(row, layer, expected)}: expert id {EMPTY} in {rows[row, layer].tolist()}")
    recorded = ~missing.all(axis=1)
    for layer in np.flatnonzero(missing[recorded].all(axis=0) & recorded.any()).tolist():
        row = int(np.flatnonzero(recorded)[0])
        raise ValueError(
            f"{_where(row, layer, expected)}: no token has a route in this layer (an unmerged pipeline stage?)"
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
            f"{_where(row, layer, expected)}: no route ({reason}); {tokens} of {len(rows)} tokens have none;"
            " fill='live' fills them by live_routing"
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


def _warn_of_filled_tokens(filled: np.ndarray, expected: Expected, layout: str) -> None:
    """Log how many tokens got their routes from ``live_routing``; ``filled`` is bool ``[tokens]``."""
    parts = np.split(filled, np.cumsum(expected.tokens)[:-1])
    last = sum(bool(part[-1:].any()) for part in parts)
    LOGGER.warning(
        "layout %r: live_routing filled the routes of %d of %d tokens, in %d of %d samples"
        " (%d are the last of their sample, which engines do not route)",
        layout,
        filled.sum(),
        filled.size,
        sum(bool(part.any()) for part in parts),
        len(parts),
        last,
    )


def _where(row: int, layer: int, expected: Expected) -> str:
    sample, token = locate(expected.mask, row)
    return f"sample {sample}, token {token}, layer {expected.moe_layers[layer]}"
