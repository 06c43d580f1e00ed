"""Windows: responses are carried from rollout to rollout and through checkpoints, and learned from."""

import dataclasses
import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from support.damage import files_under
from support.runs import SIZES, SMALL

from experiments.engines import embedded
from experiments.rl.configs import Train
from experiments.rl.generation import Responses
from experiments.rl.optimizer import AdamW
from experiments.rl.targets import compute_targets
from experiments.rl.tasks import TASKS
from experiments.rl.tokens import BYTES
from experiments.rl.trainer import Trainer
from experiments.rl.windows import (
    carry_nothing,
    carry_unfinished,
    fill_free_rows,
    find_learned,
    join_windows,
)
from experiments.run import main
from relibra_jax.contract.types import EMPTY

pytestmark = pytest.mark.usefixtures("smallest_policy")
WINDOW, LONGEST, PROMPT = 14, 42, 14
OPTIONS = SMALL | {
    "algorithm": "tppo",
    "window": WINDOW,
    "response_tokens": LONGEST,
    "warmup_steps": 0,
    "steps": 4,
    "epochs": 1,
    "learning_rate": 3e-2,
    "planner": "static",
    "anneal_steps": 0,
}
ENDING = dataclasses.replace(BYTES, ends=(*BYTES.ends, *range(97, 107)))
"""A tokenizer with which about half of the responses of a new policy end in a window."""


def make(**changes):
    return Trainer(Train(**(OPTIONS | changes)), 0, tokenizer=ENDING)


