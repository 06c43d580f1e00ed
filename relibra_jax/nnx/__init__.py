"""The Flax interface: a mixture-of-experts layer that executes plans, and a balancer that prepares every batch.

    parallel = ExpertParallel(mesh=expert_mesh(topology), topology=topology)
    balancer = Balancer(relibra(), parallel, num_layers=4, num_micro_batches=2, key=key)
    for replay, samples in batches:
        batch = balancer.prepare(model, optimizer, replay)  # plans, moves experts, sizes buffers
        train_step(model, optimizer, batch, batch.to_ranks(samples))

The balancer plans a batch from its routing replay, moves the experts to their new homes, and sizes the buffers. The
layers then follow the plan. The caller keeps its own model, loss, optimizer and training loop.

This package is built on the pure functions of `relibra_jax.execution`, which are public too. That package also lists
the precision of every array.
"""

from relibra_jax.execution.gating import GATINGS, Gating
from relibra_jax.execution.mesh import expert_mesh
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.nnx.balancer import Balancer, BalancerState
from relibra_jax.nnx.batch_sequences import SequencePacking
from relibra_jax.nnx.checks import check_executed
from relibra_jax.nnx.gradients import accumulate_gradients, prepare_residents
from relibra_jax.nnx.homes import expert_labels, get_homes, reorder_experts, set_homes
from relibra_jax.nnx.layer import MoELayer, MoEOutput
from relibra_jax.nnx.logical import from_logical, logical_optimizer_state, logical_params
from relibra_jax.nnx.prepared import PreparedBatch
from relibra_jax.nnx.training_checkpoint import restore_training, save_training
from relibra_jax.nnx.variables import CorrectionBias, ExpertParam, Homes
from relibra_jax.support.programs import keep_programs

__all__ = [
    "GATINGS",
    "Balancer",
    "BalancerState",
    "CorrectionBias",
    "ExpertParallel",
    "ExpertParam",
    "Gating",
    "Homes",
    "MoELayer",
    "MoEOutput",
    "PreparedBatch",
    "SequencePacking",
    "accumulate_gradients",
    "check_executed",
    "expert_labels",
    "expert_mesh",
    "from_logical",
    "get_homes",
    "keep_programs",
    "logical_optimizer_state",
    "logical_params",
    "prepare_residents",
    "reorder_experts",
    "restore_training",
    "save_training",
    "set_homes",
]
