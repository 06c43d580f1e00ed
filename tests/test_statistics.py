"""Statistics of a trace equal numbers computed by hand, and `relibra inspect` prints them."""

import numpy as np
import pytest

from relibra_jax.cli.main import main
from relibra_jax.contract.replay_files import save_replay
from relibra_jax.contract.types import RoutingReplay
from relibra_jax.traces.imbalance_benchmark import imbalance_benchmark
from relibra_jax.traces.statistics import (
    contiguous_imbalance,
    count_load,
    hot_expert_churn,
    hottest_expert,
    load_spread,
    micro_batch_load,
    neighbour_correlation,
    pair_lift,
)


def replay_of(rows):
    """Return a replay of one layer with one token per sample."""
    ids = np.array(rows)[:, None, None, :]
    return RoutingReplay(ids, np.ones(ids.shape[:2], bool))


def test_micro_batch_load_is_of_runs_of_samples():
    load = count_load(replay_of([[0, 1], [0, 2], [3, 1], [3, 2], [3, 0]]), 4)
    np.testing.assert_array_equal(load.sum(0), [[3, 2, 2, 3]])
    parts = micro_batch_load(load, 2)  # three samples and two
    np.testing.assert_array_equal(parts, [[[2, 2, 1, 1]], [[1, 0, 1, 2]]])


def test_count_load_and_pair_lift_count_no_padding():
    replay = replay_of([[0, 1], [0, 2], [3, 1]])
    masked = RoutingReplay(replay.expert_ids, np.array([[True], [False], [True]]))
    np.testing.assert_array_equal(count_load(masked, 4).sum(0), [[1, 2, 0, 1]])
    np.testing.assert_array_equal(pair_lift(masked, 4), pair_lift(replay_of([[0, 1], [3, 1]]), 4))


def test_hottest_expert_and_load_spread_are_over_the_mean():
    load = np.array([[7, 1, 0, 0], [2, 2, 2, 2]])
    np.testing.assert_array_equal(hottest_expert(load), [3.5, 1])
    np.testing.assert_allclose(load_spread(load), [np.sqrt((25 + 1 + 4 + 4) / 4) / 2, 0])


def test_contiguous_imbalance_grows_where_micro_batches_are_uneven_in_turn():
    """With two ranks of two experts, each micro-batch loads another rank more, the whole batch both equally."""
    load = np.array([[[3, 3, 1, 1]], [[1, 1, 3, 3]]])
    assert contiguous_imbalance(load.sum(0, keepdims=True), 2) == 1
    assert contiguous_imbalance(load, 2) == 1.5


def test_hot_expert_churn_is_the_share_of_new_hot_experts():
    """Two of 16 experts are hot: first both stay hot, then one, then none."""
    load = np.ones((4, 1, 16), int)
    for micro_batch, hot in enumerate(([0, 1], [1, 0], [1, 2], [8, 9])):
        load[micro_batch, 0, hot] = 5
    assert hot_expert_churn(load) == pytest.approx((0 + 1 / 2 + 1) / 3)
    assert hot_expert_churn(load[:2]) == 0


def test_neighbour_correlation_is_the_mean_without_flat_micro_batches():
    load = np.array([[[1, 2, 3]], [[2, 4, 6]], [[6, 4, 2]]])
    assert neighbour_correlation(load[:2]) == pytest.approx(1)
    assert neighbour_correlation(load) == pytest.approx((1 - 1) / 2)
    flat = np.concatenate([load[:2], np.ones((1, 1, 3), int)])
    assert neighbour_correlation(flat) == pytest.approx(1), "what is flat has no correlation"
    assert neighbour_correlation(np.ones((3, 1, 3), int)) == 1


def test_pair_lift_is_one_by_chance_and_larger_for_experts_used_together():
    pairs = [[a, b] for a in range(4) for b in range(4) if a != b] * 10
    uniform = pair_lift(replay_of(pairs), 4)
    np.testing.assert_allclose(uniform, 1)
    # Tokens use two of the six pairs: each is three times as common as by chance.
    np.testing.assert_allclose(pair_lift(replay_of([[0, 1], [3, 2]] * 40), 4), 3)
    # 80 pairs; by chance 13.3 of each of six kinds. One token of ten does not use these two pairs.
    mixed = pair_lift(replay_of(([[0, 1], [2, 3]] * 9 + [[0, 2], [1, 3]]) * 4), 4)
    np.testing.assert_allclose(mixed.largest, 6 * 36 / 80)
    np.testing.assert_allclose(mixed.mean, 6 * (2 * 36**2 + 2 * 4**2) / 80**2)


