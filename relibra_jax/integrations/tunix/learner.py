"""Tunix's GRPO learner with every update planned from its rollout, before its first micro-batch.

What Tunix decides stays as it is: which samples are in which micro-batch and on which rank. What is planned are the
experts' homes and replicas.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from tunix.rl import rl_cluster as rl_cluster_lib
from tunix.rl.grpo import grpo_learner

from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.prepared_layer import PreparedLayer
from relibra_jax.integrations.tunix.model import BalancedQwen3
from relibra_jax.integrations.tunix.rollout import RecordingRollout
from relibra_jax.integrations.tunix.routes import replay_of_rows
from relibra_jax.integrations.tunix.rows import FIRST_OVER_RANKS, ranks_first
from relibra_jax.integrations.tunix.settings import batch_sizes, check_sizes
from relibra_jax.nnx import Balancer, PreparedBatch, get_homes
from relibra_jax.plan import rank_load
from relibra_jax.planning.metrics import batch_imbalance


class BalancedExample(NamedTuple):
    """Tunix's training example and what the layers follow in it. Tunix hands it through to the loss as it is."""

    example: Any
    """Tunix's ``TrainExample``, a micro-batch."""
    layers: PreparedLayer | None = None
    """The prepared layers of this micro-batch, ranks first; None for live routing, in evaluations."""
    parallel: ExpertParallel | None = None
    """How the layers are run: static under jit."""


class BalancedGRPOLearner(grpo_learner.GRPOLearner):
    """Tunix's ``GRPOLearner``, balanced.

    Args:
        rl_cluster: Tunix's cluster with a `BalancedQwen3` as actor and `RecordingRollout` as rollout engine.
        algo_config: Tunix's ``GRPOConfig``.
        reward_fns: Tunix's reward functions.
        balancer: what plans the updates, with ``num_micro_batches`` as Tunix accumulates them, and ``assign=None``.
        options: Tunix's further arguments.

    Raises:
        ValueError: if the cluster is set up in a way that cannot be planned, in one line with the setting.
    """

    def __init__(
        self, rl_cluster: Any, algo_config: Any, reward_fns: Any, *, balancer: Balancer, **options: Any
    ):
        check_cluster(rl_cluster, balancer)
        super().__init__(rl_cluster, algo_config, reward_fns, **options)
        self.balancer = balancer
        trainer = rl_cluster.actor_trainer
        trainer.with_loss_fn(following(trainer.loss_fn), has_aux=True)

    def train(self, train_ds: Iterable[Any], eval_ds: Iterable[Any] | None = None, skip_jit: bool = False):
        """Tunix's training loop.

        Raises:
            ValueError: if Tunix's batch sizes would make two plans before one update, or do not divide over the
                ranks, in one line with the settings and their numbers.
        """
        batches = iter(train_ds)
        first = next(batches)
        sizes = batch_sizes(self.rl_cluster.cluster_config.training_config, len(first["prompts"]))
        check_sizes(
            sizes,
            num_generations=self.algo_config.num_generations,
            num_ranks=self.balancer.topology.num_ranks,
            num_micro_batches=self.balancer.num_micro_batches,
            scores_policies=self.algo_config.beta != 0 or self.algo_config.num_iterations > 1,
        )
        super().train(itertools.chain([first], batches), eval_ds, skip_jit)

    def _process_accumulated_batches(
        self, micro_batches: list[Any], micro_batch_sizes: list[int], mode: Any
    ) -> list[BalancedExample]:
        examples = super()._process_accumulated_batches(micro_batches, micro_batch_sizes, mode)
        if not examples:
            return []
        routes = self.rl_cluster.rollout.take_routes()
        if mode != rl_cluster_lib.Mode.TRAIN:
            return [BalancedExample(example) for example in examples]
        masks = [
            np.concatenate([np.asarray(example.prompt_mask), np.asarray(example.completion_mask)], axis=1)
            for example in examples
        ]
        trainer = self.rl_cluster.actor_trainer
        replay = replay_of_rows(
            routes, np.concatenate(masks).astype(bool), num_experts=self.balancer.topology.num_experts
        )
        before = get_homes(trainer.model)
        batch = self.balancer.prepare(trainer.model, trainer.optimizer, replay)
        self._report(batch, int((get_homes(trainer.model) != before).sum()), mode)
        return [self._balanced(example, batch, index) for index, example in enumerate(examples)]

    def _balanced(self, example: Any, batch: PreparedBatch, micro_batch: int) -> BalancedExample:
        mesh, layers = self.balancer.mesh, batch.micro_batch(micro_batch)
        assert layers is not None
        balanced = BalancedExample(example, ranks_first(layers, mesh), batch.parallel)
        # Tunix places an example whose arrays are not all there yet, by way of the host.
        return jax.device_put(balanced, jax.NamedSharding(mesh, FIRST_OVER_RANKS))

    def _report(self, batch: PreparedBatch, moved: int, mode: Any) -> None:
        found = {
            "imbalance": float(batch_imbalance(rank_load(batch.batch_plan.plan))),
            "experts_moved": moved,
            "plan_seconds": batch.plan_seconds,
        }
        metrics = {f"balance/{name}": (value, np.mean) for name, value in found.items()}
        self.rl_cluster.buffer_metrics(metrics, mode=mode)


