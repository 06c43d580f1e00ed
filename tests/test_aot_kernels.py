"""The conclusions of `make aot` from reports on kernels; these tests compile no kernels."""

import sys

from experiments.aot import __main__ as aot
from experiments.aot.compilers import COMPILERS, Compiler
from experiments.aot.kernels import FEW_ROWS, KERNEL_CASES, KERNELS, Compiled, judge_kernels
from pallas_kernels.hopper.tile_sizes import MODELS, Problem, choose_tile_sizes

CLEAN = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nUsed 168 registers\n"


SASS = "QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR20], R24 ;"


def compiled(kernels, assembled, *, temporary=0, shared=1000, height=128):
    return Compiled(kernels, temporary, shared, frozenset({height}), assembled)


def test_kernel_cases_have_tiles_of_64_rows():
    few = [case for case in KERNEL_CASES if case.rows == FEW_ROWS]
    assert {case.part for case in few} == set(KERNELS)
    for case in few:
        shape, groups = MODELS[case.model], sum(case.slots)
        problem = Problem(2, shape.width, shape.expert_width, case.rows // groups, groups)
        assert choose_tile_sizes(problem).height == 64


def test_kernel_cases_have_one_two_and_three_weight_buffers():
    for part in KERNELS:
        assert {len(case.slots) for case in KERNEL_CASES if case.part == part} == {1, 2, 3}
    assert len({(case.name, case.part) for case in KERNEL_CASES}) == len(KERNEL_CASES)


def test_judge_kernels_fails_a_kernel_that_does_not_compile():
    clean = CLEAN
    cases = [case for case in KERNEL_CASES if case.sound]
    sound = {case: compiled(KERNELS[case.part], clean * KERNELS[case.part] + SASS) for case in cases}
    assert all(finding.good for finding in judge_kernels(sound))
    serial = "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."
    ignored = "(C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain ..."
    spills = clean.replace("0 bytes spill stores", "1936 bytes spill stores")
    broken = (
        "exceeds available shared memory",
        compiled(2, clean * 5),
        compiled(3, ""),
        compiled(5, clean * 4 + spills),
        compiled(3, clean * 3 + serial),
        compiled(5, clean * 5 + ignored),
        compiled(3, clean * 3, shared=232_449),
        # Three warpgroups: 170 registers of each thread are more than a block has, and with 160 two can't have 232.
        compiled(5, clean * 4 + clean.replace("168", "170")),
        compiled(3, clean * 2 + clean.replace("168", "160")),
        compiled(5, clean * 4 + clean.replace("168", "128"), height=64),
    )
    judged = judge_kernels(sound | dict(zip(cases[1:], broken, strict=False)))
    assert [finding.result for finding in judged if not finding.good] == [
        "exceeds available shared memory",
        "2, 0 MB temporary, 1,000 of 232,448 bytes of shared memory",
        "0 kernels, 0 bytes spilled, 0 serialised, 0 without setmaxnreg",
        " for a thread, in tiles of 128 rows",
        "5 kernels, 1936 bytes spilled, 0 serialised, 0 without setmaxnreg",
        "3 kernels, 0 bytes spilled, 1 serialised, 0 without setmaxnreg",
        "5 kernels, 0 bytes spilled, 0 serialised, 1 without setmaxnreg",
        "3, 0 MB temporary, 232,449 of 232,448 bytes of shared memory",
        "168, 168, 168, 168, 170 for a thread, in tiles of 128 rows",
        "168, 168, 160 for a thread, in tiles of 128 rows",
        "168, 168, 168, 168, 128 for a thread, in tiles of 64 rows",
    ]


def test_judge_kernels_requires_instructions_of_float8():
    case = next(case for case in KERNEL_CASES if case.part == "float8")
    wider = SASS.replace("QGMMA.64x128x32.F32.E4M3.E4M3", "HGMMA.64x128x16.F32.BF16")
    for text, result, good in (
        (SASS * 4, "4 instructions of float8, 0 of other products", True),
        (SASS + wider, "1 instructions of float8, 1 of other products", False),
        (wider, "0 instructions of float8, 1 of other products", False),
        ("", "nvdisasm is not installed", None),
    ):
        *_, last = judge_kernels({case: compiled(2, CLEAN * 2 + text)})
        assert (last.result, last.good) == (result, good)


def test_judge_kernels_requires_bad_tiles_to_be_rejected():
    bad = [case for case in KERNEL_CASES if not case.sound]
    assert {case.part for case in bad} == {"mlp", "products"}
    for case in bad:
        clean = compiled(KERNELS[case.part], CLEAN * KERNELS[case.part])
        spills = clean._replace(
            assembled=clean.assembled.replace("0 bytes spill stores", "984 bytes spill stores")
        )
        (accepted,) = judge_kernels({case: clean})
        assert (accepted.result, accepted.good) == ("accepted", False)
        (rejected,) = judge_kernels({case: spills})
        assert rejected.good
        assert "984 bytes" in rejected.result
        (rejected,) = judge_kernels({case: "exceeds available shared memory"})
        assert (rejected.result, rejected.good) == ("rejected: exceeds available shared memory", True)


def test_other_compilers_are_steps_only_where_they_are_installed(monkeypatch, tmp_path):
    for name in COMPILERS:
        monkeypatch.setitem(COMPILERS, name, Compiler(tmp_path / name, sys.executable, {}))
        assert COMPILERS[name].why_not == f"{tmp_path / name} is not installed: run make aot-compilers"
    without = aot.aot_steps()
    first = next(iter(COMPILERS))
    (tmp_path / first).mkdir()
    (tmp_path / first / "installed").touch()
    (step,) = set(aot.aot_steps()) - set(without)
    assert (step.name, step.arguments) == (f"Hopper kernels, {first}", (first,))
    assert step not in aot.aot_steps(quick=True)
