"""Rollouts: the responses of a step, as its algorithm wants them sampled.

Most algorithms take one response to every prompt of the batch. DAPO takes further prompts until there are enough whose
rewards differ. T-PPO takes a window of each response, and goes on with those that have not ended.
"""

import dataclasses
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from experiments.rl.configs import Train
from experiments.rl.dapo import choose_prompts, overlong_penalty, rewards_differ
from experiments.rl.generation import Responses, Watch, generate
from experiments.rl.processes import from_first, is_first, on_every_host
from experiments.rl.prompts import Prompts
from experiments.rl.rewards import Rewards, score_responses, unscored
from experiments.rl.state import State
from experiments.rl.step_clock import StepClock
from experiments.rl.tasks import Example
from experiments.rl.windows import Carried, carry_unfinished, fill_free_rows, join_windows
from relibra_jax.types import Array

PROMPTS: Final = 1
"""Part of the seed of what is drawn for learning: of examples, and of keys."""


class Rollout(NamedTuple):
    """What the policy has sampled in a step."""

    responses: Responses
    """Prompts, and all that there is of their responses, on the host."""
    new: Bool[Array, "B T"]
    """The tokens that were sampled in this step; the others of responses come from earlier ones."""
    finished: Bool[Array, " B"]
    """False for responses that the next rollout goes on with."""
    rewards: Callable[[], Rewards]
    """Waits for the rewards; on several processes all of them call it, once."""
    carried: Carried | None
    """What the next rollout goes on with; None for algorithms that finish all responses."""
    tokens: int
    """The tokens that the model was run on in all rollouts of the step, prompts and what was replaced among them."""
    metrics: dict[str, Any]
    """What a line says of how the responses were sampled."""


