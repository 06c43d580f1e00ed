"""Compile one program of Triton kernels for a GPU that is not here.

    python -m experiments.aot.triton_program A100 Qwen3-30B-A3B 2

The arguments are a name in `GPUS`, one in `MODELS`, and the numbers of slots of the weight buffers beside that of the
homes. The program computes the grouped product and the grouped MLP, both with gradients, inside `jax.shard_map` as a
layer does, at the shape of one rank of eight. This is a process of its own because XLA tells what it made of kernels in
logs and dumps, which must be asked for before it starts: `experiments.aot.triton_kernels` does that.
"""

import functools
import sys

import jax
from jax.sharding import NamedSharding, PartitionSpec

from experiments.aot.gpus import GPUS, gpu_mesh
from experiments.aot.kernels import ROWS
from pallas_kernels import grouped_dot, grouped_mlp
from pallas_kernels.hopper.tile_sizes import MODELS, RANKS


def compile_program(gpu: str, model: str, copies: list[int]) -> None:
    """Compile the program.

    Args:
        gpu: the GPU's name in `GPUS`.
        model: the model's name in `MODELS`.
        copies: the numbers of slots of the weight buffers beside that of the homes.
    """
    mesh, shape = gpu_mesh(GPUS[gpu]), MODELS[model]
    slots, of_rank = [shape.experts // RANKS, *copies], PartitionSpec("rank")

    def array(*sizes: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, of_rank))

    def weights(*matrices: int) -> list[jax.ShapeDtypeStruct]:
        return [array(count, *matrices, shape.width, shape.expert_width) for count in slots]

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=of_rank, out_specs=of_rank)
    def program(rows, of_dot, of_mlp, sizes, scale, d_dot):
        def mlp(rows, weights, scale):
            return grouped_mlp(rows, weights, sizes, scale, implementation="triton")

        dot = functools.partial(grouped_dot, group_sizes=sizes, implementation="triton")
        product, pull_product = jax.vjp(dot, rows, of_dot)
        out, pull_out = jax.vjp(mlp, rows, of_mlp, scale)
        return product, out, pull_product(d_dot), pull_out(rows)

    rows, d_dot = array(ROWS, shape.width), array(ROWS, shape.expert_width)
    scale, sizes = array(ROWS, dtype="float32"), array(sum(slots), dtype="int32")
    program.lower(rows, weights(), weights(3), sizes, scale, d_dot).compile()


if __name__ == "__main__":
    compile_program(sys.argv[1], sys.argv[2], [int(count) for count in sys.argv[3:]])
