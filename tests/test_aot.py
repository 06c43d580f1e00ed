"""The conclusions of `make aot` from parsed programs; these tests compile no programs."""

from dataclasses import replace

import pytest

from experiments.aot.attention import PHASES, judge_attention
from experiments.aot.attention import Measured as AttentionMeasured
from experiments.aot.checks import BUFFER, EXCHANGES, STACKS, Case, Measured, Move, judge, stack_cases
from experiments.aot.hlo import Program, RowPasses
from experiments.aot.host import CASES, HostMeasured, judge_host
from experiments.aot.late import Beside, judge_fetches
from experiments.aot.migration import Migration, judge_migration
from experiments.aot.pieces import Crossing, judge_crossings
from experiments.aot.ways import EXPERT
from relibra_jax.execution.exchange import UPDATES

PROGRAM = """HloModule step, is_scheduled=true

%product (p: bf16[8,8], q: bf16[8,8]) -> bf16[8,8] {
  %p = bf16[8,8]{1,0} parameter(0)
  %q = bf16[8,8]{1,0} parameter(1)
  ROOT %dot.1 = bf16[8,8]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (state: (s32[], bf16[8,8])) -> (s32[], bf16[8,8]) {
  %state = (s32[], bf16[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = bf16[8,8]{1,0} get-tuple-element(%state), index=1
  %push-start = ((bf16[8,8]{1,0}), bf16[4,8]{1,0}) reduce-scatter-start(%x), metadata={op_name="step/replica_fetch"}
  %fused = bf16[8,8]{1,0} fusion(%x, %x), kind=kCustom, calls=%product, metadata={op_name="step/attention/dot"}
  %push-done = bf16[4,8]{1,0} reduce-scatter-done(%push-start)
  %late = bf16[8,8]{1,0} dot(%fused, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %next = (s32[], bf16[8,8]{1,0}) tuple(%i, %late)
}

%more (state: (s32[], bf16[8,8])) -> pred[] {
  %state.1 = (s32[], bf16[8,8]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (start: (s32[], bf16[8,8])) -> bf16[8,8] {
  %start = (s32[], bf16[8,8]{1,0}) parameter(0)
  %loop = (s32[], bf16[8,8]{1,0}) while(%start), condition=%more, body=%body, backend_config={TRIPS}
  %out = bf16[8,8]{1,0} get-tuple-element(%loop), index=1
  ROOT %all = bf16[8,8]{1,0} all-reduce(%out), replica_groups={{0,1}}, metadata={op_name="step/sum"}
}
"""
TRIPS = '{"known_trip_count":{"n":"5"}}'


def test_transfers_know_what_runs_beside_them_and_how_often():
    program = Program.parse(PROGRAM.replace("{TRIPS}", TRIPS))
    push, total = program.transfers()
    assert (push.kind, push.op_name, push.times, push.asynchronous) == (
        "reduce-scatter",
        "step/replica_fetch",
        5,
        True,
    )
    assert [(one.name, program.is_gemm(one)) for one in push.between] == [("fused", True)]
    assert (total.kind, total.times, total.asynchronous, total.between) == ("all-reduce", 1, False, ())


def test_transfers_in_a_loop_of_unknown_length_run_infinitely_often():
    push, _ = Program.parse(PROGRAM.replace("{TRIPS}", "{}")).transfers()
    assert push.times == float("inf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("is_scheduled=true", "is_scheduled=false"), "not a scheduled HloModule"),
        (("ENTRY %main", "%main"), "has no ENTRY computation"),
        (("reduce-scatter-done(%push-start)", "copy(%x)"), "push-start has no done instruction"),
        (("  %i = s32[] get", "  %i s32[] get"), "not an HLO instruction: %i s32"),
    ],
)
def test_parse_rejects_a_text_that_is_no_scheduled_program(change, message):
    with pytest.raises(ValueError, match=message):
        list(Program.parse(PROGRAM.replace(*change)).transfers())


