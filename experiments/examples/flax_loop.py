"""A plain Flax training loop with `MoELayer` and a plan: ``python -m experiments.examples.flax_loop``.

One mixture-of-experts layer learns a function of its input. Every batch comes with its routing, as rollouts do, so
it is planned before it runs: experts move home, buffers are counted, replicas do the rest.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")


import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from flax import nnx

from relibra_jax import (
    RoutingReplay,
    Topology,
    assign_in_order,
    batch_imbalance,
    expert_load,
    rank_load,
    relibra,
)
from relibra_jax.execution import ExpertParallel, capacities, expert_mesh, grow_capacities, rank_sharding
from relibra_jax.execution.gating import GATINGS
from relibra_jax.nnx.layer import MoELayer, reorder_experts
from relibra_jax.plan import layer_plan

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=4, num_experts=32, replica_slots=2)
SAMPLES, TOKENS, WIDTH, TOP_K = 16, 64, 16, 4
BY_RANK = (TOPOLOGY.num_nodes, TOPOLOGY.ranks_per_node, -1)


@nnx.jit(static_argnames="parallel")
def train_step(layer, optimizer, x, target, expert_ids, plan, load, *, parallel):
    def loss(layer):
        output = layer(x, expert_ids, plan, load, parallel=parallel).output
        return jnp.square(output - target).mean()

    value, gradients = nnx.value_and_grad(loss)(layer)
    optimizer.update(layer, gradients)
    return value


def main(steps: int = 10) -> list[float]:
    """Train for so many batches; the losses."""
    mesh, rng = expert_mesh(TOPOLOGY), np.random.default_rng(0)
    sizes, losses = None, []
    layer = MoELayer(TOPOLOGY, WIDTH, 32, GATINGS["gpt-oss"], sharding=rank_sharding(mesh), rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(layer, optax.adamw(1e-2), wrt=nnx.Param)
    planner = relibra()
    state = planner.init(TOPOLOGY, 1, key=jax.random.key(0))
    make_plan = jax.jit(planner.update)
    for step in range(steps):
        # What a rollout would bring: tokens and the experts that they used, some of them hot.
        x = rng.normal(size=(SAMPLES, TOKENS, WIDTH)).astype(np.float32)
        scores = 2 * rng.normal(size=(1, 1, 1, 32)) + rng.gumbel(size=(SAMPLES, TOKENS, 1, 32))
        replay = RoutingReplay(
            np.argsort(-scores)[..., :TOP_K].astype(np.uint8), np.ones((SAMPLES, TOKENS), bool)
        )

        # Plan: one micro-batch, one layer.
        where = assign_in_order(SAMPLES, TOPOLOGY, num_micro_batches=1)
        load = expert_load(replay, where, num_experts=32)
        plan, state = make_plan(load, state, TOPOLOGY)

        # Between batches: experts and their optimizer state go home, buffers are counted.
        reorder_experts(layer, optimizer, plan.home, mesh=mesh, topology=TOPOLOGY)
        sizes = grow_capacities(sizes, count_capacities(plan, load, TOPOLOGY), round_up=lambda size: size * 5 // 4)
        parallel = ExpertParallel(mesh=mesh, topology=TOPOLOGY, capacities=sizes)

        x = x.reshape(*BY_RANK, WIDTH)
        ids = replay.expert_ids.reshape(*BY_RANK, TOP_K)
        following = layer_plan(plan, 0, 0), load[0, 0]
        losses.append(float(train_step(layer, optimizer, x, np.tanh(x), ids, *following, parallel=parallel)))
        print(f"step {step}: loss {losses[-1]:.4f}, imbalance {batch_imbalance(rank_load(plan)):.3f}")
    return losses


if __name__ == "__main__":
    main()
