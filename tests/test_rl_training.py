"""Small training runs: planning and stopping do not change what is learned, and failures are reported."""

import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from rich.console import Console
from support.runs import SIZES, SMALL, SMALLEST, update_from

from experiments.rl.configs import Train
from experiments.rl.losses import token_weights
from experiments.rl.metrics_log import MetricsLog, read_metrics
from experiments.rl.planner_settings import Reorder, Replicate
from experiments.rl.report import summarise, training_figure
from experiments.rl.rewards import Rewards, score_responses
from experiments.rl.stages import recompute_planned
from experiments.rl.step import recompute
from experiments.rl.step_clock import StepClock
from experiments.rl.tasks import TASKS
from experiments.rl.tokens import BYTES
from experiments.rl.train import run_train
from experiments.rl.trainer import Trainer
from experiments.run import main
from relibra_jax.contract.plan import replica_experts, resident_experts
from relibra_jax.contract.planner import PlanRequest
from relibra_jax.contract.recording import UNKNOWN
from relibra_jax.contract.types import EMPTY, RoutingReplay
from relibra_jax.evaluation import Ranks
from relibra_jax.nnx import check_executed, get_homes
from relibra_jax.planning.placement import place_experts
from relibra_jax.traces.read import read_trace

pytestmark = pytest.mark.usefixtures("smallest_policy")
# The tolerance is on the norm of the difference between two runs' parameters, relative to the norm of what the updates
# changed. Runs differ because float32 sums have a different order, and AdamW divides small gradients by their own size.
UPDATES, TOLERANCE = 10, 1e-4


@pytest.fixture(scope="module", autouse=True)
def _first_sizes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.rl.state.FIRST_CAPACITIES", SIZES)
        yield


def small(**changes):
    return Train(**(SMALL | {"evaluation_batches": 1} | changes))


def logical(trainer):
    """Get the parameters as NumPy arrays by name, with experts in the order of their ids."""
    home = get_homes(trainer.state.agent)
    parameters = {}
    for path, leaf in jax.tree.leaves_with_path(nnx.state(trainer.state.agent, nnx.Param)):
        name, value = jax.tree_util.keystr(path), np.asarray(leaf)
        if "experts']['experts'" in name:
            rows = value.reshape(*home.shape, -1)
            value = np.take_along_axis(rows, home[..., None], axis=1)
        parameters[name] = value
    return parameters


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(other[name], value, err_msg=name)


@functools.cache
def recorded():
    """Sample responses from an untrained policy, with random rewards; return its parameters and the batches."""
    trainer = Trainer(small(), 0)
    batches = []
    for number in range(UPDATES):
        responses = trainer.sampler.respond(
            trainer.sampler.examples(number), jax.random.key(number)
        ).responses
        reward = np.random.default_rng(number).random(len(responses.tokens), np.float32)
        batches.append((responses, Rewards(reward, np.ones(len(reward), bool), [])))
    return logical(trainer), batches


def learn_from(trainer, responses, rewards):
    """Make one balanced update from recorded responses, and return its loss."""
    stages = trainer.prepare(responses, StepClock())
    topology = trainer.config.topology
    recomputed = recompute_planned(trainer.state, trainer.config, stages)
    assert (recomputed.residents is not None) == (topology.resident_slots > 0)
    if recomputed.residents is not None:
        assert (resident_experts(stages.updates[0].batch.batch_plan.plan, topology) != EMPTY).any()
    return float(update_from(trainer, stages, responses, rewards, recomputed).policy.loss)


@functools.cache
def trained(planner, resident_slots=0):
    ranks = dataclasses.replace(small().ranks, resident_slots=resident_slots)
    trainer = Trainer(small(planner=planner, epochs=1, ranks=ranks), 0)
    losses = [learn_from(trainer, *batch) for batch in recorded()[1]]
    return logical(trainer), losses, get_homes(trainer.state.agent)