def following(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Tunix's loss of one training example, under the plan that comes with the example.

    Args:
        loss_fn: ``(model, train_example, algo_config)``.

    Returns:
        The same, whose model follows the example's layers if it has any.
    """

    def follow(model: BalancedQwen3, train_example: BalancedExample, algo_config: Any) -> Any:
        example, layers, parallel = train_example
        if layers is not None and parallel is not None:
            model = nnx.merge(*nnx.split(model))  # the trained model's own graph stays as it is
            model.follow(layers, parallel)
        return loss_fn(model, example, algo_config)

    return follow


def check_cluster(cluster: Any, balancer: Balancer) -> None:
    """Raise unless the cluster is one that a balancer can plan for.

    Args:
        cluster: Tunix's ``RLCluster``.
        balancer: what is to plan its updates.

    Raises:
        ValueError: if not, in one line that names the setting.
    """
    config, roles = cluster.cluster_config, rl_cluster_lib.Role
    training = config.training_config
    if not isinstance(cluster.rollout, RecordingRollout):
        raise ValueError(
            f"rollout_engine={config.rollout_engine!r} records no routing: give ClusterConfig"
            " rollout_engine=RecordingRollout"
        )
    model = cluster.actor_trainer.model
    if not isinstance(model, BalancedQwen3):
        raise ValueError(f"the actor is a {type(model).__name__}, not a BalancedQwen3")
    if model.layers[0].mlp.parallel != balancer.live:
        raise ValueError(
            "the actor's live routing is not the balancer's: make it with BalancedQwen3(model, balancer.live)"
        )
    for role in (roles.ACTOR, roles.ROLLOUT):
        if config.role_to_mesh[role] != balancer.mesh:
            raise ValueError(
                f"role_to_mesh[{role.name}] must be the balancer's mesh: actor and rollout share one model, whose"
                " experts move"
            )
    if balancer.assign is not None:
        raise ValueError("assign must be None: Tunix decides which samples a micro-batch and a rank have")
    if balancer.topology.resident_slots:
        raise ValueError(
            f"resident_slots={balancer.topology.resident_slots} must be 0: Tunix's update does not push residents"
        )
    expected = tuple(FIRST_OVER_RANKS)
    if tuple(training.data_sharding_axis) != expected:
        raise ValueError(f"data_sharding_axis={training.data_sharding_axis} must be {expected}")
    if training.max_seq_token_per_tpu is not None:
        raise ValueError(
            f"max_seq_token_per_tpu={training.max_seq_token_per_tpu} packs rows anew after they were planned: leave it"
            " None"
        )
    if config.offload_to_cpu:
        raise ValueError("offload_to_cpu=True: experts could not move where they are, set it to False")
    if jax.process_count() > 1:
        raise ValueError(f"{jax.process_count()} processes: routing is recorded on one")
