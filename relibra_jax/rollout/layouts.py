"""Every layout in which routed experts are handed over, as a table of pure decoders.

A decoder only finds the rows of each sample; `replay_from_rollout` places and checks them, alike for all. The
axis order is never guessed: two orders are two names. The files of SGLang's expert-distribution recorder are
pickles (``torch.save``) and are not read.

What a layout takes as ``source``, with samples in the order of the mask's rows; ``layers`` are all hidden
layers or the MoE layers, told apart by size; ``start`` is the token of a sample's first row, 0 unless an engine
was asked to skip those before it:

``sglang``
    Each response's ``meta_info``: ``routed_experts`` is base64 of flat ids ``[tokens - 1 - start, layers,
    K]``, int32 unless ``routed_experts_dtype`` says uint16 or uint8. The request's ``routed_experts_start_len`` is
    start; SGLang does not answer with it, so put it into the mapping or pass it.
``vllm``
    Each sample's array ``[tokens - 1 - start, layers, K]``; the request's ``routed_experts_prompt_start`` is
    start, and is not in the answer.
``vllm_http``
    Each response; its samples are ``choices``, in order. ``choices[i].routed_experts`` is what ``vllm`` takes, or,
    beside ``prompt_routed_experts`` (the prompt from start on), the generated tokens but the last; either is
    base64 of an ``.npy``, or ``{encoding, dtype, shape, data}``, or nested lists.
``verl``
    One array ``[B, T, layers, K]`` laid out as the mask, padded with zeros.
``slime``
    Each sample's array ``[tokens - 1 - start, layers, K]``, or a mapping with it as
    ``rollout_routed_experts`` and start as ``routed_experts_start_len``. Rows that slime appends are ``arange
    % num_experts``.
``nemo_rl``
    One array ``[B, T, layers, K]`` laid out as the mask, or each sample's ``[tokens, layers, K]``, as an array
    or as the wire string ``nrlre1:<dtype>:<tokens>x<layers>x<K>:<base64>``; -1 where there is no route. Rows of
    ``0..K-1`` in every layer at a sample's end are NeMo-RL's own, and no routes.
``maxtext``
    ``forced_routed_experts [B, T, layers, K]``, -1 where unset.
``tunix``, ``tunix_layers_first``
    ``[B, T, layers, K]`` and ``[B, layers, T, K]``, -1 where unset; T is the prompt, right-aligned, and then
    the completion, as in the mask.
``megatron_inference``
    Each sample's array ``[tokens, MoE layers, K]``.
``megatron_router_tracer``
    Each rank's lines, see `router_trace`.
``npz``
    The path of a file that `save_replay` writes.
"""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from relibra_jax.replay import IMPLAUSIBLE_BITS
from relibra_jax.replay_files import read_arrays
from relibra_jax.rollout.payload import (
    ASK_FOR_START,
    Expected,
    Recorded,
    from_base64,
    from_http,
    from_nemo_rl,
    integers,
    sequence,
)
from relibra_jax.rollout.router_trace import router_trace


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


def sglang(meta: Any, expected: Expected, sample: int) -> Recorded:
    """One response's ``meta_info``."""
    dtype, start = _field(meta, "routed_experts_dtype", "int32"), _start(meta, expected.tokens[sample])
    if dtype not in ("int32", "uint16", "uint8"):
        raise ValueError(f"routed_experts_dtype {dtype!r} is none of int32, uint16, uint8")
    flat = from_base64(_field(meta, "routed_experts"), dtype=dtype)
    layers = _layers_of_flat(flat.size, expected, sample, expected.start[sample] if start is None else start)
    return Recorded(flat.reshape(-1, layers, expected.top_k), start)


