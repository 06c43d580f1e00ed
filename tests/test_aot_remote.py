"""The conclusions of `make aot` from a program whose replicas a kernel pulls; these tests compile no program."""

import pytest

from experiments.aot.remote import Remote, judge_remote, read_pulls
from experiments.aot.ways import EXPERT

KERNEL = (
    "  {name} = (bf16[2,64,128]{{2,1,0}}, s32[32]{{0}}) custom-call(%a, %b, %c, %d),"
    ' custom_call_target="mosaic_gpu_v2", backend_config={{uses_xla_collective_metadata = {remote}}}'
)


def test_read_pulls_finds_kernels_in_and_out_of_fusions():
    text = "\n".join(
        [
            "%dynamic-slice-fusion.3 (p0: bf16[2,64,128]) -> (bf16[2,64,128], s32[32]) {",
            KERNEL.format(name="ROOT %pull.1", remote="true"),
            "}",
            "",
            "ENTRY %main (a: bf16[2,64,128]) -> bf16[2,64,128] {",
            KERNEL.format(name="%pull.2", remote="true"),
            KERNEL.format(name="%experts", remote="false"),
            "}",
        ]
    )
    assert read_pulls(text) == ([2 * 64 * 128] * 2, 1)


SOUND = Remote(
    pulled=[2 * EXPERT] * 3,
    merged=0,
    exchanges={"return": 2.0},
    extra=7,
    assembled=[(0, 17)],
    sent=5,
    expected=5,
)


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({}, []),
        ({"pulled": [2 * EXPERT, 3 * EXPERT, 2 * EXPERT]}, ["one kernel fetches"]),
        ({"merged": 1}, ["one kernel fetches"]),
        ({"exchanges": {"return": 2.0, "fetch": 2.0}}, ["fetching uses no exchange"]),
        ({"sent": 6}, ["MB of experts"]),
        ({"assembled": [(8, 255)]}, ["the kernel spills"]),
        ({"assembled": []}, ["the kernel spills"]),
    ],
)
def test_judge_remote_can_fail_every_requirement(change, broken):
    failed = [finding for finding in judge_remote(SOUND._replace(**change)) if finding.good is False]
    assert len(failed) == len(broken)
    for finding, requirement in zip(failed, broken, strict=True):
        assert finding.requirement.startswith(requirement)
