"""The benchmark of the Hopper kernels, at a small shape and without a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench_gpu import __main__ as command
from experiments.bench_gpu import checks, group_sizes, operations, timing
from pallas_kernels.hopper.tile_sizes import ModelShape, Problem, choose_tile_sizes
from relibra_jax.types import Topology


def test_it_refuses_politely(capsys):
    assert command.main(command.BenchGpu()) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert said.endswith("cpu is no Hopper GPU. No number is printed.")


def test_sizes_keep_proportions():
    quota = np.array([5, 0, 10, 1])
    sizes = group_sizes.scaled_sizes(quota, 256)
    assert 1020 <= sizes.sum() <= 1024
    assert sizes[1] == 0
    assert sizes[2] == 2 * sizes[0]


SHAPE = ModelShape(64, 128, 32, 2)


@pytest.fixture
def on_cpu(monkeypatch):
    """The whole benchmark at a small shape, with one set of operands, the peers that are left, and no clock."""
    monkeypatch.setattr(operations, "SETS", 1)
    monkeypatch.setattr(command, "why_not_hopper", lambda _: None)
    monkeypatch.setattr(command, "copy_bandwidth", lambda _: 1e12)
    for module in (command, timing):
        monkeypatch.setattr(module, "median_seconds", lambda runs, *_, **__: dict.fromkeys(runs, 1e-3))
    monkeypatch.setitem(command.MODELS, "small", SHAPE)


@pytest.mark.slow
def test_it_runs_and_records(on_cpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "PATTERNS", ())
    record = tmp_path / "results" / "gpu.txt"
    config = command.BenchGpu(models=("small",), rows=(32,), micro_batches=2, layers=1, record=record)
    assert command.main(config, implementation="xla") == 0
    said = capsys.readouterr().out
    assert record.read_text() == said
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines() if "│" in line]
    product = ["ours", "dense matmul", "jax.lax.ragged_dot"]
    mlp = ["ours", "products one at a time", "dense matmul"]
    assert [tuple(line[:2]) for line in lines] == [
        (plan, peer)
        for peers in (product, product, product, mlp, mlp)
        for plan in ("static", "relibra")
        for peer in peers
    ]
    assert lines[0][2:] == ["1.000", "0", "100%"]
    for operation in ("forward", "input gradient", "weight gradient", "MLP forward", "MLP with gradients"):
        assert f"small, 4+2 slots, 32 rows a group: {operation}\n" in said
    # JAX's example kernel is for GPUs.
    assert "JAX's example, 128x128, forward: Only interpret mode is supported on CPU" in said
    assert "small, slowest ranks, ms: static 2.00, eplb 2.00, relibra 2.00, balanced 2.00" in said


def test_operands_are_what_the_kernels_take():
    for sets in (
        operations.operand_sets((64, 128), 16, 4, 128),
        operations.operand_sets((3, 64, 128), 16, 4, 64),
    ):
        assert {leaf.dtype for leaf in jax.tree.leaves(sets)} == {jnp.dtype(jnp.bfloat16)}
        assert [len(buffer) for buffer in sets[0].weights] == [4, 2]
        assert sets[0].dense[0].shape == (64, 128)


def test_sizes_come_from_the_rank_with_most_copies():
    """Two layers of one micro-batch on two ranks; the second rank's second layer has the copies."""
    topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=2)
    quota = np.array([[[10, 0, 0, 0], [20, 0, 0, 0]], [[30, 10, 0, 0], [40, 20, 8, 12]]])
    quotas = dict.fromkeys(("static", "relibra"), quota.reshape(1, 2, 1, 2, 4))
    sizes = group_sizes.planned_sizes(quotas, topology, 3, 20)
    np.testing.assert_array_equal(sizes["relibra"], sizes["static"])
    np.testing.assert_array_equal(sizes["relibra"], np.array([40, 20, 20, 8, 12]))


@pytest.mark.slow
def test_patterns_are_checked(monkeypatch):
    assert checks.check_patterns(40, 8, "xla") == 2 * 256
    monkeypatch.setattr(checks, "TOLERANCE", 1e-9)
    with pytest.raises(AssertionError, match=r"of groups \[.*\]: off by"):
        checks.check_patterns(40, 8, "reference")


def test_patterns_are_checked_for_small_and_for_large_tiles():
    high, wide = zip(
        *(
            tuple(choose_tile_sizes(Problem(2, width, width, rows // 8, 8)))[:2]
            for rows, width in checks.PATTERNS
        ),
        strict=True,
    )
    assert (high, wide) == ((64, 128), (64, 128))


def test_a_wrong_result_stops_it():
    right = (jnp.ones((2, 3)), jnp.zeros((1, 3)))
    checks.assert_close("weights", right, right)
    for wrong in (1.1, np.nan):
        with pytest.raises(AssertionError, match="weights: off by"):
            checks.assert_close("weights", right, (right[0], jnp.full((1, 3), wrong)))


def test_what_has_to_be_done_is_counted():
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": ("nothing",)}, "models: nothing not among Qwen3-30B-A3B"),
        ({"models": ()}, "models: name some of Qwen3-30B-A3B"),
        ({"rows": (256, 0)}, r"rows=\(256, 0\) must be numbers of at least 1"),
        ({"layers": 0}, "layers=0 must be at least 1"),
    ],
)
def test_what_cannot_be_run_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        command.BenchGpu(**options)
