"""Recordings of several training steps: files keep every part, and `relibra inspect` shows what steps change."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.engines.protocol import UNSAMPLED
from experiments.rl.configs import Train
from experiments.rl.evaluation import Evaluation
from experiments.rl.recording import describe_run, join_routing, record_batch, save_routing
from experiments.rl.rewards import Rewards
from experiments.rl.rollout import Rollout
from experiments.rl.tasks import TASKS, Example
from experiments.rl.tokens import Message
from relibra_jax.cli.main import main
from relibra_jax.contract.recording import UNKNOWN, Recording
from relibra_jax.contract.replay_files import save_replay
from relibra_jax.contract.types import RoutingReplay
from relibra_jax.evaluation import Batching, Ranks, make_setting
from relibra_jax.traces.bootstrap import bootstrap
from relibra_jax.traces.drift import measure_drift
from relibra_jax.traces.read import read_trace

LENGTHS = np.array([1, 3, 2, 2, 1])
MASK = np.arange(3) < LENGTHS[:, None]
REPLAY = RoutingReplay(np.arange(30, dtype=np.uint8).reshape(5, 3, 1, 2) % 8, MASK)
RECORDING = Recording(
    step=np.array([4, 4, 4, 6, 6]),
    prompt=np.array([0, 1, 1, 0, 1]),
    rewards=np.array([0.5, np.nan, 1, 0, 2], np.float32),
    versions=np.where(MASK & (np.arange(3) > 0), 3, UNKNOWN),
    provenance={"model": "tiny", "sizes": {"experts": 8}},
)


@pytest.mark.parametrize("absent", [None, *Recording._fields])
def test_a_trace_file_keeps_every_part_of_a_recording_and_needs_none(tmp_path, absent):
    recording = RECORDING if absent is None else RECORDING._replace(**{absent: None})
    save_replay(tmp_path / "steps.npz", REPLAY, num_experts=8, recording=recording)
    trace = read_trace(tmp_path / "steps.npz")
    for name, saved, read in zip(Recording._fields, recording, trace.recording, strict=True):
        assert (saved is None) == (read is None), name
        np.testing.assert_array_equal(read, saved, err_msg=name)
    drawn = bootstrap(trace, 8, seed=0).recording
    assert drawn == Recording(provenance=recording.provenance), "drawn batches mix the steps"


def test_recorded_prompts_are_those_of_rows_that_windows_mix():
    """There are two responses to each prompt; a carried one lies apart from the other."""
    chat = (Message("user", "a"),)
    prompts = ("b", "a", "b", chat, "a", chat)
    version, mask = np.full((6, 2), 4), np.ones((6, 2), bool)
    version[:, 0] = UNSAMPLED
    rollout = Rollout(
        *(None, mask, ~mask, mask[:, 0], None, None, 0, {}, version),
        examples=[Example(prompt, "", number) for number, prompt in enumerate(prompts)],
    )
    scored = np.arange(6) != 1
    recording = record_batch(rollout, Rewards(np.arange(6, dtype=np.float32), scored, []), step=4)
    assert recording.prompt.tolist() == [0, 1, 0, 2, 1, 2]
    assert recording.step.tolist() == [4] * 6
    np.testing.assert_array_equal(recording.rewards, [0, np.nan, 2, 3, 4, 5])
    assert recording.versions.tolist() == [[UNKNOWN, 4]] * 6


def test_provenance_states_what_ran_and_no_places():
    config = Train(
        prompts_file=Path("/somewhere/prompts.jsonl"),
        evaluation=Evaluation(prompts_file=Path("/somewhere/asked.jsonl"), pass_at=2),
        out=Path("/somewhere/out"),
        reward="my_reward:reward",
        warmup_steps=0,
        record=2,
    )
    about = describe_run(config, 3)
    assert "/somewhere" not in json.dumps(about)
    assert about["task"] == "own prompts"
    assert about["settings other than the defaults"] == {
        "reward": "my_reward:reward",
        "evaluation.pass_at": 2,
        "warmup_steps": 0,
        "record": 2,
    }
    assert "learn" not in about["recorded by"], "the configuration is not known"
    assert describe_run(Train(), 3)["task"] == Train().task
    assert describe_run(Train(), 3, TASKS["copy"])["task"] == "copy"


def test_parts_of_steps_join_to_one_trace_even_if_their_deletion_was_killed(tmp_path):
    short = RoutingReplay(REPLAY.expert_ids[3:, :2], MASK[3:, :2])
    last = RECORDING._replace(
        step=RECORDING.step[3:],
        prompt=RECORDING.prompt[3:],
        rewards=RECORDING.rewards[3:],
        versions=RECORDING.versions[3:, :2],
    )
    first = RECORDING._replace(
        step=RECORDING.step[:3],
        prompt=RECORDING.prompt[:3],
        rewards=RECORDING.rewards[:3],
        versions=RECORDING.versions[:3],
    )
    save_routing(tmp_path, 4, RoutingReplay(REPLAY.expert_ids[:3], MASK[:3]), first, num_experts=8)
    save_routing(tmp_path, 6, short, last, num_experts=8)
    kept = (tmp_path / "routing-6.npz").read_bytes()
    join_routing(tmp_path, range(3, 9), RECORDING.provenance)
    (tmp_path / "routing-6.npz").write_bytes(kept)
    join_routing(tmp_path, range(3, 9), RECORDING.provenance)
    assert [path.name for path in tmp_path.iterdir()] == ["replay.npz"]
    for saved, read in zip(RECORDING, read_trace(tmp_path / "replay.npz").recording, strict=True):
        np.testing.assert_array_equal(read, saved)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("step", np.zeros(4, np.int32), r"step must be integers \[5\], not int32\[4\]"),
        ("step", np.zeros(5), r"step must be integers \[5\], not float64\[5\]"),
        ("step", np.array([0, 0, -2, 0, 0]), r"step\[2\] is -2, but must be at least 0"),
        ("prompt", np.zeros((5, 1), int), r"prompt must be integers \[5\], not int64\[5, 1\]"),
        ("rewards", np.zeros(5, int), r"rewards must be floats \[5\], not int64"),
        ("rewards", np.array([0, 1, np.inf, 0, 0]), r"rewards\[2\] is inf, but must be finite, or NaN"),
        ("versions", np.zeros(15, int), r"versions must be integers \[9\], not int64\[15\]"),
        ("versions", np.full(9, -2), r"versions\[0\] is -2, but must be at least -1"),
        ("provenance", np.array(["{}"]), r"provenance must be one text, not <U2\[1\]"),
        ("provenance", np.array("{"), r"provenance is not JSON \("),
        ("provenance", np.array("[1]"), r"provenance must be a JSON object, not '\[1\]'"),
        ("step", np.array([None] * 5), r"Object arrays cannot be loaded"),
    ],
)
def test_read_trace_refuses_a_recording_that_does_not_fit(tmp_path, name, array, message):
    path = tmp_path / "steps.npz"
    rows = {"routed_experts": np.asarray(REPLAY.expert_ids)[MASK], "lengths": LENGTHS}
    np.savez(path, **rows, **{name: array})
    with pytest.raises(ValueError, match=message) as refusal:
        read_trace(path)
    assert str(refusal.value).startswith(f"{path}: ")


def test_save_replay_writes_no_file_for_a_recording_that_does_not_fit(tmp_path):
    for wrong, message in (
        (RECORDING._replace(step=np.zeros(3, int)), r"step must be integers \[5\]"),
        (RECORDING._replace(step=np.full(5, 0.5)), r"step must be integers \[5\], not float64\[5\]"),
        (
            RECORDING._replace(step=np.full(5, 2**31)),
            r"step\[0\] is 2147483648, but must be at most 2147483647",
        ),
        (
            RECORDING._replace(prompt=np.full(5, -(2**32))),
            r"prompt\[0\] is -4294967296, but must be at least 0",
        ),
        (
            RECORDING._replace(versions=np.full((5, 3), 2**32)),
            r"versions\[0\] is 4294967296, but must be at most",
        ),
        (RECORDING._replace(versions=np.zeros((5, 3))), r"versions must be integers \[9\], not float64\[9\]"),
        (RECORDING._replace(versions=np.zeros((5, 4), int)), r"versions must be \[5, 3\], not \[5, 4\]"),
    ):
        with pytest.raises(ValueError, match=message):
            save_replay(tmp_path / "wrong.npz", REPLAY, num_experts=8, recording=wrong)
    assert not any(tmp_path.iterdir())


def test_batches_of_a_trace_with_steps_are_its_steps(tmp_path):
    save_replay(tmp_path / "steps.npz", REPLAY, num_experts=8, recording=RECORDING)
    trace, topology = read_trace(tmp_path / "steps.npz"), Ranks(nodes=1, ranks_per_node=2).topology(8)
    for batching, sizes in (
        (Batching(), [3, 2]),
        (Batching(order="shuffled"), [3, 2]),
        (Batching(batch_size=2), [2, 2]),
    ):
        batches = make_setting(trace, topology, batching=batching).batches
        assert [len(replay.mask) for replay in batches.replays] == sizes
    with pytest.raises(ValueError, match=r"micro_batches=3 exceeds the 2 samples of a batch"):
        make_setting(trace, topology, batching=Batching(micro_batches=3))


def change(one, other):
    """Return what moved between the loads of 16 experts, and the share of the two hottest that are new."""
    moved = sum(abs(a / sum(one) - b / sum(other)) for a, b in zip(one, other, strict=True)) / 2
    hot = [
        sorted(range(16), key=lambda expert, load=load: (-load[expert], expert))[:2] for load in (one, other)
    ]
    return moved, sum(expert not in hot[1] for expert in hot[0]) / 2


def test_drift_equals_loops_over_all_halves():
    """With two prompts a step there is one way to halve it, so loops give every change exactly."""
    rng = np.random.default_rng(0)
    step, prompt = np.repeat([0, 1, 2], 4), np.tile([0, 0, 1, 1], 3)
    load = rng.integers(0, 9, (12, 2, 16)) + (np.arange(16) == step[:, None, None] + 3) * 30
    drift = measure_drift(load, step, prompt)
    for layer in range(2):
        halves = {
            (s, p): [
                sum(int(load[b, layer, e]) for b in range(12) if (step[b], prompt[b]) == (s, p))
                for e in range(16)
            ]
            for s in range(3)
            for p in range(2)
        }

        for s in range(2):
            pairs = [change(halves[s, p], halves[s + 1, q]) for p in (0, 1) for q in (0, 1)]
            # The share of hot experts is the same from both sides, because the hot sets are equally large.
            chance = [change(halves[t, 0], halves[t, 1]) for t in (s, s + 1)]
            for part in (0, 1):
                expected = np.mean([pair[part] for pair in pairs]), np.mean([pair[part] for pair in chance])
                found = drift.between[part][s, layer], drift.by_chance[part][s, layer]
                np.testing.assert_allclose(found, expected, err_msg=f"{layer=} {s=} {part=}")
    assert (drift.between.distance > drift.by_chance.distance).all(), "a hot expert moves"


def test_steps_without_drift_change_as_much_as_chance():
    """Responses to a prompt are equal here, so halves that mixed them would show a drift where there is none."""
    rng = np.random.default_rng(1)
    of_prompt = rng.poisson(rng.gamma(1, 20, (2 * 64, 1, 32)))
    load, step = np.repeat(of_prompt, 4, axis=0), np.repeat([0, 1], 256)
    prompt = np.tile(np.repeat(np.arange(64), 4), 2)
    drift, mixed = measure_drift(load, step, prompt), measure_drift(load, step)
    np.testing.assert_allclose(drift.between.distance, drift.by_chance.distance, rtol=0.2)
    assert mixed.between.distance > 1.2 * mixed.by_chance.distance


def test_a_step_of_one_prompt_has_no_halves():
    drift = measure_drift(np.ones((3, 1, 8), int), np.array([0, 0, 1]))
    assert np.isnan(drift.between.distance).all()
    assert np.isnan(drift.by_chance.distance).all()


def test_inspect_shows_where_a_trace_is_from_and_what_its_steps_change(tmp_path, monkeypatch, capsys):
    """No plan is priced, because 12 experts do not divide over 8 ranks. Half of the load moves in the second step."""
    monkeypatch.setenv("COLUMNS", "140")
    mask = np.arange(4) < np.array([4, 4, 2, 2, 3, 1])[:, None]
    step = np.array([7, 7, 8, 8, 9, 9])
    ids = np.zeros((6, 4, 1, 2), np.uint8)
    ids[..., 1] = np.array([1, 1, 2, 2, 2, 2])[:, None, None]
    recording = Recording(
        step=step,
        rewards=np.array([0, 1, 1, 1, np.nan, np.nan], np.float32),
        versions=np.where(mask, (step - 1)[:, None], UNKNOWN),
        provenance={"model": "hand-made", "sizes": {"experts": 12}},
    )
    save_replay(tmp_path / "steps.npz", RoutingReplay(ids, mask), num_experts=12, recording=recording)
    assert main(["inspect", str(tmp_path / "steps.npz")]) == 0
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.split("step by step")[1].split("layer by layer")[0].splitlines()]
    rows = {line[0]: line[1:] for line in lines if line and line[0] in ("7", "8", "9")}
    assert rows["7"] == ["2", "8", "4", "4", "4", "0.500", "1.00"]
    assert rows["8"] == ["2", "4", "2", "2", "2", "1.000", "1.00", "50.0%", "0.0%", "0.0%", "0.0%"]
    assert rows["9"][5:] == ["none", "1.00", "0.0%", "0.0%", "0.0%", "0.0%"]
    assert "hand-made" in shown
    assert json.dumps({"experts": 12}) in shown
    assert "placed by the loads of the step before" not in shown


@pytest.mark.slow
def test_inspect_prices_replicas_from_the_step_before(tmp_path, monkeypatch, capsys):
    """Every step has a hot expert of its own, so loads of the step before place replicas of the wrong one."""
    monkeypatch.setenv("COLUMNS", "300")
    step, rng = np.repeat([0, 1, 2], 16), np.random.default_rng(0)
    ids = rng.integers(0, 8, (48, 12, 1, 1), dtype=np.uint8)
    ids[:, :6] = (2 + 2 * step)[:, None, None, None]
    replay = RoutingReplay(ids, np.ones((48, 12), bool))
    save_replay(tmp_path / "steps.npz", replay, num_experts=8, recording=Recording(step=step))
    assert main(["inspect", str(tmp_path / "steps.npz")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    factor = float(shown.split("a step takes ")[1].split()[0])
    assert factor > 1.1
