"""Responses of several turns: what the policy wrote and what it did not, its routes, and what is learned from it."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console
from support.runs import HASTY, SMALL

from experiments.engines.protocol import Generation
from experiments.rl.advantages import discounted_returns, generalized_advantages
from experiments.rl.calculator import calculate
from experiments.rl.configs import Train
from experiments.rl.dapo import Dapo
from experiments.rl.generation import Responses
from experiments.rl.metrics import names_of
from experiments.rl.prompts import Prompts
from experiments.rl.rewards import score_responses
from experiments.rl.run_folder import save_config, saved_config
from experiments.rl.step_clock import StepClock
from experiments.rl.targets import compute_targets
from experiments.rl.tasks import TASKS, Example, Task
from experiments.rl.tokens import BOS, BYTES, EOS
from experiments.rl.trainer import Trainer
from experiments.rl.turns import count_tokens_run, measure_turns, respond_in_turns
from relibra_jax.models import token_log_probs

PROMPT, LONGEST, TURN = 6, 20, 5
SETTINGS = {"task": "calculator", "prompt_tokens": PROMPT, "response_tokens": LONGEST}
SETTINGS |= {"turns": 3, "turn_tokens": TURN}
REPLIES = {"1+1=": "2\n", "9=": "", "a=": "bc", "long=": "x" * 11}
SCRIPTS = {
    "p0": ["1+1=|", "2|"],
    "p01": ["a=|", "a=|", "last|", "a fourth turn"],
    "p2": ["9=|", "9|"],
    "p3": ["7|", "a turn after the answer"],
    "p4": ["a=bcd", "a turn after one that was cut off"],
    "p5": ["long|", "a turn after a reply that is too long"],
    "p6": ["bad=|", "a turn after a failure"],
    "p7": ["a=|", None],
}
"""What the policy writes in each turn after a prompt. A bar is the end of a turn, and None a sample that is dropped."""


def reply(turns, example):
    if turns[-1] == "bad=":
        raise RuntimeError("no tool")
    return REPLIES.get(turns[-1] if turns[-1] != "long" else "long=")


class ScriptedEngine:
    """An engine that writes scripts. It runs no last token: that one has the route of the token before.

    The log-probability of a token and its one expert tell the turn that sampled or ran it, and the position.
    """

    def __init__(self):
        self.asked = []

    def __call__(self, conversations, lengths, turn):
        samples, width = conversations.shape
        self.asked.append(lengths.tolist())
        tokens = np.full((samples, width + TURN), 256, np.int32)
        lasts, ended = np.zeros(samples, np.int32), np.zeros(samples, bool)
        for sample in np.flatnonzero(lengths):
            before = conversations[sample, : lengths[sample]].tolist()
            script = SCRIPTS[list(SCRIPTS)[sample]][turn]
            if script is None:
                continue
            text = [EOS if letter == "|" else ord(letter) for letter in script]
            lasts[sample], ended[sample] = len(before) + len(text), text[-1] == EOS
            tokens[sample, : lasts[sample]] = before + text
        place = np.arange(width + TURN)
        mask = place < lasts[:, None]
        response_mask = mask & (place >= lengths[:, None])
        route = np.where(mask, 32 * (turn + 1) + np.minimum(place, lasts[:, None] - 2), 0)
        log_probs = np.where(response_mask, -(turn + 1) - place / 100, 0).astype(np.float32)
        responses = Responses(
            tokens, mask, response_mask, route[..., None, None].astype(np.uint8), log_probs, ended
        )
        dropped = (lengths > 0) & (lasts == 0)
        version = np.where(response_mask, turn + 5, -1)
        return Generation(responses, version, dropped, (lasts > 0).astype(np.int32), 1)


@pytest.fixture(scope="module")
def scripted():
    """Return the engine, the settings' prompts, the examples and the responses of all scripts."""
    task = Task(
        name="scripted",
        draw=lambda seed, count: [],
        score=lambda text, example: float(len(text)),
        reply=reply,
    )
    prompts, engine = Prompts(Train(**SETTINGS), task, BYTES), ScriptedEngine()
    examples = [Example(prompt, "") for prompt in SCRIPTS]
    return engine, prompts, examples, respond_in_turns(engine, prompts, examples, *prompts.encode(examples))


