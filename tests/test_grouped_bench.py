"""What is asked of the kernels elsewhere: the GPU bench without a GPU, and verdicts on compiled programs."""

import jax
import numpy as np

from experiments import bench_gpu
from experiments.aot.kernels import KERNEL_CASES, KERNELS, Compiled, judge_kernels
from pallas_kernels.hopper.tiles import Shape


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


def test_the_cases_fit_together(monkeypatch):
    """Shapes only: ours by the blocked path, where the kernels cannot run."""
    monkeypatch.setattr(bench_gpu.gpu_peers, "products", lambda *_: {})
    for call in ("grouped_dot", "grouped_outer", "grouped_mlp"):
        own = getattr(bench_gpu, call)
        monkeypatch.setattr(
            bench_gpu,
            call,
            lambda *args, own=own, **options: own(*args, **options | {"implementation": "xla"}),
        )
    sizes, shape = np.array([3, 0, 8], np.int32), Shape(64, 128, 8, 2)
    cases = dict([*bench_gpu.products(shape, sizes, 2), *bench_gpu.mlps(shape, sizes, 2)])
    bench_gpu.check(cases)
    assert {
        name: sum(a.size for a in jax.tree.leaves(case.runs["ours"]())) for name, case in cases.items()
    } == {
        "forward": 16 * 128,
        "input gradient": 16 * 64,
        "weight gradient": 3 * 64 * 128,
        "MLP forward": 16 * 64,
        "MLP with gradients": 2 * 16 * 64 + 3 * 3 * 64 * 128 + 16,
    }
    assert cases["forward"].flops == 2 * 11 * 64 * 128
    assert cases["forward"].bytes == 2 * (11 * (64 + 128) + 2 * 64 * 128)


def test_a_kernel_that_does_not_compile_fails():
    clean = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
    sound = {case: Compiled(KERNELS[case.part], 0, clean) for case in KERNEL_CASES}
    assert all(finding.good for finding in judge_kernels(sound))
    slow = "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."
    broken = (
        "exceeds available shared memory",
        Compiled(2, 0, clean),
        Compiled(3, 0, ""),
        Compiled(5, 0, clean.replace("0 bytes spill loads", "8 bytes spill loads")),
        Compiled(3, 0, clean + slow),
    )
    judged = judge_kernels(sound | dict(zip(KERNEL_CASES[1:], broken, strict=False)))
    assert [finding.found for finding in judged if not finding.good] == [
        "exceeds available shared memory",
        "2, 0 MB temporary",
        "ptxas said nothing",
        "8 bytes, 0 serialized",
        "0 bytes, 1 serialized",
    ]
