"""What is asked of the kernels elsewhere: the GPU bench without a GPU, and verdicts on compiled programs."""

import functools

import jax
import numpy as np
import pytest

from experiments import bench_gpu
from experiments.aot.kernels import KERNEL_CASES, KERNELS, Compiled, judge_kernels
from pallas_kernels.hopper import autotune
from pallas_kernels.hopper.tiles import Shape, candidates


def test_it_refuses_politely(capsys):
    assert bench_gpu.main(bench_gpu.BenchGpu()) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert said.endswith("cpu is no Hopper GPU. No number is printed.")


def test_sizes_keep_proportions():
    quota = np.array([5, 0, 10, 1])
    sizes = bench_gpu.scaled_sizes(quota, 256)
    assert 1020 <= sizes.sum() <= 1024
    assert sizes[1] == 0
    assert sizes[2] == 2 * sizes[0]


SHAPE = Shape(64, 128, 32, 2)


@pytest.fixture
def on_cpu(monkeypatch):
    """The whole bench at a small shape: ours by the blocked path, peers that are left, and no clock."""
    monkeypatch.setattr(bench_gpu, "SETS", 1)
    monkeypatch.setattr(bench_gpu, "IMPLEMENTATION", "xla")
    monkeypatch.setattr(bench_gpu, "why_no_hopper", lambda _: None)
    monkeypatch.setattr(bench_gpu, "copy_bandwidth", lambda _: 1e12)
    monkeypatch.setattr(bench_gpu, "seconds", lambda runs, *_, **__: dict.fromkeys(runs, 1e-3))
    monkeypatch.setitem(bench_gpu.MODELS, "small", SHAPE)


def test_it_runs_and_records(on_cpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench_gpu, "check_patterns", lambda: 510)
    record = tmp_path / "results" / "gpu.txt"
    config = bench_gpu.BenchGpu(models=("small",), rows=(32,), micro_batches=2, layers=1, record=record)
    assert bench_gpu.main(config) == 0
    said = capsys.readouterr().out
    assert record.read_text() == said
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines() if "│" in line]
    done = [tuple(line[1:4]) for line in lines]
    by = {
        "forward": ["ours", "dense matmul", "jax.lax.ragged_dot"],
        "input gradient": ["ours", "dense matmul", "jax.lax.ragged_dot"],
        "weight gradient": ["ours", "dense matmul", "jax.lax.ragged_dot"],
        "MLP forward": ["ours", "products one at a time", "dense matmul"],
        "MLP with gradients": ["ours", "products one at a time", "dense matmul"],
    }
    assert done == [(plan, name, peer) for name in by for plan in ("static", "relibra") for peer in by[name]]
    assert lines[0][4:] == ["1.000", "0", "100%"]
    # JAX's example kernel is for GPUs.
    assert "JAX's example, forward: Only interpret mode is supported on CPU" in said
    assert "slowest ranks, ms: static 2.00, eplb 2.00, relibra 2.00, balanced 2.00" in said


def test_patterns_are_checked(on_cpu, monkeypatch):
    assert bench_gpu.check_patterns(rows=40, width=8) == 2 * 255
    monkeypatch.setattr(bench_gpu, "TOLERANCE", 1e-9)
    with pytest.raises(AssertionError, match=r"of groups \[0, 0, 0, 0, 0, 0, 0, 5\]: off by"):
        bench_gpu.check_patterns(rows=40, width=8)


def test_a_wrong_result_stops_it():
    right = (np.ones((2, 3)), np.ones((1, 3)))
    bench_gpu.assert_close("weights", right, np.ones((3, 3)))
    for wrong in (1.1, np.nan):
        with pytest.raises(AssertionError, match="weights: off by"):
            bench_gpu.assert_close("weights", right, np.full((3, 3), wrong))


def test_what_has_to_be_done_is_counted():
    sizes = np.array([3, 0, 8], np.int32)
    counted = {
        one.name: (one.flops(sizes), one.bytes(sizes))
        for one in (*bench_gpu.products(SHAPE), *bench_gpu.mlps(SHAPE))
    }
    assert counted == {
        "forward": (2 * 11 * 64 * 128, 2 * (11 * (64 + 128) + 2 * 64 * 128)),
        "input gradient": (2 * 11 * 64 * 128, 2 * (11 * (64 + 128) + 2 * 64 * 128)),
        "weight gradient": (2 * 11 * 64 * 128, 2 * (11 * (64 + 128) + 3 * 64 * 128)),
        "MLP forward": (6 * 11 * 64 * 128, 2 * (2 * 11 * 64 + 2 * 3 * 64 * 128)),
        "MLP with gradients": (18 * 11 * 64 * 128, 2 * (5 * 11 * 64 + 3 * 2 * 3 * 64 * 128)),
    }


def test_an_unknown_model_is_named():
    with pytest.raises(ValueError, match="models: nothing not among Qwen3-30B-A3B"):
        bench_gpu.BenchGpu(models=("nothing",))


@pytest.mark.parametrize("rows", [16, 300])
def test_autotune_runs_what_it_asks_tiles_for(rows):
    """Shapes only: kernels run on GPUs."""
    for problem in autotune.problems(SHAPE, rows):
        operands = autotune._operands(problem)
        for tiles in candidates(problem):
            outs = jax.eval_shape(functools.partial(autotune._run, problem, tiles), *operands)
            shape = (problem.expected * problem.groups, problem.columns)
            if not problem.matrices:
                shape = (problem.groups, 1, problem.rows, problem.columns)
            assert outs[0].shape == shape


def test_a_kernel_that_does_not_compile_fails():
    clean = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
    sound = {case: Compiled(KERNELS[case.part], 0, clean) for case in KERNEL_CASES}
    assert all(finding.good for finding in judge_kernels(sound))
    slow = "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."
    broken = (
        "exceeds available shared memory",
        Compiled(2, 0, clean),
        Compiled(3, 0, ""),
        Compiled(5, 0, clean.replace("0 bytes spill stores", "24 bytes spill stores")),
        Compiled(3, 0, clean + slow),
    )
    judged = judge_kernels(sound | dict(zip(KERNEL_CASES[1:], broken, strict=False)))
    assert [finding.found for finding in judged if not finding.good] == [
        "exceeds available shared memory",
        "2, 0 MB temporary",
        "ptxas said nothing",
        "24 bytes, 0 serialized",
        "0 bytes, 1 serialized",
    ]
