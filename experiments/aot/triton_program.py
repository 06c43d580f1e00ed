"""Compile one program of Triton kernels for a described GPU.

    python -m experiments.aot.triton_program A100 Qwen3-30B-A3B 2

The arguments are a name in `GPUS`, a name in `MODELS`, and the numbers of slots of the weight buffers other than the
homes. The program computes the grouped product, the grouped MLP and attention, all with gradients, and a product of
float8 operands if the GPU has them, inside `jax.shard_map` as a layer does, at the shape of one rank of eight.
`experiments.aot.triton_kernels` runs it as a separate process, because XLA reports on kernels only in logs and dumps,
which must be enabled before XLA starts.
"""

import functools
import sys
from typing import Final

import jax
from jax.sharding import NamedSharding, PartitionSpec

from experiments.aot.gpus import GPUS, gpu_mesh
from experiments.aot.kernels import ROWS
from pallas_kernels import flash_attention, grouped_dot, grouped_dot_float8, grouped_mlp
from pallas_kernels.hopper.tile_sizes import MODELS, RANKS
from pallas_kernels.products import SCALE_BLOCK

TOKENS: Final = 8192
HEADS: Final = 32
KEY_HEADS: Final = 4
HEAD_WIDTH: Final = 128
"""The sizes of attention, those of Qwen3-30B-A3B."""


FLOAT8_WIDTHS: Final = (2048, 1536)
"""The numbers of columns of the rows and of the product in float8, those of Qwen3-30B-A3B's gate and up."""


def compile_program(gpu: str, model: str, copies: list[int]) -> None:
    """Compile the program for a GPU and a model.

    Args:
        gpu: the GPU's name in `GPUS`.
        model: the model's name in `MODELS`.
        copies: the numbers of slots of the weight buffers other than the homes.
    """
    mesh, shape = gpu_mesh(GPUS[gpu]), MODELS[model]
    slots, rank_spec = [shape.experts // RANKS, *copies], PartitionSpec("rank")

    def array(*sizes: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, rank_spec))

    def weights(*matrices: int) -> list[jax.ShapeDtypeStruct]:
        return [array(count, *matrices, shape.width, shape.expert_width) for count in slots]

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=rank_spec, out_specs=rank_spec)
    def program(rows, dot_weights, mlp_weights, sizes, scale, d_dot, tokens, keys, ranges, float8):
        def mlp(rows, weights, scale):
            return grouped_mlp(rows, weights, sizes, scale, implementation="triton")

        dot = functools.partial(grouped_dot, group_sizes=sizes, implementation="triton")
        product, pull_product = jax.vjp(dot, rows, dot_weights)
        out, pull_out = jax.vjp(mlp, rows, mlp_weights, scale)
        attend = functools.partial(flash_attention, first=ranges, last=ranges, implementation="triton")
        attention, pull_attention = jax.vjp(attend, tokens, keys, keys)
        gradients = pull_product(d_dot), pull_out(rows), pull_attention(attention)
        products = [
            grouped_dot_float8(x, scales, matrices, matrix_scales, sizes, implementation="triton")
            for x, scales, matrices, matrix_scales in float8
        ]
        return product, out, attention, gradients, products

    rows, d_dot = array(ROWS, shape.width), array(ROWS, shape.expert_width)
    scale, sizes = array(ROWS, dtype="float32"), array(sum(slots), dtype="int32")
    tokens, keys = (array(TOKENS, heads, HEAD_WIDTH) for heads in (HEADS, KEY_HEADS))
    ranges = array(TOKENS, dtype="int32")
    width, columns = FLOAT8_WIDTHS
    blocks = [size // SCALE_BLOCK for size in FLOAT8_WIDTHS]
    float8 = (
        array(ROWS, width, dtype="float8_e4m3fn"),
        array(ROWS, blocks[0], dtype="float32"),
        [array(count, columns, width, dtype="float8_e4m3fn") for count in slots],
        [array(count, blocks[1], blocks[0], dtype="float32") for count in slots],
    )
    operands = rows, weights(), weights(3), sizes, scale, d_dot, tokens, keys, ranges
    program.lower(*operands, [float8] if GPUS[gpu].multiplies_float8 else []).compile()


if __name__ == "__main__":
    compile_program(sys.argv[1], sys.argv[2], [int(count) for count in sys.argv[3:]])
