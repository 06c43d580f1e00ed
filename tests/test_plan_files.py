"""Conversion of placements to the formats of other systems and back, and files of plans."""

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.plans import planned, random_plan

from relibra_jax.contract.plan_files import load_plan, save_plan
from relibra_jax.contract.types import EMPTY, Plan, Topology
from relibra_jax.integrations.engine_placements import (
    from_physical,
    from_sglang,
    homes_only,
    placement_of,
    to_eplb,
    to_sglang,
    to_vllm,
)
from relibra_jax.planning.baselines.eplb import rebalance_experts
from relibra_jax.support.atomic_write import write_atomically

TOPOLOGY = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=2)


@pytest.fixture(scope="module")
def plan():
    load = np.random.default_rng(0).zipf(1.4, (2, 3, 2, 2, 8)).clip(0, 900)
    return planned("eplb", TOPOLOGY, load)


def test_from_physical_restores_a_placement_of_to_vllm(plan):
    placement = placement_of(plan, 1)
    physical = to_vllm(placement)
    assert physical.shape == (3, TOPOLOGY.num_ranks * TOPOLOGY.slots)
    back = from_physical(physical, TOPOLOGY)
    np.testing.assert_array_equal(back.home, placement.home)
    experts = np.sort(placement.slot_expert, axis=-1)
    np.testing.assert_array_equal(np.sort(back.slot_expert, axis=-1), experts)


def test_from_sglang_restores_a_placement_of_to_sglang(plan, tmp_path):
    placement = homes_only(plan)
    to_sglang(tmp_path / "location.json", placement)
    content = json.loads((tmp_path / "location.json").read_text())
    assert list(content) == ["physical_to_logical_map"]
    back = from_sglang(tmp_path / "location.json", TOPOLOGY)
    np.testing.assert_array_equal(back.home, placement.home)
    np.testing.assert_array_equal(back.slot_expert[..., : TOPOLOGY.home_slots], placement.slot_expert)
    assert (back.slot_expert[..., TOPOLOGY.home_slots :] == EMPTY).all()


def test_from_physical_and_to_eplb_convert_the_output_of_eplb():
    """The output of EPLB, with copies anywhere, becomes a placement, which converts to the same arrays."""
    load = np.random.default_rng(1).integers(1, 100, (3, 8))
    published = rebalance_experts(load, 16, 1, 1, 4)
    placement = from_physical(published.physical_to_logical, TOPOLOGY)
    for layer in range(3):
        homes = placement.slot_expert[layer, ..., : TOPOLOGY.home_slots]
        assert sorted(homes.ravel()) == list(range(8))
        experts = [set(row) - {EMPTY} for row in placement.slot_expert[layer].reshape(4, -1).tolist()]
        physical = np.asarray(published.physical_to_logical[layer]).reshape(4, -1).tolist()
        assert experts == [set(row) for row in physical]
    full = from_physical(np.tile([0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7, 0, 1], (1, 1)), TOPOLOGY)
    again = to_eplb(full)
    assert again.logical_count.tolist() == [[2] * 8]
    for expert, slots in enumerate(again.logical_to_physical[0]):
        assert (again.physical_to_logical[0, slots] == expert).all()


def test_from_physical_finds_homes_that_do_not_come_first():
    """Rank 0 holds experts 0 and 1 twice; only a matching finds two homes for each rank."""
    physical = np.array([[0, 1, 2, 3, 0, 1, 2, 4, 5, 4, 6, 7, 6, 7, 5, 3]])
    placement = from_physical(physical, TOPOLOGY)
    assert sorted(placement.slot_expert[..., :2].ravel()) == list(range(8))


def test_from_physical_rejects_experts_without_a_home():
    physical = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]])
    with pytest.raises(ValueError, match=r"layer 0: no home for expert \d \(\d copies\)"):
        from_physical(physical, TOPOLOGY)


@pytest.mark.parametrize(
    ("physical", "message"),
    [
        ([[0, 1, 2]], "3 physical slots do not fit 4 ranks of 2 to 4 slots each"),
        ([[0, 1, 2, 3, 4, 5, 6, 8]], r"layer 0, slot 7: expert 8 is outside 0\.\.7"),
        ([0, 1, 2, 3], r"expected integers \[layers, physical\], found int64 \(4,\)"),
    ],
)
def test_from_physical_rejects_arrays_that_do_not_fit(physical, message):
    with pytest.raises(ValueError, match=message):
        from_physical(np.array(physical), TOPOLOGY)


def test_to_sglang_rejects_empty_slots(plan, tmp_path):
    placement = from_physical(np.arange(8)[None], TOPOLOGY)
    with pytest.raises(ValueError, match="layer 0, slot 2 is empty, but SGLang has no empty slots"):
        to_sglang(tmp_path / "location.json", placement)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text", ["", "[1, 2]", '{"logical_count": [[1]]}', '{"physical_to_logical_map": [[1], [2, 3]]}']
)
def test_from_sglang_rejects_broken_json(tmp_path, text):
    path = tmp_path / "location.json"
    path.write_text(text)
    with pytest.raises(
        ValueError,
        match=r"location\.json: it must be a JSON object with a rectangular physical_to_logical_map",
    ):
        from_sglang(path, TOPOLOGY)


