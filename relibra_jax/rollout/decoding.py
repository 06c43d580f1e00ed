"""Functions that decoders of several engines share: decoding by sample or by batch, and removal of placeholder routes.

A placeholder route is one that a trainer writes for a token that the engine did not route.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, NamedTuple

import numpy as np

from relibra_jax.contract.replay import IMPLAUSIBLE_BITS
from relibra_jax.rollout.expected import Expected
from relibra_jax.rollout.payload import Recorded, integers, sequence


class Layout(NamedTuple):
    """The decoder of one layout."""

    decode: Callable[[Any, Expected], Iterable[Recorded]]
    """``(source, expected) -> rows of each sample``, decoded one by one if the layout keeps samples apart. It raises
    ValueError if it cannot read the source."""
    moe_only: bool = False
    """True if recordings of the layout have rows of MoE layers alone, never of dense layers."""


def per_sample(
    decode: Callable[[Any, Expected, int], Recorded],
) -> Callable[[Any, Expected], Iterator[Recorded]]:
    """Build a decoder of a sequence of samples from a decoder of one.

    Args:
        decode: ``(item, expected, sample) -> rows``, where ``sample`` is the index of the item in the batch.
    """

    def decode_all(source: Any, expected: Expected) -> Iterator[Recorded]:
        items, samples = sequence(source, of="samples as the source"), len(expected.mask)
        if isinstance(items, Sized):
            _check_count(len(items), samples)
        count = 0
        for sample, item in enumerate(items):
            count += 1
            if count > samples:
                continue
            try:
                yield decode(item, expected, sample)
            except ValueError as error:
                raise ValueError(f"sample {sample}: {error}") from error
        _check_count(count, samples)

    return decode_all


def _check_count(items: int, samples: int) -> None:
    if items != samples:
        raise ValueError(f"the source has {items} samples, but the mask has {samples}")


def array(item: Any, expected: Expected, sample: int) -> Recorded:
    """Read the rows of one sample from an array ``[rows, layers, K]``."""
    return Recorded(integers(item, ndim=3), None)


def grid(source: Any, expected: Expected) -> Iterator[Recorded]:
    """Read an array ``[B, T, layers, K]`` whose tokens are at the same positions as in the mask."""
    ids, mask = integers(source, ndim=4), expected.mask
    if ids.shape[:2] != mask.shape:
        raise ValueError(f"expected {list(mask.shape)} samples and tokens, found {list(ids.shape[:2])}")
    return (Recorded(sample[real], 0) for sample, real in zip(ids, mask, strict=True))


def layers_first(source: Any, expected: Expected) -> Iterator[Recorded]:
    """Read an array ``[B, layers, T, K]`` whose tokens are at the same positions as in the mask."""
    return grid(np.moveaxis(integers(source, ndim=4), 1, 2), expected)


def drop_placeholders(rows: np.ndarray, expected: Expected) -> np.ndarray:
    """Remove placeholder routes ``0..K-1`` (the same in every layer) from the end of a sample.

    NeMo-RL (``pad_and_align_routed_expert_indices`` and ``_dummy_routed_experts_for_tokens``) and SkyRL
    (``make_replay_padding_indices_np``) write these for the last token, and for tokens of an environment after the
    last generation. Before the last token, such a row counts as a placeholder only if chance does not produce it
    (`IMPLAUSIBLE_BITS`).
    """
    if not rows.shape[1] or rows.shape[2] != expected.top_k:
        return rows  # read_rows raises on these
    recorded = (rows != np.arange(expected.top_k)).any(axis=(1, 2))
    end = int(np.flatnonzero(recorded).max(initial=-1)) + 1
    bits = rows.shape[1] * math.log2(math.perm(expected.num_experts, expected.top_k))
    return rows[:end] if bits > IMPLAUSIBLE_BITS else rows[: max(end, len(rows) - 1)]


def drop_placeholder_last(rows: np.ndarray) -> np.ndarray:
    """Remove the last row if it is a placeholder for the last token: a repetition of the row before it, or zeros.

    verifiers (``_attribute_routed_experts``) and AReaL (``_preprocess_one``) repeat the row before it; prime-rl
    (``_encode_routed_experts``) appends zeros if a row is missing.
    """
    if not len(rows):
        return rows
    repeats = len(rows) > 1 and np.array_equal(rows[-1], rows[-2])
    return rows[:-1] if repeats or not rows[-1].any() else rows


def widen_ids(rows: np.ndarray, num_experts: int) -> np.ndarray:
    """Cast rows to int32 if their dtype is too small for the ids of the model.

    SkyRL and prime-rl choose the dtype by the largest id of a sample, so a small dtype is no error there. In other
    formats the dtype is the model's, and ids in a dtype that is too small have overflowed.
    """
    return rows if np.iinfo(rows.dtype).max >= num_experts - 1 else rows.astype(np.int32)


def field(item: Any, name: str, *default: Any) -> Any:
    """Return a value of a mapping, or the default if the value is missing or None.

    Raises:
        ValueError: if ``item`` is not a mapping, or if the value is missing and there is no default.
    """
    if not isinstance(item, Mapping):
        raise ValueError(f"expected a mapping with {name!r}, found {type(item).__name__}")
    value = item.get(name)
    if value is None and not default:
        raise ValueError(f"no value for {name!r}; the keys are {sorted(map(str, item))}")
    return default[0] if value is None else value


def start_in(item: Any, tokens: int, *, name: str = "routed_experts_start_len") -> int | None:
    """Return the token of the first row that a recording states under ``name``; None if it states none.

    Raises:
        ValueError: if the stated value is not an integer from 0 to the number of tokens of the sample.
    """
    start = field(item, name, None)
    if start is not None and (not isinstance(start, int) or not 0 <= start <= tokens):
        raise ValueError(f"{name}={start!r} must be an integer from 0 to its {tokens} tokens")
    return start
