"""The trainer of one seed: it warms up a policy, then generates responses and learns from them in balanced steps.

All random draws follow from the seed and the number of the step. So a run that resumes from a checkpoint draws the same
numbers as one that was never stopped, and on the same mesh it computes the same bits.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]
from flax import nnx

from experiments.rl.balance import measure_batch
from experiments.rl.configs import Train
from experiments.rl.devices import copies_of_group, host_devices
from experiments.rl.evaluation import pass_at_k
from experiments.rl.generation import Responses
from experiments.rl.losses import token_weights
from experiments.rl.metrics import (
    ALGORITHM_METRICS,
    EVALUATE,
    FAILURES,
    LEARN,
    METRICS,
    WARM_UP,
)
from experiments.rl.plan_ahead import PlanAhead
from experiments.rl.processes import is_first, on_every_host
from experiments.rl.prompts import EVALUATION, Prompts, find_run_task, find_tokenizer
from experiments.rl.recording import record_batch
from experiments.rl.rewards import (
    Rewards,
    describe_failures,
    mean_by_task,
    mean_or_none,
    measure_solved,
    share_rewards,
)
from experiments.rl.rollout import Sampler
from experiments.rl.sample_texts import SampleText, choose_texts
from experiments.rl.stages import (
    RecomputeResult,
    Stages,
    add_hidden,
    prepare_live,
    prepare_stages,
    recompute_live,
    recompute_planned,
    recompute_reference,
)
from experiments.rl.state import State
from experiments.rl.step import StepMetrics, TrainingBatch, recompute, update
from experiments.rl.step_clock import StepClock
from experiments.rl.step_metrics import (
    measure_critic,
    measure_memory,
    measure_mismatch,
    measure_phases,
    measure_policy,
    measure_responses,
    measure_rewards,
    measure_speed,
)
from experiments.rl.targets import compute_targets, initialise_critic
from experiments.rl.tasks import Example, Task
from experiments.rl.tokens import Tokenizer
from experiments.rl.updates import check_forward, update_policy, update_values
from relibra_jax.contract.recording import Recording
from relibra_jax.execution.mesh import expert_mesh
from relibra_jax.nnx.modelled_times import add_stages, summarise

SUPERVISED = 0
"""A part of the seeds of examples, for the warm-up; see `experiments.rl.rollout.PROMPTS`."""


class Trainer:
    """The state of a run, and the steps that change it.

    Args:
        config: the settings of the run.
        seed: one of the seeds of the run.
        task: the task. None uses the one that ``config`` names.
        tokenizer: the tokenizer. None uses the one of the model.

    Raises:
        ValueError: if the task is unknown or its prompts cannot be read, the tokenizer has more tokens than the
            policy's vocabulary, or there are fewer devices than ranks.
    """

    def __init__(
        self, config: Train, seed: int, *, task: Task | None = None, tokenizer: Tokenizer | None = None
    ):
        self.config, self.seed = config, seed
        tokenizer = find_tokenizer(config) if tokenizer is None else tokenizer
        if tokenizer.size > config.model_config.vocabulary:
            raise ValueError(
                f"the tokenizer has {tokenizer.size} tokens, but the policy's vocabulary has only"
                f" {config.model_config.vocabulary}"
            )
        self.prompts = Prompts(config, find_run_task(config, tokenizer) if task is None else task, tokenizer)
        copies = copies_of_group(config.data, config.fsdp)
        self.mesh = expert_mesh(config.topology, devices=host_devices(config.num_ranks), **copies)
        self.state = State(config, seed, self.mesh)
        self.sampler = Sampler(config, seed, self.state, self.prompts)
        self.responses: Responses | None = None
        """The last responses, with the routing that was replayed. None before the first."""
        self.recording = Recording()
        """What was recorded of the last responses beside their routing. Empty before the first."""
        self.texts: list[SampleText] = []
        """Some samples of the last learning step as text, on the first process."""
        self.summary: str | None = None
        """The modelled time of the last batch, in a few lines. None before the first, and without a price."""

    @property
    def total_steps(self) -> int:
        """The number of steps in warm-up and learning together."""
        return self.config.warmup_steps + self.config.steps

    def close(self) -> None:
        """End what runs beside the run, and free what the engine holds outside of this process."""
        self.sampler.close()

    def restore(self, manager: ocp.CheckpointManager, *, verify: bool = True) -> None:
        """Restore the latest checkpoint.

        Args:
            manager: the Orbax manager of the checkpoint directory.
            verify: whether to compare every array with the digest that was saved with it.

        Raises:
            ValueError: under the conditions of `State.restore` and `experiments.rl.rollout.Sampler.next_rows`.
        """
        self.state.restore(manager, verify=verify)
        if self.state.carried is not None:
            self.sampler.next_rows(self.state.carried)

    def warm_up(self) -> dict[str, Any]:
        """Make one supervised update on prompts with correct answers, and return its metrics.

        An update that is not finite is repeated with other prompts, so that the warm-up has all its updates: the
        learning rate after it counts them.
        """
        config, state, clock = self.config, self.state, StepClock()
        with clock("update"):
            for skipped in range(config.adamw.skipped_in_a_row + 1):
                part = [skipped] if skipped else []
                examples = self.prompts.draw((self.seed, SUPERVISED, state.step, *part), config.samples)
                metrics, num_tokens = self._supervise(examples)
                if not metrics.skipped:
                    break
            else:
                raise self._diverged(metrics)
        state.step += 1
        return {
            "kind": WARM_UP,
            "warmup/loss": float(metrics.policy.loss),
            "policy/skipped": skipped,
            **measure_speed(num_tokens, clock),
        }

    def _supervise(self, examples: list[Example]) -> tuple[StepMetrics, int]:
        """Make a supervised update on examples; return its metrics and the number of tokens."""
        config, state = self.config, self.state
        tokens, mask, answer_mask = self.prompts.supervise(examples)
        weights = token_weights(answer_mask)
        batch, samples = prepare_live(state, config, TrainingBatch(tokens, mask, weights=weights))
        # The load of live routing is known only after a run, so a recompute counts it.
        batch_load = recompute(state.on_devices(), batch, samples, temperature=1.0).load.sum((0, 2, 3))
        metrics = update(
            state.agent,
            state.optimizer,
            batch,
            samples,
            batch_load,
            balance=config.balance,
            largest_gradient=config.adamw.largest_gradient,
        )
        metrics = on_every_host(metrics, self.mesh)
        check_forward(state.step, int(metrics.tokens_not_finite))
        return metrics, int(mask.sum())

    def learn(self) -> dict[str, Any]:
        """Sample responses to one batch of prompts, learn from them, and return the metrics of the step."""
        config, state, clock = self.config, self.state, StepClock()
        # Scoring runs in Python and the search in compiled code, so they overlap with devices and with each other.
        with ThreadPoolExecutor(2) as executor:
            plan_ahead = PlanAhead(state, config, executor, clock)
            rollout = self.sampler.roll_out(executor, plan_ahead.watch, clock)
            stages, recomputed = self._plan_and_recompute(rollout.responses, plan_ahead, clock)
            with clock("score_wait"):
                rewards = rollout.rewards()
        with clock("update"):
            recomputed = initialise_critic(state, config, rollout, rewards, recomputed)
            targets, not_finite = compute_targets(config, rollout, rewards, recomputed)
            metrics = update_policy(state, config, stages, targets, recomputed)
            critic_loss = update_values(state, config, stages, targets, recomputed)
            self._count_skipped(metrics, critic_loss)
        # DAPO chooses among samples of several rollouts, so they do not lie in waves any more.
        at_once = config.samples if config.algorithm_entry.dynamic_sampling else config.samples_at_once
        if is_first():
            self.texts = choose_texts(rollout.responses, rewards, self.prompts.tokenizer)
        num_tokens = int(rollout.responses.mask.sum())
        speed = measure_speed(num_tokens, clock)
        self.recording = record_batch(rollout, rewards, step=state.step)
        state.step += 1
        state.carried = rollout.carried
        return {
            "kind": LEARN,
            **dict.fromkeys(ALGORITHM_METRICS),
            **measure_rewards(rewards, self.prompts.task, rollout.examples),
            **self._measure_solved(rewards),
            **measure_responses(rollout, at_once),
            **rollout.metrics,
            **measure_mismatch(rollout, recomputed, config.correction),
            **measure_policy(metrics),
            **measure_critic(targets, rollout, recomputed, critic_loss, not_finite),
            **measure_batch(
                [stage.batch for stage in stages.updates], metrics, num_tokens, live=not config.replay
            ),
            **self._model_times(stages),
            "balance/imbalance_recompute": recomputed.imbalance,
            "batch/fill": num_tokens / sum(stage.samples.mask.size for stage in stages.updates),
            "batch/tokens_run": rollout.tokens_run + (config.recomputes + config.epochs) * num_tokens,
            **speed,
            **measure_memory(),
            **measure_phases(clock, plan_ahead.wait()),
            # With staleness, the phase is only the wait for responses.
            "speed/response_tokens_per_second": None
            if config.staleness
            else float(rollout.new_mask.sum() / clock.phases["generate"]),
            "speed/update_tokens_per_second": config.epochs * num_tokens / clock.phases["update"],
        }

    def evaluate(self) -> dict[str, Any]:
        """Score responses to the evaluation prompts, the same at every call and for every seed. Nothing is learned."""
        config, rewards = self.config, list[Rewards]()
        all_examples: list[Example] = []
        self.sampler.sync()
        for number in range(config.evaluation_batches):
            examples = self.prompts.evaluation_groups(number)
            all_examples += examples
            key = jax.random.fold_in(jax.random.fold_in(self.state.key, EVALUATION), number)
            generation = self.sampler.respond(examples, key, evaluation=True)
            scored = self.sampler.score(
                *(examples, generation.responses, StepClock(), ~generation.dropped, generation.failures)
            )
            rewards.append(share_rewards(scored))
        reward, is_scored = (
            np.concatenate([getattr(part, name) for part in rewards]) for name in ("reward", "scored")
        )
        failures = [failure for part in rewards for failure in part.failures]
        shape = (-1, config.evaluation_samples)
        correct = (reward >= config.evaluation.correct).reshape(shape)
        return {
            "kind": EVALUATE,
            "evaluation/reward": mean_or_none(reward[is_scored]),
            "evaluation/reward_by_task": mean_by_task(self.prompts.task, all_examples, reward, is_scored),
            "evaluation/pass_at_k": pass_at_k(correct, is_scored.reshape(shape), config.evaluation.pass_at),
            "evaluation/samples": int(is_scored.sum()),
            "evaluation/failed": len(failures),
            FAILURES: describe_failures(failures),
        }

    def _plan_and_recompute(
        self, responses: Responses, plan_ahead: PlanAhead, clock: StepClock
    ) -> tuple[Stages, RecomputeResult]:
        """Plan the batch and recompute its log-probabilities. A recompute that routes live comes first."""
        config, state, hidden = self.config, self.state, None
        if config.reference.kind != "none":
            state.keep_reference()
        if config.recomputes_live:
            with clock("recompute"):
                routed, recomputed, hidden = recompute_live(state, config, responses)
            # Without replay, the rollout's routing remains the record with which metrics compare.
            responses = routed if config.replay else responses
        with clock("plan"):
            plan_ahead.wait()
        stages = self.prepare(responses, clock)
        if config.recomputes_live:
            recomputed = add_hidden(recomputed, stages, hidden, responses)
        else:
            with clock("recompute"):
                float8 = config.float8_rollout if config.float8_recompute else None
                recomputed = recompute_planned(state, config, stages, float8=float8)
        passes = [recomputed.old_log_probs]
        if config.reference.kind != "none":
            with clock("recompute"):
                log_probs = recompute_reference(state, config, stages)
            recomputed = recomputed._replace(reference_log_probs=log_probs)
            passes.append(log_probs)
        not_finite = sum(int((~np.isfinite(each[responses.response_mask])).sum()) for each in passes)
        check_forward(state.step, not_finite)
        return stages, recomputed

    def prepare(self, responses: Responses, clock: StepClock) -> Stages:
        """Plan the routing of responses, and move experts to their homes and samples to their ranks.

        The clock gets the phases ``plan``, ``size`` and ``migrate``.
        """
        state, total = self.state, StepClock()
        with total("prepare"):
            stages = prepare_stages(state, self.config, responses)
            jax.block_until_ready(([stage.samples for stage in stages.updates], nnx.state(state.agent)))
        batch = stages.updates[0].batch
        clock.add("plan", batch.plan_seconds)
        clock.add("size", batch.size_seconds)
        clock.add("migrate", total.phases["prepare"] - batch.plan_seconds - batch.size_seconds)
        self.responses = responses
        return stages

    def _model_times(self, stages: Stages) -> dict[str, float | None]:
        """Model the time of a batch for its line of metrics, and describe it in `summary`."""
        parts = [part for batch in stages.batches if (part := batch.modelled_times) is not None]
        if not parts:
            return {name: None for name in METRICS if name.startswith("time/modelled_")}
        times = add_stages(parts)
        self.summary = summarise(times, stages.updates[0].batch.plan_seconds)
        seconds = {name: time.total for name, time in zip(times._fields, times, strict=True)}
        seconds |= {f"plan_{name}": part for name, part in times.plan.parts().items()}
        return {f"time/modelled_{name}_seconds": float(value) for name, value in seconds.items()}

    def _measure_solved(self, rewards: Rewards) -> dict[str, float | None]:
        """Measure which prompts are solved. With windows, rows of responses that are not compared mix prompts."""
        config = self.config
        if config.window is not None and config.compared == 1:
            return dict.fromkeys(("reward/solved_by_all", "reward/solved_by_none"))
        return measure_solved(rewards, config.responses_per_prompt, config.evaluation.correct)

    def _count_skipped(self, metrics: StepMetrics, critic_loss: float | None) -> None:
        """Count the steps in a row in which the policy or the critic did not change. Raise ValueError at too many."""
        config, state = self.config, self.state
        unchanged = int(metrics.skipped) == int(metrics.updates)
        if unchanged:
            # The balancer would otherwise wait for a step of the optimizer.
            state.balancer.discard()
        if not unchanged and (critic_loss is None or np.isfinite(critic_loss)):
            state.skipped = 0
            return
        if state.skipped == config.adamw.skipped_in_a_row:
            raise self._diverged(metrics, critic_loss)
        state.skipped += 1

    def _diverged(self, metrics: StepMetrics, critic_loss: float | None = None) -> ValueError:
        """Return the error of a step after too many that were skipped. It names what is not finite."""
        values = {
            "the policy's loss": float(metrics.policy.loss),
            "the norm of the gradient": float(metrics.gradient_norm),
            "the critic's loss or gradient": 0.0 if critic_loss is None else critic_loss,
        }
        problems = [f"{name} is {value}" for name, value in values.items() if not np.isfinite(value)]
        return ValueError(
            f"step {self.state.step}: {', '.join(problems)}, after adamw.skipped_in_a_row="
            f"{self.config.adamw.skipped_in_a_row} batches that were skipped for it: the training diverged; nothing of"
            " this step is saved, and a resumed run needs other settings, such as a lower learning_rate"
        )