def test_save_plan_writes_one_file_that_load_plan_restores(plan, tmp_path):
    save_plan(tmp_path / "plan.npz", plan, TOPOLOGY)
    back, topology = load_plan(tmp_path / "plan.npz")
    assert topology == TOPOLOGY
    chex.assert_trees_all_equal(back, jax.tree.map(np.asarray, plan))
    assert [path.name for path in tmp_path.iterdir()] == ["plan.npz"]


@pytest.mark.parametrize("residents", [0, 1])
@pytest.mark.parametrize("across_nodes", [False, True])
def test_load_plan_restores_any_saved_plan(across_nodes, residents, tmp_path):
    """Files keep plans of device arrays as well, and plans with replicas across nodes."""
    topology = dataclasses.replace(TOPOLOGY, resident_slots=residents)
    rng = np.random.default_rng(2)
    load = rng.integers(0, 90, (2, 3, 2, 2, 8))
    plan = random_plan(rng, load, topology, across_nodes=across_nodes)
    save_plan(tmp_path / "plan.npz", jax.tree.map(jnp.asarray, plan), topology)
    back, loaded_topology = load_plan(tmp_path / "plan.npz")
    assert loaded_topology == topology
    chex.assert_trees_all_equal(back, plan)
    assert all(isinstance(leaf, np.ndarray) for leaf in back)


def test_load_plan_of_a_file_that_names_no_residents_has_none(plan, tmp_path):
    """Files from before residents existed can be loaded."""
    save_plan(tmp_path / "plan.npz", plan, TOPOLOGY)
    with np.load(tmp_path / "plan.npz") as file:
        arrays = {name: file[name] for name in file if name != "resident_slots"}
    np.savez(tmp_path / "plan.npz", **arrays)
    assert load_plan(tmp_path / "plan.npz")[1] == TOPOLOGY


def broken(plan, slot, value):
    slot_expert = plan.slot_expert.copy()
    slot_expert[slot] = value
    return plan._replace(slot_expert=slot_expert)


RANK = "micro-batch 0, layer 0, node 0, local rank 0"
REFUSED = {
    "not in the canonical order": (
        lambda plan: broken(plan, (0, 0, 0, 0, np.s_[2:]), [3, 2]),
        rf"{RANK}: replicas \[3, 2\] have home slots \[3, 2\], but must be sorted by home slot, empty"
        " slots last; assemble_plan sorts them",
    ),
    "an empty slot before a replica": (
        lambda plan: broken(plan, (0, 0, 0, 0, np.s_[2:]), [EMPTY, 2]),
        rf"{RANK}: replicas \[-1, 2\] have home slots \[8, 2\]",
    ),
    "an expert twice on a rank": (
        lambda plan: broken(plan, (0, 0, 0, 0, np.s_[2:]), [2, 2]),
        f"{RANK}: holds expert 2 twice",
    ),
    "a replica beside its own home": (
        lambda plan: broken(plan, (0, 0, 0, 0, 2), 1),
        f"{RANK}: holds expert 1 twice",
    ),
    "slots and homes that disagree": (
        lambda plan: plan._replace(home=plan.home[:, [1, 0, *range(2, 8)]]),
        f"{RANK}, slot 0: the home slot of expert 1 holds 0",
    ),
    "quota below zero": (
        lambda plan: plan._replace(quota=plan.quota - 1),
        f"{RANK}, slot 0: quota -1 is negative",
    ),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_load_plan_refuses_files_that_break_a_rule(tmp_path, rule):
    homes = np.concatenate([np.arange(8).reshape(4, 2), np.full((4, 2), EMPTY)], 1)
    slot_expert = homes.reshape(1, 1, 2, 2, 4).astype(np.int32)
    plan = Plan(slot_expert, np.arange(8, dtype=np.int32)[None], np.zeros_like(slot_expert))
    path = tmp_path / "plan.npz"
    for right in (plan, broken(plan, (0, 0, 0, 0, np.s_[2:]), [2, 7])):
        save_plan(path, right, TOPOLOGY)
        chex.assert_trees_all_equal(load_plan(path)[0], right)
    change, message = REFUSED[rule]
    with pytest.raises(ValueError, match=message):
        save_plan(path, change(plan), TOPOLOGY)
    chex.assert_trees_all_equal(load_plan(path)[0], right)
    np.savez(path, **change(plan)._asdict(), **vars(TOPOLOGY))
    with pytest.raises(ValueError, match=rf"plan\.npz: .*{message}"):
        load_plan(path)


def test_plan_files_that_cannot_be_opened_are_errors_of_the_system(plan, tmp_path):
    for path in (tmp_path, tmp_path / "missing.npz"):
        with pytest.raises(OSError, match=str(path)):
            load_plan(path)
    with pytest.raises(FileNotFoundError, match=f"no such folder: '{tmp_path}/missing'"):
        save_plan(tmp_path / "missing" / "plan.npz", plan, TOPOLOGY)


@pytest.mark.parametrize("keep", [0, 100, -30])
def test_load_plan_refuses_a_truncated_file(plan, tmp_path, keep):
    path = tmp_path / "plan.npz"
    save_plan(path, plan, TOPOLOGY)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"plan\.npz: not a plan, or truncated"):
        load_plan(path)


def test_write_atomically_leaves_only_the_old_file_if_it_fails(tmp_path):
    kept = tmp_path / "kept.txt"
    kept.write_text("before")

    def fail():
        with write_atomically(kept) as part:
            part.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]
    assert kept.read_text() == "before"
