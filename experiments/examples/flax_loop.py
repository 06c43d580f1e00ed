"""A plain Flax training loop with balanced experts: ``python -m experiments.examples.flax_loop``.

A transformer with four mixture-of-experts layers learns to predict the next token. Every batch brings the expert ids
that the rollout recorded. `Balancer.prepare` plans the batch, moves the experts to their new homes and sizes the
buffers; the layers then follow the plan. Model, loss, gradients and optimizer are the caller's own.
"""

import os

# Eight host devices stand in for eight GPUs, with two threads each: `experiments.rl.devices.host_devices` says why.
# The other flags let XLA compile for CPUs in a third of the time. Both variables must be set before JAX starts.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)
os.environ.setdefault("NPROC", str(max(16, os.cpu_count() or 1)))

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from flax import nnx

from relibra_jax import Planner, RoutingReplay, Topology, batch_imbalance, rank_load, relibra
from relibra_jax.nnx import (
    GATINGS,
    Balancer,
    ExpertParallel,
    MoELayer,
    accumulate_gradients,
    expert_mesh,
    keep_programs,
)

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=2)
LAYERS, WIDTH, EXPERT_WIDTH, VOCABULARY = 4, 32, 32, 64
SAMPLES, TOKENS, TOP_K, MICRO_BATCHES = 32, 48, 2, 2


class Block(nnx.Module):
    """A transformer block: causal attention, then experts."""

    def __init__(self, rngs: nnx.Rngs):
        gating = dataclasses.replace(GATINGS["qwen3-moe"], top_k=TOP_K)
        self.norm, self.expert_norm = (nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.experts = MoELayer(TOPOLOGY, WIDTH, EXPERT_WIDTH, gating, rngs=rngs)

    def __call__(self, x, expert_ids, layer, parallel, mask):
        """Apply the block to ``x``, with the recorded ``expert_ids`` and the plan of this ``layer``."""
        experts, x = self.experts.fetch(x, layer, parallel)  # fetches replicas while attention computes
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))
        of_layer = {"parallel": parallel, "experts": experts, "mask": mask}
        return x + self.experts(self.expert_norm(x), expert_ids, layer, **of_layer).output


class Model(nnx.Module):
    """The language model: embedding, blocks and output head. The blocks are stacked, so that they compile once."""

    def __init__(self, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.vmap(Block)(rngs.split(LAYERS))
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens, expert_ids, layers, parallel, mask=None):
        """Compute the logits, with the recorded ``expert_ids`` and the plans of all ``layers``, or None for both.

        No expert computes tokens where ``mask`` is False: padding, and places of ranks that hold no sample.
        """

        @nnx.scan(in_axes=(nnx.Carry, 0, 0, 0), out_axes=nnx.Carry)
        def run_blocks(x, block, expert_ids, layer):
            return block(x, expert_ids, layer, parallel, mask)

        routes = None if expert_ids is None else jnp.moveaxis(expert_ids, -2, 0)
        x = run_blocks(self.embedding(tokens), self.blocks, routes, layers)
        return self.head(x)


@nnx.jit
def make_model() -> tuple[Model, nnx.Optimizer]:
    """Make the model and its optimizer in one program."""
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


def rollouts(batches: int) -> Iterator[tuple[np.ndarray, RoutingReplay]]:
    """Yield random batches in place of rollouts: tokens, and the experts that they used.

    The hot experts change from batch to batch, as they do in real runs.
    """
    rng = np.random.default_rng(0)
    for _ in range(batches):
        tokens = (rng.integers(VOCABULARY, size=(SAMPLES, 1)) + 3 * np.arange(TOKENS)) % VOCABULARY
        popularity = 2 * rng.normal(size=(1, 1, LAYERS, TOPOLOGY.num_experts))
        scores = popularity + rng.gumbel(size=(SAMPLES, TOKENS, LAYERS, TOPOLOGY.num_experts))
        expert_ids = np.argsort(-scores)[..., :TOP_K].astype(np.uint8)
        yield tokens, RoutingReplay(expert_ids, np.ones((SAMPLES, TOKENS), bool))


@nnx.jit
def train_step(model, optimizer, batch, sequences):
    """Accumulate gradients over the micro-batches of a prepared batch, then update the model once; return the loss."""

    def objective(model, sequences, layers):
        tokens, replay = sequences
        logits = model(tokens, replay.expert_ids, layers, batch.parallel, replay.mask)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        loss = (losses * replay.mask[:, 1:]).sum() / (SAMPLES * (TOKENS - 1))
        return loss, loss

    gradients, losses = accumulate_gradients(model, objective, batch, sequences)
    optimizer.update(model, gradients)
    return losses.sum()


def main(batches: int = 10, planner: Planner | None = None) -> list[float]:
    """Train for a number of batches, and print the loss and the imbalance of each.

    Args:
        batches: the number of batches.
        planner: the planner. None uses `relibra_jax.relibra`.

    Returns:
        The loss of every batch.
    """
    keep_programs()
    model, optimizer = make_model()
    parallel = ExpertParallel(mesh=expert_mesh(TOPOLOGY), topology=TOPOLOGY)
    balancer = Balancer(
        planner or relibra(),
        parallel,
        num_layers=LAYERS,
        num_micro_batches=MICRO_BATCHES,
        key=jax.random.key(0),
    )
    losses = []
    for tokens, replay in rollouts(batches):
        batch = balancer.prepare(model, optimizer, replay)
        losses.append(float(train_step(model, optimizer, batch, batch.to_ranks((tokens, replay)))))
        imbalance = batch_imbalance(rank_load(batch.batch_plan.plan))
        print(f"batch {len(losses)}: loss {losses[-1]:.4f}, imbalance {imbalance:.3f}")
    return losses


if __name__ == "__main__":
    main()
