"""Rehearsals of the `experiments.gpu_day` steps, at small sizes without a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.gpu_day import group_sizes, operations
from experiments.gpu_day.report import OPERATIONS
from experiments.gpu_day.steps import day_steps, hopper_checks, smoke_steps
from experiments.ladder.child import run_function
from experiments.ladder.facts import facts_of
from experiments.ladder.record import Record, read_record
from experiments.ladder.steps import run_ladder
from pallas_kernels.compare import NORM_LIMIT, check_close
from pallas_kernels.hopper.tile_sizes import ModelShape, Problem, choose_tile_sizes
from relibra_jax.contract.types import Topology


def test_scaled_sizes_keep_proportions():
    quota = np.array([5, 0, 10, 1])
    sizes = group_sizes.scaled_sizes(quota, 256)
    assert 1020 <= sizes.sum() <= 1024
    assert sizes[1] == 0
    assert sizes[2] == 2 * sizes[0]


SHAPE = ModelShape(64, 128, 32, 2)


def rehearse(step, capsys):
    """Run a step as a rehearsal in this process, and return the results that it prints."""
    run_function(step.function, list(step.arguments), rehearsal=True)
    return [facts for line in capsys.readouterr().out.splitlines() if (facts := facts_of(line))]


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Return all steps by name, after making their plan."""
    commands = day_steps(str(tmp_path_factory.mktemp("day")), None)
    steps = {step.name: step for command in commands.values() for step in command}
    run_function(steps["plan"].function, list(steps["plan"].arguments), rehearsal=True)
    return steps


LONG = ("patterns, large tiles", "repeats")
"""Steps whose rehearsal covers nothing that others do not, and takes 15 seconds each."""
CHECKS = ["environment", "JAX's example", "self-check", *[step.name for step in hopper_checks()]]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name in LONG else pytest.mark.slow) for name in CHECKS],
)
def test_right_rehearses_every_check(steps, name, capsys):
    facts_of_step = rehearse(steps[name], capsys)
    assert facts_of_step
    assert all(facts["norm"] <= NORM_LIMIT for facts in facts_of_step if "norm" in facts)
    assert all(facts["moved"] == 0 for facts in facts_of_step if "moved" in facts)


@pytest.mark.long
def test_speed_is_rehearsed(steps, capsys):
    name = "speed of Qwen3-30B-A3B, 1024 rows"
    lines = [facts for what in ("products", "MLPs") for facts in rehearse(steps[f"{name}: {what}"], capsys)]
    timed = [facts for facts in lines if "milliseconds" in facts]
    product = ["ours", "dense matmul", "jax.lax.ragged_dot"]
    mlp = ["ours", "products one at a time", "dense matmul"]
    names = (product, product, product, ["dense matmul"], mlp, mlp)
    assert [(facts["operation"], facts["plan"], facts["by"]) for facts in timed] == [
        (operation, plan, by)
        for operation, of_operation in zip((*OPERATIONS[:3], "forward", *OPERATIONS[3:]), names, strict=True)
        for plan in ("static", "relibra")
        for by in of_operation
    ]
    assert all(facts["of_roofline"] > 0 for facts in timed)
    # JAX's example kernels are for GPUs.
    refused = {facts["by"] for facts in lines if "refused" in facts}
    assert {name for name in refused if name.startswith("JAX's example")} == {
        f"JAX's example, {tiles}" for tiles in ("128x128", "64x128", "64x64")
    }


@pytest.mark.slow
def test_speed_with_clusters_is_rehearsed(steps, capsys):
    problems = rehearse(steps["clusters"], capsys)
    assert len(problems) == 7
    for facts in problems:
        first, *others = [tiles[3] for tiles in facts["milliseconds"]]
        assert (first, {*others}) == (1, {2})
    lines = rehearse(steps["speed of Qwen3-30B-A3B, 1024 rows: products, clusters"], capsys)
    assert {facts["by"] for facts in lines if "by" in facts} == {"ours", "dense matmul"}


@pytest.mark.slow
def test_speed_of_attention_is_rehearsed(steps, capsys):
    lines = rehearse(steps["attention, 8192 tokens"], capsys)
    assert [(facts["attention"], facts["part"], facts["samples"]) for facts in lines] == [
        ("xla", part, samples) for samples in (1, 4, 16) for part in ("forward", "with gradients")
    ]
    assert all(facts["teraflops"] > 0 for facts in lines)


@pytest.mark.slow
def test_why_rehearses_stragglers_and_the_layer(steps, capsys):
    of_planners = {facts["planner"]: facts for facts in rehearse(steps["stragglers"], capsys)}
    assert list(of_planners) == ["static", "eplb", "relibra", "balanced"]
    assert of_planners["relibra"]["imbalance_of_rows"] < of_planners["static"]["imbalance_of_rows"]
    ranks = rehearse(steps["layer"], capsys)
    assert [facts["rank"] for facts in ranks] == list(range(8))
    assert all(facts["norm"] <= NORM_LIMIT for facts in ranks)


@pytest.mark.slow
def test_why_rehearses_branches_pieces_and_the_profile(steps, capsys):
    assert [facts["products"] for facts in rehearse(steps["branches"], capsys)] == [1, 8]
    (facts,) = rehearse(steps["ragged exchange"], capsys)
    assert [len(sent) for sent in facts["sent"].values()] == [1, 8, 32, 128, 64]
    assert {sum(sent) for sent in facts["sent"].values()} == {61}
    parts, facts = rehearse(steps["layer of full size"], capsys)
    assert parts["rows"] == 126, "14 rows in each of 9 slots, for 64 tokens with two experts"
    assert facts["total"] == 0, "a CPU has no kernels of a GPU"