def by_hand(prompt, parts):
    """Return each token of a response with its expert and its log-probability, 0 for tokens of prompt and replies.

    Args:
        prompt: the prompt.
        parts: turns and replies in turn.
    """
    rows = [(token, 32 + place, 0.0) for place, token in enumerate([BOS, *prompt.encode()])]
    for number, part in enumerate(parts):
        turn, written = number // 2 + 1, number % 2 == 0
        for letter in part:
            place = len(rows)
            # The last token of a turn, and the reply after it, run in the next turn.
            ran = turn + 1 if letter == "|" or not written else turn
            log_prob = np.float32(-turn - place / 100) if written else 0.0
            rows.append((EOS if letter == "|" else ord(letter), 32 * ran + place, log_prob))
    token, _, log_prob = rows[-1]  # No turn follows, so the engine does not run it.
    return [*rows[:-1], (token, rows[-2][1], log_prob)]


@pytest.mark.parametrize(
    ("sample", "parts"),
    [
        (0, ["1+1=|", "2\n", "2|"]),
        (1, ["a=|", "bc", "a=|", "bc", "last|"]),
        (2, ["9=|", "", "9|"]),
        (3, ["7|"]),
        (4, ["a=bcd"]),
    ],
)
def test_responses_join_turns_and_replies(scripted, sample, parts):
    responses = scripted[-1].responses
    mask, written = responses.mask[sample], responses.response_mask[sample]
    rows = by_hand(list(SCRIPTS)[sample], parts)
    assert mask.tolist() == [place < len(rows) for place in range(PROMPT + LONGEST)]
    tokens, routes, log_probs = zip(*rows, strict=True)
    assert responses.tokens[sample][mask].tolist() == list(tokens)
    assert responses.expert_ids[sample, :, 0, 0][mask].tolist() == list(routes)
    assert responses.log_probs[sample][mask].tolist() == list(log_probs)
    assert (written == (responses.log_probs[sample] < 0)).all(), "masks have the tokens of the policy alone"
    versions = [5 + number // 2 for number, part in enumerate(parts) if number % 2 == 0 for _ in part]
    assert scripted[-1].version[sample][written].tolist() == versions
    assert (scripted[-1].version[sample][~written] == -1).all()
    assert responses.ended[sample] == parts[-1].endswith("|")
    assert not responses.expert_ids[sample][~mask].any()
    assert not responses.log_probs[sample][~written].any()


def test_replies_without_a_turn_after_them_are_left_out(scripted):
    """The reply to sample 5 leaves no room for the largest turn, so the response ends with the policy's turn."""
    responses = scripted[-1].responses
    assert BYTES.decode_turns(responses.tokens[5][responses.response_mask[5]].tolist()) == ["long"]
    assert responses.mask[5].sum() == 3 + 5


def test_failed_replies_and_dropped_turns_leave_the_sample_out(scripted):
    *_, generation = scripted
    assert np.flatnonzero(generation.dropped).tolist() == [6, 7]
    for name in ("mask", "response_mask", "expert_ids", "log_probs", "ended"):
        assert not getattr(generation.responses, name)[6:].any(), name
    assert (generation.version[6:] == -1).all()
    [failure] = generation.failures
    assert failure == "sample 6: prompt 'p6', reply to turns ['bad=']: RuntimeError('no tool')"
    # Of each response only the very last token has no route of its own.
    assert generation.filled.tolist() == [1] * 6 + [0] * 2
    assert generation.retried == 3


def test_a_process_joins_the_routes_of_its_own_samples(scripted):
    _, prompts, examples, whole = scripted
    engine, own = ScriptedEngine(), np.array([1, 4, 6])

    def generate(*arguments):
        generation = engine(*arguments)
        responses = generation.responses
        return generation._replace(
            responses=responses._replace(expert_ids=responses.expert_ids[own], own=own)
        )

    responses = respond_in_turns(generate, prompts, examples, *prompts.encode(examples)).responses
    np.testing.assert_array_equal(responses.own, own)
    np.testing.assert_array_equal(responses.expert_ids, whole.responses.expert_ids[own])
    np.testing.assert_array_equal(responses.tokens, whole.responses.tokens)


def test_the_engine_is_asked_for_unfinished_responses_only(scripted):
    first, second, third = scripted[0].asked
    assert first == [1 + len(prompt) for prompt in SCRIPTS]
    assert second == [3 + 7, 4 + 5, 3 + 3, 0, 0, 0, 0, 3 + 5]
    assert third == [0, 4 + 5 + 5, 0, 0, 0, 0, 0, 0]


def test_rewards_are_for_the_last_turn(scripted):
    _, prompts, examples, generation = scripted
    tokens, written = generation.responses.tokens, generation.responses.response_mask
    rewards = score_responses(prompts.task, examples, tokens, written, finished=~generation.dropped)
    assert rewards.reward.tolist() == [1, 4, 1, 1, 5, 4, 0, 0]


def test_metrics_count_turns_replies_and_repeated_prefixes(scripted):
    responses = scripted[-1].responses
    metrics = measure_turns(responses, BYTES.ends, samples_at_once=4)
    assert metrics["response/turns"] == (2 + 3 + 2 + 1 + 1 + 1) / 6
    assert metrics["response/reply_tokens"] == (2 + 4) / 6
    # Waves of four samples: 5, 3 and 5 decoding steps of their turns, and 5.
    assert metrics["response/slots_used_share"] == pytest.approx(35 / (4 * (5 + 3 + 5 + 5)))
    runs = [(8, 12), (7, 12, 19), (6, 8), (5,), (8,), (8,)]
    assert count_tokens_run(responses, BYTES.ends) == sum(map(sum, runs))


def test_advantages_pass_over_replies():
    """They equal those of the policy's tokens alone, which a loop in float64 computes."""
    rng = np.random.default_rng(0)
    samples, tokens, discount, decay = 6, 24, 0.9, 0.8
    written = rng.random((samples, tokens)) < 0.6
    written[:, :2] = False
    values, rewards = (
        rng.normal(size=(samples, tokens)).astype(np.float32),
        rng.random(samples).astype(np.float32),
    )
    finished = np.arange(samples) % 2 == 0
    actual = generalized_advantages(values, rewards, written, finished, discount=discount, decay=decay)
    returns = discounted_returns(rewards, written, discount=discount)
    assert not np.asarray(actual)[~written].any()
    for sample in range(samples):
        value = values[sample][written[sample]].astype(np.float64)
        following = np.append(value[1:], 0.0 if finished[sample] else value[-1])
        reward = np.zeros_like(value)
        reward[-1] = rewards[sample] if finished[sample] else 0
        expected, advantage = [], 0.0
        for delta in (reward + discount * following - value)[::-1]:
            advantage = delta + discount * decay * advantage
            expected.append(advantage)
        np.testing.assert_allclose(actual[sample][written[sample]], expected[::-1], atol=1e-5)
        powers = discount ** np.arange(len(value))[::-1].astype(np.float64)
        np.testing.assert_allclose(returns[sample][written[sample]], powers * rewards[sample], rtol=1e-5)


def test_warm_up_learns_from_turns_and_not_from_replies():
    example = Example("2*3+4=", "10", turns=("2*3+4=",))
    settings = {"task": "calculator", "prompt_tokens": 8, "response_tokens": 20}
    for changes, expected in (
        ({"turns": 2, "turn_tokens": 8}, [("2*3+4=|", True), ("10\n", False), ("10|", True)]),
        ({}, [("10|", True)]),
    ):
        prompts = Prompts(Train(**settings, **changes), TASKS["calculator"], BYTES)
        tokens, mask, written = prompts.supervise([example])
        parts = [("_2*3+4=", False), *expected]
        text = "".join(part for part, _ in parts)
        letters = {BOS: "_", EOS: "|"}
        assert "".join(letters.get(token, chr(token)) for token in tokens[0][mask[0]].tolist()) == text
        assert written[0][mask[0]].tolist() == [flag for part, flag in parts for _ in part]
        assert not written[~mask].any()


def test_examples_must_leave_room_for_their_last_turn():
    prompts = Prompts(
        Train(**SETTINGS | {"prompt_tokens": 12, "response_tokens": 26}), TASKS["calculator"], BYTES
    )
    with pytest.raises(
        ValueError,
        match=r"only \d of 64 examples fit prompt_tokens=12 and response_tokens=26 with turn_tokens=5, and 8 are"
        r" needed; the longest prompt has \d+ tokens, the longest turn \d+, and responses need room for \d+",
    ):
        prompts.draw((0,), 8)


def test_calculator_computes_sums_differences_and_products():
    for example in TASKS["calculator"].sample(0, 50):
        [call] = example.turns
        assert TASKS["calculator"].reply([call], example) == f"{example.answer}\n"
        assert TASKS["calculator"].reply([call, example.answer], example) is None
    assert calculate("7-(2+-3)*4") == 11
    assert calculate("9" * 64) == int("9" * 64)


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("", "not an expression"),
        ("1+", "not an expression"),
        ("2**3", "not an expression"),
        ("1(2)", "not an expression"),
        ("((((1", "not an expression"),
        ("1/2", r"only integers and \+ - \* \( \)"),
        ("__import__('os')", "only integers"),
        ("1" * 65, "more than 64 characters"),
    ],
)
def test_calculator_rejects_everything_else_in_one_line(expression, says):
    with pytest.raises(ValueError, match=says):
        calculate(expression)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"turns": 2},
            "turns=2 with turn_tokens=None: several turns need turn_tokens, and one turn has none",
        ),
        ({"turn_tokens": 3}, "turns=1 with turn_tokens=3: several turns need turn_tokens"),
        ({"turns": 0}, "turns=0 must be an integer of at least 1"),
        (
            {"turns": 2, "turn_tokens": 20, "response_tokens": 20},
            "turn_tokens=20 must be below response_tokens=20: a second turn needs room for so many tokens",
        ),
        (
            {"turns": 2, "turn_tokens": 4, "algorithm": "tppo", "response_tokens": 48, "window": 24},
            "turns=2 is not for window=24, which cuts turns off",
        ),
        (
            {"turns": 2, "turn_tokens": 4, "response_tokens": 20, "plan_ahead": 0.5},
            "turns=2: responses whose turn has ended may go on, so plan_ahead=0.5 cannot plan for them",
        ),
    ],
)
def test_settings_of_turns_that_mean_nothing_are_errors(changes, says):
    with pytest.raises(ValueError, match=says):
        Train(**changes)


