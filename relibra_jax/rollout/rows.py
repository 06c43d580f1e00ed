"""Assignment of decoded rows to the real tokens of a batch, with checks and optional filling of missing routes.

Nothing is repaired. A missing route is an error, unless the caller provides a live forward pass that fills it; then a
warning is logged.
"""

import difflib
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from relibra_jax.contract.replay import IMPLAUSIBLE_BITS, find_fault, find_unused_layer, locate, outside
from relibra_jax.contract.types import EMPTY, Array
from relibra_jax.rollout.expected import Expected
from relibra_jax.rollout.layouts import LAYOUTS
from relibra_jax.rollout.payload import ASK_FOR_START, Recorded

LOGGER = logging.getLogger("relibra_jax")


class _Sample(NamedTuple):
    """The checked routes of one sample."""

    rows: np.ndarray
    """``[tokens, L, K]`` integers in the dtype of the recording, or in a signed one that holds EMPTY."""
    missing: np.ndarray
    """``[tokens, L]`` bool, True where a route is missing. The rows are checked in all other places."""


def read_rows(
    source: Any,
    expected: Expected,
    *,
    layout: str,
    fill: str | None,
    live_routing: Callable[[np.ndarray], Array] | None,
) -> Iterator[np.ndarray]:
    """Read the routes of all real tokens, sample after sample; the arguments are those of `replay_from_rollout`.

    A sample is decoded and checked when it is asked for, so that reading takes the memory of one sample besides the
    source. Only where missing routes are filled, all samples are read first.

    Args:
        source: the recording, in the form of the layout.
        expected: the batch and its model.
        layout: the name of the layout, a key of `LAYOUTS`.
        fill: "live" to fill missing routes, None to raise for them.
        live_routing: the function that returns missing routes, for ``fill="live"`` alone.

    Returns:
        ``[tokens, L, K]`` integers of each sample; every row is K different logical experts.

    Raises:
        ValueError: under the conditions of `replay_from_rollout`, some of them only after the last sample.
    """
    if layout not in LAYOUTS:
        nearest = difflib.get_close_matches(layout, LAYOUTS, n=1, cutoff=0)[0]
        raise ValueError(f"layout {layout!r} must be one of {', '.join(LAYOUTS)}; the nearest is {nearest!r}")
    if fill not in (None, "live"):
        raise ValueError(f"fill={fill!r} must be 'live' or None")
    if (fill is None) != (live_routing is None):
        present, lacking = ("fill='live'", "live_routing") if fill else ("live_routing", "fill='live'")
        raise ValueError(f"{present} is given without {lacking}, but filling missing routes needs both")
    samples = _check_samples(source, expected, layout)
    if live_routing is None:
        return _name_layout(layout, _complete(samples, expected))
    return _filled(_name_layout(layout, samples), expected, layout, live_routing)


def _name_layout[T](layout: str, parts: Iterator[T]) -> Iterator[T]:
    """Yield the parts; their errors name the layout."""
    try:
        yield from parts
    except ValueError as error:
        raise ValueError(f"layout {layout!r}: {error}") from error


def _check_samples(source: Any, expected: Expected, layout: str) -> Iterator[_Sample]:
    """Decode and check the samples of a recording; missing routes are only marked."""
    decode, moe_only = LAYOUTS[layout]
    layers = len(expected.moe_layers)
    used, routed = np.zeros(layers, bool), np.zeros(layers, bool)
    first, checked, first_routed = 0, 0, -1
    for sample, (recording, tokens) in enumerate(zip(decode(source, expected), expected.tokens, strict=True)):
        rows = _rows_of(recording, sample, first, expected, moe_only=moe_only)
        missing = _missing(rows, first, expected)
        complete = ~missing.any(axis=1)
        _check_rows(rows, complete, first, expected)
        yield _Sample(rows, missing)
        if expected.top_k == 1:  # with more experts of a token, a layer of zeros is a fault of any sample
            used |= (rows.any(axis=-1) & complete[:, None]).any(axis=0)
        routed |= (~missing).any(axis=0)
        checked += int(complete.sum())
        for row in np.flatnonzero(~missing.all(axis=1))[:1].tolist():
            first_routed = first + row if first_routed < 0 else first_routed
        first += tokens
    for layer in np.flatnonzero(~routed).tolist() if first_routed >= 0 else []:
        raise ValueError(
            f"{_where(first_routed, layer, expected)}: no token has a route in this layer (an unmerged pipeline stage?)"
        )
    if expected.top_k == 1 and (fault := find_unused_layer(used, checked, num_experts=expected.num_experts)):
        layer, problem = fault
        raise ValueError(f"{_where(0, layer, expected)}: {problem}")


