"""Decoders for the routed experts that trainers pass on: verl, slime, Miles, NeMo-RL, SkyRL, prime-rl, AReaL.

The trainers differ in the placeholder of tokens without a route: zeros, -1, ``0..K-1``, ``arange % num_experts``, or a
repetition of the row before.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from relibra_jax.rollout.decoding import (
    drop_placeholder_last,
    drop_placeholders,
    field,
    grid,
    per_sample,
    start_in,
    widen_ids,
)
from relibra_jax.rollout.expected import Expected
from relibra_jax.rollout.payload import Recorded, from_fields, from_nemo_rl, integers


def verl(source: Any, expected: Expected) -> Iterator[Recorded]:
    """Read an array ``[B, T, layers, K]`` in which zeros are the placeholder of the last token."""
    return (
        Recorded(rows[:-1] if len(rows) and not rows[-1].any() else rows, start)
        for rows, start in grid(source, expected)
    )


def nemo_rl(source: Any, expected: Expected) -> Iterator[Recorded]:
    """Read an array ``[B, T, layers, K]`` or the rows of each sample, with or without placeholders of NeMo-RL."""
    recorded = (grid if getattr(source, "ndim", 0) == 4 else per_sample(_nemo_rl_rows))(source, expected)
    return (Recorded(drop_placeholders(rows, expected), start) for rows, start in recorded)


def _nemo_rl_rows(item: Any, expected: Expected, sample: int) -> Recorded:
    rows = integers(from_nemo_rl(item) if isinstance(item, str) else item, ndim=3)
    return Recorded(rows, 0 if len(rows) >= expected.tokens[sample] else None)


def slime(item: Any, expected: Expected, sample: int) -> Recorded:
    """Read the rows of one sample, with or without the padding that slime appends."""
    wrapped = isinstance(item, Mapping)
    start = start_in(item, expected.tokens[sample]) if wrapped else None
    rows = integers(field(item, "rollout_routed_experts") if wrapped else item, ndim=3)
    # The padding is arange % num_experts from its own first row on, so it may begin at any row that equals this row.
    first = np.arange(rows[0].size).reshape(rows.shape[1:]) % expected.num_experts if len(rows) else rows
    for begin in np.flatnonzero((rows == first).all(axis=(1, 2))).tolist():
        if np.array_equal(rows[begin:].ravel(), np.arange(rows[begin:].size) % expected.num_experts):
            return Recorded(rows[:begin], start)
    return Recorded(rows, start)


def miles(item: Any, expected: Expected, sample: int) -> Recorded:
    """Read the rows of one sample; Miles checks that every sample has a row for each token but the last."""
    rows = integers(field(item, "rollout_routed_experts") if isinstance(item, Mapping) else item, ndim=3)
    return Recorded(rows, 0 if len(rows) >= expected.tokens[sample] - 1 else None)


def skyrl(source: Any, expected: Expected) -> Iterator[Recorded]:
    """Read a batch with placeholders of SkyRL, or the rows of each sample from its first token on."""
    if getattr(source, "ndim", 0) != 4:
        return per_sample(_skyrl_rows)(source, expected)
    return (
        Recorded(drop_placeholders(widen_ids(rows, expected.num_experts), expected), start)
        for rows, start in grid(source, expected)
    )


def _skyrl_rows(item: Any, expected: Expected, sample: int) -> Recorded:
    packed = isinstance(item, Mapping)
    rows = from_fields(item, dtypes=("uint8", "int16", "int32")) if packed else integers(item, ndim=3)
    return Recorded(widen_ids(rows, expected.num_experts), 0)


def prime_rl(item: Any, expected: Expected, sample: int) -> Recorded:
    """Read one sample's array, or the fields of one, from an engine's response or from the transport to the trainer."""
    if hasattr(item, "ndim"):
        rows, start, is_response = integers(item, ndim=3), 0, False
    else:
        names = ("data", "shape", "dtype", "start")
        parts = (
            item if isinstance(item, Mapping) else {n: getattr(item, n) for n in names if hasattr(item, n)}
        )
        start = start_in(parts, expected.tokens[sample], name="start") or 0
        rows = from_fields({"dtype": "uint8"} | dict(parts), dtypes=("uint8", "uint16"))
        is_response = isinstance(parts.get("data"), str)
    # A response has the rows of the engine alone; the transport to the trainer has one row for every token.
    recorded = rows if is_response else drop_placeholder_last(rows)
    return Recorded(widen_ids(recorded, expected.num_experts), start)


def areal(source: Any, expected: Expected) -> Iterator[Recorded]:
    """Read the ids ``[rows, layers * K]`` of each sample, or trajectories, of which invalid ones have no routes."""
    if not isinstance(source, Mapping):
        return per_sample(_areal_rows)(source, expected)
    recorded = grid(field(source, "routed_experts"), expected)
    valid = np.asarray(field(source, "r3_routing_valid"))
    if valid.dtype != np.bool_ or valid.shape != (len(expected.mask),):
        kind = f"{valid.dtype}{list(valid.shape)}"
        raise ValueError(f"r3_routing_valid must be bool [{len(expected.mask)}], not {kind}")
    return (
        Recorded(drop_placeholder_last(rows) if replayed else rows[:0], start)
        for (rows, start), replayed in zip(recorded, valid, strict=True)
    )


def _areal_rows(item: Any, expected: Expected, sample: int) -> Recorded:
    flat = integers(item, ndim=2)
    layers, rest = divmod(flat.shape[1], expected.top_k)
    if rest:
        raise ValueError(f"{flat.shape[1]} ids of a token are not layers x top-{expected.top_k}")
    start = 0 if len(flat) >= expected.tokens[sample] - 1 else None
    return Recorded(flat.reshape(len(flat), layers, expected.top_k), start)