def test_turns_need_a_task_that_replies():
    with pytest.raises(
        ValueError, match="turns=3 needs a task that replies to turns, and task 'count' does not"
    ):
        Prompts(Train(**SETTINGS), TASKS["count"], BYTES)
    quiet = dataclasses.replace(TASKS["calculator"], reply=lambda turns, example: None)
    prompts = Prompts(Train(**SETTINGS), quiet, BYTES)
    with pytest.raises(
        ValueError, match=r"no reply to turns \['1='\] of its example '1=', so its answer could not"
    ):
        prompts.supervise([Example("1=", "1", turns=("1=",))])


def test_settings_of_turns_are_saved(tmp_path):
    config = Train(**SETTINGS)
    save_config(config, tmp_path, Console())
    assert saved_config(tmp_path) == config


TALKING = dataclasses.replace(
    TASKS["copy"],
    score=lambda completion, example: len(completion) % 3 / 2,
    reply=lambda turns, example: "more\n" if len(turns[-1]) != 1 else None,
)
"""A task that replies to most turns."""


@pytest.fixture(scope="module")
def trainer(smallest_policy):
    """Return the trainer of a run of two turns, without a warm-up, whose policy ends about half of its turns early."""
    settings = SMALL | {"warmup_steps": 0, "epochs": 1, "response_tokens": 14, "turns": 2, "turn_tokens": 4}
    settings |= {"evaluation_batches": 1, "planner": "static", "anneal_steps": 0}
    return Trainer(Train(**settings), 0, task=TALKING, tokenizer=HASTY)