def _rows_of(
    recording: Recorded, sample: int, first: int, expected: Expected, *, moe_only: bool
) -> np.ndarray:
    """Return the rows of all real tokens of a sample, ``[tokens, L, K]``; EMPTY for missing routes."""
    tokens, start = expected.tokens[sample], _first_token(recording, sample, expected)
    rows = recording.rows
    if len(rows):
        rows = _moe_rows(rows, sample, expected, moe_only=moe_only)
        if rows.min() < EMPTY or rows.max() >= expected.num_experts:
            row, layer, k = np.argwhere((rows < EMPTY) | (rows >= expected.num_experts))[0].tolist()
            problem = outside(int(rows[row, layer, k]), expected.num_experts)
            raise ValueError(f"{_where(first + start + row, layer, expected)}: {problem}")
        if len(rows) == tokens:
            return rows
    # A dtype that can hold EMPTY. Values were checked in the dtype of the recording, before a cast could overflow.
    dtype = np.int16 if expected.num_experts <= 1 << 15 else np.int64
    gathered = np.full((tokens, len(expected.moe_layers), expected.top_k), EMPTY, dtype)
    if len(rows):
        gathered[start : start + len(rows)] = rows
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


def _missing(rows: np.ndarray, first: int, expected: Expected) -> np.ndarray:
    """Mark missing routes of a sample, ``[tokens, L]``: rows of EMPTY, and tokens with zeros in every layer.

    Zeros in every layer are not a route if K > 1, because they repeat expert 0. If K = 1 they count as missing unless
    chance explains them (`IMPLAUSIBLE_BITS`).
    """
    missing = np.zeros(rows.shape[:2], bool)
    if rows.dtype.kind == "i":
        empty = rows == EMPTY
        missing = empty.all(axis=-1)
        for row, layer in np.argwhere(empty.any(axis=-1) & ~missing).tolist():
            raise ValueError(
                f"{_where(first + row, layer, expected)}: expert id {EMPTY} in {rows[row, layer].tolist()}"
            )
    if expected.top_k > 1 or rows.shape[1] * math.log2(expected.num_experts) > IMPLAUSIBLE_BITS:
        missing |= ~rows.any(axis=(1, 2))[:, None]
    return missing


def _check_rows(rows: np.ndarray, chosen: np.ndarray, first: int, expected: Expected) -> None:
    if fault := find_fault(rows if chosen.all() else rows[chosen], num_experts=expected.num_experts):
        row, layer, problem = fault
        place = _where(first + int(np.flatnonzero(chosen)[row]), layer, expected)
        raise ValueError(f"{place}: {problem}")


def _complete(samples: Iterator[_Sample], expected: Expected) -> Iterator[np.ndarray]:
    """Yield the rows of samples; raise after the last one if any of them lacks a route."""
    problem, lacking, first = "", 0, 0
    for rows, missing in samples:
        for row, layer in np.argwhere(missing)[:1].tolist():
            problem = problem or _describe_missing(rows[row], first + row, layer, expected)
        lacking, first = lacking + int(missing.any(axis=1).sum()), first + len(rows)
        if not problem:
            yield rows
    if problem:
        raise ValueError(
            f"{problem}; {lacking} of {first} tokens have none; fill='live' fills them by live_routing"
        )


def _describe_missing(route: np.ndarray, row: int, layer: int, expected: Expected) -> str:
    sample, token = locate(expected.mask, row)
    if not route.any():
        reason = "only zeros: a prefix-cached or padding token?"
    elif token == np.flatnonzero(expected.mask[sample])[-1]:
        reason = "engines do not route the last token"
    else:
        reason = "not recorded"
    return f"{_where(row, layer, expected)}: no route ({reason})"


def _filled(
    samples: Iterator[_Sample],
    expected: Expected,
    layout: str,
    live_routing: Callable[[np.ndarray], Array],
) -> Iterator[np.ndarray]:
    """Yield the rows of all samples with the missing routes of ``live_routing``."""
    parts = list(samples)
    if not any(part.missing.any() for part in parts):
        yield from (part.rows for part in parts)
        return
    rows, missing = map(np.concatenate, zip(*parts, strict=True))
    rows = _fill(rows, missing, expected, live_routing)
    _warn_of_filled_tokens(missing.any(axis=1), expected, layout)
    ends = itertools.accumulate(expected.tokens)
    yield from (rows[end - tokens : end] for end, tokens in zip(ends, expected.tokens, strict=True))


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
        _check_rows(filled, missing.any(axis=1), 0, expected)
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
