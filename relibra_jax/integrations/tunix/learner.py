"""Tunix's GRPO learner, with a plan for every update that is made from the rollout before its first micro-batch.

The plan chooses the homes and replicas of experts. As before, Tunix decides which samples are in which micro-batch and
on which rank.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from tunix.rl import rl_cluster as rl_cluster_lib
from tunix.rl.grpo import grpo_learner

from relibra_jax.contract.plan import rank_load
from relibra_jax.execution.parallel import ExpertParallel
from relibra_jax.execution.prepared_layer import PreparedLayer
from relibra_jax.integrations.tunix.model import BalancedQwen3
from relibra_jax.integrations.tunix.rollout import RecordingRollout
from relibra_jax.integrations.tunix.routes import replay_of_sequences
from relibra_jax.integrations.tunix.rows import FIRST_OVER_RANKS, ranks_first
from relibra_jax.integrations.tunix.settings import batch_sizes, check_sizes
from relibra_jax.nnx import Balancer, PreparedBatch, get_homes
from relibra_jax.planning.metrics import batch_imbalance


class BalancedExample(NamedTuple):
    """Tunix's training example together with the prepared layers for it. Tunix passes it to the loss unchanged."""

    example: Any
    """Tunix's ``TrainExample``, which is one micro-batch."""
    layers: PreparedLayer | None = None
    """The prepared layers of this micro-batch, with ranks as the first axis. None in evaluations, with live routing."""
    parallel: ExpertParallel | None = None
    """The mesh, topology, buffer sizes and exchange of the prepared batch; static under jit."""


class BalancedGRPOLearner(grpo_learner.GRPOLearner):
    """Tunix's ``GRPOLearner`` with balanced expert layers.

    Args:
        rl_cluster: Tunix's cluster, with a `BalancedQwen3` as actor and `RecordingRollout` as rollout engine.
        algo_config: Tunix's ``GRPOConfig``.
        reward_fns: Tunix's reward functions.
        balancer: the balancer that plans the updates. Its ``num_micro_batches`` must be the number of micro-batches
            that Tunix accumulates in an update, and ``assign`` must be None.
        options: additional arguments of Tunix's learner.

    Raises:
        ValueError: if the cluster has a setting with which updates cannot be planned. The message names the setting.
    """

    def __init__(
        self, rl_cluster: Any, algo_config: Any, reward_fns: Any, *, balancer: Balancer, **options: Any
    ):
        check_cluster(rl_cluster, balancer)
        super().__init__(rl_cluster, algo_config, reward_fns, **options)
        self.balancer = balancer
        trainer = rl_cluster.actor_trainer
        trainer.with_loss_fn(with_plan(trainer.loss_fn), has_aux=True)

    def train(self, train_ds: Iterable[Any], eval_ds: Iterable[Any] | None = None, skip_jit: bool = False):
        """Check Tunix's batch sizes, and run Tunix's training loop.

        Args:
            train_ds: the training batches.
            eval_ds: the evaluation batches, if any.
            skip_jit: whether Tunix runs its steps without compiling them.

        Raises:
            ValueError: if one update would need several plans, if the number of micro-batches differs from the
                balancer's, or if samples do not divide evenly over the ranks. The message gives the settings.
        """
        batches = iter(train_ds)
        first_batch = next(batches)
        sizes = batch_sizes(self.rl_cluster.cluster_config.training_config, len(first_batch["prompts"]))
        check_sizes(
            sizes,
            num_generations=self.algo_config.num_generations,
            num_ranks=self.balancer.parallel.topology.num_ranks,
            num_micro_batches=self.balancer.num_micro_batches,
            scores_policies=self.algo_config.beta != 0 or self.algo_config.num_iterations > 1,
        )
        super().train(itertools.chain([first_batch], batches), eval_ds, skip_jit)

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
        replay = replay_of_sequences(
            routes,
            np.concatenate(masks).astype(bool),
            num_experts=self.balancer.parallel.topology.num_experts,
        )
        old_homes = get_homes(trainer.model)
        batch = self.balancer.prepare(trainer.model, trainer.optimizer, replay)
        self._report(batch, int((get_homes(trainer.model) != old_homes).sum()), mode)
        return [self._balanced(example, batch, index) for index, example in enumerate(examples)]

    def _balanced(self, example: Any, batch: PreparedBatch, micro_batch: int) -> BalancedExample:
        mesh, layers = self.balancer.parallel.mesh, batch.micro_batch(micro_batch)
        assert layers is not None
        balanced = BalancedExample(example, ranks_first(layers, mesh), batch.parallel)
        # If an example's arrays were not yet placed with this sharding, Tunix would move them through the host.
        return jax.device_put(balanced, jax.NamedSharding(mesh, FIRST_OVER_RANKS))

    def _report(self, batch: PreparedBatch, experts_moved: int, mode: Any) -> None:
        values = {
            "imbalance": float(batch_imbalance(rank_load(batch.batch_plan.plan))),
            "experts_moved": experts_moved,
            "plan_seconds": batch.plan_seconds,
        }
        metrics = {f"balance/{name}": (value, np.mean) for name, value in values.items()}
        self.rl_cluster.buffer_metrics(metrics, mode=mode)


