"""One run: a policy that is warmed up, generates responses, and learns from them in balanced steps.

What is drawn follows from the seed and the number of the step, so a run that goes on from a checkpoint draws what it
would have drawn, and on the same mesh computes the same bits.
"""

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import jax
import numpy as np
from flax import nnx

from experiments.rl.balance import measure_batch
from experiments.rl.checkpoint_tokenizer import load_tokenizer
from experiments.rl.configs import Train
from experiments.rl.devices import host_devices
from experiments.rl.generation import Responses, Watch, generate
from experiments.rl.losses import token_weights
from experiments.rl.metrics import EVALUATE, FAILURES, LEARN, WARM_UP
from experiments.rl.plan_ahead import PlanAhead
from experiments.rl.processes import check_same, from_first, is_first, on_every_host
from experiments.rl.rewards import Rewards, score_responses, unscored
from experiments.rl.stages import (
    OldPolicy,
    Stages,
    join_metrics,
    prepare_stages,
    recompute_live,
    recompute_planned,
    with_lessons,
)
from experiments.rl.state import State
from experiments.rl.step import StepMetrics, TrainingBatch, recompute, update
from experiments.rl.step_clock import StepClock, exposed_seconds
from experiments.rl.tasks import Example, Task, find_task
from experiments.rl.tokens import BYTES, Tokenizer
from relibra_jax.execution import check_residents
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
            batch_load = recompute(state.model, batch, samples, temperature=1.0).load.sum((0, 2, 3))
            metrics = update(
                *(state.model, state.optimizer, batch, samples, batch_load), balance=config.balance
            )
            metrics = on_every_host(metrics, self.mesh)
            loss = self._check_finite(metrics)
        state.step += 1
        return {"kind": WARM_UP, "warmup/loss": loss, **_speed(int(mask.sum()), clock)}

    def learn(self) -> dict[str, Any]:
        """Responses to one batch of prompts and what is learned from them; its metrics."""
        config, state, clock = self.config, self.state, StepClock()
        examples = self.examples(PROMPTS, state.step)
        # Rewards are Python, planning is compiled: they run beside what devices do, and beside each other.
        with ThreadPoolExecutor(2) as beside:
            ahead = PlanAhead(state, config, beside, clock)
            with clock("generate"):
                responses = self.generate(examples, self._key(PROMPTS, state.step), watch=ahead.watch)
            scoring = beside.submit(self._score, examples, responses, clock)
            if config.routing == "recompute":
                with clock("recompute"):
                    responses, old = recompute_live(state, config, responses)
            with clock("plan"):
                plan_ahead_seconds = ahead.wait()
            stages = self.prepare(responses, clock)
            if config.routing == "rollout":
                with clock("recompute"):
                    float8 = config.float8_rollout if config.float8_recompute else None
                    old = recompute_planned(state, config, stages, float8=float8)
            with clock("score_wait"):
                rewards = _share(scoring.result())
        with clock("update"):
            metrics = self.update(stages, responses, rewards, old)
            loss = self._check_finite(metrics)
        num_tokens = int(responses.mask.sum())
        times, exposed = _speed(num_tokens, clock), exposed_seconds(clock.phases)
        state.step += 1
        lengths = responses.response.sum(1)
        return {
            "kind": LEARN,
            "reward/mean": _mean(rewards.reward[rewards.scored]),
            "reward/failed": len(rewards.failures),
            FAILURES: rewards.failures[:SHOWN_FAILURES],
            "response/tokens": float(lengths.mean()),
            "response/longest": int(lengths.max()),
            "response/ended_share": float(responses.ended.mean()),
            "policy/loss": loss,
            "policy/clipped_share": float(metrics.policy.clipped),
            "policy/kl": float(metrics.policy.kl),
            "policy/gradient_norm": float(metrics.gradient_norm),
            **measure_batch(
                [stage.batch for stage in stages.updates],
                metrics,
                num_tokens,
                live=not config.replay,
            ),
            "balance/imbalance_recompute": old.imbalance,
            "batch/fill": num_tokens / sum(stage.samples.mask.size for stage in stages.updates),
            **times,
            "time/count_seconds": clock.phases.get("count"),
            "time/plan_ahead_seconds": plan_ahead_seconds,
            "time/exposed_seconds": sum(exposed.values()),
            **{f"time/exposed_{name}_seconds": seconds for name, seconds in exposed.items()},
            "speed/response_tokens_per_second": float(lengths.sum() / clock.phases["generate"]),
            "speed/update_tokens_per_second": config.epochs * num_tokens / clock.phases["update"],
        }

    def evaluate(self) -> dict[str, Any]:
        """Score prompts that are the same at every call and for every seed; nothing is learned."""
        rewards: list[Rewards] = []
        for number in range(self.config.evaluation_batches):
            examples = self.examples(EVALUATION, number)
            responses = self.generate(examples, self._key(EVALUATION, number))
            rewards.append(_share(self._score(examples, responses, StepClock())))
        scored = np.concatenate([each.reward[each.scored] for each in rewards])
        failures = [failure for each in rewards for failure in each.failures]
        return {
            "kind": EVALUATE,
            "evaluation/reward": _mean(scored),
            "evaluation/samples": len(scored),
            "evaluation/failed": len(failures),
            FAILURES: failures[:SHOWN_FAILURES],
        }

    def generate(self, examples: list[Example], key: jax.Array, *, watch: Watch | None = None) -> Responses:
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
            parallel=dataclasses.replace(self.state.balancer.live, float8=config.float8_rollout),
            max_new_tokens=config.response_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            ends=tokenizer.ends,
            pad=tokenizer.pad,
            allowed=tokenizer.allowed(config.model_config.vocabulary),
            watch=watch,
        )
        return on_every_host(responses, self.mesh)

    def prepare(self, responses: Responses, clock: StepClock) -> Stages:
        """Plan the recorded routing, and move experts to their homes and samples to their ranks."""
        state, total = self.state, StepClock()
        with total("prepare"):
            stages = prepare_stages(state, self.config, responses)
            jax.block_until_ready(([stage.samples for stage in stages.updates], nnx.state(state.model)))
        batch = stages.updates[0].batch
        clock.add("plan", batch.plan_seconds)
        clock.add("size", batch.size_seconds)
        clock.add("migrate", total.phases["prepare"] - batch.plan_seconds - batch.size_seconds)
        self.replay = responses.replay
        return stages

    def update(self, stages: Stages, responses: Responses, rewards: Rewards, old: OldPolicy) -> StepMetrics:
        """Learn from a batch for so many epochs, each update from samples of its own; the metrics of the last epoch.

        An update's loss is a mean over its own tokens, as if its samples were a batch. Residents are pushed for each
        update; those that the recompute ran with serve the first one.
        """
        config, state, residents = self.config, self.state, old.residents
        lessons = with_lessons(config, stages.updates, responses, rewards, old)
        live = None if config.replay else self._prepare_live()
        for _ in range(config.epochs):
            metrics = []
            for batch, samples in lessons:
                shared = residents if config.replay else None
                if shared is not None:
                    plan, topology = batch.batch_plan.plan, batch.parallel.topology
                    check_residents(shared, state.optimizer.step[...], plan, topology)
                batch_load = batch.batch_plan.load.sum((0, 2, 3))
                ran = update(
                    *(state.model, state.optimizer, live or batch, samples, batch_load, shared),
                    balance=config.balance,
                    temperature=config.temperature,
                    clip=config.clip,
                )
                ran = on_every_host(ran, self.mesh)
                residents = None
                if config.replay:
                    check_executed(ran.slot_rows, batch)
                metrics.append(ran)
        return join_metrics(metrics)

    def examples(self, what: int, number: int) -> list[Example]:
        """The prompts of one batch, each as often as it is responded to."""
        seed = (what, number) if what == EVALUATION else (self.seed, what, number)
        drawn = self._draw(seed, self.config.prompts)
        return [example for example in drawn for _ in range(self.config.responses_per_prompt)]

    def _score(self, examples: list[Example], responses: Responses, clock: StepClock) -> Rewards:
        """The rewards, on the first process; a reward function is called once for every sample, wherever it ran."""
        with clock("score"):
            if not is_first():
                return unscored(len(examples))
            texts = (responses.tokens, responses.response, self.tokenizer)
            return score_responses(self.task, examples, *texts)

    def _prepare_live(self) -> PreparedBatch:
        state = self.state
        (batch,) = state.balancer.prepare_stages(
            *(state.model, state.optimizer, None),
            num_micro_batches=(self.config.updates * self.config.micro_batches,),
            num_samples=self.config.samples,
        )
        return batch

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


def find_tokenizer(config: Train) -> Tokenizer:
    """The tokenizer beside the checkpoint that a run starts from; bytes for models that were made for them.

    Raises:
        ValueError: as `experiments.rl.checkpoint_tokenizer.load_tokenizer` says.
    """
    bytes_suffice = config.model_config.vocabulary == BYTES.size
    if config.model is None or (bytes_suffice and not (config.model / "tokenizer.json").exists()):
        return BYTES
    return load_tokenizer(config.model)


def _speed(num_tokens: int, clock: StepClock) -> dict[str, int | float]:
    times = clock.report()
    return {
        "batch/tokens": num_tokens,
        "speed/tokens_per_second": num_tokens / times["time/step_seconds"],
        **times,
    }


def _share(rewards: Rewards) -> Rewards:
    """What the first process has scored; the texts of failures stay there."""
    reward, scored = from_first((rewards.reward, rewards.scored))
    return Rewards(np.asarray(reward), np.asarray(scored), rewards.failures)


def _mean(rewards: np.ndarray) -> float | None:
    return float(rewards.mean()) if rewards.size else None
