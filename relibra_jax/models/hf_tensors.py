"""The map between tensors of a Hugging Face checkpoint and parts of a `LanguageModel`, for reading and writing.

A linear layer of a checkpoint is ``[outputs, inputs]``. In the model it is ``[inputs, outputs]``, with heads as
separate axes. Every entry of the map is therefore a reshape, with or without a transposition. Experts have their
logical numbers; the homes determine the slot of each. Checkpoints store experts in two forms. Most have one tensor for
each expert and matrix. In *fused* checkpoints all experts of a layer are in two tensors, as `transformers` 5 keeps them
in memory and writes them on request. Those of GPT-OSS are always fused, but in another layout: ``[inputs, outputs]``,
with alternating columns of gate and up.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from relibra_jax.execution.expert_mlp import DOWN, GATE, UP
from relibra_jax.models.config import ModelConfig

EXPERTS: Final = ("layers", "experts", "experts")
"""The path of the parameter that holds all experts in a model's state."""


class Part(NamedTuple):
    """One part of a parameter and its place in a checkpoint."""

    name: str
    """The name of the tensor in the checkpoint."""
    tensor_shape: tuple[int, ...]
    """The shape of the whole tensor."""
    rows: tuple[int | slice, ...]
    """The index of this part in the tensor; empty for the whole tensor."""
    path: tuple[str, ...]
    """The path of the parameter in the model's state."""
    at: tuple[int, ...]
    """The index of the part in the parameter: ``(layer,)`` for stacked layers, ``(layer, expert, matrix)`` for experts,
    where ``expert`` is the logical number."""
    transposed: bool
    """Whether the part is ``[outputs, inputs]`` in the checkpoint and ``[inputs, outputs]`` in the parameter."""
    bias: bool = False
    """Whether the part is the bias of an expert's matrix, which is in the last columns of the parameter."""


class Names(NamedTuple):
    """The names that an architecture gives to the MLP of a layer and to the matrices of an expert."""

    mlp: str = "mlp"
    router: str = "gate"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


NAMES: Final = {
    "mixtral": Names("block_sparse_moe", expert=("w1", "w3", "w2")),
    "gpt_oss": Names(router="router"),
}
"""The names of architectures that differ from Qwen3-MoE. Checkpoints that `transformers` fuses on request use the names
of Qwen3-MoE."""
ALWAYS_FUSED: Final = {"gpt_oss"}
"""The architectures all of whose checkpoints have fused experts, in a layout of their own."""


def tensor_parts(config: ModelConfig, *, fused: bool = False) -> Iterator[Part]:
    """Yield all parts of a model's parameters. The bias of an expert's matrix follows the matrix.

    Args:
        config: the model's sizes and its architecture, which determines the tensor names.
        fused: whether the checkpoint stores the experts of a layer in two tensors as `transformers` fuses them; not
            for `ALWAYS_FUSED`.

    Yields:
        The parts, layer by layer, with the matrices of an expert together. Every part of a parameter comes exactly
        once, in the order of its index.
    """
    vocabulary, width = config.vocabulary, config.width
    names = Names() if fused else NAMES.get(config.architecture, Names())
    yield _whole("model.embed_tokens.weight", (vocabulary, width), ("embedding",))
    for layer in range(config.layers):
        yield from _layer_parts(layer, config, names, fused)
    yield _whole("model.norm.weight", (width,), ("norm", "scale"))
    if not config.tied:
        yield _whole("lm_head.weight", (vocabulary, width), ("head",), transposed=True)


