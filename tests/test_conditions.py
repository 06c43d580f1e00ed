"""The sweep of conditions under which parts of ReLibra gain what its paper says, on tiny grids."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.claims.conditions import SHARE_MODEL, homes_table, reached_table, replication_table
from experiments.claims.part_gains import (
    JOINT,
    REPLICATION,
    BalanceCell,
    HomesCell,
    Loads,
    lpt_homes,
    sweep_balance,
    waiting_share,
)
from relibra_jax import PlanRequest, Topology
from relibra_jax.planning.ablation.token_splits import place_heaviest, split_tokens

ROOT = Path(__file__).parents[1]
NO_HOMES = np.zeros((1, 8), np.int32)
"""Previous homes, which LPT does not read."""
ROWS = (JOINT, "splits, places by EPLB, once a batch")


@pytest.fixture(scope="module")
def cells():
    """Return a sweep of one small setting."""
    counts = np.random.default_rng(0).poisson(np.random.default_rng(1).lognormal(4, 1.5, (24, 1, 8)))
    sweep = sweep_balance(
        [Loads("drawn", counts)],
        ranks=(4, 3),
        slots=(1,),
        samples=(2, 24),
        micro_batches=4,
        rows={name: REPLICATION[name] for name in ROWS},
    )
    return list(sweep)


def test_settings_are_those_whose_experts_divide(cells):
    assert [(cell.ranks, cell.experts_per_rank, cell.samples) for cell in cells] == [(4, 2, 2), (4, 2, 24)]


def test_joint_replication_is_at_least_as_even_as_replicas_that_stay_for_a_batch(cells):
    for cell in cells:
        assert 1 <= cell.imbalance[JOINT] <= cell.imbalance[ROWS[1]]


def test_micro_batches_that_are_all_alike_are_served_by_places_of_the_batch(cells):
    every = cells[1]  # each micro-batch has all samples
    assert every.imbalance[ROWS[1]] == pytest.approx(every.imbalance[JOINT], abs=0.05)
    assert cells[0].imbalance[ROWS[1]] > every.imbalance[ROWS[1]]


def test_places_of_a_batch_are_those_of_its_summed_load(cells):
    counts = np.random.default_rng(0).poisson(np.random.default_rng(1).lognormal(4, 1.5, (24, 1, 8)))
    topology = Topology(num_nodes=1, ranks_per_node=4, num_experts=8, replica_slots=1)
    load = np.zeros((1, 1, 1, 4, 8), np.int32)
    load[0, 0, 0, 0] = counts.sum(0)[0]
    home = np.asarray(lpt_homes(PlanRequest(load), NO_HOMES, topology, key=jax.random.key(0)).home)[0]
    by_slot = load[0, 0, 0, 0][np.argsort(home)].reshape(4, 2)
    replica = place_heaviest(by_slot, replica_slots=1)
    rank_load = np.asarray(split_tokens(by_slot, replica)[1]).sum(1)
    assert cells[1].imbalance[ROWS[1]] == pytest.approx(rank_load.max() / rank_load.mean(), rel=1e-5)


def test_lpt_gives_the_heaviest_expert_to_the_lightest_rank_with_room():
    topology = Topology(num_nodes=2, ranks_per_node=1, num_experts=4, replica_slots=0)
    load = np.array([9, 8, 2, 4], np.int32).reshape(1, 1, 1, 1, 4).repeat(2, axis=2)
    for nodes in (True, False):
        home = lpt_homes(
            PlanRequest(load), NO_HOMES[:, :4], topology, key=jax.random.key(0), nodes=nodes
        ).home
        assert (np.asarray(home) // 2).tolist() == [[0, 1, 0, 1]]


def test_a_gain_is_at_most_that_of_the_fullest_ranks():
    cell = BalanceCell("drawn", 4, 2, 1, 2, {"static": 2.0, JOINT: 1.0, "rival": 1.2})
    assert cell.gain("rival") == pytest.approx(0.2)
    assert cell.gain("rival", share=0.5) == pytest.approx(0.1)
    assert cell.gain("rival", share=0.0) == 0


def test_less_of_a_run_waits_if_attention_has_more_to_do():
    assert 0 < waiting_share("qwen3-30b-a3b", context=16384) < waiting_share("qwen3-30b-a3b") < 1


def test_tables_have_the_median_and_the_extremes():
    cells = [
        BalanceCell("drawn", 4, 2, 1, 2, {"static": 2.0, JOINT: 1.0, "splits, rival": 1 + gain})
        for gain in (0.1, 0.3, 0.2)
    ]
    assert replication_table(cells, 1.0).splitlines()[-1] == "| 1 | splits, rival | 20.0% (30.0%) |"
    assert reached_table(cells, (0.5, 1.0)).splitlines()[-1] == "| splits, rival | 2 of 3 | 3 of 3 |"
    names = ("annealed, joint", "LPT, joint", "annealed, alone", "LPT, alone")
    balance = [BalanceCell("drawn", 4, 2, 1, 2, dict(zip(names, (1.0, 1.1, 1.0, 1.5), strict=True)))]
    seconds = {"LPT over ranks": 2.2, "LPT over nodes": 2.1, "annealed": 2.0}
    lines = homes_table(
        balance, [HomesCell("drawn", "tiny", 2, 8, {}, {}, seconds, seconds)], 1.0
    ).splitlines()
    assert lines[2] == "| balance | joint | 2 samples a micro-batch | +10.0% | +10.0% | +10.0% |"
    assert lines[3] == "| balance | none | 2 samples a micro-batch | +50.0% | +50.0% | +50.0% |"
    assert lines[4] == "| time | joint | 2 nodes, 8 samples a micro-batch, as run | +5.0% | +5.0% | +5.0% |"


def test_the_page_has_the_tables_of_the_kept_numbers():
    kept = json.loads((ROOT / "experiments" / "results" / "conditions" / "conditions.json").read_text())
    replication, balance = (
        [BalanceCell(**cell) for cell in kept[name]] for name in ("replication", "balanced_homes")
    )
    homes = [HomesCell(**cell) for cell in kept["homes"]]
    experts, share = (kept[name][SHARE_MODEL] for name in ("experts_share", "waiting_share"))
    page = (ROOT / "docs" / "evidence" / "parts.md").read_text()
    assert replication_table(replication, share) in page
    assert reached_table(replication, (experts, share, 1.0)) in page
    assert homes_table(balance, homes, share) in page
