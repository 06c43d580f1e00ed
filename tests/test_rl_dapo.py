"""DAPO's dynamic sampling and its penalty on overlong responses, in a learning step."""

import dataclasses

import numpy as np
import pytest
from support.runs import HASTY, SMALL

from experiments.rl.configs import Train
from experiments.rl.dapo import Dapo, overlong_penalty
from experiments.rl.targets import compute_targets
from experiments.rl.tasks import TASKS
from experiments.rl.trainer import Trainer

pytestmark = pytest.mark.usefixtures("smallest_policy")
OPTIONS = SMALL | {
    "algorithm": "dapo",
    "warmup_steps": 0,
    "epochs": 1,
    "planner": "static",
    "anneal_steps": 0,
}
FIRST = len("copy ")


def score(completion, example):
    """Give equal rewards to all responses to some prompts, and almost always different ones for other prompts."""
    return 0.5 if is_equal(example) else (len(completion) + sum(map(ord, completion)) / 1e6) % 1


@pytest.fixture
def learn(monkeypatch):
    """Return a function that makes one learning step.

    It returns the prompts of all possible rollouts, the responses and rewards that were learned from, and the metrics.
    """

    def step(**changes):
        seen = []

        def recording(config, rollout, rewards, recomputed):
            seen.append((rollout.responses, rewards))
            return compute_targets(config, rollout, rewards, recomputed)

        monkeypatch.setattr("experiments.rl.trainer.compute_targets", recording)
        task = dataclasses.replace(TASKS["copy"], score=score)
        trainer = Trainer(Train(**(OPTIONS | changes)), 0, task=task, tokenizer=HASTY)
        metrics = trainer.learn()
        drawn = [trainer.sampler.examples(0, number)[::4] for number in range(4)]
        [(responses, rewards)] = seen
        return drawn, responses, rewards, metrics

    return step


def is_equal(example):
    return example.prompt[FIRST] < "q"


@pytest.mark.slow
def test_dynamic_sampling_replaces_prompts_with_equal_rewards(learn):
    drawn, responses, rewards, metrics = learn()
    differ = np.array([[not is_equal(example) for example in rollout] for rollout in drawn])
    needed = int(np.argmax(np.cumsum(differ.sum(1)) >= 8)) + 1
    assert 1 < needed < 4, "or the first rollout would do, or none"
    expected = [example for rollout in drawn for example in rollout if not is_equal(example)][:8]
    assert responses.tokens.shape[0] == 32
    for sample, example in enumerate(example for example in expected for _ in range(4)):
        prompt = HASTY.encode_prompt(example.prompt)
        assert responses.tokens[sample, : len(prompt)].tolist() == prompt
        sampled = responses.tokens[sample][responses.response_mask[sample]].tolist()
        penalty = overlong_penalty(np.array([len(sampled)]), 7, Dapo())[0]
        assert rewards.reward[sample] == pytest.approx(
            score(HASTY.decode(sampled), example) - penalty, abs=1e-6
        )
    assert metrics["reward/equal_prompts"] == 0
    assert metrics["reward/replaced_prompts"] == (~differ[:needed]).sum()
    assert (~differ[:needed]).sum() != 8 * (needed - 1), "of the last rollout, some are not needed"
    assert metrics["batch/tokens_run"] > 2 * metrics["batch/tokens"] + responses.mask.sum()
    # The mean is over all sampled responses, without penalties.
    assert metrics["reward/mean"] > rewards.reward.mean()


@pytest.mark.slow
def test_dynamic_sampling_stops_after_more_rollouts(learn):
    drawn, responses, rewards, metrics = learn(dapo=Dapo(more_rollouts=0))
    assert metrics["reward/replaced_prompts"] == 0
    assert metrics["reward/equal_prompts"] == sum(map(is_equal, drawn[0])) > 0
    # Prompts with different rewards come first, and the batch is full.
    order = sorted(drawn[0], key=is_equal)
    for number, example in enumerate(order):
        prompt = HASTY.encode_prompt(example.prompt)
        assert responses.tokens[4 * number, : len(prompt)].tolist() == prompt
    # Equal rewards give no advantage, although their penalties may differ.
    differ = np.array([not is_equal(example) for example in order])
    np.testing.assert_array_equal(rewards.scored.reshape(8, 4), np.repeat(differ[:, None], 4, axis=1))


def test_overlong_penalty_grows_linearly_over_the_last_tokens():
    lengths = np.array([1, 16, 18, 20])
    dapo = Dapo(overlong_share=0.25, overlong_penalty=0.5)
    np.testing.assert_allclose(overlong_penalty(lengths, 20, dapo), [0, 0.1, 0.3, 0.5], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"more_rollouts": -1}, "dapo.more_rollouts=-1 must be an integer of at least 0"),
        ({"overlong_share": 0.0}, "dapo.overlong_share=0.0 must be above 0 and at most 1"),
        ({"overlong_penalty": -1.0}, "dapo.overlong_penalty=-1.0 must be at least 0"),
    ],
)
def test_dapo_rejects_numbers_out_of_range(changes, says):
    with pytest.raises(ValueError, match=says):
        Dapo(**changes)
