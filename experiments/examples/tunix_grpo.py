"""Tunix's GRPO with balanced experts on 8 host devices: ``python -m experiments.examples.tunix_grpo PLANNER``.

PLANNER is a name of `relibra_jax.PLANNERS`: ``relibra``, or ``static`` for the same training without balancing. The
script trains a tiny random model for three steps, and prints loss and imbalance of every step.
"""

import os
import sys

# Eight host devices stand in for eight GPUs, with two threads each: `experiments.rl.devices.host_devices` says why.
# Both variables must be set before JAX starts.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("NPROC", str(max(16, os.cpu_count() or 1)))

import jax
import optax  # type: ignore[import-untyped]
from flax import nnx
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from relibra_jax import PLANNERS, Topology
from relibra_jax.integrations.tunix.learner import BalancedGRPOLearner
from relibra_jax.integrations.tunix.model import BalancedQwen3, rank_shardings
from relibra_jax.integrations.tunix.rollout import RecordingRollout
from relibra_jax.nnx import Balancer, ExpertParallel, expert_mesh

LETTERS = "0123456789+=abcdefghijklmnopqrstuvwxyz"
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "shd_config": rank_shardings()}
MODEL = ModelConfig(2, 41, 32, 24, 4, 8, 2, 1_000_000, 1e-6, **EXPERTS)
SIZES = {"mini_batch_size": 4, "train_micro_batch_size": 2, "data_sharding_axis": (("node", "local"),)}
# Tunix generates and scores all samples of an update at once, so the balancer plans the update once.
SIZES |= {"rollout_micro_batch_size": 4, "compute_logps_micro_batch_size": 4, "eval_every_n_steps": 100}
ROLLOUT = RolloutConfig(max_tokens_to_generate=24, max_prompt_length=8, kv_cache_size=32, temperature=1.0)


class Tokenizer:
    """A tokenizer of one token for each letter, with the methods that Tunix calls."""

    bos_id, eos_id, pad_id = (lambda self, token=token: token for token in (1, 2, 0))
    encode = staticmethod(lambda text, **_: [LETTERS.index(letter) + 3 for letter in text])
    decode = staticmethod(lambda ids, **_: "".join(LETTERS[token - 3] for token in ids if token >= 3))


def reward(prompts, completions, **_):
    """Return a reward for every completion: a tenth of the number of its letters from a to h."""
    return [sum(letter in "abcdefgh" for letter in text) / 10 for text in completions]


def main(name: str, steps: int = 3) -> None:
    """Train for a number of steps under the named planner, and print loss and imbalance of every step."""
    topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=2)
    options = {"num_layers": MODEL.num_layers, "num_micro_batches": 2, "key": jax.random.key(0)}
    parallel = ExpertParallel(mesh=expert_mesh(topology), topology=topology)
    balancer = Balancer(PLANNERS[name].planner, parallel, assign=None, **options)
    actor, reference = (BalancedQwen3(Qwen3(MODEL, rngs=nnx.Rngs(0)), balancer.live) for _ in range(2))
    training = RLTrainingConfig(actor_optimizer=optax.adamw(3e-3), max_steps=steps, **SIZES)
    roles = {"role_to_mesh": dict.fromkeys(Role, parallel.mesh), "rollout_engine": RecordingRollout}
    config = ClusterConfig(**roles, training_config=training, rollout_config=ROLLOUT)
    cluster = RLCluster(actor=actor, reference=reference, tokenizer=Tokenizer(), cluster_config=config)
    learner = BalancedGRPOLearner(cluster, GRPOConfig(num_generations=8, beta=0.1), reward, balancer=balancer)
    learner.train({"prompts": [f"{step}+{number}=" for number in range(4)]} for step in range(steps))
    history = cluster.actor_trainer.metrics_logger.get_metric_history
    for metric in (("actor", "loss"), ("balance", "imbalance")):
        print(name, metric[1], *(f"{value:.8f}" for value in history(*metric, "train")))


if __name__ == "__main__":
    main(sys.argv[1])
