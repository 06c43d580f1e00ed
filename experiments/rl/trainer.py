"""One run: a policy that is warmed up, generates responses, and learns from them in balanced steps.

What is drawn follows from the seed and the number of the step, so a run that goes on from a checkpoint draws what it
would have drawn, and on the same mesh computes the same bits.
"""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import jax
import numpy as np
from flax import nnx

from experiments.rl.checkpoint_tokenizer import load_tokenizer
from experiments.rl.configs import Train
from experiments.rl.devices import host_devices
from experiments.rl.generation import Responses, generate
from experiments.rl.imbalance import measure_imbalance, measure_push
from experiments.rl.losses import relative_advantages, token_weights
from experiments.rl.processes import check_same, from_first, is_first, on_every_host
from experiments.rl.rewards import Rewards, score_responses, unscored
from experiments.rl.state import State
from experiments.rl.step import StepMetrics, TrainingBatch, prepare_residents, recompute, update
from experiments.rl.step_clock import StepClock
from experiments.rl.tasks import Example, Task, find_task
from experiments.rl.tokens import BYTES, Tokenizer
from relibra_jax.execution import Residents, check_residents
from relibra_jax.execution.mesh import expert_mesh
from relibra_jax.nnx import PreparedBatch, check_executed
from relibra_jax.types import RoutingReplay

SHOWN_FAILURES: Final = 3
"""So many failures of reward functions are written down in full."""
MORE_EXAMPLES: Final = 8
"""So many times the examples that are needed are drawn where some have no room."""
SUPERVISED, PROMPTS, EVALUATION = range(3)
"""What is drawn: part of the seed of examples, and of the keys."""


