"""Steps that are not finite are skipped and counted, and rejected plans are errors at once."""

import dataclasses
import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from support.runs import SIZES, SMALL

from experiments.rl import trainer as trainer_module
from experiments.rl.advantages import Group
from experiments.rl.configs import Train
from experiments.rl.optimizer import AdamW
from experiments.rl.step_clock import StepClock
from experiments.rl.tasks import TASKS
from experiments.rl.trainer import Trainer
from relibra_jax.nnx import get_homes
from relibra_jax.nnx.homes import set_homes

pytestmark = [pytest.mark.usefixtures("smallest_policy"), pytest.mark.slow]
# Advantages are differences of rewards, so large rewards give gradients whose norm overflows.
SETTINGS = SMALL | {"group": Group(deviation="none"), "adamw": AdamW(skipped_in_a_row=1)}


@pytest.fixture(scope="module", autouse=True)
def _first_sizes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.rl.state.FIRST_CAPACITIES", SIZES)
        yield


class Rewards:
    """Rewards for lengths of responses, times a factor that tests change."""

    factor = 1.0

    def __call__(self, completion, example):
        return self.factor * (len(completion) % 3)


def make_trainer(**changes):
    rewards = Rewards()
    task = dataclasses.replace(TASKS["copy"], score=rewards)
    return Trainer(Train(**(SETTINGS | changes)), 0, task=task), rewards


def trained_state(trainer):
    """Get parameters, moments and counts as arrays, with experts in the slots where they are."""
    return jax.device_get(
        [nnx.as_pure(nnx.state(each)) for each in (trainer.state.agent, trainer.state.optimizer)]
    )


def assert_same_bits(one, other):
    for (path, value), (_, same) in zip(
        jax.tree.leaves_with_path(one), jax.tree.leaves_with_path(other), strict=True
    ):
        np.testing.assert_array_equal(same, value, err_msg=jax.tree_util.keystr(path))


@pytest.fixture(scope="module")
def after_one_step():
    """Warm up and learn from a batch; return the trainer, its rewards and the lines of metrics."""
    trainer, rewards = make_trainer()
    return trainer, rewards, [trainer.warm_up(), trainer.learn()]


def test_a_step_that_is_not_finite_is_skipped_and_too_many_in_a_row_end_the_run(after_one_step, tmp_path):
    trainer, rewards, lines = after_one_step
    other, _ = make_trainer()
    other.warm_up(), other.learn()
    updates = int(trainer.state.optimizer.step[...])
    rewards.factor = 1e30
    lines.append(trainer.learn())
    # The same plan moves the experts of the other trainer, which makes no update.
    other.prepare(trainer.responses, StepClock())
    other.state.balancer.discard()
    other.state.step += 1
    assert_same_bits(trained_state(trainer), trained_state(other))
    assert int(trainer.state.optimizer.step[...]) == updates == 1 + SMALL["epochs"]
    rewards.factor = 1.0
    lines.append(trainer.learn())
    other.learn()
    assert_same_bits(trained_state(trainer), trained_state(other))
    assert int(trainer.state.optimizer.step[...]) == updates + SMALL["epochs"]
    assert [line["policy/skipped"] for line in lines] == [0, 0, SMALL["epochs"], 0]
    assert [line["policy/gradient_norm"] is None for line in lines[1:]] == [False, True, False]
    json.dumps(lines, allow_nan=False)

    rewards.factor = 1e30
    trainer.learn()
    with ocp.CheckpointManager(tmp_path) as manager:
        trainer.state.save(manager)
        manager.wait_until_finished()
        other.restore(manager)
    message = (
        r"step 5: .*the norm of the gradient is inf, after adamw\.skipped_in_a_row=1 batches .* diverged"
    )
    other.prompts.task.score.factor = 1e30
    for each in (trainer, other):
        with pytest.raises(ValueError, match=message):
            each.learn()


def test_the_warm_up_repeats_an_update_that_is_not_finite(after_one_step, monkeypatch):
    trainer, _, _ = after_one_step
    updates = int(trainer.state.optimizer.step[...])
    drawn, weigh, bad = [], trainer_module.token_weights, [True, False, True, True]
    draw = trainer.prompts.draw

    def token_weights(mask):
        return weigh(mask) * (np.float32(np.inf) if bad.pop(0) else 1)

    def remember(seed, count):
        drawn.append(draw(seed, count))
        return drawn[-1]

    monkeypatch.setattr(trainer_module, "token_weights", token_weights)
    monkeypatch.setattr(trainer.prompts, "draw", remember)
    line = trainer.warm_up()
    assert (line["policy/skipped"], np.isfinite(line["warmup/loss"])) == (1, True)
    assert int(trainer.state.optimizer.step[...]) == updates + 1
    assert drawn[0] != drawn[1], "the same prompts would most likely fail again"
    with pytest.raises(
        ValueError, match=r"step \d: the policy's loss is (nan|inf).*skipped_in_a_row=1 batches"
    ):
        trainer.warm_up()


@pytest.mark.parametrize("moved_after", ["prepare", "recompute"])
def test_a_rejected_plan_is_an_error_at_once(moved_after, after_one_step, monkeypatch):
    trainer, rewards, _ = after_one_step
    rewards.factor = 1.0
    trainer.state.balancer.discard()
    skipped = trainer.state.skipped

    def then_misplace(function):
        def run(*args, **options):
            result = function(*args, **options)
            set_homes(trainer.state.agent, np.roll(get_homes(trainer.state.agent), 1, axis=1))
            return result

        return run

    if moved_after == "prepare":
        monkeypatch.setattr(trainer, "prepare", then_misplace(trainer.prepare))
    else:
        monkeypatch.setattr(
            trainer_module, "recompute_planned", then_misplace(trainer_module.recompute_planned)
        )
    with pytest.raises(
        ValueError, match=r"log-probabilities of \d+ tokens are not finite: a layer rejected its plan"
    ):
        trainer.learn()
    assert trainer.state.skipped == skipped
    set_homes(trainer.state.agent, np.roll(get_homes(trainer.state.agent), -1, axis=1))
