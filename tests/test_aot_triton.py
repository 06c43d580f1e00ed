"""The conclusions of `make aot` from reports on Triton kernels; these tests compile no kernels."""

from experiments.aot.gpus import GPUS, target_config
from experiments.aot.triton_kernels import (
    NUM_KERNELS,
    TRITON_CASES,
    Kernel,
    judge_triton,
    read_kernels,
)
from pallas_kernels.implementation import why_not_ampere

ASSEMBLED = """I1123 12:00:00 subprocess_compilation.cc:356] ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'grouped_row_product' for 'sm_80'
ptxas info    : Function properties for grouped_row_product
    96 bytes stack frame, 184 bytes spill stores, 120 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 432 bytes cmem[0], 8 bytes cmem[2]
ptxas info    : Compiling entry function 'loop_compare_fusion' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 25 registers, used 0 barriers, 384 bytes cmem[0]
ptxas info    : Compiling entry function 'flash_attention' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 171 registers, used 1 barriers, 384 bytes cmem[0]
ptxas info    : Compiling entry function 'grouped_weight_gradient__1' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 208 registers, used 1 barriers, 392 bytes cmem[0]
"""
LAUNCHES = """004: kCustomKernel loop_compare_fusion grid: [3, 1, 1] threads: [128, 1, 1]  shared_memory: 0 bytes
005: kCustomKernel grouped_row_product grid: [12, 274, 1] threads: [256, 1, 1]  shared_memory: 49152 bytes
006: kCustomKernel flash_attention grid: [64, 32, 1] threads: [256, 1, 1]  shared_memory: 98304 bytes
007: kCustomKernel grouped_weight_gradient__1 grid: [96, 1, 18] threads: [128, 1, 1]  shared_memory: 32768 bytes
"""


def test_read_kernels_parses_the_output_of_the_compiler():
    assert read_kernels(ASSEMBLED, LAUNCHES) == {
        "grouped_row_product": Kernel(255, 184, 49152),
        "flash_attention": Kernel(171, 0, 98304),
        "grouped_weight_gradient__1": Kernel(208, 0, 32768),
    }


def test_triton_cases_have_every_family_which_chooses_these_kernels():
    assert {case.gpu for case in TRITON_CASES} == set(GPUS)
    assert {len(case.copies) for case in TRITON_CASES} == {1, 2}
    for gpu in GPUS.values():
        assert f'device_description_str: "{gpu.kind}"' in target_config(gpu)
        described = type("Described", (), {"device_kind": gpu.kind})
        assert why_not_ampere(described) is None


def test_judge_triton_fails_kernels_that_do_not_fit():
    """A GPU that multiplies float8 has one kernel more than the others."""
    for case in TRITON_CASES:
        count = sum(NUM_KERNELS) + (GPUS[case.gpu].capability >= (8, 9))
        kernels = {str(number): Kernel(255, 64, 99 * 1024) for number in range(count)}
        assert all(finding.good for finding in judge_triton({case: kernels}))
        some = dict(list(kernels.items())[1:])
        for broken in (
            "Shared memory size limit exceeded",
            {},
            some,
            some | {"0": Kernel(255, 65, 99 * 1024)},
            some | {"0": Kernel(255, 64, 228 * 1024)},
        ):
            assert not any(finding.good for finding in judge_triton({case: broken}))
        if case.gpu in ("A100", "A10"):  # an A100 has what an A10 lacks
            (finding,) = judge_triton({case: some | {"0": Kernel(255, 64, 163 * 1024)}})
            assert finding.good == (case.gpu == "A100")