class Sampler:
    """Samples responses from the policy of a run, and has them scored.

    Args:
        config: the settings of the run.
        seed: the seed of the run.
        state: the state of the run.
        prompts: where its prompts come from.
    """

    def __init__(self, config: Train, seed: int, state: State, prompts: Prompts):
        self.config, self.seed, self.state, self.prompts = config, seed, state, prompts

    def roll_out(self, beside: Executor, watch: Watch | None, clock: StepClock) -> Rollout:
        """The responses of the next step; rewards are scored in ``beside``."""
        entry = self.config.algorithm_entry
        if entry.windows:
            return self._window(beside, watch, clock)
        if entry.mixed_groups:
            return self._mixed_groups(beside, clock)
        examples = self.examples(self.state.step)
        with clock("generate"):
            responses = self.respond(examples, self._key(), watch=watch)
        scoring = beside.submit(self.score, examples, responses, clock)
        everywhere = np.ones(len(examples), bool)
        return Rollout(
            *(responses, responses.response, everywhere, lambda: share_rewards(scoring.result()), None),
            tokens=int(responses.mask.sum()),
            metrics={},
        )

    def _mixed_groups(self, beside: Executor, clock: StepClock) -> Rollout:
        """Prompts whose responses differ in reward, from as many rollouts as that takes, or as there may be."""
        config, per_prompt = self.config, self.config.responses_per_prompt
        rollouts: list[tuple[Responses, Rewards]] = []
        differ = np.zeros(0, bool)
        while len(rollouts) <= config.dapo.more_rollouts and differ.sum() < config.prompts:
            number = len(rollouts)
            examples = self.examples(self.state.step, number)
            with clock("generate"):
                responses = self.respond(examples, jax.random.fold_in(self._key(), number))
            with clock("score_wait"):
                rewards = share_rewards(beside.submit(self.score, examples, responses, clock).result())
            rollouts.append((responses, rewards))
            differ = np.append(differ, rewards_differ(rewards, responses_per_prompt=per_prompt))
        chosen = choose_prompts(differ, config.prompts)
        samples = (chosen[:, None] * per_prompt + np.arange(per_prompt)).reshape(-1)
        all_responses, all_rewards = zip(*rollouts, strict=True)
        responses = Responses(
            *(np.concatenate(leaves)[samples] for leaves in zip(*all_responses, strict=True))
        )
        reward, scored = (
            np.concatenate([getattr(rewards, name) for rewards in all_rewards])
            for name in ("reward", "scored")
        )
        penalty = overlong_penalty(responses.response.sum(1), config.response_tokens, config.dapo)
        failures = [failure for rewards in all_rewards for failure in rewards.failures]
        shaped = Rewards(np.where(scored[samples], reward[samples] - penalty, 0), scored[samples], failures)
        return Rollout(
            *(responses, responses.response, np.ones(len(samples), bool), lambda: shaped, None),
            tokens=sum(int(each.mask.sum()) for each in all_responses),
            metrics={
                # Of what was replaced, too: the policy's, not that of prompts that it is in two minds about.
                "reward/mean": mean_or_none(reward[scored]),
                "reward/overlong": float(penalty.mean()),
                "reward/replaced_prompts": int((~differ).sum() - (~differ[chosen]).sum()),
                "reward/equal_prompts": int((~differ[chosen]).sum()),
            },
        )

    def _window(self, beside: Executor, watch: Watch | None, clock: StepClock) -> Rollout:
        """A window more of every response, with new prompts in the rows of those that have finished."""
        config, state, carried = self.config, self.state, self.state.carried
        assert config.window is not None
        assert carried is not None
        context = config.prompt_tokens + config.response_tokens - config.window
        rows, examples = self.next_rows(carried)
        with clock("generate"):
            window = self._generate(rows.tokens[:, :context], rows.lengths, config.window, self._key(), watch)
        responses = join_windows(rows, window)
        lengths = responses.response.sum(1)
        finished = responses.ended | (lengths == config.response_tokens)
        scoring = beside.submit(self.score, examples, responses, clock, finished)
        return Rollout(
            *(responses, window.response, finished, lambda: share_rewards(scoring.result())),
            carried=carry_unfinished(rows, responses, finished, step=state.step),
            tokens=int(responses.mask.sum()),
            metrics={
                "response/carried": int((~rows.free).sum()),
                "response/unfinished": int((~finished).sum()),
                "response/most_policies": int(-(-lengths.max() // config.window)),
            },
        )

    def next_rows(self, carried: Carried) -> tuple[Carried, list[Example]]:
        """The rows of the next rollout, and the example of every one, drawn again for the rows that go on.

        Raises:
            ValueError: if these respond to other prompts than the settings draw.
        """
        rows = fill_free_rows(carried, *self.prompts.encode(self.examples(self.state.step)))
        drawn = np.where(rows.free, self.state.step, rows.drawn)
        by_step = {step: self.examples(step) for step in np.unique(drawn).tolist()}
        examples = [by_step[step][row] for row, step in enumerate(drawn.tolist())]
        tokens, lengths = self.prompts.encode(examples)
        held = np.arange(tokens.shape[1]) < lengths[:, None]
        differs = (held & (tokens != rows.tokens[:, : tokens.shape[1]])).any(1)
        same = (lengths == rows.prompt_lengths) & ~differs
        if (others := np.flatnonzero(~same)).size:
            raise ValueError(
                f"row {others[0]} goes on with a response to a prompt of step {drawn[others[0]]} that task"
                f" {self.prompts.task.name!r} does not draw there: resume with the settings that the run began with"
            )
        return rows, examples

    def examples(self, step: int, rollout: int = 0) -> list[Example]:
        """The prompts of one batch, each as often as it is responded to."""
        return self.prompts.groups((self.seed, PROMPTS, step, *([rollout] if rollout else [])))

    def respond(self, examples: list[Example], key: jax.Array, *, watch: Watch | None = None) -> Responses:
        """Whole responses to the prompts of ``examples``, each by a key of its own; on the host."""
        return self._generate(*self.prompts.encode(examples), self.config.response_tokens, key, watch)

    def score(
        self,
        examples: list[Example],
        responses: Responses,
        clock: StepClock,
        finished: Bool[Array, " B"] | None = None,
    ) -> Rewards:
        """The rewards, on the first process; a reward function is called once for every sample, wherever it ran."""
        with clock("score"):
            if not is_first():
                return unscored(len(examples))
            texts = (responses.tokens, responses.response, self.prompts.tokenizer)
            return score_responses(self.prompts.task, examples, *texts, finished=finished)

    def _generate(
        self,
        prompts: Int[Array, "B P"],
        lengths: Int[Array, " B"],
        max_new_tokens: int,
        key: jax.Array,
        watch: Watch | None,
    ) -> Responses:
        config, state, tokenizer = self.config, self.state, self.prompts.tokenizer
        responses = generate(
            *(state.agent.policy, prompts, lengths, jax.random.split(key, len(prompts))),
            parallel=dataclasses.replace(state.balancer.live, float8=config.float8_rollout),
            max_new_tokens=max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            ends=tokenizer.ends,
            pad=tokenizer.pad,
            allowed=tokenizer.allowed(config.model_config.vocabulary),
            watch=watch,
        )
        return on_every_host(responses, state.balancer.mesh)

    def _key(self) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(self.state.key, PROMPTS), self.state.step)


def share_rewards(rewards: Rewards) -> Rewards:
    """What the first process has scored; the texts of failures stay there."""
    reward, scored = from_first((rewards.reward, rewards.scored))
    return Rewards(np.asarray(reward), np.asarray(scored), rewards.failures)


def mean_or_none(values: np.ndarray) -> float | None:
    """The mean, None of nothing."""
    return float(values.mean()) if values.size else None