def test_pair_lift_takes_no_rare_pair_as_the_largest():
    """Experts 2 and 3 are used together once, 102 times as often as by chance (0.01 times), which is noise."""
    lift = pair_lift(replay_of([[0, 1]] * 99 + [[2, 3]]), 4)
    weight = 99 * 99 + 4 * 99 + 1  # products of the experts' loads, over all pairs
    np.testing.assert_allclose(lift.largest, 0.99 * weight / 99**2)
    np.testing.assert_allclose(lift.mean, 0.99**2 * weight / 99**2 + 0.01**2 * weight)


def test_pair_lift_of_few_tokens_has_no_largest():
    assert np.isnan(pair_lift(replay_of([[0, 1], [2, 3]]), 4).largest).all()


def cells(shown):
    """Parse the printed table to a dict; the lines of a wrapped cell are joined."""
    table, name = {}, ""
    for line in shown.splitlines():
        if line.startswith("│"):
            left, value = (cell.strip() for cell in line.strip("│").split("│"))
            broken = not value or (left and name and name not in table)
            name = f"{name} {left}".strip() if broken else left or name
            table[name] = f"{table.get(name, '')} {value}".strip()
    return table


def test_inspect_tells_what_matters(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "w6.npz"
    trace = imbalance_benchmark("W6", steps=48, samples_per_step=4)
    save_replay(path, trace.replay, num_experts=32)
    assert main(["inspect", str(path)]) == 0
    table = cells(capsys.readouterr().out)
    assert table["domains"] == "not recorded"
    together = table["pairs of experts used together"]
    assert together.startswith("2.9")
    assert together.endswith(" times among pairs that chance gives at least 10 times")
    # The hot rank, one of four, moves every third step, and each of the 16 micro-batches is three steps.
    assert table["imbalance of 8 ranks, static placement"].startswith("1.0")
    assert ", 3.2" in table["imbalance of 8 ranks, static placement"]
    assert table["hot experts new in the next of 16 micro-batches"] == "100% of the hottest eighth"


def test_inspect_shows_how_long_attention_waits_for_a_long_sample(monkeypatch, capsys, tmp_path):
    """One sample of 12 times the length of 16 others is 144 of 160 squared units: 7.2 times the mean of 8 ranks."""
    monkeypatch.setenv("COLUMNS", "200")
    mask = np.arange(1200) < np.array([1200] + [100] * 16)[:, None]
    ids = np.tile(np.arange(8, dtype=np.uint8), (17, 150))[..., None, None]
    replay = RoutingReplay(ids, mask)
    save_replay(tmp_path / "long.npz", replay, num_experts=8)
    assert main(["inspect", str(tmp_path / "long.npz")]) == 0
    table = cells(capsys.readouterr().out)
    assert table["imbalance of attention of 8 ranks"].startswith("7.20 with 1, ")
    assert table["the same, at least, with whole samples"].startswith("7.20 with 1, ")
    # The exchange takes 7/8 of 323 tokens for each of 1200: (144 / 8 + 33.9) / 20, and two short samples on each rank.
    assert table["the same, with long samples split over a node"].startswith("2.69 with 1, ")


@pytest.mark.parametrize(
    ("rows", "experts", "absent", "text"),
    [
        (
            [[0], [1], [2]],
            8,
            "pairs of experts used together",
            "correlation of neighbouring micro-batches' loads",
        ),
        ([[0, 1]], 8, "none", "(mean), too few tokens for the largest: chance gives no pair 10 times"),
        ([[0, 1]], 8, "correlation of neighbouring micro-batches' loads", "with 1 micro-batches"),
        ([[0, 1], [1, 2]], 12, "none", "12 experts do not divide"),
    ],
    ids=["top-1", "few tokens", "one sample", "experts that do not divide"],
)
def test_inspect_leaves_out_what_is_not_there(monkeypatch, capsys, tmp_path, rows, experts, absent, text):
    monkeypatch.setenv("COLUMNS", "200")
    save_replay(tmp_path / "small.npz", replay_of(rows), num_experts=experts)
    assert main(["inspect", str(tmp_path / "small.npz")]) == 0
    shown = capsys.readouterr().out
    assert absent not in cells(shown)
    assert text in shown