@pytest.fixture(scope="module")
def stepped(smallest_policy, tmp_path_factory):
    """Make a run of three steps, with a checkpoint after the second.

    Yields the trainer, the folder, and for each step the lengths and responses of generation, the carried responses
    afterwards, the replay that was learned from, and the metrics.
    """
    folder, seen = tmp_path_factory.mktemp("stepped"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.rl.state.FIRST_CAPACITIES", dataclasses.replace(SIZES, rows=2048))
        generate, generated = embedded.generate_in_waves, []

        def recording(policy, prompts, lengths, keys, **options):
            responses = generate(policy, prompts, lengths, keys, **options)
            generated.append((np.asarray(lengths), jax.device_get(responses)))
            return responses

        patch.setattr(embedded, "generate_in_waves", recording)
        trainer = make()
        for number in range(3):
            if number == 2:
                with ocp.CheckpointManager(folder) as manager:
                    trainer.state.save(manager)
            metrics = trainer.learn()
            seen.append((*generated[-1], trainer.state.carried, trainer.responses.replay, metrics))
        yield trainer, folder, seen


@pytest.mark.slow
def test_credit_at_the_end_learns_from_whole_groups_and_samples_no_response_that_waits(monkeypatch):
    generate, sampled = embedded.generate_in_waves, []

    def recording(policy, prompts, lengths, keys, **options):
        sampled.append(np.asarray(lengths))
        return generate(policy, prompts, lengths, keys, **options)

    monkeypatch.setattr(embedded, "generate_in_waves", recording)
    trainer = make(algorithm="grpo", learning_rate=3e-4)
    waited, waits = np.zeros(32, bool), []
    for _ in range(3):
        first = len(sampled)
        metrics = trainer.learn()
        # Rows that waited since the last step are not sampled in this one, and are learned from as they were.
        assert not sampled[first][waited].any()
        carried, responses = trainer.state.carried, trainer.responses
        learned, lengths = responses.mask.any(1), responses.response_mask.sum(1)
        assert learned.any()
        np.testing.assert_array_equal(learned, learned.reshape(-1, 4).all(1).repeat(4))
        np.testing.assert_array_equal(learned, carried.free)
        assert (responses.ended | (lengths == LONGEST))[learned].all()
        assert (responses.log_probs[responses.response_mask] < 0).all()
        assert metrics["batch/tokens"] == responses.mask.sum()
        if not waits:  # no group is whole after the first window, so more follow under the same policy
            assert len(sampled) > 1
            assert metrics["response/most_policies"] == 1
            assert WINDOW < metrics["response/decoding_steps"] <= WINDOW * len(sampled)
        waited = (carried.to_sample(LONGEST) == 0) & ~carried.free
        waits.append(waited.any())
    assert any(waits[:-1])


def restored(folder, **changes):
    trainer = make(**changes)
    with ocp.CheckpointManager(folder) as manager:
        trainer.restore(manager)
    return trainer


@pytest.mark.slow
def test_replay_of_a_carried_response_joins_both_recordings(stepped):
    _, _, (first, second, third) = stepped
    lengths, again, carried, replay, metrics = second
    going_on = first[2].drawn == 0
    assert 4 < going_on.sum() < 28
    assert metrics["response/carried"] == going_on.sum() == first[4]["response/unfinished"]
    before = np.arange(replay.mask.shape[1]) < lengths[:, None]
    np.testing.assert_array_equal(first[1].mask[going_on], before[going_on])
    np.testing.assert_array_equal(again.mask, replay.mask)
    recorded = np.where((before & going_on[:, None])[..., None, None], first[1].expert_ids, again.expert_ids)
    np.testing.assert_array_equal(replay.expert_ids, recorded)
    # For tokens of the first policy, the second policy would have chosen different experts.
    assert (again.expert_ids != recorded)[going_on].any()
    # The log-probabilities of a response that continues for a third window are joined in the same way.
    longest = third[2].drawn == 0
    assert not longest.any(), "three windows reach the maximum length"
    twice = carried.drawn == 0
    assert twice.any()
    log_probs = np.where(before, first[1].log_probs, again.log_probs)
    np.testing.assert_array_equal(carried.log_probs[twice], log_probs[twice])
    answered = np.arange(replay.mask.shape[1]) >= carried.prompt_lengths[:, None]
    assert (carried.log_probs[twice] < 0).sum() == (replay.mask & answered)[twice].sum() == 28 * twice.sum()


@pytest.mark.slow
def test_rollout_fills_free_rows_with_new_prompts(stepped):
    trainer, _, seen = stepped
    for step, (_, window, carried, _, metrics) in enumerate(seen):
        new = window.response_mask.sum(1)
        assert (new > 0).all()
        unfinished = carried.drawn != EMPTY
        assert (new[unfinished] == WINDOW).all()
        assert metrics["response/unfinished"] == unfinished.sum()
        for row in np.flatnonzero(unfinished):
            example = trainer.sampler.examples(int(carried.drawn[row]))[row]
            prompt = ENDING.encode_prompt(example.prompt)
            assert carried.tokens[row, : len(prompt)].tolist() == prompt
            assert carried.prompt_lengths[row] == len(prompt)
        free = ~unfinished
        assert not any(leaf[free].any() for leaf in carried[1:])
        if step < 2:  # free rows get the prompts of the next step
            examples = trainer.sampler.examples(step + 1)
            expected = [len(ENDING.encode_prompt(example.prompt)) for example in examples]
            np.testing.assert_array_equal(seen[step + 1][0][free], np.array(expected)[free])


@pytest.mark.slow
def test_carried_responses_are_restored_from_a_checkpoint(stepped):
    trainer, folder, seen = stepped
    other = restored(folder)
    assert other.state.step == 2
    for name, saved, now in zip(seen[1][2]._fields, seen[1][2], other.state.carried, strict=True):
        np.testing.assert_array_equal(now, saved, err_msg=name)
        assert now.dtype == saved.dtype
    metrics, expected = other.learn(), seen[2][-1]
    for name, value in expected.items():
        if not name.startswith(("time/", "speed/")):
            assert metrics[name] == value, name
    for now, then in zip(other.state.carried, trainer.state.carried, strict=True):
        np.testing.assert_array_equal(now, then)


@pytest.fixture(scope="module")
def stopped(smallest_policy, tmp_path_factory):
    """Write the files of a run whose first rollout has cut off all responses, without training; return its folder."""
    folder = tmp_path_factory.mktemp("stopped")
    trainer = Trainer(Train(**(OPTIONS | {"steps": 1})), 0)
    prompts, lengths = trainer.prompts.encode(trainer.sampler.examples(0))
    tokens = np.array(trainer.state.carried.tokens)
    tokens[:, :PROMPT] = prompts
    trainer.state.carried = trainer.state.carried._replace(
        drawn=np.zeros_like(lengths), prompt_lengths=lengths, lengths=lengths + WINDOW, tokens=tokens
    )
    trainer.state.step = 1
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(trainer.config), default=str))
    with ocp.CheckpointManager(folder / "seed-0" / "checkpoints") as manager:
        trainer.state.save(manager)
    return folder


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            ["--task", "reverse"],
            "row 0 continues a response to a prompt of step 0 that task 'reverse' does not draw: resume with the"
            " settings that the run began with",
        ),
        (["--window", "21"], "its checkpoints have window=14, but this run has window=21"),
        (
            ["--response-tokens", "28"],
            "its checkpoints have response_tokens=42, but this run has response_tokens=28",
        ),
        (
            ["--algorithm", "ppo", "--window", "None"],
            "its checkpoints have algorithm=tppo, but this run has algorithm=ppo",
        ),
    ],
    ids=["task", "window", "response_tokens", "algorithm"],
)
def test_resume_rejects_carried_responses_of_other_settings(changes, says, stopped, capfd):
    """The rejected settings are not saved, either."""
    before = files_under(stopped)
    assert main(["demo", "--resume", str(stopped), "--steps", "5", *changes]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.endswith(says)
    assert files_under(stopped) == before


@pytest.mark.slow
def test_samples_with_a_critic_that_is_not_finite_are_masked_and_counted(stepped):
    trainer = restored(stepped[1])
    critic = trainer.state.critic
    critic.linear[...] = jax.numpy.full_like(critic.linear[...], 3e38)  # large enough that products overflow
    metrics = trainer.learn()
    assert metrics["critic/not_finite"] == 32
    assert metrics["policy/loss"] == 0
    assert metrics["critic/loss"] is None, "nothing has a return"
    assert np.isfinite(metrics["policy/gradient_norm"])
    for leaf in jax.tree.leaves(nnx.state(trainer.state.agent.policy, nnx.Param)):
        assert np.isfinite(leaf).all()


@pytest.mark.slow
def test_critic_loss_that_overflows_ends_the_run_in_one_line(stepped):
    trainer = restored(stepped[1], adamw=AdamW(skipped_in_a_row=0))
    critic = trainer.state.critic
    critic.linear[...] = jax.numpy.full_like(
        critic.linear[...], 1e25
    )  # large enough that the squares of values overflow
    with pytest.raises(
        ValueError, match=r"^step 2: the critic's loss or gradient is nan, after adamw.skipped_in_a_row=0 "
    ):
        trainer.learn()


@pytest.mark.slow
def test_new_critic_starts_at_the_mean_return_of_the_first_finished_responses(stepped, monkeypatch):
    seen = []

    def recording(config, rollout, rewards, recomputed):
        seen.append((rollout, rewards, recomputed.old_values))
        return compute_targets(config, rollout, rewards, recomputed)

    monkeypatch.setattr("experiments.rl.trainer.compute_targets", recording)
    task = dataclasses.replace(TASKS["copy"], score=lambda completion, example: 0.25 + len(completion) % 2)
    trainer = Trainer(Train(**OPTIONS), 0, task=task, tokenizer=ENDING)
    trainer.learn()
    [(rollout, rewards, value)] = seen
    assert 0 < rewards.scored.sum() < 32
    reward, length = (
        each[rewards.scored] for each in (rewards.reward, rollout.responses.response_mask.sum(1))
    )
    np.testing.assert_allclose(value, np.average(reward, weights=length), rtol=1e-5)
    assert (value == value[0, 0]).all()
    assert trainer.state.critic.bias[...] != value[0, 0], "it has learned since"


ROWS = carry_nothing(3, 6, layers=1, top_k=1, dtype=np.dtype(np.uint8))
"""Three free rows of prompts of at most 2 tokens and responses of at most 4, in windows of 2."""


def generated(tokens, lengths, context, *, route):
    """Make the responses that generating two tokens after the given contexts would return."""
    position = np.arange(6)
    lengths, context = np.array(lengths), np.array(context)
    mask = position < lengths[:, None]
    response = mask & (position >= context[:, None])
    tokens = np.where(mask, tokens, 256).astype(np.int32)
    ids = np.where(mask, route, 0)[..., None, None].astype(np.uint8)
    log_probs = np.where(response, -np.float32(route), 0).astype(np.float32)
    return Responses(tokens, mask, response, ids, log_probs, np.array([False, True, False]))


def test_windows_fill_join_and_carry_rows():
    prompts, lengths = np.array([[1, 2], [3, 256], [4, 256]], np.int32), np.array([2, 1, 1], np.int32)
    rows = fill_free_rows(ROWS, prompts, lengths)
    np.testing.assert_array_equal(rows.tokens[:, :2], prompts)
    first = generated(
        [[1, 2, 7, 7, 0, 0], [3, 9, 0, 0, 0, 0], [4, 8, 8, 0, 0, 0]], [4, 2, 3], lengths, route=1
    )
    joined = join_windows(rows, first)
    for actual, expected in zip(joined, first, strict=True):
        np.testing.assert_array_equal(actual, expected)
    carried = carry_unfinished(rows, joined, np.array([False, True, False]), step=5)
    assert carried.drawn.tolist() == [5, EMPTY, 5]
    assert carried.lengths.tolist() == [4, 0, 3]
    assert carried.tokens.tolist() == [[1, 2, 7, 7, 0, 0], [0] * 6, [4, 8, 8, 0, 0, 0]]
    # In the next step the second row has a new prompt, and the others continue, with different routes.
    rows = fill_free_rows(carried, prompts[[1, 0, 1]], lengths[[1, 0, 1]])
    assert rows.lengths.tolist() == [4, 2, 3]
    second = generated(
        [[1, 2, 7, 7, 6, 6], [1, 2, 5, 0, 0, 0], [4, 8, 8, 6, 6, 0]], [6, 3, 5], rows.lengths, route=2
    )
    joined = join_windows(rows, second)
    assert joined.response_mask.sum(1).tolist() == [4, 1, 4]
    assert joined.expert_ids[..., 0, 0].tolist() == [
        [1, 1, 1, 1, 2, 2],
        [2, 2, 2, 0, 0, 0],
        [1, 1, 1, 2, 2, 0],
    ]
    assert joined.log_probs.tolist() == [[0, 0, -1, -1, -2, -2], [0, 0, -2, 0, 0, 0], [0, -1, -1, -2, -2, 0]]
    # The first response is whole; the others have ended if an end token says so, and groups wait for all of theirs.
    learned = find_learned(joined, response_tokens=4, compared=1)
    assert learned.tolist() == [True, True, True]
    assert find_learned(joined, response_tokens=5, compared=1).tolist() == [False, True, False]
    assert find_learned(joined, response_tokens=5, compared=3).tolist() == [False] * 3
    # A response that waits is not sampled, and keeps its tokens.
    waiting = carry_unfinished(rows, joined, np.zeros(3, bool), step=6)
    assert waiting.to_sample(5).tolist() == [6, 0, 5]
    nothing = generated(np.full((3, 6), 9), [6, 0, 5], [6, 0, 5], route=3)._replace(ended=np.zeros(3, bool))
    again = join_windows(waiting, nothing)
    for name in ("tokens", "mask", "response_mask", "expert_ids", "log_probs"):
        np.testing.assert_array_equal(getattr(again, name)[1], getattr(joined, name)[1], err_msg=name)
    assert again.ended.tolist() == [False, True, False]
    carried = carry_unfinished(rows, joined, np.array([True, True, True]), step=6)
    for actual, expected in zip(carried, ROWS, strict=True):
        np.testing.assert_array_equal(actual, expected)
