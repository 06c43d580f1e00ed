"""The conclusions of `make aot` from reports on kernels; these tests compile no kernels."""

from experiments.aot.kernels import KERNEL_CASES, KERNELS, Compiled, judge_kernels


def test_kernel_cases_have_one_two_and_three_weight_buffers():
    for part in KERNELS:
        assert {len(case.slots) for case in KERNEL_CASES if case.part == part} == {1, 2, 3}
    assert len({(case.name, case.part) for case in KERNEL_CASES}) == len(KERNEL_CASES)


def test_judge_kernels_fails_a_kernel_that_does_not_compile():
    clean = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
    cases = [case for case in KERNEL_CASES if case.sound]
    sound = {case: Compiled(KERNELS[case.part], 0, clean * KERNELS[case.part]) for case in cases}
    assert all(finding.good for finding in judge_kernels(sound))
    serial = "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."
    ignored = "(C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain ..."
    spills = clean.replace("0 bytes spill stores", "1936 bytes spill stores")
    broken = (
        "exceeds available shared memory",
        Compiled(2, 0, clean * 5),
        Compiled(3, 0, ""),
        Compiled(5, 0, clean * 4 + spills),
        Compiled(3, 0, clean * 3 + serial),
        Compiled(5, 0, clean * 5 + ignored),
    )
    judged = judge_kernels(sound | dict(zip(cases[1:], broken, strict=False)))
    assert [finding.result for finding in judged if not finding.good] == [
        "exceeds available shared memory",
        "2, 0 MB temporary",
        "0 kernels, 0 bytes spilled, 0 serialised, 0 without setmaxnreg",
        "5 kernels, 1936 bytes spilled, 0 serialised, 0 without setmaxnreg",
        "3 kernels, 0 bytes spilled, 1 serialised, 0 without setmaxnreg",
        "5 kernels, 0 bytes spilled, 0 serialised, 1 without setmaxnreg",
    ]


def test_judge_kernels_requires_bad_tiles_to_be_rejected():
    bad = [case for case in KERNEL_CASES if not case.sound]
    assert {case.part for case in bad} == {"mlp", "products"}
    clean = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
    for case in bad:
        compiled = Compiled(KERNELS[case.part], 0, clean * KERNELS[case.part])
        spills = compiled._replace(
            assembled=compiled.assembled.replace("0 bytes spill stores", "984 bytes spill stores")
        )
        (accepted,) = judge_kernels({case: compiled})
        assert (accepted.result, accepted.good) == ("accepted", False)
        (rejected,) = judge_kernels({case: spills})
        assert rejected.good
        assert "984 bytes" in rejected.result
        (rejected,) = judge_kernels({case: "exceeds available shared memory"})
        assert (rejected.result, rejected.good) == ("rejected: exceeds available shared memory", True)