@pytest.mark.slow
def test_recompute_of_whole_conversations_agrees_with_the_engine(trainer):
    """Of all tokens, replies too, the routes are those of one forward pass; of the policy's, the log-probabilities."""
    examples = trainer.sampler.examples(0)
    generation = trainer.sampler.respond(examples, jax.random.key(1))
    responses, policy, parallel = (
        generation.responses,
        trainer.state.agent.policy,
        trainer.state.balancer.live,
    )

    @nnx.jit
    def run(policy, tokens, mask):
        output = policy(tokens, mask, parallel=parallel)
        return output.expert_ids, token_log_probs(
            policy, output.hidden, tokens, parallel=parallel, temperature=1.0
        )

    turns = [
        HASTY.decode_turns(row[written].tolist())
        for row, written in zip(responses.tokens, responses.response_mask, strict=True)
    ]
    assert {1, 2} == set(map(len, turns))
    in_reply = responses.mask & ~responses.response_mask
    in_reply &= np.arange(in_reply.shape[1]) > responses.response_mask.argmax(1)[:, None]
    assert in_reply.sum() == 5 * sum(len(each) == 2 for each in turns)
    tokens = np.where(responses.mask, responses.tokens, 0).astype(np.int32)
    expert_ids, log_probs = jax.device_get(run(policy, tokens, responses.mask))
    np.testing.assert_array_equal(responses.expert_ids[responses.mask], expert_ids[responses.mask])
    expected = np.where(responses.response_mask, log_probs, 0)
    np.testing.assert_allclose(responses.log_probs, expected, atol=2e-5)


