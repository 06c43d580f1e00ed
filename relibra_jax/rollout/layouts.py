"""Every layout in which routed experts are handed over, as a table of pure decoders.

A decoder only finds the rows of each sample; `replay_from_rollout` places and checks them, alike for all. The
axis order is never guessed: two orders are two names. The files of SGLang's expert-distribution recorder are
pickles (``torch.save``) and are not read.

What a layout takes as ``source``, with samples in the order of the mask's rows; ``layers`` are all hidden
layers or the MoE layers, told apart by size:

``sglang``
    Each response's ``meta_info``: ``routed_experts`` is base64 of flat ids ``[tokens - 1 - start, layers,
    K]``, int32 unless ``routed_experts_dtype`` says uint16 or uint8, start 0 unless
    ``routed_experts_start_len`` says so.
``vllm``
    Each sample's array ``[tokens - 1, layers, K]``, from its first token on.
``vllm_http``
    Each response; its samples are ``choices``, in order. ``prompt_routed_experts`` (the prompt) and
    ``choices[i].routed_experts`` (generated but the last) are base64 of an ``.npy``, or ``{encoding, dtype,
    shape, data}``, or nested lists. Without the former the latter must be the whole sequence.
``verl``
    One array ``[B, T, layers, K]`` laid out as the mask, padded with zeros.
``slime``
    Each sample's array ``[tokens - 1 - start, layers, K]``, or a mapping with it as
    ``rollout_routed_experts`` and start as ``routed_experts_start_len``. Rows that slime appends are ``arange
    % num_experts``.
``nemo_rl``
    One array ``[B, T, layers, K]`` laid out as the mask, or each sample's ``[tokens, layers, K]``, as an array
    or as the wire string ``nrlre1:<dtype>:<tokens>x<layers>x<K>:<base64>``; -1 where there is no route.
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

import os
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from relibra_jax.replay_files import read_arrays
from relibra_jax.rollout.payload import (
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
    """Lift a decoder of one sample, which also gets its number of real tokens, to a sequence of them."""

    def decode_all(source: Any, expected: Expected) -> list[Recorded]:
        items, lengths = list(sequence(source, of="samples")), expected.mask.sum(axis=1).tolist()
        if len(items) != len(lengths):
            raise ValueError(f"{len(items)} samples, the mask has {len(lengths)}")
        recorded = []
        for sample, (item, tokens) in enumerate(zip(items, lengths, strict=True)):
            try:
                recorded.append(decode(item, expected, tokens))
            except ValueError as error:
                raise ValueError(f"sample {sample}: {error}") from error
        return recorded

    return decode_all


def array(item: Any, expected: Expected, tokens: int) -> Recorded:
    """One sample's rows from its first token on."""
    return Recorded(integers(item, ndim=3))


def sglang(meta: Any, expected: Expected, tokens: int) -> Recorded:
    """One response's ``meta_info``."""
    dtype, start = _field(meta, "routed_experts_dtype", "int32"), _start(meta, tokens)
    if dtype not in ("int32", "uint16", "uint8"):
        raise ValueError(f"routed_experts_dtype {dtype!r} is none of int32, uint16, uint8")
    flat = from_base64(_field(meta, "routed_experts"), dtype=dtype)
    # The buffer states no shape. A row for every token, or every one but the last, settles what the layer
    # axis is; fewer rows do so only if a single reading remains.
    widths = {layers * expected.top_k for layers in (expected.num_layers, len(expected.moe_layers))}
    readings = {w for w in widths if flat.size % w == 0 and flat.size // w <= tokens - start}
    whole = {w for w in readings if flat.size // w >= tokens - 1 - start}
    if len(whole or readings) != 1 and flat.size:
        raise ValueError(
            f"{flat.size} ids are not {tokens - 1 - start} rows (token {start} to the last but one) of"
            f" {expected.num_layers} layers or {len(expected.moe_layers)} MoE layers x top-{expected.top_k}"
        )
    width = max(whole or readings or widths)
    return Recorded(flat.reshape(-1, width // expected.top_k, expected.top_k), start)


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


def _prompt_and_generated(fields: tuple[Any, Any], expected: Expected, tokens: int) -> Recorded:
    prompt, generated = (None if field is None else from_http(field) for field in fields)
    if prompt is None and (generated is None or len(generated) < tokens - 1):
        rows = "no" if generated is None else len(generated)
        raise ValueError(
            f"{rows} rows for {tokens} tokens and no prompt_routed_experts to tell where they start"
        )
    parts = [part for part in (prompt, generated) if part is not None and part.size]
    if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
        kinds = [f"{part.dtype}{list(part.shape[1:])}" for part in parts]
        raise ValueError(f"prompt rows are {kinds[0]}, generated rows {kinds[1]}")
    if not parts:
        return Recorded(np.zeros((0, len(expected.moe_layers), expected.top_k), np.uint8))
    return Recorded(np.concatenate(parts))


def grid(source: Any, expected: Expected) -> list[Recorded]:
    """``[B, T, layers, K]``, laid out as the mask."""
    ids, mask = integers(source, ndim=4), expected.mask
    if ids.shape[:2] != mask.shape:
        raise ValueError(f"expected {list(mask.shape)} samples and tokens, found {list(ids.shape[:2])}")
    return [Recorded(sample[real]) for sample, real in zip(ids, mask, strict=True)]


def layers_first(source: Any, expected: Expected) -> list[Recorded]:
    """``[B, layers, T, K]``."""
    return grid(np.moveaxis(integers(source, ndim=4), 1, 2), expected)


def verl(source: Any, expected: Expected) -> list[Recorded]:
    """A grid in which zeros stand for the route that the last token never got."""
    return [
        Recorded(rows[:-1]) if len(rows) and not rows[-1].any() else Recorded(rows)
        for rows, _ in grid(source, expected)
    ]


def nemo_rl(source: Any, expected: Expected) -> list[Recorded]:
    """A grid, or each sample's rows."""
    return (grid if getattr(source, "ndim", 0) == 4 else per_sample(_nemo_rl_rows))(source, expected)


def _nemo_rl_rows(item: Any, expected: Expected, tokens: int) -> Recorded:
    return Recorded(from_nemo_rl(item)) if isinstance(item, str) else array(item, expected, tokens)


def slime(item: Any, expected: Expected, tokens: int) -> Recorded:
    """One sample's rows, with or without the padding that slime appends."""
    wrapped = isinstance(item, Mapping)
    start = _start(item, tokens) if wrapped else 0
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
    arrays, real = read_arrays(source), expected.mask.sum(axis=1)
    stored = int(arrays.get("num_experts", expected.num_experts))
    if stored != expected.num_experts:
        raise ValueError(f"{os.fspath(source)} has num_experts={stored}, not {expected.num_experts}")
    if not np.array_equal(arrays["lengths"], real):
        raise ValueError(f"{os.fspath(source)} has samples of {arrays['lengths']} tokens, the mask of {real}")
    return [Recorded(rows) for rows in np.split(arrays["routed_experts"], np.cumsum(real)[:-1])]


def _field(item: Any, name: str, *default: Any) -> Any:
    if not isinstance(item, Mapping):
        raise ValueError(f"expected a mapping with {name!r}, found {type(item).__name__}")
    value = item.get(name)
    if value is None and not default:
        raise ValueError(f"there is no {name!r} among {sorted(map(str, item))}")
    return default[0] if value is None else value


def _start(item: Mapping[str, Any], tokens: int) -> int:
    start = _field(item, "routed_experts_start_len", 0)
    if not isinstance(start, int) or not 0 <= start <= tokens:
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
