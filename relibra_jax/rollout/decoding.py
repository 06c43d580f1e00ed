"""What decoders of several engines share: samples one by one, grids, and the rows that engines make up."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from relibra_jax.replay import IMPLAUSIBLE_BITS
from relibra_jax.rollout.expected import Expected
from relibra_jax.rollout.payload import Recorded, integers, sequence


class Layout(NamedTuple):
    """How one source is read."""

    decode: Callable[[Any, Expected], list[Recorded]]
    """``(source, expected) -> rows of each sample``; raises ValueError on what it cannot read."""
    moe_only: bool = False
    """True where the layout never has rows of dense layers."""


def per_sample(decode: Callable[[Any, Expected, int], Recorded]) -> Callable[[Any, Expected], list[Recorded]]:
    """Lift a decoder of one sample, which also gets the sample's place in the batch, to a sequence of them."""

    def decode_all(source: Any, expected: Expected) -> list[Recorded]:
        items, samples = list(sequence(source, of="samples")), len(expected.mask)
        if len(items) != samples:
            raise ValueError(f"{len(items)} samples, the mask has {samples}")
        recorded = []
        for sample, item in enumerate(items):
            try:
                recorded.append(decode(item, expected, sample))
            except ValueError as error:
                raise ValueError(f"sample {sample}: {error}") from error
        return recorded

    return decode_all


def array(item: Any, expected: Expected, sample: int) -> Recorded:
    """One sample's rows."""
    return Recorded(integers(item, ndim=3), None)


def grid(source: Any, expected: Expected) -> list[Recorded]:
    """``[B, T, layers, K]``, laid out as the mask."""
    ids, mask = integers(source, ndim=4), expected.mask
    if ids.shape[:2] != mask.shape:
        raise ValueError(f"expected {list(mask.shape)} samples and tokens, found {list(ids.shape[:2])}")
    return [Recorded(sample[real], 0) for sample, real in zip(ids, mask, strict=True)]


def layers_first(source: Any, expected: Expected) -> list[Recorded]:
    """``[B, layers, T, K]``."""
    return grid(np.moveaxis(integers(source, ndim=4), 1, 2), expected)


def without_made_up(rows: np.ndarray, expected: Expected) -> np.ndarray:
    """Rows up to those at the end that are ``0..K-1`` in every layer.

    NeMo-RL (``pad_and_align_routed_expert_indices`` and ``_dummy_routed_experts_for_tokens``) and SkyRL
    (``make_replay_padding_indices_np``) write these for the last token, and for tokens of an environment behind the
    last generation. But for the last, they are taken for made up only where chance does not produce them
    (`IMPLAUSIBLE_BITS`).
    """
    if not rows.shape[1] or rows.shape[2] != expected.top_k:
        return rows  # refused by name where rows are placed
    recorded = (rows != np.arange(expected.top_k)).any(axis=(1, 2))
    end = int(np.flatnonzero(recorded).max(initial=-1)) + 1
    bits = rows.shape[1] * math.log2(math.perm(expected.num_experts, expected.top_k))
    return rows[:end] if bits > IMPLAUSIBLE_BITS else rows[: max(end, len(rows) - 1)]


def without_made_up_last(rows: np.ndarray) -> np.ndarray:
    """Rows without a last one that is the row before it over again, or zeros: what stands for the last token's route.

    verifiers (``_attribute_routed_experts``) and AReaL (``_preprocess_one``) write the row before it again; prime-rl
    (``_encode_routed_experts``) appends zeros where a row is missing.
    """
    if not len(rows):
        return rows
    repeats = len(rows) > 1 and np.array_equal(rows[-1], rows[-2])
    return rows[:-1] if repeats or not rows[-1].any() else rows


def wide_enough(rows: np.ndarray, num_experts: int) -> np.ndarray:
    """Rows in a dtype for all ids of the model.

    SkyRL and prime-rl take the dtype from the largest id of a sample, so that a small one says nothing of the model.
    Elsewhere it is the model's, and one that is too small has wrapped.
    """
    return rows if np.iinfo(rows.dtype).max >= num_experts - 1 else rows.astype(np.int32)


def field(item: Any, name: str, *default: Any) -> Any:
    """A value of a mapping, or the default if there is none.

    Raises:
        ValueError: if it is no mapping, or has no such value and there is no default.
    """
    if not isinstance(item, Mapping):
        raise ValueError(f"expected a mapping with {name!r}, found {type(item).__name__}")
    value = item.get(name)
    if value is None and not default:
        raise ValueError(f"there is no {name!r} among {sorted(map(str, item))}")
    return default[0] if value is None else value


def start_in(item: Any, tokens: int, *, name: str = "routed_experts_start_len") -> int | None:
    """The start that a recording states under ``name``, None if it states none.

    Raises:
        ValueError: if it is not one of the sample's tokens.
    """
    start = field(item, name, None)
    if start is not None and (not isinstance(start, int) or not 0 <= start <= tokens):
        raise ValueError(f"{name}={start!r} is not one of its {tokens} tokens")
    return start