def _layers_of_flat(size: int, expected: Expected, sample: int, start: int | None) -> int:
    """The layer axis of a buffer that states no shape.

    Where its rows start is known, a row for every token from there, or every one but the last, settles it; fewer
    rows do so, and any number where the start is not known, only if a single reading remains.
    """
    tokens = expected.tokens[sample]
    first = start or 0
    rows = {
        layers: divmod(size, layers * expected.top_k)
        for layers in (expected.num_layers, len(expected.moe_layers))
    }
    readings = [layers for layers, (count, rest) in rows.items() if not rest and count <= tokens - first]
    whole = [layers for layers in readings if rows[layers][0] >= tokens - 1 - first]
    settled = whole if whole and start is not None else readings
    if len(settled) == 1 or not size:
        return max(settled or rows)
    kinds = f"{expected.num_layers} layers or {len(expected.moe_layers)} MoE layers x top-{expected.top_k}"
    if start is None and readings:
        counts = " or ".join(str(rows[layers][0]) for layers in readings)
        raise ValueError(f"found {counts} rows of {kinds} for {tokens} real tokens{ASK_FOR_START}")
    raise ValueError(
        f"{size} ids are not {tokens - 1 - first} rows (token {first} to the last but one) of {kinds}"
    )


def vllm_http(source: Any, expected: Expected) -> list[Recorded]:
    """Responses, each with one sample a choice."""
    samples: list[tuple[Any, Any]] = []
    for response in sequence(source, of="responses"):
        prompt = _field(response, "prompt_routed_experts", None)
        for position, choice in enumerate(sequence(_field(response, "choices"), of="choices")):
            if _field(choice, "index", position) != position:
                raise ValueError(f"sample {len(samples)}: choice {choice['index']} is at position {position}")
            samples.append((prompt, _field(choice, "routed_experts", None)))
    return per_sample(_prompt_and_generated)(samples, expected)


def _prompt_and_generated(fields: tuple[Any, Any], expected: Expected, sample: int) -> Recorded:
    arrays = [from_http(field) for field in fields if field is not None]
    if not arrays:
        raise ValueError("there is neither routed_experts nor prompt_routed_experts")
    parts = [part for part in arrays if part.size]
    if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
        kinds = [f"{part.dtype}{list(part.shape[1:])}" for part in parts]
        raise ValueError(f"prompt rows are {kinds[0]}, generated rows {kinds[1]}")
    if not parts:
        return Recorded(np.zeros((0, len(expected.moe_layers), expected.top_k), np.uint8), None)
    return Recorded(np.concatenate(parts), None)


def grid(source: Any, expected: Expected) -> list[Recorded]:
    """``[B, T, layers, K]``, laid out as the mask."""
    ids, mask = integers(source, ndim=4), expected.mask
    if ids.shape[:2] != mask.shape:
        raise ValueError(f"expected {list(mask.shape)} samples and tokens, found {list(ids.shape[:2])}")
    return [Recorded(sample[real], 0) for sample, real in zip(ids, mask, strict=True)]


def layers_first(source: Any, expected: Expected) -> list[Recorded]:
    """``[B, layers, T, K]``."""
    return grid(np.moveaxis(integers(source, ndim=4), 1, 2), expected)


def verl(source: Any, expected: Expected) -> list[Recorded]:
    """A grid in which zeros stand for the route that the last token never got."""
    return [
        Recorded(rows[:-1] if len(rows) and not rows[-1].any() else rows, start)
        for rows, start in grid(source, expected)
    ]


def nemo_rl(source: Any, expected: Expected) -> list[Recorded]:
    """A grid, or each sample's rows, with or without the routes that NeMo-RL makes up."""
    recorded = (grid if getattr(source, "ndim", 0) == 4 else per_sample(_nemo_rl_rows))(source, expected)
    return [Recorded(_without_made_up(rows, expected), start) for rows, start in recorded]


def _nemo_rl_rows(item: Any, expected: Expected, sample: int) -> Recorded:
    rows = integers(from_nemo_rl(item) if isinstance(item, str) else item, ndim=3)
    return Recorded(rows, 0 if len(rows) >= expected.tokens[sample] else None)


