"""What trainers make of their engine's recordings: verl, slime, Miles, NeMo-RL, SkyRL, prime-rl, AReaL.

Where they differ is what stands for tokens without a route: zeros, -1, ``0..K-1``, ``arange % num_experts``, or the row
before.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from relibra_jax.rollout.decoding import (
    field,
    grid,
    per_sample,
    start_in,
    wide_enough,
    without_made_up,
    without_made_up_last,
)
from relibra_jax.rollout.expected import Expected
from relibra_jax.rollout.payload import Recorded, from_fields, from_nemo_rl, integers


def verl(source: Any, expected: Expected) -> list[Recorded]:
    """A grid in which zeros stand for the route that the last token never got."""
    return [
        Recorded(rows[:-1] if len(rows) and not rows[-1].any() else rows, start)
        for rows, start in grid(source, expected)
    ]


def nemo_rl(source: Any, expected: Expected) -> list[Recorded]:
    """A grid, or each sample's rows, with or without the routes that NeMo-RL makes up."""
    recorded = (grid if getattr(source, "ndim", 0) == 4 else per_sample(_nemo_rl_rows))(source, expected)
    return [Recorded(without_made_up(rows, expected), start) for rows, start in recorded]


def _nemo_rl_rows(item: Any, expected: Expected, sample: int) -> Recorded:
    rows = integers(from_nemo_rl(item) if isinstance(item, str) else item, ndim=3)
    return Recorded(rows, 0 if len(rows) >= expected.tokens[sample] else None)


def slime(item: Any, expected: Expected, sample: int) -> Recorded:
    """One sample's rows, with or without the padding that slime appends."""
    wrapped = isinstance(item, Mapping)
    start = start_in(item, expected.tokens[sample]) if wrapped else None
    rows = integers(field(item, "rollout_routed_experts") if wrapped else item, ndim=3)
    # Padding counts on from its own first row, so it may begin at any row that looks like a first one.
    first = np.arange(rows[0].size).reshape(rows.shape[1:]) % expected.num_experts if len(rows) else rows
    for begin in np.flatnonzero((rows == first).all(axis=(1, 2))).tolist():
        if np.array_equal(rows[begin:].ravel(), np.arange(rows[begin:].size) % expected.num_experts):
            return Recorded(rows[:begin], start)
    return Recorded(rows, start)


def miles(item: Any, expected: Expected, sample: int) -> Recorded:
    """One sample's rows; Miles holds every sample to a row for each token but the last."""
    rows = integers(field(item, "rollout_routed_experts") if isinstance(item, Mapping) else item, ndim=3)
    return Recorded(rows, 0 if len(rows) >= expected.tokens[sample] - 1 else None)


def skyrl(source: Any, expected: Expected) -> list[Recorded]:
    """A batch padded with routes that SkyRL makes up, or each sample's rows from its first token on."""
    if getattr(source, "ndim", 0) != 4:
        return per_sample(_skyrl_rows)(source, expected)
    ids = wide_enough(integers(source, ndim=4), expected.num_experts)
    return [Recorded(without_made_up(rows, expected), start) for rows, start in grid(ids, expected)]


def _skyrl_rows(item: Any, expected: Expected, sample: int) -> Recorded:
    packed = isinstance(item, Mapping)
    rows = from_fields(item, dtypes=("uint8", "int16", "int32")) if packed else integers(item, ndim=3)
    return Recorded(wide_enough(rows, expected.num_experts), 0)


def prime_rl(item: Any, expected: Expected, sample: int) -> Recorded:
    """One sample's array, or the parts of one: of an answer, or of the transport to the trainer."""
    if hasattr(item, "ndim"):
        rows, start, answer = integers(item, ndim=3), 0, False
    else:
        names = ("data", "shape", "dtype", "start")
        parts = (
            item if isinstance(item, Mapping) else {n: getattr(item, n) for n in names if hasattr(item, n)}
        )
        start = start_in(parts, expected.tokens[sample], name="start") or 0
        rows = from_fields({"dtype": "uint8"} | dict(parts), dtypes=("uint8", "uint16"))
        answer = isinstance(parts.get("data"), str)
    # An answer has the engine's rows alone; what goes to the trainer has one for every token.
    recorded = rows if answer else without_made_up_last(rows)
    return Recorded(wide_enough(recorded, expected.num_experts), start)


def areal(source: Any, expected: Expected) -> list[Recorded]:
    """Each sample's ids ``[rows, layers * K]``, or trajectories, of which an invalid one has no routes."""
    if not isinstance(source, Mapping):
        return per_sample(_areal_rows)(source, expected)
    recorded = grid(field(source, "routed_experts"), expected)
    valid = np.asarray(field(source, "r3_routing_valid"))
    if valid.dtype != np.bool_ or valid.shape != (len(recorded),):
        found = f"{valid.dtype}{list(valid.shape)}"
        raise ValueError(f"r3_routing_valid must be bool [{len(recorded)}], not {found}")
    return [
        Recorded(without_made_up_last(rows) if replayed else rows[:0], start)
        for (rows, start), replayed in zip(recorded, valid, strict=True)
    ]


def _areal_rows(item: Any, expected: Expected, sample: int) -> Recorded:
    flat = integers(item, ndim=2)
    layers, rest = divmod(flat.shape[1], expected.top_k)
    if rest:
        raise ValueError(f"{flat.shape[1]} ids of a token are not layers x top-{expected.top_k}")
    return Recorded(flat.reshape(len(flat), layers, expected.top_k), 0)
