"""A tiny Tunix model and its training runs, with and without balanced layers. This module imports Tunix."""

import dataclasses

import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role

from experiments.examples import tunix_grpo
from relibra_jax import Topology, relibra
from relibra_jax.integrations.tunix.learner import BalancedGRPOLearner
from relibra_jax.integrations.tunix.model import BalancedQwen3
from relibra_jax.integrations.tunix.rollout import RecordingRollout
from relibra_jax.nnx import Balancer, ExpertParallel, expert_mesh
from relibra_jax.nnx.put_on_mesh import put_on_mesh

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=2)


VOCABULARY = 8192
"""The size of the vocabulary, so large that no test samples the padding token. Tunix's learner treats a sampled padding
token as padding, and does not count it in the positions of later tokens; its sampler does."""


ROLLOUT = dataclasses.replace(tunix_grpo.ROLLOUT, eos_tokens=list(range(4000, 4300)))
"""The rollout settings, with so many end-of-sequence tokens that samples have various lengths."""


class Tokenizer(tunix_grpo.Tokenizer):
    """The tokenizer of the example, for a vocabulary larger than its letters."""

    decode = staticmethod(lambda ids, **_: tunix_grpo.Tokenizer.decode([3 + token % 38 for token in ids]))


def balancer_of(
    planner=None, *, micro_batches=2, topology=TOPOLOGY, mesh=None, assign=None, check_rows=False
):
    """Return the balancer for the tiny model."""
    parallel = ExpertParallel(mesh=mesh or expert_mesh(topology), topology=topology, check_rows=check_rows)
    return Balancer(
        planner or relibra(),
        parallel,
        num_layers=tunix_grpo.MODEL.num_layers,
        num_micro_batches=micro_batches,
        key=jax.random.key(0),
        assign=assign,
        cost="balance",
    )


def tunix_model(remat="NONE", **changes):
    """Return Tunix's own model, with scaled router weights, so that the routing is not sensitive to rounding."""
    remat = qwen3.RematConfig[remat]
    changes = {"remat_config": remat, "vocab_size": VOCABULARY} | changes
    model = qwen3.Qwen3(dataclasses.replace(tunix_grpo.MODEL, **changes), rngs=nnx.Rngs(0))
    for layer in model.layers:
        layer.mlp.router.kernel[...] *= 3
        for weights in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            weights[...] *= 15
    return model


def prompts(batches, size=4, start=0):
    """Return a data set of ``batches`` batches with ``size`` prompts each."""
    return [{"prompts": np.array([f"{start + batch}+{i}=" for i in range(size)])} for batch in range(batches)]


def cluster_of(balancer, *, stock=False, steps=3, training=None, **changes):
    """Return a cluster with an actor and its reference model; they are Tunix's own models if ``stock``."""
    models = [tunix_model() for _ in range(2)]
    if stock:
        for model in models:
            put_on_mesh(model, None, balancer.parallel.mesh)
    else:
        models = [BalancedQwen3(model, balancer.live) for model in models]
    sizes = tunix_grpo.SIZES | (training or {})
    config = ClusterConfig(
        **{
            "role_to_mesh": dict.fromkeys(Role, balancer.parallel.mesh),
            "rollout_engine": "vanilla" if stock else RecordingRollout,
            "training_config": RLTrainingConfig(actor_optimizer=optax.adamw(3e-3), max_steps=steps, **sizes),
            "rollout_config": ROLLOUT,
        }
        | changes
    )
    actor, reference = models
    return RLCluster(actor=actor, reference=reference, tokenizer=Tokenizer(), cluster_config=config)


def train(balancer, *, stock=False, data=None, eval_ds=None, algorithm=None, **options):
    """Train, and return the losses of all updates and the cluster."""
    cluster = cluster_of(balancer, stock=stock, **options)
    config = GRPOConfig(**{"num_generations": 8, "beta": 0.1} | (algorithm or {}))
    kinds = {} if stock else {"balancer": balancer}
    learner = (GRPOLearner if stock else BalancedGRPOLearner)(cluster, config, tunix_grpo.reward, **kinds)
    learner.train(data or prompts(3), eval_ds)
    return np.asarray(history(cluster, "actor", "loss")), cluster


def history(cluster, prefix, name):
    return cluster.actor_trainer.metrics_logger.get_metric_history(prefix, name, "train")