def _without_made_up(rows: np.ndarray, expected: Expected) -> np.ndarray:
    """Rows up to those at the end that are ``0..K-1`` in every layer.

    NeMo-RL writes these for the last token, and for tokens of an environment behind the last generation
    (``pad_and_align_routed_expert_indices`` and ``_dummy_routed_experts_for_tokens``). But for the last, they are
    taken for made up only where chance does not produce them (`IMPLAUSIBLE_BITS`).
    """
    if not rows.shape[1] or rows.shape[2] != expected.top_k:
        return rows  # refused by name where rows are placed
    recorded = (rows != np.arange(expected.top_k)).any(axis=(1, 2))
    end = int(np.flatnonzero(recorded).max(initial=-1)) + 1
    bits = rows.shape[1] * math.log2(math.perm(expected.num_experts, expected.top_k))
    return rows[:end] if bits > IMPLAUSIBLE_BITS else rows[: max(end, len(rows) - 1)]


def slime(item: Any, expected: Expected, sample: int) -> Recorded:
    """One sample's rows, with or without the padding that slime appends."""
    wrapped = isinstance(item, Mapping)
    start = _start(item, expected.tokens[sample]) if wrapped else None
    rows = integers(_field(item, "rollout_routed_experts") if wrapped else item, ndim=3)
    # Padding counts on from its own first row, so it may begin at any row that looks like a first one.
    first = np.arange(rows[0].size).reshape(rows.shape[1:]) % expected.num_experts if len(rows) else rows
    for begin in np.flatnonzero((rows == first).all(axis=(1, 2))).tolist():
        if np.array_equal(rows[begin:].ravel(), np.arange(rows[begin:].size) % expected.num_experts):
            return Recorded(rows[:begin], start)
    return Recorded(rows, start)


def npz(source: Any, expected: Expected) -> list[Recorded]:
    """A file of ours."""
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"expected a path, found {type(source).__name__}")
    arrays = read_arrays(source)
    stored = int(arrays.get("num_experts", expected.num_experts))
    if stored != expected.num_experts:
        raise ValueError(f"{os.fspath(source)} has num_experts={stored}, not {expected.num_experts}")
    if arrays["lengths"].tolist() != list(expected.tokens):
        raise ValueError(
            f"{os.fspath(source)} has samples of {arrays['lengths'].tolist()} tokens,"
            f" the mask of {list(expected.tokens)}"
        )
    return [Recorded(rows, 0) for rows in np.split(arrays["routed_experts"], np.cumsum(expected.tokens)[:-1])]


def _field(item: Any, name: str, *default: Any) -> Any:
    if not isinstance(item, Mapping):
        raise ValueError(f"expected a mapping with {name!r}, found {type(item).__name__}")
    value = item.get(name)
    if value is None and not default:
        raise ValueError(f"there is no {name!r} among {sorted(map(str, item))}")
    return default[0] if value is None else value


def _start(item: Any, tokens: int) -> int | None:
    start = _field(item, "routed_experts_start_len", None)
    if start is not None and (not isinstance(start, int) or not 0 <= start <= tokens):
        raise ValueError(f"routed_experts_start_len={start!r} is not one of its {tokens} tokens")
    return start


LAYOUTS: Final[Mapping[str, Layout]] = {
    "sglang": Layout(per_sample(sglang)),
    "vllm": Layout(per_sample(array)),
    "vllm_http": Layout(vllm_http),
    "verl": Layout(verl),
    "slime": Layout(per_sample(slime)),
    "nemo_rl": Layout(nemo_rl),
    "maxtext": Layout(grid),
    "tunix": Layout(grid),
    "tunix_layers_first": Layout(layers_first),
    "megatron_inference": Layout(per_sample(array), moe_only=True),
    "megatron_router_tracer": Layout(router_trace, moe_only=True),
    "npz": Layout(npz, moe_only=True),
}
"""Every layout by name."""
