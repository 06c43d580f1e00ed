"""Decoders for the routed experts that inference engines return: SGLang, vLLM over HTTP, and transformers."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from relibra_jax.rollout.decoding import field, grid, per_sample, start_in
from relibra_jax.rollout.expected import Expected
from relibra_jax.rollout.payload import ASK_FOR_START, Recorded, from_base64, from_http, integers, sequence


def sglang(meta: Any, expected: Expected, sample: int) -> Recorded:
    """Read one sample from the ``meta_info`` of an SGLang response."""
    dtype, start = field(meta, "routed_experts_dtype", "int32"), start_in(meta, expected.tokens[sample])
    if dtype not in ("int32", "uint16", "uint8"):
        raise ValueError(f"routed_experts_dtype {dtype!r} must be one of int32, uint16, uint8")
    flat = from_base64(field(meta, "routed_experts"), dtype=dtype)
    layers = _layers_of_flat(flat.size, expected, sample, expected.start[sample] if start is None else start)
    return Recorded(flat.reshape(-1, layers, expected.top_k), start)


def _layers_of_flat(size: int, expected: Expected, sample: int, start: int | None) -> int:
    """Infer the number of layers of a flat buffer that states no shape: all hidden layers, or the MoE layers.

    If the first token is known, the number of layers is the one with which the buffer has a row for every token from
    there, or for every one but the last. Otherwise, or if no such number exists, it is inferred only if a single
    interpretation of the buffer is possible.
    """
    tokens = expected.tokens[sample]
    first = start or 0
    rows = {
        layers: divmod(size, layers * expected.top_k)
        for layers in (expected.num_layers, len(expected.moe_layers))
    }
    readings = [layers for layers, (count, rest) in rows.items() if not rest and count <= tokens - first]
    whole = [layers for layers in readings if rows[layers][0] >= tokens - 1 - first]
    candidates = whole if whole and start is not None else readings
    if len(candidates) == 1 or not size:
        return max(candidates or rows)
    kinds = f"{expected.num_layers} layers or {len(expected.moe_layers)} MoE layers x top-{expected.top_k}"
    if start is None and readings:
        counts = " or ".join(str(rows[layers][0]) for layers in readings)
        raise ValueError(f"found {counts} rows of {kinds} for {tokens} real tokens{ASK_FOR_START}")
    raise ValueError(
        f"{size} ids are not {tokens - 1 - first} rows (token {first} to the last but one) of {kinds}"
    )


def vllm_http(source: Any, expected: Expected) -> Iterator[Recorded]:
    """Read HTTP responses of vLLM, whose choices are the samples."""
    samples: list[tuple[Any, Any]] = []
    for response in sequence(source, of="responses as the source"):
        prompt = field(response, "prompt_routed_experts", None)
        for position, choice in enumerate(sequence(field(response, "choices"), of="choices")):
            if field(choice, "index", position) != position:
                raise ValueError(f"sample {len(samples)}: choice {choice['index']} is at position {position}")
            samples.append((prompt, field(choice, "routed_experts", None)))
    return per_sample(_prompt_and_generated)(samples, expected)


def _prompt_and_generated(fields: tuple[Any, Any], expected: Expected, sample: int) -> Recorded:
    arrays = [from_http(field) for field in fields if field is not None]
    if not arrays:
        raise ValueError("it has neither routed_experts nor prompt_routed_experts")
    parts = [part for part in arrays if part.size]
    if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
        kinds = [f"{part.dtype}{list(part.shape[1:])}" for part in parts]
        raise ValueError(f"prompt rows are {kinds[0]}, but generated rows are {kinds[1]}")
    if not parts:
        return Recorded(np.zeros((0, len(expected.moe_layers), expected.top_k), np.uint8), None)
    return Recorded(np.concatenate(parts), None)


def transformers(source: Any, expected: Expected) -> Iterator[Recorded]:
    """Read a ``MoERouting``, its ``selected_experts``, or a mapping from layers to arrays, for every position of the
    mask."""
    layers = getattr(source, "selected_experts", source)
    if isinstance(layers, Mapping):
        numbers = sorted(layers)
        if numbers not in (list(range(expected.num_layers)), list(expected.moe_layers)):
            raise ValueError(
                f"layers {numbers} are neither all {expected.num_layers} nor the MoE layers"
                f" {list(expected.moe_layers)}"
            )
        layers = [layers[number] for number in numbers]
    rows, shape = [], (expected.mask.size, expected.top_k)
    for number, layer in enumerate(sequence(layers, of="layers")):
        ids = integers(layer, ndim=2)
        if ids.shape != shape:
            raise ValueError(
                f"array {number} of selected_experts is {list(ids.shape)}, not [B * T, K] = {list(shape)}"
            )
        rows.append(ids)
    if not rows:
        raise ValueError("selected_experts has no layers")
    return grid(np.stack(rows, axis=1).reshape(*expected.mask.shape, len(rows), expected.top_k), expected)