@pytest.mark.long
def test_why_rehearses_host_copies_and_planning(steps, capsys):
    (facts,) = rehearse(steps["host copies"], capsys)
    assert facts["bytes"] == 2 * 3 * 64 * 64 * 2
    planned = rehearse(steps["planning"], capsys)
    assert [(facts["device"], facts["planner"]) for facts in planned] == [
        ("cpu", name) for name in ("eplb", "lplb", "relibra")
    ]


@pytest.mark.long
def test_smoke_trains_the_flax_loop(tmp_path):
    (loop,) = (step for step in smoke_steps(2, rehearsal=True) if step.name == "Flax loop")
    record = Record(tmp_path / "day.jsonl", rehearsal=True)
    assert run_ladder([loop._replace(needs=())], record, seconds=200.0, echo=False) == {"Flax loop": "passed"}
    facts = read_record(record.path)[0]
    assert facts["devices"] == 2
    assert facts["losses"] == pytest.approx([5.136], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.long), 2])
def test_check_group_is_rehearsed(devices, capsys):
    run_function("experiments.gpu_day.group_layer:check_group", [devices, "padded"], rehearsal=True)
    (facts,) = [facts for line in capsys.readouterr().out.splitlines() if (facts := facts_of(line))]
    assert facts["norm"] <= NORM_LIMIT
    assert facts["devices"] == devices
    assert (facts["replicas"] > 0) == (devices > 1)


def test_check_group_rejects_too_few_devices():
    with pytest.raises(ValueError, match="9 devices are needed, but there are 8"):
        run_function("experiments.gpu_day.group_layer:check_group", [9, "padded"], rehearsal=True)


@pytest.mark.slow
def test_tune_model_is_rehearsed(steps, capsys):
    lines = rehearse(steps["tuning"], capsys)
    assert {facts["problem"].split("-")[0] for facts in lines} == {"0", "1", "2"}
    assert all(facts["candidates"] > 1 for facts in lines)


def test_operand_sets_are_what_the_kernels_take():
    for sets in (
        operations.operand_sets((64, 128), 16, 4, 128),
        operations.operand_sets((3, 64, 128), 16, 4, 64),
    ):
        assert {leaf.dtype for leaf in jax.tree.leaves(sets)} == {jnp.dtype(jnp.bfloat16)}
        assert [len(buffer) for buffer in sets[0].weights] == [4, 2]
        assert sets[0].dense[0].shape == (64, 128)


def test_planned_sizes_come_from_the_rank_with_most_copies():
    """The second layer of the second rank has the rows in replica slots, in two layers of one micro-batch."""
    topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=2)
    quota = np.array([[[10, 0, 0, 0], [20, 0, 0, 0]], [[30, 10, 0, 0], [40, 20, 8, 12]]])
    quotas = dict.fromkeys(("static", "relibra"), quota.reshape(1, 2, 1, 2, 4))
    sizes = group_sizes.planned_sizes(quotas, topology, 3, 20)
    np.testing.assert_array_equal(sizes["relibra"], sizes["static"])
    np.testing.assert_array_equal(sizes["relibra"], np.array([40, 20, 20, 8, 12]))


def test_hopper_checks_have_patterns_for_small_and_for_large_tiles():
    patterns = [step.arguments for step in hopper_checks() if step.name.startswith("patterns")]
    high, wide = zip(
        *(
            tuple(choose_tile_sizes(Problem(2, width, width, rows // 8, 8)))[:2]
            for _, rows, width in patterns
        ),
        strict=True,
    )
    assert (high, wide) == ((64, 128), (64, 128))


def test_check_close_rejects_wrong_results():
    right = {"out": jnp.ones((2, 3)), "d_x": jnp.zeros((1, 3))}
    assert check_close("weights", right, right) == (0, 0)
    for wrong in (1.1, np.nan):
        with pytest.raises(ValueError, match=r"weights, array \['d_x'\] of shape \[1, 3\]: the error is"):
            check_close("weights", right | {"d_x": jnp.full((1, 3), wrong)}, right)
    one_row = np.ones((4096, 8), np.float32)
    one_row[7] = 0.9
    with pytest.raises(ValueError, match=r"0\.1 of the largest entry"):
        check_close("a row that the norm does not show", one_row, np.ones((4096, 8)))


def test_operations_count_flops_and_bytes():
    sizes = np.array([3, 0, 8], np.int32)
    counted = {
        one.name: (one.flops(sizes), one.bytes(sizes))
        for one in (*operations.products(SHAPE, "xla"), *operations.mlps(SHAPE, "xla"))
    }
    assert counted == {
        "forward": (2 * 11 * 64 * 128, 2 * (11 * (64 + 128) + 2 * 64 * 128)),
        "input gradient": (2 * 11 * 64 * 128, 2 * (11 * (64 + 128) + 2 * 64 * 128)),
        "weight gradient": (2 * 11 * 64 * 128, 2 * (11 * (64 + 128) + 3 * 64 * 128)),
        "MLP forward": (6 * 11 * 64 * 128, 2 * (2 * 11 * 64 + 2 * 3 * 64 * 128)),
        "MLP with gradients": (18 * 11 * 64 * 128, 2 * (4 * 11 * 64 + 3 * (2 + 3) * 64 * 128)),
    }