@pytest.mark.slow
def test_a_step_learns_from_the_policys_tokens_alone(trainer, monkeypatch):
    seen = []

    def recording(config, rollout, rewards, recomputed):
        targets, not_finite = compute_targets(config, rollout, rewards, recomputed)
        seen.append((rollout, rewards, recomputed, targets))
        return targets, not_finite

    monkeypatch.setattr("experiments.rl.trainer.compute_targets", recording)
    metrics = trainer.learn()
    [(rollout, rewards, recomputed, targets)] = seen
    written = rollout.responses.response_mask
    assert rewards.scored.all()
    np.testing.assert_array_equal(targets.policy_mask, written)
    assert np.abs(targets.advantages[written]).max() > 0.5
    assert not targets.advantages[~written].any()
    np.testing.assert_allclose(
        rollout.responses.log_probs[written], recomputed.old_log_probs[written], atol=5e-5
    )
    assert metrics.keys() - {"kind", "failures"} == names_of("learn")
    assert 1 < metrics["response/turns"] < 2
    assert 0 < metrics["response/reply_tokens"] < 5
    assert metrics["time/plan_ahead_seconds"] is None


@pytest.mark.slow
def test_dapo_replaces_prompts_of_several_turns(trainer):
    config = dataclasses.replace(trainer.config, algorithm="dapo", dapo=Dapo(overlong_share=0.5))
    other = Trainer(config, 0, task=TALKING, tokenizer=HASTY)
    with ThreadPoolExecutor(2) as executor:
        rollout = other.sampler.roll_out(executor, None, StepClock())
    responses, metrics = rollout.responses, rollout.metrics
    assert 1 < metrics["response/turns"] < 2
    assert rollout.tokens_run > responses.mask.sum()
    # Replies belong to the length that is penalised: the penalty starts after 7 of at most 14 tokens.
    lengths = responses.mask.sum(1) - responses.response_mask.argmax(1)
    assert metrics["reward/overlong"] == pytest.approx(np.maximum(lengths / 7 - 1, 0).mean())
    assert metrics["reward/overlong"] > 0


@pytest.mark.slow
def test_evaluations_report_failed_replies(trainer, monkeypatch):
    def fail(turns, example):
        raise RuntimeError("no tool")

    monkeypatch.setattr(trainer.prompts, "task", dataclasses.replace(TALKING, reply=fail))
    evaluation = trainer.evaluate()
    assert 0 < evaluation["evaluation/failed"] < 32
    assert evaluation["evaluation/samples"] == 32 - evaluation["evaluation/failed"]
    assert "RuntimeError('no tool')" in evaluation["failures"][0]