def _layer_parts(layer: int, config: ModelConfig, names: Names, fused: bool) -> Iterator[Part]:
    dense = layer < config.dense_layers
    stack, index = ("dense", layer) if dense else ("layers", layer - config.dense_layers)
    prefix, width = f"model.layers.{layer}", config.width

    def part(name, shape, *path, transposed=False):
        return _whole(f"{prefix}.{name}", shape, (stack, *path), (index,), transposed=transposed)

    yield part("input_layernorm.weight", (width,), "attention_norm", "scale")
    second = "mlp_norm" if dense else "experts_norm"
    yield part("post_attention_layernorm.weight", (width,), second, "scale")
    yield from _attention_parts(config, part)
    if dense:
        for name, shape in _matrix_shapes(config.dense_width, width).items():
            yield part(f"mlp.{name}_proj.weight", shape, name, "kernel", transposed=True)
        return
    experts = ("experts", config.num_experts)
    router = f"{names.mlp}.{names.router}"
    yield part(f"{router}.weight", (config.num_experts, width), "experts", "router", transposed=True)
    if config.gating.router_bias:
        yield part(f"{router}.bias", experts[1:], "experts", "router_bias")
    if config.gating.correction_bias:
        yield part(f"{names.mlp}.gate.e_score_correction_bias", experts[1:], "experts", "correction_bias")
    if config.shared_width:
        for matrix, (name, shape) in enumerate(_matrix_shapes(config.shared_width, width).items()):
            shared = part(f"{names.mlp}.shared_experts.{name}_proj.weight", shape, "experts", "shared")
            yield shared._replace(at=(index, matrix), transposed=matrix != DOWN)
    for expert in range(config.num_experts):
        if config.architecture in ALWAYS_FUSED:
            yield from _gpt_oss_expert(config, f"{prefix}.{names.mlp}.experts", index, expert)
            continue
        for matrix in (GATE, UP, DOWN):
            place = _fused(config, expert, matrix) if fused else _separate(config, names, expert, matrix)
            name, shape, rows = place
            yield Part(
                *(f"{prefix}.{names.mlp}.experts.{name}", shape, rows),
                *(EXPERTS, (index, expert, matrix), matrix != DOWN),
            )


def _attention_parts(config: ModelConfig, part) -> Iterator[Part]:
    width = config.width
    query, key = config.heads * config.head_width, config.kv_heads * config.head_width
    for name, attribute, outputs in (("q", "query", query), ("k", "key", key), ("v", "value", key)):
        yield part(
            f"self_attn.{name}_proj.weight",
            (outputs, width),
            "attention",
            attribute,
            "kernel",
            transposed=True,
        )
        if config.qkv_bias:
            yield part(f"self_attn.{name}_proj.bias", (outputs,), "attention", attribute, "bias")
    yield part("self_attn.o_proj.weight", (width, query), "attention", "out", "kernel", transposed=True)
    if config.out_bias:
        yield part("self_attn.o_proj.bias", (width,), "attention", "out", "bias")
    if config.sinks:
        yield part("self_attn.sinks", (config.heads,), "attention", "sinks")
    if config.qk_norm is not None:
        head = config.head_width
        norm_width = {"q": head, "k": head} if config.qk_norm == "head" else {"q": query, "k": key}
        for name, attribute in (("q", "query_norm"), ("k", "key_norm")):
            yield part(f"self_attn.{name}_norm.weight", (norm_width[name],), "attention", attribute, "scale")


def _matrix_shapes(hidden: int, width: int) -> dict[str, tuple[int, int]]:
    return {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}


def _separate(config: ModelConfig, names: Names, expert: int, matrix: int):
    hidden, width = config.expert_width, config.width
    shape = (width, hidden) if matrix == DOWN else (hidden, width)
    return f"{expert}.{names.expert[matrix]}.weight", shape, ()


def _fused(config: ModelConfig, expert: int, matrix: int):
    experts, hidden, width = config.num_experts, config.expert_width, config.width
    if matrix == DOWN:
        return "down_proj", (experts, width, hidden), (expert,)
    return (
        "gate_up_proj",
        (experts, 2 * hidden, width),
        (expert, slice(matrix * hidden, (matrix + 1) * hidden)),
    )


def _gpt_oss_expert(config: ModelConfig, prefix: str, layer: int, expert: int) -> Iterator[Part]:
    experts, hidden, width = config.num_experts, config.expert_width, config.width
    for matrix in (GATE, UP, DOWN):
        name, inputs, outputs = (
            ("down_proj", hidden, width) if matrix == DOWN else ("gate_up_proj", width, 2 * hidden)
        )
        columns = slice(None) if matrix == DOWN else slice(matrix, None, 2)
        place = (EXPERTS, (layer, expert, matrix))
        rows = (expert, slice(None), columns)
        yield Part(f"{prefix}.{name}", (experts, inputs, outputs), rows, *place, matrix == DOWN)
        yield Part(f"{prefix}.{name}_bias", (experts, outputs), (expert, columns), *place, False, bias=True)


def _whole(name, shape, path, index=(), *, transposed=False) -> Part:
    return Part(name, tuple(shape), (), tuple(path), tuple(index), transposed)