def sound_moves(case):
    if not case.replica_slots:
        return []
    # One of the padded fetch's two exchanges overlaps with no product.
    products = [4, 0][: EXCHANGES[case.way]]
    return [
        Move(phase, case.layers, True, count, count, 2 * EXPERT)
        for phase in ("fetch", "refetch", "return")
        for count in products
    ]


SENT = {("tokens", "node"): 1000, ("replicas", "local"): 500}
SOUND = {
    case: Measured(
        temporary=100 * BUFFER + (3 * BUFFER if case.replica_slots else 0),
        moves=sound_moves(case),
        gathered=0,
        sent=SENT,
        expected=SENT,
        passes=RowPasses(10.0, 5.0, 0.0),
        gates_alone=3.0,
        updates=UPDATES if case.way == "ragged" else None,
        kernels=(2.0, 3.0),
    )
    for stack in STACKS
    for case in stack_cases(*stack)
}
DEEP = Case(way="auto", scanned=True, layers=8)
PADDED, RAGGED = (replace(DEEP, way=way) for way in ("padded", "ragged"))


@pytest.mark.parametrize(
    ("case", "change", "broken"),
    [
        (DEEP, {}, []),
        (
            DEEP,
            {"moves": [*SOUND[DEEP].moves, Move("refetch", 8, True, 4, 4, 0)]},
            ["one replica fetch, refetch"],
        ),
        (DEEP, {"moves": SOUND[DEEP].moves[:-2]}, ["one replica fetch, refetch", "every return overlaps"]),
        (DEEP, {"moves": [one._replace(asynchronous=False) for one in SOUND[DEEP].moves]}, ["every "] * 3),
        (
            DEEP,
            {"moves": [one._replace(attention=0) for one in SOUND[DEEP].moves]},
            ["every fetch", "every refetch"],
        ),
        (DEEP, {"moves": [one._replace(sent=10 * EXPERT) for one in SOUND[DEEP].moves]}, ["a rank sends"]),
        (DEEP, {"gathered": EXPERT}, ["no all-gather"]),
        (DEEP, {"temporary": 103 * BUFFER + BUFFER * 11 // 20}, ["temporary memory"]),
        (DEEP, {"temporary": 105 * BUFFER}, ["temporary memory", "its growth with depth"]),
        (DEEP, {"sent": SENT | {("tokens", "node"): 1001}}, ["MB sent"]),
        (DEEP, {"sent": SENT | {("other", "all"): 1}}, ["MB sent"]),
        (DEEP, {"kernels": (2.0, 5.0)}, ["experts of a layer: two kernels forward"]),
        (DEEP, {"passes": RowPasses(28.0, 5.0, 0.0)}, ["a layer gathers"]),
        (RAGGED, {"passes": RowPasses(10.0, 5.0, 1.0)}, ["a layer gathers"]),
        (DEEP, {"gates_alone": 4.0}, ["at most 3 exchanges of gates"]),
        (RAGGED, {"updates": 8}, ["ragged exchanges have"]),
        (RAGGED, {"moves": SOUND[DEEP].moves}, ["one replica fetch, refetch"]),
        (PADDED, {"moves": [one._replace(attention=0) for one in SOUND[PADDED].moves]}, ["every "] * 2),
        (PADDED, {"temporary": 106 * BUFFER}, ["temporary memory", "its growth with depth"]),
    ],
)
def test_judge_can_fail_every_requirement(case, change, broken):
    measured = SOUND | {case: SOUND[case]._replace(**change)}
    findings = [finding for stack in STACKS for finding in judge(*stack, measured)]
    failed = [finding for finding in findings if finding.good is False]
    assert {finding.program for finding in failed} <= {f"{case.way}, scanned"}
    assert len(failed) == len(broken)
    for finding, requirement in zip(failed, broken, strict=True):
        assert finding.requirement.startswith(requirement)


def test_judge_migration_fails_a_migration_that_gathers():
    assert [one.good for one in judge_migration(Migration(1, 0))] == [True, None]
    assert [one.good for one in judge_migration(Migration(1, 5))] == [False, None]


def test_judge_attention_wants_kernels_without_large_arrays_and_replicas_beside_it():
    sound = AttentionMeasured(10**7, 3, 0, dict.fromkeys(PHASES, 1))
    assert all(one.good for one in judge_attention(sound))
    unsound = AttentionMeasured(5 * 10**8, 3, 1, dict.fromkeys(PHASES, 0))
    assert not any(one.good for one in judge_attention(unsound))
    without_kernels = next(iter(judge_attention(sound._replace(kernels=0))))
    assert not without_kernels.good


def test_judge_crossings_wants_every_way_of_both_directions_beside_experts():
    """It is enough that one of several exchanges is."""
    sound = [
        Crossing(direction, out, count)
        for direction, kernels in (("forward", 2), ("backward", 3))
        for out in (True, False)
        for count in (0, kernels)
    ]
    assert [one.good for one in judge_crossings(sound)] == [True] * 4
    late = [one._replace(kernels=min(one.kernels, 2)) for one in sound]
    assert [one.good for one in judge_crossings(late)] == [True, True, False, False]
    assert [one.good for one in judge_crossings([])] == [False] * 4


def test_judge_fetches_wants_pieces_beside_attention_and_replicas_beside_home_experts():
    sound = [
        Beside(backward, *count)
        for backward, kernels in ((False, 2), (True, 3))
        for count in ((4, 0), (0, kernels))
    ]
    assert [one.good for one in judge_fetches(sound)] == [True] * 4
    early = [one._replace(kernels=min(one.kernels, 2)) for one in sound[1:]]
    assert [one.good for one in judge_fetches(early)] == [False, True, True, False]


HOST_PROGRAM = """HloModule step, is_scheduled=true

%slice (p: bf16[5,8], i: s32[]) -> bf16[1,8] {
  %p = bf16[5,8]{1,0:S(5)} parameter(0)
  %i = s32[] parameter(1)
  ROOT %cut = bf16[1,8]{1,0} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={1,8}
}

ENTRY %main (kept: bf16[5,8], i: s32[], x: bf16[8,8]) -> bf16[8,8] {
  %kept = bf16[5,8]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %x = bf16[8,8]{1,0} parameter(2)
  %out-start = (bf16[5,8]{1,0:S(5)}, bf16[5,8]{1,0}, u32[]) copy-start(%kept)
  %on-host = bf16[5,8]{1,0:S(5)} copy-done(%out-start)
  %cut-start = ((bf16[5,8]{1,0:S(5)}, s32[]), bf16[1,8]{1,0}, u32[]) fusion-start(%on-host, %i.1), calls=%slice
  %product = bf16[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %cut-done = bf16[1,8]{1,0} fusion-done(%cut-start)
  ROOT %sum = bf16[8,8]{1,0} add(%product, %x)
}
"""


def test_copies_from_host_memory_are_counted_and_those_to_it_are_not():
    (copy,) = Program.parse(HOST_PROGRAM).host_copies()
    assert (copy.array, copy.times) == (("bf16", (1, 8)), 1)
    assert [one.opcode for one in copy.between] == ["dot"]


def test_host_replicas_are_judged_by_bytes_and_overlap():
    case = CASES[1]
    good = HostMeasured(copied=4 * 2 * EXPERT * 2, beside=[5, 4], linked=4 * 8 * 3 * EXPERT * 2 // 4)
    assert all(finding.good for finding in judge_host(case, good))
    for wrong in (good._replace(copied=0), good._replace(beside=[5, 0]), good._replace(linked=1)):
        assert sum(finding.good is False for finding in judge_host(case, wrong)) == 1
