"""Rollouts: sampling the responses of a step in the way that its algorithm needs.

Without settings of their own, rollouts sample a whole response for every sample of the batch. DAPO samples responses to
more prompts, until enough prompts have rewards that differ. With a window, rollouts sample so many tokens of each
response, and continue the unfinished responses in the next rollout (`experiments.rl.windows`). A response is learned
from in the batch in which it ends, with all of its tokens; T-PPO learns from the new tokens of every batch. Responses
of several turns are sampled turn after turn (`experiments.rl.turns`).

With servers, later batches can be sampled while the run learns from this one (`experiments.rl.batches_ahead`). The
first tokens of their responses then come from weights before the update: they are *stale*. The recompute computes all
log-probabilities under the newest weights, which losses take for the old policy. A resumed run samples its first
batches with the weights of the checkpoint.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int, Key

from experiments.engines.embedded import EmbeddedEngine
from experiments.engines.protocol import UNSAMPLED, EngineError, Generation, RolloutEngine, Sampling, Sent
from experiments.engines.sharing import own_part, share_generation
from experiments.rl.batches_ahead import BatchesAhead
from experiments.rl.configs import Train
from experiments.rl.dapo import choose_prompts, overlong_penalty, rewards_differ
from experiments.rl.generation import Responses, Watch
from experiments.rl.processes import is_first
from experiments.rl.prompts import Prompts
from experiments.rl.responses import choose_samples, join_responses
from experiments.rl.reward_worker import RAISED
from experiments.rl.rewards import (
    Failure,
    Rewards,
    mean_by_task,
    mean_or_none,
    measure_solved,
    score_responses,
    share_rewards,
    start_pool,
    unscored,
)
from experiments.rl.state import State
from experiments.rl.step_clock import StepClock
from experiments.rl.tasks import Example
from experiments.rl.turns import count_tokens_run, measure_turns, respond_in_turns
from experiments.rl.windows import Carried, carry_unfinished, fill_free_rows, find_learned, join_windows
from relibra_jax.contract.types import Array

PROMPTS: Final = 1
"""A part of the seeds of the examples and the random keys of rollouts for learning."""


class Rollout(NamedTuple):
    """The responses of one step."""

    responses: Responses
    """The prompts with all tokens of their responses so far, on the host. Samples that nothing is learned from are
    empty."""
    new_mask: Bool[Array, "B T"]
    """True on the tokens that were sampled in this step. Other response tokens come from earlier steps."""
    older_mask: Bool[Array, "B T"]
    """True on the response tokens that weights before the last update sampled: in earlier steps, or stale."""
    finished: Bool[Array, " B"]
    """False for responses that the next rollout continues, or that wait for those that they are compared with."""
    rewards: Callable[[], Rewards]
    """A function that waits for the rewards and returns them. All processes call it, once."""
    carried: Carried | None
    """The unfinished responses for the next rollout. None for algorithms that finish all responses."""
    tokens_run: int
    """The number of tokens that the model ran on in all rollouts of the step, with prompts and replaced samples. A
    prompt counts for each of its responses, although ranks run it once for several."""
    metrics: dict[str, Any]
    """The metrics of how the responses were sampled, by name."""
    version: Int[Array, "B T"]
    """The version of the weights that sampled each token. `UNSAMPLED` for tokens that were not sampled, and for those
    that earlier steps sampled and windows carried, whose version is not kept."""
    examples: Sequence[Example] = ()
    """The example of every sample."""


class Sampler:
    """The sampler of a run: it generates responses from the policy and scores them.

    Args:
        config: the settings of the run.
        seed: the seed of the run.
        state: the state of the run.
        prompts: the source of prompts.
    """

    def __init__(self, config: Train, seed: int, state: State, prompts: Prompts):
        self.config, self.seed, self.state, self.prompts = config, seed, state, prompts
        self.engine = make_engine(config, state)
        self._sent = Sent()
        steps = config.warmup_steps + config.steps
        self._ahead = BatchesAhead(config.staleness, steps, self._batch_of) if config.staleness else None
        self._pool = start_pool(prompts.task, config.reward_pool) if is_first() else None

    def sync(self) -> None:
        """Give the engine the weights of the run. Responses that it is sampling carry on under them."""
        sent = self.engine.sync(self.state.agent.policy, self.state.step)
        self._sent = Sent(self._sent.bytes + sent.bytes, self._sent.seconds + sent.seconds)

    def close(self) -> None:
        """End what runs beside the run, and free what the engine holds outside of this process."""
        if self._pool is not None:
            self._pool.close()
        if self._ahead is not None:
            self._ahead.forget()
        self.engine.close()
        if self._ahead is not None:
            self._ahead.wait()

    def roll_out(self, executor: Executor, watch: Watch | None, clock: StepClock) -> Rollout:
        """Sample the responses of the next step, and start to score them.

        Args:
            executor: the executor that scores rewards.
            watch: a callback to call during generation. None for no callback.
            clock: the clock of the step.

        Returns:
            The rollout.
        """
        entry = self.config.algorithm_entry
        if self.config.window is not None:
            return self._windows(executor, watch, clock)
        if entry.dynamic_sampling:
            return self._dynamic_sampling(executor, clock)
        step = self.state.step
        examples = self.examples(step)
        with clock("generate"):
            self.sync()
            if self._ahead is None:
                generation = self.respond(examples, self._key(step), watch=watch)
            else:
                ahead = self._ahead
                generation = share_generation(lambda: ahead.take(step), len(examples))
        responses, finished = generation.responses, ~generation.dropped
        if not finished.any():
            first = generation.failures[0] if generation.failures else "the engine gave none"
            raise EngineError(f"step {step}: no sample has a response: {first}")
        scoring = executor.submit(self.score, examples, responses, clock, finished, generation.failures)
        return Rollout(
            responses,
            new_mask=responses.response_mask,
            older_mask=responses.response_mask & (generation.version < step),
            finished=np.ones(len(examples), bool),
            rewards=lambda: share_rewards(scoring.result()),
            carried=None,
            tokens_run=self._tokens_run(responses),
            metrics={
                **self._measure([generation]),
                **self._measure_turns(responses, self.config.samples_at_once),
            },
            version=generation.version,
            examples=examples,
        )

    def _dynamic_sampling(self, executor: Executor, clock: StepClock) -> Rollout:
        """Make rollouts until enough prompts have rewards that differ, or the maximum number of rollouts is reached."""
        config, per_prompt = self.config, self.config.responses_per_prompt
        rollouts: list[tuple[Responses, Rewards]] = []
        all_examples: list[Example] = []
        generations: list[Generation] = []
        differ = np.zeros(0, bool)
        with clock("generate"):
            self.sync()
        while len(rollouts) <= config.dapo.more_rollouts and differ.sum() < config.prompts:
            number = len(rollouts)
            examples = self.examples(self.state.step, number)
            with clock("generate"):
                generation = self.respond(examples, jax.random.fold_in(self._key(self.state.step), number))
            generations.append(generation)
            all_examples += examples
            responses, finished = generation.responses, ~generation.dropped
            with clock("score_wait"):
                scoring = executor.submit(
                    self.score, examples, responses, clock, finished, generation.failures
                )
                rewards = share_rewards(scoring.result())
            rollouts.append((responses, rewards))
            differ = np.append(differ, rewards_differ(rewards, responses_per_prompt=per_prompt))
        chosen = choose_prompts(differ, config.prompts)
        samples = (chosen[:, None] * per_prompt + np.arange(per_prompt)).reshape(-1)
        all_responses, all_rewards = zip(*rollouts, strict=True)
        responses = choose_samples(join_responses(all_responses), samples)
        reward = np.concatenate([rewards.reward for rewards in all_rewards])
        scored = np.concatenate([rewards.scored for rewards in all_rewards])
        lengths = responses.mask.sum(1) - responses.response_mask.argmax(1)  # replies count
        penalty = overlong_penalty(lengths, config.response_tokens, config.dapo)
        # Where all rewards are equal, the penalty alone would become an advantage of full size.
        compared = scored[samples] & np.repeat(differ[chosen], per_prompt)
        shaped = Rewards(
            np.where(compared, reward[samples] - penalty, 0),
            compared,
            [failure for rewards in all_rewards for failure in rewards.failures],
        )
        return Rollout(
            responses,
            new_mask=responses.response_mask,
            older_mask=np.zeros_like(responses.response_mask),
            finished=np.ones(len(samples), bool),
            rewards=lambda: shaped,
            carried=None,
            tokens_run=sum(map(self._tokens_run, all_responses)),
            metrics={
                **self._measure(generations),
                **self._measure_turns(responses, config.samples),
                # Replaced samples count, too: the mean over the chosen prompts alone would not be that of the policy.
                "reward/mean": mean_or_none(reward[scored]),
                **measure_solved(Rewards(reward, scored, []), per_prompt, config.evaluation.correct),
                "reward/mean_by_task": mean_by_task(self.prompts.task, all_examples, reward, scored),
                "reward/overlong": float(penalty.mean()),
                "reward/replaced_prompts": int((~differ).sum() - (~differ[chosen]).sum()),
                "reward/equal_prompts": int((~differ[chosen]).sum()),
            },
            version=np.where(responses.response_mask, self.state.step, UNSAMPLED),
            examples=[all_examples[sample] for sample in samples],
        )

    def _windows(self, executor: Executor, watch: Watch | None, clock: StepClock) -> Rollout:
        """Sample the next window of every response, with new prompts in the rows of responses that were learned from.

        If nothing can be learned from after it, further windows follow.
        """
        config, state, carried = self.config, self.state, self.state.carried
        assert carried is not None
        assert config.window is not None
        first, examples = self.next_rows(carried)
        generations: list[Generation] = []
        rows, new_mask = first, np.zeros(first.tokens.shape, bool)
        with clock("generate"):
            self.sync()
        while True:
            with clock("generate"):
                generations.append(self._window(rows, len(generations), watch))
            new_mask |= generations[-1].responses.response_mask
            responses = join_windows(rows, generations[-1].responses)
            finished = find_learned(
                responses, response_tokens=config.response_tokens, compared=config.compared
            )
            carried = carry_unfinished(rows, responses, finished, step=state.step)
            if finished.any() or config.algorithm_entry.learns_unfinished:
                break
            rows = carried
        began = np.where(first.free, state.step, first.drawn)
        tokens_run = sum(int(each.responses.mask.sum()) for each in generations)
        if not config.algorithm_entry.learns_unfinished:
            responses = responses._replace(
                mask=responses.mask & finished[:, None],
                response_mask=responses.response_mask & finished[:, None],
            )
        scoring = executor.submit(self.score, examples, responses, clock, finished)
        return Rollout(
            responses,
            new_mask=new_mask,
            older_mask=responses.response_mask & ~new_mask,
            finished=finished,
            rewards=lambda: share_rewards(scoring.result()),
            carried=carried,
            tokens_run=tokens_run,
            metrics={
                **self._measure(generations),
                "response/carried": int((~first.free).sum()),
                "response/unfinished": int((~finished).sum()),
                "response/most_policies": int(state.step - began[new_mask.any(1)].min() + 1),
            },
            version=np.where(new_mask & responses.response_mask, state.step, UNSAMPLED),
            examples=examples,
        )

    def _window(self, rows: Carried, number: int, watch: Watch | None) -> Generation:
        """Sample the next window of every row whose response is not whole."""
        config, samples = self.config, len(rows.tokens)
        assert config.window is not None
        context, window_tokens = config.prompt_tokens + config.response_tokens - config.window, config.window
        key = self._key(self.state.step)
        keys = jax.random.split(jax.random.fold_in(key, number) if number else key, samples)
        lengths = rows.to_sample(config.response_tokens)
        own = own_part(samples) if config.engine else slice(None)

        def part() -> Generation:
            return self._generate(rows.tokens[own, :context], lengths[own], keys[own], window_tokens, watch)

        return share_generation(part, samples) if config.engine else part()

    def next_rows(self, carried: Carried) -> tuple[Carried, list[Example]]:
        """Fill the free rows with new prompts, and draw the example of every row (for carried rows once more).

        Args:
            carried: the responses that the last rollout left unfinished.

        Returns:
            The rows of the next rollout, and the example of each.

        Raises:
            ValueError: if a carried response belongs to a different prompt than the current settings draw.
        """
        prompts, prompt_lengths = self.prompts.encode(self.examples(self.state.step))
        rows = fill_free_rows(carried, prompts, prompt_lengths)
        steps = np.where(rows.free, self.state.step, rows.drawn)
        by_step = {step: self.examples(step) for step in np.unique(steps).tolist()}
        examples = [by_step[step][row] for row, step in enumerate(steps.tolist())]
        tokens, lengths = self.prompts.encode(examples)
        mask = np.arange(tokens.shape[1]) < lengths[:, None]
        differs = (mask & (tokens != rows.tokens[:, : tokens.shape[1]])).any(1)
        same = (lengths == rows.prompt_lengths) & ~differs
        if (mismatches := np.flatnonzero(~same)).size:
            raise ValueError(
                f"row {mismatches[0]} continues a response to a prompt of step {steps[mismatches[0]]} that task"
                f" {self.prompts.task.name!r} does not draw: resume with the settings that the run began with"
            )
        return rows, examples

    def examples(self, step: int, rollout: int = 0) -> list[Example]:
        """Draw the examples of one rollout of a step, each repeated for all its responses."""
        return self.prompts.groups((self.seed, PROMPTS, step, *([rollout] if rollout else [])))

    def respond(
        self,
        examples: list[Example],
        key: jax.Array,
        *,
        watch: Watch | None = None,
        evaluation: bool = False,
    ) -> Generation:
        """Sample a whole response to each example's prompt, with random keys of their own.

        Args:
            examples: the examples, each repeated for all its responses.
            key: the random key of the rollout.
            watch: a callback to call during generation. None for no callback. With several turns it is not called,
                because responses whose turn has ended may go on.
            evaluation: whether to sample as evaluations do, and not as for learning.

        Returns:
            The responses, on the host, and those that were dropped.
        """
        part = self._part(examples, key, watch, evaluation=evaluation)
        return share_generation(part, len(examples)) if self.config.engine else part()

    def score(
        self,
        examples: list[Example],
        responses: Responses,
        clock: StepClock,
        finished: Bool[Array, " B"] | None = None,
        failures: Sequence[str] = (),
    ) -> Rewards:
        """Score responses on the first process, so that the reward function is called once for every sample.

        Args:
            examples: the example of every sample.
            responses: the responses, on the host.
            clock: the clock of the step.
            finished: False for unfinished responses, which get no reward. None if all have finished.
            failures: the texts of failures to reply, to which the failures of the reward function are added.

        Returns:
            The rewards on the first process, and unscored samples on the others.
        """
        with clock("score"):
            if not is_first():
                return unscored(len(examples))
            rewards = score_responses(
                self.prompts.task,
                examples,
                responses.tokens,
                responses.response_mask,
                self.prompts.tokenizer,
                finished=finished,
                pool=self._pool,
            )
            before = [Failure(RAISED, text) for text in failures]
            return rewards._replace(failures=[*before, *rewards.failures])

    def _batch_of(self, step: int) -> Callable[[], Generation]:
        return self._part(self.examples(step), self._key(step))

    def _part(
        self,
        examples: list[Example],
        key: jax.Array,
        watch: Watch | None = None,
        *,
        evaluation: bool = False,
    ) -> Callable[[], Generation]:
        """Return a function that samples the responses for which this process asks servers, or all without servers.

        It may run in another thread if there are servers: processes then exchange nothing meanwhile.
        """
        config, turn_tokens, samples = self.config, self.config.turn_tokens, len(examples)
        own = own_part(samples) if config.engine else np.arange(samples)
        prompts, lengths = (array[own] for array in self.prompts.encode(examples))
        per_prompt, temperature = config.responses_per_prompt, config.temperature
        if evaluation:
            per_prompt, temperature = config.evaluation_samples, config.evaluation_temperature
        if turn_tokens is None:
            keys = jax.random.split(key, samples)[own]
            return lambda: self._generate(
                *(prompts, lengths, keys, config.response_tokens, watch),
                temperature=temperature,
                responses_per_prompt=per_prompt,
            )

        def generate(conversations: Int[Array, "B P"], lengths: Int[Array, " B"], turn: int) -> Generation:
            # The responses to a prompt have only the first turn's prompt in common.
            keys = jax.random.split(jax.random.fold_in(key, turn), samples)[own]
            return self._generate(
                *(conversations, lengths, keys, turn_tokens),
                temperature=temperature,
                responses_per_prompt=1 if turn else per_prompt,
            )

        of_part = [examples[sample] for sample in own]
        return lambda: respond_in_turns(generate, self.prompts, of_part, prompts, lengths)

    def _generate(
        self,
        prompts: Int[Array, "B P"],
        lengths: Int[Array, " B"],
        keys: Key[jax.Array, " B"],
        max_new_tokens: int,
        watch: Watch | None = None,
        *,
        temperature: float | None = None,
        responses_per_prompt: int = 1,
    ) -> Generation:
        config, tokenizer = self.config, self.prompts.tokenizer
        sampling = Sampling(
            max_new_tokens=max_new_tokens,
            temperature=config.temperature if temperature is None else temperature,
            top_p=config.top_p,
            ends=tokenizer.ends,
            pad=tokenizer.pad,
            allowed=tokenizer.allowed(config.model_config.vocabulary),
        )
        return self.engine.generate(
            prompts, lengths, keys, sampling, responses_per_prompt=responses_per_prompt, watch=watch
        )

    def _tokens_run(self, responses: Responses) -> int:
        """Count the tokens that the model ran on to sample whole responses."""
        if self.config.turns == 1:
            return int(responses.mask.sum())
        return count_tokens_run(responses, self.prompts.tokenizer.ends)

    def _measure_turns(self, responses: Responses, samples_at_once: int) -> dict[str, Any]:
        """Return the metrics of several turns. With one turn there are none."""
        if self.config.turns == 1:
            return {}
        return measure_turns(responses, self.prompts.tokenizer.ends, samples_at_once)

    def _measure(self, generations: list[Generation]) -> dict[str, Any]:
        """Return the metrics of the servers of a step. Without servers there are none."""
        if not self.config.engine:
            return {}
        tokens = sum(int(each.responses.mask.sum()) for each in generations)
        sent, self._sent = self._sent, Sent()
        age = np.concatenate(
            [self.state.step - each.version[each.version != UNSAMPLED] for each in generations]
        )
        oldest = int(age.max(initial=0))
        assert oldest <= self.config.staleness, f"a token is {oldest} updates old"
        return {
            "rollout/staleness": mean_or_none(age.astype(np.float64)),
            "rollout/staleness_max": oldest,
            "rollout/continued": sum(int(_has_several(each.version).sum()) for each in generations),
            "rollout/sync_seconds": sent.seconds,
            "rollout/sync_bytes": sent.bytes,
            "rollout/retried": sum(each.retried for each in generations),
            "rollout/dropped": sum(int(each.dropped.sum()) - len(each.failures) for each in generations),
            "rollout/filled_share": sum(int(each.filled.sum()) for each in generations) / max(tokens, 1),
        }

    def _key(self, step: int) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(self.state.key, PROMPTS), step)


def _has_several(version: Int[np.ndarray, "B T"]) -> Bool[np.ndarray, " B"]:
    """Return True for responses with tokens of several versions of the weights."""
    sampled = version != UNSAMPLED
    oldest = np.where(sampled, version, np.iinfo(version.dtype).max).min(1)
    return sampled.any(1) & (version.max(1) > oldest)


def make_engine(config: Train, state: State) -> RolloutEngine:
    """Return the engine of a run: the servers of its settings, or the sampler on its own devices."""
    if config.engine:
        assert config.model is not None
        try:
            from experiments.engines.http import HttpEngine
        except ModuleNotFoundError as error:
            raise ValueError(
                f"engine={' '.join(config.engine)} needs the extra engine ({error.name} is not installed)"
            ) from None
        return HttpEngine(config.engine, config.model, config.model_config, config.requests)
    return EmbeddedEngine(
        lambda: state.on_devices().policy,
        state.balancer.live,
        wave_samples=config.wave_samples,
        float8=config.float8_rollout,
        dtype=config.rollout_dtype,
    )
