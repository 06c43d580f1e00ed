"""The tables of `experiments.beyond_balance`: their numbers, and that the command prints and writes them."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.beyond_balance.__main__ import BeyondBalance, draw_samples, main
from experiments.beyond_balance.measures import micro_batches_to_pay
from experiments.program import run_program
from experiments.synthetic_traces import synthetic_trace
from relibra_jax.contract.replay_files import save_replay

TINY = (
    "--ranks",
    "2x2",
    "--rivals",
    "static",
    "lplb",
    "lplb_repacked",
    "--residents",
    "0",
    "1",
    "--samples",
    "16",
    "--micro-batches",
    "4",
    "--no-halves",
)
program = functools.partial(run_program, main, BeyondBalance)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    synthetic = synthetic_trace(samples=24, mean_tokens=24, layers=2, num_experts=8, top_k=2)
    path = tmp_path_factory.mktemp("trace") / "tiny.npz"
    save_replay(path, synthetic.replay, num_experts=8)
    return str(path)


def test_draw_samples_shares_no_sample_between_halves_and_previous_batch():
    trace = synthetic_trace(samples=24, mean_tokens=24, layers=1, num_experts=8, top_k=2)
    ids = np.broadcast_to(np.arange(24).reshape(-1, 1, 1, 1), trace.replay.expert_ids.shape)
    trace = trace._replace(replay=trace.replay._replace(expert_ids=ids))
    whole, *halves = draw_samples(trace, BeyondBalance(samples=16, micro_batches=4))
    samples = [draw.batch.expert_ids[:, 0, 0, 0].tolist() for draw in (whole, *halves)]
    before = whole.before.expert_ids[:, 0, 0, 0].tolist()
    assert samples[1] + samples[2] == samples[0]
    assert sorted(samples[0] + before) == list(range(24))
    assert [draw.micro_batches for draw in (whole, *halves)] == [4, 2, 2]


def test_micro_batches_to_pay_is_none_for_residents_that_save_nothing():
    assert (
        micro_batches_to_pay({"micro_batch_seconds": 2.0, "push_seconds": 1.0}, {"micro_batch_seconds": 2.0})
        is None
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--samples", "24"),
            "tiny.npz has 24 samples; samples=24 leaves fewer than 4 for the previous batch",
        ),
        (("--samples", "8"), "samples=8 must be an integer of at least 16"),
        (("--rivals", "lpbl"), "rivals: 'lpbl' must be one of static, "),
        (
            ("--model", "deepseek-v3", "--ranks", "2x2", "--residents", "0", "1"),
            "resident_slots=1: a rank needs 188.0 GB",
        ),
        (("--ranks", "2by4"), "ranks='2by4' must be nodes x local ranks, for example 2x4"),
    ],
)
def test_beyond_balance_refuses_bad_input_in_one_line(trace, options, message, capsys):
    assert program([trace, *(() if "--samples" in options else ("--samples", "16")), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.long
def test_beyond_balance_prints_and_records_every_row(trace, tmp_path):
    record = tmp_path / "beyond.json"
    command = [sys.executable, "-m", "experiments.beyond_balance", trace, *TINY, "--record", str(record)]
    environment = {**os.environ, "COLUMNS": "200"}
    process = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1], env=environment
    )
    printed = process.stdout
    for text in (
        "balanced",
        "lplb",
        "best rival: ",
        "overlapped",
        "as needed",
        "of local",
        "packed",
        "assigned",
        "cold",
        "Cost of residents",
    ):
        assert text in printed
    tables = json.loads(record.read_text())["tables"]
    assert [table["samples"] for table in tables] == ["all"]
    for table in tables:
        assert table["uniform"]["copies_crossing"] == 0.5
        for row in table["plans"]:
            measures = row["measures"]
            assert measures["imbalance"] >= 1
            assert 0 < measures["mean"] <= measures["busiest_node"] <= measures["busiest_rank"]
            assert measures["as_needed"] >= measures["of_balanced"] > 0
            assert row["residents"] or not measures["push_seconds"]
            assert row["residents"] or not measures["resident_memory_bytes"]