def with_plan(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss function for `BalancedExample` whose model follows the plan in the example.

    Args:
        loss_fn: Tunix's loss function ``(model, train_example, algo_config)``.

    Returns:
        A function with the same arguments. Without prepared layers in the example, the model uses live routing.
    """

    def follow(model: BalancedQwen3, train_example: BalancedExample, algo_config: Any) -> Any:
        example, layers, parallel = train_example
        if layers is not None and parallel is not None:
            model = nnx.merge(
                *nnx.split(model)
            )  # a copy, so that the graph of the trained model does not change
            model.follow(layers, parallel)
        return loss_fn(model, example, algo_config)

    return follow


def check_cluster(cluster: Any, balancer: Balancer) -> None:
    """Check that a balancer can plan the updates of a Tunix cluster.

    Args:
        cluster: Tunix's ``RLCluster``.
        balancer: the balancer that plans the updates.

    Raises:
        ValueError: if a setting of the cluster or of the balancer does not allow it. The message names the setting.
    """
    config, roles = cluster.cluster_config, rl_cluster_lib.Role
    training = config.training_config
    if not isinstance(cluster.rollout, RecordingRollout):
        raise ValueError(
            f"rollout_engine={config.rollout_engine!r} does not record the routing: set"
            " rollout_engine=RecordingRollout in ClusterConfig"
        )
    model = cluster.actor_trainer.model
    if not isinstance(model, BalancedQwen3):
        raise ValueError(f"the actor is a {type(model).__name__}, not a BalancedQwen3")
    if model.layers[0].mlp.parallel != balancer.live:
        raise ValueError(
            "the actor was made with another balancer's live: make it with BalancedQwen3(model, balancer.live)"
        )
    for role in (roles.ACTOR, roles.ROLLOUT):
        if config.role_to_mesh[role] != balancer.parallel.mesh:
            raise ValueError(
                f"role_to_mesh[{role.name}] must be the balancer's mesh: actor and rollout share one model, and the"
                " balancer moves its experts"
            )
    if balancer.assign is not None:
        raise ValueError("assign must be None: Tunix decides which samples a micro-batch and a rank have")
    if slots := balancer.parallel.topology.resident_slots:
        raise ValueError(f"resident_slots={slots} must be 0: Tunix's update does not push residents")
    expected = tuple(FIRST_OVER_RANKS)
    if tuple(training.data_sharding_axis) != expected:
        raise ValueError(f"data_sharding_axis={training.data_sharding_axis} must be {expected}")
    if training.max_seq_token_per_tpu is not None:
        raise ValueError(
            f"max_seq_token_per_tpu={training.max_seq_token_per_tpu} must be None: with it, Tunix packs the"
            " sequences again after they have been planned"
        )
    if config.offload_to_cpu:
        raise ValueError(
            "offload_to_cpu=True must be False: the balancer cannot move experts that are offloaded"
        )
    if jax.process_count() > 1:
        raise ValueError(
            f"jax.process_count()={jax.process_count()} must be 1: the rollout records routing in one process"
        )