@pytest.mark.long
@pytest.mark.parametrize("resident_slots", [0, 1])
def test_balancing_does_not_change_learning(resident_slots):
    start, _ = recorded()
    (balanced, losses, home), (still, expected, at_birth) = (
        trained("relibra", resident_slots),
        trained("static"),
    )
    assert (home != at_birth).any(), "experts have moved"
    np.testing.assert_allclose(losses, expected, atol=1e-5)
    for name, value in still.items():
        moved = np.linalg.norm(value - start[name])
        assert moved > 1e-3, name
        assert np.linalg.norm(balanced[name] - value) < TOLERANCE * moved, name


@pytest.mark.long
def test_recompute_equals_the_log_probs_of_generation():
    trainer, (responses, _) = Trainer(small(), 0), recorded()[1][0]
    ((batch, samples),) = trainer.prepare(responses, StepClock()).recompute
    ran = recompute(trainer.state.agent, batch, samples, temperature=1.0)
    log_probs = np.where(responses.response_mask, batch.from_ranks(ran.log_probs), 0)
    np.testing.assert_allclose(log_probs, responses.log_probs, atol=2e-5)
    check_executed(ran.slot_rows, batch)
    assert ran.expert_ids is None
    assert int(np.asarray(ran.load).sum()) == responses.mask.sum() * SMALLEST.layers * SMALLEST.top_k


@pytest.fixture(scope="module")
def prepared():
    """Prepare a batch of random routing."""
    state, rng = Trainer(small(), 0).state, np.random.default_rng(0)
    ids = np.argsort(rng.random((32, 21, SMALLEST.layers, 16)))[..., : SMALLEST.top_k].astype(np.uint8)
    replay = RoutingReplay(ids, np.ones(ids.shape[:2], bool))
    return state.balancer.prepare(state.agent, state.optimizer, replay)


@pytest.mark.slow
def test_check_executed_notices_rows_that_differ_from_the_plan(prepared):
    rows = np.array(prepared.batch_plan.plan.quota)
    check_executed(rows, prepared)
    rows[1, 0, 0, 0, 1] += 1
    with pytest.raises(
        RuntimeError, match=r"micro-batch 1, layer 0, node 0, rank 0, slot 1: expert \d+ computed"
    ):
        check_executed(rows, prepared)


def run(folder, console=None, *, task=None, **changes):
    console = Console(quiet=True) if console is None else console
    config = small(**changes)
    where = {"resume": folder} if (folder / "config.json").exists() else {"out": folder}
    return run_train(dataclasses.replace(config, **where), console, task=task)


def numbers(folder):
    """Read the metrics of a run, without times."""
    lines = read_metrics(folder / "seed-0" / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "speed/"))} for line in lines]


