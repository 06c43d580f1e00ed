"""Reader of Megatron-LM's ``RouterTracer``: JSON lines, one stream per rank, one record per layer and forward pass.

``{"step", "stage", "block": "decoder", "layer", "rank", "num_tokens", "topk", "top_indices": [[...], ...]}``

A record does not say which tokens it holds, so the reader derives it from the streams. Ranks with the same layers hold
successive samples, and their streams must be given in that order. Ranks with different layers are pipeline stages of
the same samples. Some mistakes in the streams can be detected, and raise: missing or renumbered layers, a rank that
occurs twice, layers with different passes, a number of tokens that differs from the mask's. The order of samples inside
a pass cannot be checked: trace with one sample, or one packed sequence, per micro-batch. If the router passed a boolean
map to the tracer, the ids of a token are in ascending order, because the tracer did not know the order of top-k.
"""

from typing import Any

import numpy as np

from relibra_jax.rollout.expected import Expected
from relibra_jax.rollout.payload import Recorded, integers, sequence
from relibra_jax.support.json_text import parse_json


def router_trace(source: Any, expected: Expected) -> list[Recorded]:
    """Read the streams of all ranks of one batch.

    Args:
        source: a sequence of streams. A stream is an iterable of lines, for example an open file, with the records of
            this batch alone. Records of blocks other than the decoder (multi-token prediction) are ignored.
        expected: the batch and its model. The layer numbers of the records are those of ``moe_layers``, across pipeline
            stages.

    Returns:
        The rows ``[tokens, MoE layers, K]`` of each sample.

    Raises:
        ValueError: if a line is not such a record, or if the streams do not contain exactly the batch.
    """
    chunks: dict[int, list[np.ndarray]] = {}
    passes: dict[int, list[tuple[int, int]]] = {}
    ranks: set[int] = set()
    for number, stream in enumerate(sequence(source, of="streams, one per rank, as the source")):
        stream_ranks = set()
        for line_number, line in enumerate(sequence(stream, of="lines"), start=1):
            if not hasattr(line, "strip"):
                found = type(line).__name__
                raise ValueError(
                    f"stream {number}, line {line_number}: expected a line of text, found {found}"
                )
            if not line.strip():
                continue
            try:
                record = parse_json(line)
                if record["block"] != "decoder":
                    continue
                layer, step, rank, tokens = (record[key] for key in ("layer", "step", "rank", "num_tokens"))
                ids = integers(record["top_indices"], ndim=2)
                if ids.shape != (tokens, expected.top_k):
                    raise ValueError(f"top_indices are {list(ids.shape)}, not [{tokens}, {expected.top_k}]")
            except (KeyError, TypeError, ValueError) as error:
                problem = f"missing key {error}" if isinstance(error, KeyError) else error
                raise ValueError(f"stream {number}, line {line_number}: {problem}") from error
            stream_ranks.add(rank)
            chunks.setdefault(layer, []).append(ids)
            passes.setdefault(layer, []).append((step, len(ids)))
        if len(stream_ranks) > 1 or stream_ranks & ranks:
            raise ValueError(
                f"stream {number} has records of ranks {sorted(stream_ranks)}, but a stream must have one rank, and a"
                " rank one stream"
            )
        ranks |= stream_ranks
    _check_layers(set(chunks), set(expected.moe_layers))
    first = expected.moe_layers[0]
    for layer in expected.moe_layers:
        if passes[layer] != passes[first]:
            raise ValueError(
                f"layer {layer} has (step, tokens) {passes[layer]}, layer {first} has {passes[first]}"
                " (the stream of a rank is missing?)"
            )
    rows = np.stack([np.concatenate(chunks[layer]) for layer in expected.moe_layers], axis=1)
    return _split(rows, expected)


def _check_layers(layers: set[int], moe_layers: set[int]) -> None:
    if layers != moe_layers:
        raise ValueError(
            f"no records of layers {sorted(moe_layers - layers)}, extra ones of {sorted(layers - moe_layers)}"
            " (is a pipeline stage missing, or does it count layers from its own first?)"
        )


def _split(rows: np.ndarray, expected: Expected) -> list[Recorded]:
    mask, tokens = expected.mask, expected.tokens
    if len(rows) == mask.size:
        return [
            Recorded(sample[real], 0)
            for sample, real in zip(rows.reshape(*mask.shape, *rows.shape[1:]), mask, strict=True)
        ]
    if len(rows) != sum(tokens):
        raise ValueError(
            f"{len(rows)} tokens per layer, but the batch has {sum(tokens)} real tokens in {mask.size}"
            " positions (a tensor-parallel copy, a recomputed pass or another batch?)"
        )
    return [Recorded(part, 0) for part in np.split(rows, np.cumsum(tokens)[:-1])]