class Trainer:
    """The state of a run and the steps that change it.

    Args:
        config: the settings of the run.
        seed: one of its seeds.
        task: a task in place of the one that ``config`` names.
        tokenizer: a tokenizer in place of the one that belongs to the model.

    Raises:
        ValueError: if there is no such task, the tokenizer has tokens that the policy does not know, or there are
            fewer devices than ranks.
    """

    def __init__(
        self, config: Train, seed: int, *, task: Task | None = None, tokenizer: Tokenizer | None = None
    ):
        self.config, self.seed = config, seed
        self.tokenizer = tokenizer = find_tokenizer(config) if tokenizer is None else tokenizer
        if tokenizer.size > config.model_config.vocabulary:
            raise ValueError(
                f"tokenizer of {tokenizer.size} tokens, the policy's vocabulary has {config.model_config.vocabulary}"
            )
        self.task = find_task(config.task) if task is None else task
        self.mesh = expert_mesh(config.topology, devices=host_devices(config.topology.num_ranks))
        self.state = State(config, seed, self.mesh)
        self.replay: RoutingReplay | None = None
        """The routing of the last responses."""

    @property
    def total_steps(self) -> int:
        """The steps of warm-up and learning together."""
        return self.config.warmup_steps + self.config.steps

    def warm_up(self) -> dict[str, Any]:
        """One supervised update on prompts with right answers; its metrics."""
        config, state, clock = self.config, self.state, StepClock()
        examples = self._draw((self.seed, SUPERVISED, state.step), config.samples)
        prompts = [self.tokenizer.encode_prompt(example.prompt) for example in examples]
        answers = [self.tokenizer.encode_answer(example.answer) for example in examples]
        texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        tokens = self.tokenizer.pad_rows(texts, config.prompt_tokens + config.response_tokens)
        check_same(tokens, "supervised samples")
        position = np.arange(tokens.shape[1])[None]
        mask = position < np.array([len(text) for text in texts])[:, None]
        answer = mask & (position >= np.array([len(prompt) for prompt in prompts])[:, None])
        weight = token_weights(answer, np.ones(len(texts), bool), token_level=True)
        with clock("update"):
            batch = self._prepare_live()
            samples = batch.to_ranks(TrainingBatch(tokens, mask, weight=weight))
            # Live routing is known once it has run.
            _, load, _ = recompute(state.model, batch, samples, temperature=1.0)
            batch_load = load.sum((0, 2, 3))
            metrics = update(
                *(state.model, state.optimizer, batch, samples, batch_load), balance=config.balance
            )
            metrics = on_every_host(metrics, self.mesh)
            loss = self._check_finite(metrics)
        state.step += 1
        return {"kind": "warm-up", "loss": loss, "tokens": int(mask.sum()), **clock.report()}

    def learn(self) -> dict[str, Any]:
        """Responses to one batch of prompts and what is learned from them; its metrics."""
        config, state, clock = self.config, self.state, StepClock()
        examples = self.examples(PROMPTS, state.step)
        with clock("generate"):
            responses = self.generate(examples, self._key(PROMPTS, state.step))
        with ThreadPoolExecutor(1) as scorer:
            # Rewards are Python, planning is compiled: they run side by side.
            scoring = scorer.submit(self._score, examples, responses)
            batch, samples = self.prepare(responses, clock)
            with clock("recompute"):
                residents = prepare_residents(state.model, state.optimizer, batch)
                old_log_prob, _, slot_rows = jax.block_until_ready(
                    recompute(state.model, batch, samples, residents, temperature=config.temperature)
                )
            check_executed(slot_rows, batch)
            with clock("score"):
                rewards = _share(scoring.result())
        with clock("update"):
            samples = samples._replace(old_log_prob=old_log_prob)
            metrics = self.update(batch, samples, responses, rewards, residents)
            loss = self._check_finite(metrics)
        times = clock.report()
        state.step += 1
        return {
            "kind": "learn",
            "reward": _mean(rewards.reward[rewards.scored]),
            "failed": len(rewards.failures),
            "failures": rewards.failures[:SHOWN_FAILURES],
            "response_tokens": float(responses.response.sum() / len(responses.response)),
            "loss": loss,
            "clipped": float(metrics.policy.clipped),
            "kl": float(metrics.policy.kl),
            "gradient_norm": float(metrics.gradient_norm),
            "tokens": int(responses.mask.sum()),
            **self._routing_metrics(batch, metrics),
            **times,
        }

    def evaluate(self) -> dict[str, Any]:
        """Score prompts that are the same at every call and for every seed; nothing is learned."""
        rewards: list[Rewards] = []
        for number in range(self.config.evaluation_batches):
            examples = self.examples(EVALUATION, number)
            responses = self.generate(examples, self._key(EVALUATION, number))
            rewards.append(_share(self._score(examples, responses)))
        scored = np.concatenate([each.reward[each.scored] for each in rewards])
        failures = [failure for each in rewards for failure in each.failures]
        return {
            "kind": "evaluation",
            "reward": _mean(scored),
            "samples": len(scored),
            "failed": len(failures),
            "failures": failures[:SHOWN_FAILURES],
        }

    def generate(self, examples: list[Example], key: jax.Array) -> Responses:
        """Responses to the prompts of ``examples``, each by a key of its own; on the host."""
        config, tokenizer = self.config, self.tokenizer
        texts = [tokenizer.encode_prompt(example.prompt) for example in examples]
        prompts = tokenizer.pad_rows(texts, config.prompt_tokens)
        check_same(prompts, "prompts")
        responses = generate(
            self.state.model,
            prompts,
            np.array([len(text) for text in texts], np.int32),
            jax.random.split(key, len(prompts)),
            parallel=self.state.balancer.live,
            max_new_tokens=config.response_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            ends=tokenizer.ends,
            pad=tokenizer.pad,
        )
        return on_every_host(responses, self.mesh)

    def prepare(self, responses: Responses, clock: StepClock) -> tuple[PreparedBatch, TrainingBatch]:
        """Plan the recorded routing, and move experts to their homes and samples to their ranks."""
        state, total = self.state, StepClock()
        with total("prepare"):
            batch = state.balancer.prepare(state.model, state.optimizer, responses.replay)
            samples = TrainingBatch(responses.tokens, responses.mask, responses.expert_ids)
            samples = batch.to_ranks(samples)
            jax.block_until_ready((samples, nnx.state(state.model)))
        clock.phases["plan"] = batch.plan_seconds
        clock.phases["migrate"] = total.phases["prepare"] - batch.plan_seconds
        self.replay = responses.replay
        return batch, samples

    def update(
        self,
        batch: PreparedBatch,
        samples: TrainingBatch,
        responses: Responses,
        rewards: Rewards,
        residents: Residents | None = None,
    ) -> StepMetrics:
        """Learn from a batch for so many epochs; the metrics of the last one. ``residents`` are those that the
        recompute ran with: they serve the first epoch too."""
        config, state = self.config, self.state
        advantage = relative_advantages(
            rewards.reward, rewards.scored, responses_per_prompt=config.responses_per_prompt
        )
        weight = token_weights(responses.response, rewards.scored, token_level=config.token_level)
        weight, advantage = batch.to_ranks((weight, advantage))
        samples = samples._replace(weight=weight, advantage=advantage)
        batch_load = batch.batch_plan.load.sum((0, 2, 3))
        followed = batch if config.replay else self._prepare_live()
        for epoch in range(config.epochs):
            shared = residents if config.replay and epoch == 0 else None
            if shared is not None:
                plan, topology = batch.batch_plan.plan, batch.parallel.topology
                check_residents(shared, state.optimizer.step[...], plan, topology)
            metrics = update(
                *(state.model, state.optimizer, followed, samples, batch_load, shared),
                balance=config.balance,
                temperature=config.temperature,
                clip=config.clip,
            )
            metrics = on_every_host(metrics, self.mesh)
            if config.replay:
                check_executed(metrics.slot_rows, batch)
        return metrics

    def examples(self, what: int, number: int) -> list[Example]:
        """The prompts of one batch, each as often as it is responded to."""
        seed = (what, number) if what == EVALUATION else (self.seed, what, number)
        drawn = self._draw(seed, self.config.prompts)
        return [example for example in drawn for _ in range(self.config.responses_per_prompt)]

    def _score(self, examples: list[Example], responses: Responses) -> Rewards:
        """The rewards, on the first process; a reward function is called once for every sample, wherever it ran."""
        if not is_first():
            return unscored(len(examples))
        return score_responses(self.task, examples, responses.tokens, responses.response, self.tokenizer)

    def _prepare_live(self) -> PreparedBatch:
        state = self.state
        return state.balancer.prepare(state.model, state.optimizer, None, num_samples=self.config.samples)

    def _draw(self, seed: tuple[int, ...], count: int) -> list[Example]:
        """The first examples that there is room for."""
        config = self.config
        for times in (1, MORE_EXAMPLES):
            drawn = self.task.sample(seed, times * count)
            lengths = np.array([self._lengths(example) for example in drawn])
            fits = (lengths <= (config.prompt_tokens, config.response_tokens)).all(1)
            fitting = list(itertools.compress(drawn, fits))
            if len(fitting) >= count:
                return fitting[:count]
        longest = lengths.max(0)
        raise ValueError(
            f"task {self.task.name!r}: of {len(drawn)} examples {len(fitting)} fit prompt_tokens="
            f"{config.prompt_tokens} and response_tokens={config.response_tokens}, {count} are needed; the longest"
            f" have {longest[0]} and {longest[1]}"
        )

    def _lengths(self, example: Example) -> tuple[int, int]:
        """The tokens of prompt and answer."""
        tokenizer = self.tokenizer
        return len(tokenizer.encode_prompt(example.prompt)), len(tokenizer.encode_answer(example.answer))

    def _key(self, what: int, number: int) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(self.state.key, what), number)

    def _check_finite(self, metrics: StepMetrics) -> float:
        """The loss, which is no number where a layer refused its plan or its buffers."""
        values = {"loss": float(metrics.policy.loss), "gradient norm": float(metrics.gradient_norm)}
        for name, value in values.items():
            if not np.isfinite(value):
                raise FloatingPointError(f"step {self.state.step}: {name} is {value}")
        return values["loss"]

    def _routing_metrics(self, batch: PreparedBatch, metrics: StepMetrics) -> dict[str, Any]:
        batch_plan, parallel = batch.batch_plan, batch.parallel
        imbalance = measure_imbalance(
            batch_plan, metrics.load, topology=parallel.topology, across_nodes=parallel.across_nodes
        )
        imbalance = on_every_host(imbalance, self.mesh)
        if self.config.replay:
            del imbalance["imbalance_live"]
        changed = np.asarray(metrics.routing_changed).sum(0)
        choices = np.asarray(batch_plan.load).sum((0, 2, 3, 4))
        return {
            **{name: np.asarray(value).tolist() for name, value in imbalance.items()},
            "routing_changed": changed.tolist(),
            "routing_changed_share": (changed / choices).tolist(),
            **measure_push(batch_plan.plan, parallel.topology),
        }


def find_tokenizer(config: Train) -> Tokenizer:
    """The tokenizer beside the checkpoint that a run starts from; bytes for models that were made for them.

    Raises:
        ValueError: as `experiments.rl.checkpoint_tokenizer.load_tokenizer` says.
    """
    bytes_suffice = config.model_config.vocabulary == BYTES.size
    if config.model is None or (bytes_suffice and not (config.model / "tokenizer.json").exists()):
        return BYTES
    return load_tokenizer(config.model)


def _share(rewards: Rewards) -> Rewards:
    """What the first process has scored; the texts of failures stay there."""
    reward, scored = from_first((rewards.reward, rewards.scored))
    return Rewards(np.asarray(reward), np.asarray(scored), rewards.failures)


def _mean(rewards: np.ndarray) -> float | None:
    return float(rewards.mean()) if rewards.size else None