def last_checkpoint(folder, config):
    trainer = Trainer(config, 0)
    with ocp.CheckpointManager((folder / "seed-0" / "checkpoints").absolute()) as manager:
        trainer.state.restore(manager)
    return trainer


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Make a run that is never stopped and records its routing; return its folder."""
    folder = tmp_path_factory.mktemp("runs") / "unbroken"
    run(folder, record=2, seeds=(0, 1))
    return folder


@pytest.mark.slow
def test_run_writes_metrics_report_checkpoint_and_trace(unbroken):
    lines = numbers(unbroken)
    kinds = ["warm-up", "evaluation", "learn", "learn", "learn", "evaluation"]
    assert [(line["step"], line["kind"]) for line in lines] == list(
        zip((0, 1, 1, 2, 3, 4), kinds, strict=True)
    )
    learn_lines = [line for line in lines if line["kind"] == "learn"]
    for line in learn_lines:
        assert 1 <= line["balance/imbalance"] <= line["balance/imbalance_bound"] * 1.01
        assert line["balance/imbalance"] < line["balance/imbalance_static"]
        assert len(line["balance/imbalance_by_micro_batch"]) == 2
    summary = json.loads((unbroken / "summary.json").read_text())["seeds"]["0"]
    assert summary["steps"] == 3
    assert summary["imbalance_static"] == pytest.approx(
        np.mean([line["balance/imbalance_static"] for line in learn_lines])
    )
    assert summary["reward_end"] == lines[-1]["evaluation/reward"]
    steps = [line for line in read_metrics(unbroken / "seed-0" / "metrics.jsonl") if line["kind"] == "learn"]
    speeds = [small().epochs * line["batch/tokens"] / line["time/update_seconds"] for line in steps]
    assert summary["update_tokens_per_second"] == pytest.approx(np.median(speeds))
    assert (unbroken / "training.png").read_bytes().startswith(b"\x89PNG")
    trace = read_trace(unbroken / "seed-0" / "replay.npz")
    assert (trace.num_experts, trace.note) == (16, "")
    assert trace.replay.mask.shape[0] == 64
    assert trace.replay.expert_ids.shape[2:] == (2, 2)
    step, prompt, rewards, versions, provenance = trace.recording
    np.testing.assert_array_equal(step, np.repeat([2, 3], 32))
    np.testing.assert_array_equal(prompt, np.tile(np.repeat(np.arange(8), 4), 2))
    for line in learn_lines[1:]:
        assert rewards[step == line["step"]].mean() == pytest.approx(line["reward/mean"])
    sampled = versions != UNKNOWN
    assert (versions[sampled] == np.broadcast_to(step[:, None], versions.shape)[sampled]).all()
    assert sampled.sum(1).max() <= 7, "prompts have no version"
    assert provenance["sizes"]["experts"] == 16
    assert provenance["settings other than the defaults"]["record"] == 2
    assert str(unbroken) not in json.dumps(provenance)
    assert not list((unbroken / "seed-0").glob("routing-*"))


@pytest.mark.slow
def test_stopped_and_resumed_run_equals_an_unbroken_one_bit_for_bit(unbroken, tmp_path, monkeypatch):
    learn = Trainer.learn

    def interrupted(trainer):
        metrics = learn(trainer)
        if trainer.state.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return metrics

    folder = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "learn", interrupted)
        run(folder)
    assert [line["step"] for line in numbers(folder)] == [0, 1, 1]
    assert not (folder / "summary.json").exists()
    run(folder)
    assert numbers(folder) == numbers(unbroken)
    one, other = last_checkpoint(unbroken, small()), last_checkpoint(folder, small())
    assert one.state.step == other.state.step == 4
    assert_same_bits(logical(one), logical(other))


@pytest.mark.slow
def test_killed_run_repeats_the_steps_since_its_checkpoint(unbroken, tmp_path, monkeypatch):
    learn = Trainer.learn

    def killed(trainer):
        if trainer.state.step == 3:
            raise KeyboardInterrupt
        return learn(trainer)

    folder = tmp_path / "killed"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "learn", killed)
        with pytest.raises(KeyboardInterrupt):
            run(folder, checkpoint_every=2, record=2)
    assert [line["step"] for line in numbers(folder)] == [0, 1, 1, 2]
    with (folder / "seed-0" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "ki')
    run(folder, checkpoint_every=2, record=2)
    assert numbers(folder) == numbers(unbroken)
    with (
        np.load(folder / "seed-0" / "replay.npz") as one,
        np.load(unbroken / "seed-0" / "replay.npz") as other,
    ):
        assert one.files == other.files
        for name in set(one.files) - {"provenance"}:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.long
def test_checkpoint_restored_on_another_mesh_gives_the_same_update(unbroken):
    responses, rewards = recorded()[1][0]
    here, there = small(), small(ranks=Ranks(nodes=2, ranks_per_node=2), anneal_steps=0)
    after = []
    for config in (here, there):
        trainer = last_checkpoint(unbroken, config)
        before = logical(trainer)
        learn_from(trainer, responses, rewards)
        after.append(logical(trainer))
    for name, value in after[0].items():
        moved = np.linalg.norm(value - before[name])
        assert np.linalg.norm(after[1][name] - value) < TOLERANCE * moved, name


@pytest.mark.slow
def test_checkpoint_of_another_model_is_rejected_with_the_difference(unbroken, monkeypatch):
    wider = dataclasses.replace(SMALLEST, expert_width=24)
    monkeypatch.setattr("experiments.rl.configs.POLICIES", {"smallest": wider})
    with pytest.raises(
        ValueError,
        match=r"step 4: array '.*experts.*' is float32\[2, 16, 3, 16, 16\], but float32.*24\] in the model",
    ):
        last_checkpoint(unbroken, small())


@pytest.mark.slow
def test_settings_that_a_checkpoint_rejects_are_not_saved(unbroken):
    before = (unbroken / "config.json").read_text()
    with pytest.raises(ValueError, match="balancer"):
        run(unbroken, planner="static")
    assert (unbroken / "config.json").read_text() == before


@pytest.mark.slow
def test_summarise_and_figure_accept_steps_with_different_settings(unbroken, tmp_path):
    lines = read_metrics(unbroken / "seed-0" / "metrics.jsonl")
    changed = lines[-2]
    assert changed["kind"] == "learn"
    changed["balance/imbalance_by_micro_batch"], changed["balance/imbalance_live"] = [1.0], 1.5
    changed["balance/imbalance_static_by_micro_batch"] = [1.2]
    assert summarise(lines)["imbalance_live"] == 1.5
    learned = [line for line in lines if line["kind"] == "learn"]
    changed["speed/response_tokens_per_second"] = None  # as with staleness
    assert summarise(lines)["response_tokens_per_second"] > 0
    assert "response_tokens_per_second" not in summarise(
        [{**line, "speed/response_tokens_per_second": None} for line in learned]
    )
    training_figure(tmp_path / "figure.png", {0: lines}, "changed on the way")


def test_main_takes_resumed_settings_as_defaults(tmp_path, capsys):
    saved = small(policy="tiny", prompts=40, responses_per_prompt=6, micro_batches=3)
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(saved)))
    for override, shown in (
        ("--micro-batches=7", "x responses_per_prompt=6 = 240 samples"),
        ("--out=b", "and out=b: give one of them"),
    ):
        assert main(["demo", "--resume", str(tmp_path), override]) == 2
        assert shown in capsys.readouterr().err


@pytest.mark.slow
def test_live_updates_count_the_choices_that_differ_from_the_record():
    trainer = Trainer(small(replay=False), 0)
    first, second = trainer.learn(), trainer.learn()
    assert len(first["routing/changed_share_by_layer"]) == SMALLEST.layers
    assert first["balance/imbalance_live"] > first["balance/imbalance"]
    assert all(0 <= share < 0.5 for share in second["routing/changed_share_by_layer"])


def test_score_responses_masks_only_the_sample_whose_reward_function_raises():
    def score(completion, example):
        if example.prompt.endswith("b: "):
            raise KeyError("b")
        return TASKS["copy"].score(completion, example)

    task = dataclasses.replace(TASKS["copy"], score=score)
    examples = Trainer(small(), 0, task=task).sampler.examples(0)
    examples[5] = examples[5]._replace(prompt="copy ab: ")
    prompts = [BYTES.encode_prompt(example.prompt) for example in examples]
    tokens = BYTES.pad_sequences([prompt + [65, 66] for prompt in prompts], 21)
    response = np.array([np.arange(21) >= len(prompt) for prompt in prompts]) & (tokens != BYTES.pad)
    rewards = score_responses(task, examples, tokens, response)
    assert rewards.scored.sum() == len(examples) - 1
    assert rewards.failures[0].text.startswith("sample 5: prompt 'copy ab: '")
    assert "KeyError('b')" in rewards.failures[0].text
    weight = np.asarray(token_weights(response & rewards.scored[:, None]))
    assert not weight[5].any()
    assert weight.sum() == pytest.approx(1, abs=1e-6)


@pytest.mark.slow
def test_run_continues_if_all_rewards_fail(tmp_path):
    def score(completion, example):
        raise RuntimeError("no judge")

    task = dataclasses.replace(TASKS["copy"], score=score)
    with (tmp_path / "shown").open("w") as file:
        run(tmp_path / "run", Console(file=file, width=200), task=task)
    lines = [line for line in numbers(tmp_path / "run") if line["kind"] == "learn"]
    assert [(line["reward/failed"], line["reward/mean"], line["policy/loss"]) for line in lines] == [
        (32, None, 0)
    ] * 3
    assert "RuntimeError('no judge')" in (tmp_path / "shown").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"planner": "relibr"}, "planner 'relibr' must be one of static,.*did you mean relibra"),
        ({"policy": "tin"}, "policy 'tin' must be one of .*did you mean tiny"),
        ({"prompts": 3}, "prompts=3 x responses_per_prompt=4 = 12 samples must divide evenly over 8 ranks"),
        ({"temperature": 0.0}, "temperature=0.0 must be positive"),
        ({"steps": -1}, "steps=-1 must be an integer of at least 0"),
        (
            {"planner": "eplb", "reorder": Reorder(steps=5)},
            r"planner=eplb does not use Reorder\(.*, which is only for relibra",
        ),
    ],
)
def test_train_rejects_bad_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_prompts_that_are_too_long_are_rejected_with_the_setting():
    trainer = Trainer(small(response_tokens=3), 0)
    with pytest.raises(
        ValueError,
        match=r"only 0 of 256 examples fit .*response_tokens=3, and 32 are .* has 14 tokens and .* 7$",
    ):
        trainer.warm_up()


def test_prompts_skip_examples_that_are_too_long():
    examples = Trainer(small(response_tokens=5), 0).sampler.examples(0)
    assert len(examples) == 32
    assert max(len(example.answer) for example in examples) == 4


@pytest.mark.long
def test_planner_settings_reach_the_planner(tmp_path):
    settings = small(reorder=Reorder(steps=3), replicate=Replicate(min_tokens=10**6))
    entry, topology = settings.planner_entry, settings.topology
    assert entry is small(reorder=settings.reorder, replicate=settings.replicate).planner_entry
    request = PlanRequest(np.random.default_rng(0).integers(0, 99, (2, 2, 2, 4, 16), np.int32))
    state = entry.planner.init(topology, 2, key=jax.random.key(0))
    plan, _ = jax.jit(entry.planner.update)(request, state, topology)
    key, _ = jax.random.split(state.key)
    few_steps, many_steps = (
        place_experts(request, state.home, topology, key=key, steps=steps).home for steps in (3, 500)
    )
    np.testing.assert_array_equal(plan.home, few_steps)
    assert (np.asarray(many_steps) != np.asarray(few_steps)).any()
    assert (replica_experts(plan, topology) == EMPTY).all()
    with pytest.raises(ValueError, match="min_tokens=0 must be an integer of at least 1"):
        run(tmp_path, replicate=Replicate(min_tokens=0))
    assert not list(tmp_path.iterdir())


def test_main_returns_2_for_unknown_names(capsys, tmp_path):
    assert main(["dmeo"]) == 2
    assert re.fullmatch(
        r"error: configuration 'dmeo' must be a .* demo, .*; did you mean demo\?\n", capsys.readouterr().err
    )
    assert main(["demo", "--prompt", "3"]) == 2
    assert "--prompts" in capsys.readouterr().err
    assert main(["demo", "--resume", str(tmp_path)]) == 2
    assert "no run to resume" in capsys.readouterr().err
    assert main(["--list"]) == 0
    assert "learn" in capsys.readouterr().out


def test_metrics_log_drops_lines_of_steps_that_are_repeated(tmp_path):
    with MetricsLog(tmp_path, 0) as log:
        for step in range(3):
            log.write(step, {"kind": "learn", "value": step})
    with MetricsLog(tmp_path, 1) as log:
        log.write(1, {"kind": "learn", "value": 7})
    assert [line["value"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0, 7]
    assert summarise([])["steps"] == 0


@pytest.mark.slow
def test_importing_run_does_not_start_jax():
    program = (
        "import experiments.run, jax; jax.config.update('jax_num_cpu_devices', 3); print(jax.device_count())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    shown = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert shown.stdout == "3\n"
