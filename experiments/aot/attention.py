"""The check of a language model on packed sequences: what attention holds, and what runs beside it."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.aot.bytes import transfer_content
from experiments.aot.checks import phase_of
from experiments.aot.findings import Finding, print_findings, read_compiled
from experiments.aot.hlo import Program
from experiments.aot.stack import FAST_COMPILATION, input_shapes, with_shardings
from experiments.aot.ways import MODEL, TOPOLOGY, parallel_of
from relibra_jax.execution import OVERLAP_OPTIONS
from relibra_jax.execution.gating import Gating
from relibra_jax.models import ModelConfig
from relibra_jax.models.language_model import abstract_model, model_maker
from relibra_jax.models.packed_attention import packed_attention
from relibra_jax.nnx import SequencePacking

ATTENTION: Final = "attention, 32,768 tokens"
MODEL_NAME: Final = "language model, packed sequences"
LAYERS: Final = 2
CONFIG: Final = ModelConfig(
    width=MODEL.width,
    layers=LAYERS,
    heads=MODEL.heads,
    kv_heads=4,
    head_width=128,
    num_experts=TOPOLOGY.num_experts,
    gating=Gating(top_k=MODEL.top_k, scores="softmax"),
    expert_width=MODEL.expert_width,
    vocabulary=256,
    dtype="bfloat16",
    param_dtype="bfloat16",
)


TOKENS: Final = 32_768
"""The number of tokens of a sequence for which attention alone is compiled."""
PHASES: Final = ("fetch", "refetch", "return")
"""The transfers of replicas: in the forward pass, repeated in the backward pass, and that of their gradients."""


class Measured(NamedTuple):
    """The measurements of both programs."""

    temporary: int
    """The temporary memory of attention alone in bytes."""
    kernels: int
    """The number of kernels of attention alone."""
    exchanges: int
    """The number of collectives of attention alone."""
    beside: Mapping[str, int]
    """The number of exchanges of each phase that run beside a kernel of attention."""


def check_attention() -> None:
    """Compile attention alone, and the gradients of a language model; sequences hold several samples."""
    program, temporary = read_compiled(compile_attention())
    exchanges = len(list(program.transfers()))
    kernels = sum(program.is_attention(one) for body in program.computations.values() for one in body)
    model, _ = read_compiled(compile_gradients())
    print_findings(judge_attention(Measured(temporary, kernels, exchanges, count_beside(model))))


def compile_attention() -> jax.stages.Compiled:
    """Compile attention and its gradients, with one sequence of many tokens for each rank."""
    parallel = parallel_of("padded")

    def tokens(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        shape = (parallel.num_ranks, TOKENS, *shape)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=parallel.token_sharding)

    on_rank = functools.partial(packed_attention, implementation=parallel.attention_implementation)
    attend: Any = jax.shard_map(
        on_rank, mesh=parallel.mesh, in_specs=parallel.token_spec, out_specs=parallel.token_spec
    )

    def gradients(query, key, value, segments, cotangent):
        return jax.vjp(lambda *arrays: attend(*arrays, segments), query, key, value)[1](cotangent)

    query, key = (tokens(heads, CONFIG.head_width) for heads in (CONFIG.heads, CONFIG.kv_heads))
    return jax.jit(gradients).lower(query, key, key, tokens(dtype=jnp.int32), query).compile()


def compile_gradients() -> jax.stages.Compiled:
    """Compile the gradients of a model with one packed sequence for each rank."""
    parallel = parallel_of("padded")
    sizes = replace(MODEL, samples=1, positions=MODEL.tokens)
    inputs = input_shapes(sizes, parallel, (), LAYERS)
    make = model_maker(CONFIG, parallel.topology, parallel.mesh, fsdp_axis=None, shard_dense=False)
    graph, shapes, _ = abstract_model(make, parallel.mesh)
    params, rest = nnx.split_state(with_shardings(shapes, parallel.mesh), nnx.Param, ...)

    def tokens(dtype: Any, *shape: int) -> Any:
        shape = (parallel.num_ranks, sizes.positions, *shape)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=parallel.token_sharding)

    def loss(params, rest, token_ids, mask, expert_ids, prepared, packing):
        model = nnx.merge(graph, params, rest)
        output = model(token_ids, mask, expert_ids, prepared, parallel=parallel, packing=packing)
        return jnp.mean(output.hidden.astype(jnp.float32) ** 2)

    packing = SequencePacking(tokens(jnp.int32), tokens(jnp.int32))
    expert_ids = tokens(jnp.uint8, LAYERS, MODEL.top_k)
    step = jax.jit(jax.grad(loss), compiler_options={**OVERLAP_OPTIONS, **FAST_COMPILATION})
    batch = (tokens(jnp.int32), tokens(jnp.bool_), expert_ids, inputs.prepared, packing)
    return step.lower(params, rest, *batch).compile()


def count_beside(program: Program) -> dict[str, int]:
    """Count the exchanges of replicas that run beside a kernel of attention, by their phase."""
    counts = dict.fromkeys(PHASES, 0)
    for transfer in program.transfers():
        if transfer.asynchronous and transfer_content(transfer) == "replicas":
            counts[phase_of(transfer)] += any(map(program.is_attention, transfer.between))
    return counts


def judge_attention(measured: Measured) -> Iterator[Finding]:
    """Check the measurements of both programs."""
    queries = 2 * CONFIG.heads * CONFIG.head_width * TOKENS
    yield Finding(
        ATTENTION,
        f"three kernels, and no array as large as the queries, {queries / 1e6:.0f} MB",
        f"{measured.kernels} kernels, {measured.temporary / 1e6:.0f} MB",
        measured.kernels == 3 and measured.temporary < queries,
    )
    yield Finding(ATTENTION, "no exchange", f"{measured.exchanges} exchanges", measured.exchanges == 0)
    for phase in PHASES:
        beside = measured.beside[phase]
        yield Finding(MODEL_NAME, f"{phase} of replicas beside attention", f"{beside} exchanges", beside > 0)
