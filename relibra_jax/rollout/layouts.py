"""Every layout in which routed experts are handed over, as a table of pure decoders.

A decoder only finds the rows of each sample; `replay_from_rollout` places and checks them, alike for all. The
axis order is never guessed: two orders are two names. docs/guides/engines.md says which versions of the engines
were read. The files of SGLang's expert-distribution recorder are pickles (``torch.save``) and are not read.

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
``tensorrt_llm``
    Each sample's array ``[tokens - 1, MoE layers, K]``, ``CompletionOutput.routed_experts``.
``skyrl``
    Each sample's rows from its first token on, ``[rows, layers, K]``: an array, or ``{data, shape, dtype}`` with data
    in base64. Or one array ``[B, T, layers, K]`` laid out as the mask, ``rollout_expert_indices``; rows of ``0..K-1``
    in every layer at a sample's end are SkyRL's own, and no routes.
``prime_rl``
    Each sample's array ``[tokens, layers, K]``, or ``{data, shape, dtype}``, a mapping or a ``RoutedExperts``: data are
    bytes in the transport to the trainer, base64 in an answer, which also says ``start``. But in an answer, a last row
    of zeros, or that is the one before it, stands for the last token, and is no route.
``miles``
    Each sample's array ``[tokens - 1, layers, K]``, or a mapping with it as ``rollout_routed_experts``; -1 where there
    is no route.
``areal``
    Each sample's ``ModelResponse.routed_experts [tokens - 1, layers * K]``. Or trajectories, a mapping with
    ``routed_experts [B, T, layers, K]`` laid out as the mask and ``r3_routing_valid [B]``: a sample that is not valid
    has no routes; a last row as in ``prime_rl`` is none.
``transformers``
    A ``MoERouting``, its ``selected_experts``, one array ``[B * T, K]`` a layer over all positions of the mask, or a
    mapping from layers to these.
``npz``
    The path of a file that `save_replay` writes.
"""

import os
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from relibra_jax.replay_files import read_arrays
from relibra_jax.rollout.decoding import Layout, array, grid, layers_first, per_sample
from relibra_jax.rollout.engines import sglang, transformers, vllm_http
from relibra_jax.rollout.expected import Expected
from relibra_jax.rollout.payload import Recorded
from relibra_jax.rollout.router_trace import router_trace
from relibra_jax.rollout.trainers import areal, miles, nemo_rl, prime_rl, skyrl, slime, verl


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
    "tensorrt_llm": Layout(per_sample(array), moe_only=True),
    "skyrl": Layout(skyrl),
    "prime_rl": Layout(per_sample(prime_rl)),
    "miles": Layout(per_sample(miles)),
    "areal": Layout(areal),
    "transformers": Layout(transformers),
    "npz": Layout(npz, moe_only=True),
}
"""Every layout by name."""
