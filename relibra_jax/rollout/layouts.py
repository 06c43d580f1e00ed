"""The supported layouts of recorded routed experts, as a table of pure decoders.

A decoder only finds the rows of each sample; `replay_from_rollout` then assigns them to tokens and checks them, in the
same way for all layouts. The order of axes is never guessed: two orders are two layouts. docs/guides/engines.md lists
the versions of the engines from which the layouts were read. The files of SGLang's expert-distribution recorder are
pickles (``torch.save``), which this library does not read.

The list below gives the ``source`` of each layout. Samples are in the order of the mask's rows. ``layers`` are all
hidden layers or the MoE layers; their number tells which. ``start`` is the token of a sample's first row, which is 0
unless the engine was asked to skip tokens.

``sglang``
    The ``meta_info`` of each response. Its ``routed_experts`` is base64 of flat ids ``[tokens - 1 - start, layers,
    K]``, int32 unless ``routed_experts_dtype`` is uint16 or uint8. Start is the ``routed_experts_start_len`` of the
    request; SGLang does not return it, so add it to the mapping or pass ``start``.
``vllm``
    The array ``[tokens - 1 - start, layers, K]`` of each sample. Start is the ``routed_experts_prompt_start`` of the
    request; vLLM does not return it.
``vllm_http``
    The responses; the samples are their ``choices``, in order. ``choices[i].routed_experts`` is the array of ``vllm``,
    or, if the response has ``prompt_routed_experts`` (the prompt from start on), the rows of the generated tokens
    except the last. Each is base64 of an ``.npy``, ``{encoding, dtype, shape, data}``, or nested lists.
``verl``
    One array ``[B, T, layers, K]`` with tokens at the positions of the mask, padded with zeros.
``slime``
    The array ``[tokens - 1 - start, layers, K]`` of each sample, or a mapping with this array as
    ``rollout_routed_experts`` and start as ``routed_experts_start_len``. Rows that slime appends as padding are
    ``arange % num_experts``.
``nemo_rl``
    One array ``[B, T, layers, K]`` with tokens at the positions of the mask, or ``[tokens, layers, K]`` of each sample,
    as an array or as the wire string ``nrlre1:<dtype>:<tokens>x<layers>x<K>:<base64>``; -1 for no route. Rows of
    ``0..K-1`` in every layer at the end of a sample are placeholders of NeMo-RL, not routes.
``maxtext``
    ``forced_routed_experts [B, T, layers, K]``, -1 for no route.
``tunix``, ``tunix_layers_first``
    ``[B, T, layers, K]`` and ``[B, layers, T, K]``, -1 for no route. T is the prompt, right-aligned, followed by the
    completion, as in the mask.
``megatron_inference``
    The array ``[tokens, MoE layers, K]`` of each sample.
``megatron_router_tracer``
    The lines of each rank; see `router_trace`.
``tensorrt_llm``
    The array ``[tokens - 1, MoE layers, K]`` of each sample, which is ``CompletionOutput.routed_experts``.
``skyrl``
    The rows of each sample from its first token on, ``[rows, layers, K]``, as an array or as ``{data, shape, dtype}``
    with data in base64. Or one array ``[B, T, layers, K]`` with tokens at the positions of the mask,
    ``rollout_expert_indices``; in it, rows of ``0..K-1`` in every layer at the end of a sample are placeholders of
    SkyRL, not routes.
``prime_rl``
    The array ``[tokens, layers, K]`` of each sample, or ``{data, shape, dtype}``, as a mapping or a ``RoutedExperts``.
    Its data are bytes in the transport to the trainer, and base64 in an engine's response, which also has ``start``.
    Except in a response, a last row that is zero or repeats the row before it is a placeholder for the last token.
``miles``
    The array ``[tokens - 1, layers, K]`` of each sample, or a mapping with it as ``rollout_routed_experts``; -1 for no
    route.
``areal``
    ``ModelResponse.routed_experts [tokens - 1, layers * K]`` of each sample. Or a mapping of trajectories with
    ``routed_experts [B, T, layers, K]``, whose tokens are at the positions of the mask, and ``r3_routing_valid [B]``:
    an invalid sample has no routes. The last row may be a placeholder as in ``prime_rl``.
``transformers``
    A ``MoERouting``, its ``selected_experts`` (one array ``[B * T, K]`` per layer, for all positions of the mask), or a
    mapping from layers to such arrays.
``npz``
    The path of a file that `save_replay` wrote.
"""

import os
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from relibra_jax.contract.replay_files import read_arrays
from relibra_jax.rollout.decoding import Layout, array, grid, layers_first, per_sample
from relibra_jax.rollout.engines import sglang, transformers, vllm_http
from relibra_jax.rollout.expected import Expected
from relibra_jax.rollout.payload import Recorded
from relibra_jax.rollout.router_trace import router_trace
from relibra_jax.rollout.trainers import areal, miles, nemo_rl, prime_rl, skyrl, slime, verl


def npz(source: Any, expected: Expected) -> list[Recorded]:
    """Read the file of a saved replay."""
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"expected a path, found {type(source).__name__}")
    arrays = read_arrays(source)
    stored = int(arrays.get("num_experts", expected.num_experts))
    if stored != expected.num_experts:
        raise ValueError(f"{os.fspath(source)} has num_experts={stored}, not {expected.num_experts}")
    if arrays["lengths"].tolist() != list(expected.tokens):
        raise ValueError(
            f"{os.fspath(source)} has samples of {arrays['lengths'].tolist()} tokens,"
            f" but the mask has {list(expected.tokens)}"
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
"""All layouts by name."""
