"""The bytes that `make aot` counts in a compiled program, and its conclusions from them and from updates."""

import dataclasses

import numpy as np
import pytest
from support.plans import load_of, random_ids, random_plan

from experiments.aot.bytes import count_by_kind, count_sent
from experiments.aot.expected_bytes import expected_sent
from experiments.aot.hlo import Program
from experiments.aot.modelled_bytes import PRICED, compare_bytes
from experiments.aot.stack import Model
from experiments.aot.update_checks import (
    BATCHES,
    LAYERS,
    MOST_EXTRA,
    InLayers,
    MeasuredBatch,
    judge_batches,
    look_into_layers,
)
from experiments.rl.policy import TINY
from relibra_jax.contract.types import Price, Topology, layer_plans
from relibra_jax.cost.copies import push_time
from relibra_jax.cost.cost_model import COMPUTE_BYTES
from relibra_jax.cost.traffic import count_traffic
from relibra_jax.execution import ExpertParallel, expert_mesh
from relibra_jax.routing.resident_push import PushSizes
from relibra_jax.routing.sizes import Capacities, ExchangeSizes, count_capacities

AXES = {"node": 2, "local": 4}
LOCAL, NODE, ALL = (
    "mesh['node'=2,'local'=4] {'local'}",
    "mesh['node'=2,'local'=4] {'node'}",
    "mesh['axis_0'=8] {'axis_0'}",
)
HLO = """HloModule step, is_scheduled=true

%body (state: (s32[], bf16[8,6])) -> (s32[], bf16[8,6]) {
  %state = (s32[], bf16[8,6]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = bf16[8,6]{1,0} get-tuple-element(%state), index=1
  LINE
  ROOT %next = (s32[], bf16[8,6]{1,0}) tuple(%i, %x)
}

%more (state: (s32[], bf16[8,6])) -> pred[] {
  %state.1 = (s32[], bf16[8,6]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (start: (s32[], bf16[8,6])) -> bf16[8,6] {
  %start = (s32[], bf16[8,6]{1,0}) parameter(0)
  %loop = (s32[], bf16[8,6]{1,0}) while(%start), condition=%more, body=%body, backend_config=TRIPS
  ROOT %out = bf16[8,6]{1,0} get-tuple-element(%loop), index=1
}
"""


def program(line, trips='{"known_trip_count":{"n":"5"}}'):
    return Program.parse(HLO.replace("LINE", line).replace("TRIPS", trips))


def sent_by(line, scope="dispatch", groups=LOCAL, **trips):
    line = f'{line}, replica_groups={groups}, metadata={{op_name="step/{scope}/op"}}'
    return count_sent(program(line, **trips).transfers(), AXES)


# Five runs of 8 x 6 bfloat16 numbers: 480 bytes.
@pytest.mark.parametrize(
    ("line", "sent"),
    [
        ("%a = bf16[8,6]{1,0} all-to-all(%x), dimensions={0}", 480 * 3 // 4),
        ("%a = bf16[2,6]{1,0} reduce-scatter(%x), dimensions={0}", 480 * 3 // 4),
        ("%a = bf16[32,6]{1,0} all-gather(%x), dimensions={0}", 480 * 3),
        ("%a = bf16[8,6]{1,0} all-reduce(%x), to_apply=%more", 480 * 2 * 3 // 4),
        ("%a = bf16[99,6]{1,0} ragged-all-to-all(%x, %x, %i, %i, %i, %i)", 480),
    ],
)
def test_count_sent_counts_the_share_of_each_kind(line, sent):
    assert sent_by(line) == {("tokens", "local"): sent}


def test_count_sent_counts_an_asynchronous_exchange_once():
    line = (
        "%a = ((bf16[8,6]{1,0}), bf16[8,6]{1,0}) all-to-all-start(%x), dimensions={0}, "
        f'replica_groups={NODE}, metadata={{op_name="step/push_residents/op"}}\n'
        "  %b = bf16[8,6]{1,0} all-to-all-done(%a)"
    )
    assert count_sent(program(line).transfers(), AXES) == {("push", "node"): 480 // 2}


@pytest.mark.parametrize(
    ("groups", "found"),
    [
        (LOCAL, ("local", 360)),
        ("{{0,1,2,3},{4,5,6,7}}", ("local", 360)),
        ("[2,4]<=[8]", ("local", 360)),
        (NODE, ("node", 240)),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("node", 240)),
        ("[4,2]<=[2,4]T(1,0)", ("node", 240)),
        (ALL, ("all", 420)),
        ("mesh['node'=2,'local'=4] {'node','local'}", ("all", 420)),
    ],
)
def test_count_sent_knows_networks_from_groups(groups, found):
    line = "%a = bf16[8,6]{1,0} all-to-all(%x), dimensions={0}"
    assert sent_by(line, groups=groups) == {("tokens", found[0]): found[1]}


@pytest.mark.parametrize("groups", ["{{0,1},{2,3},{4,5},{6,7}}", "mesh['a'=4] {'a'}", "[4,2]<=[8]"])
def test_count_sent_rejects_groups_that_match_no_axis(groups):
    with pytest.raises(ValueError, match="a: the groups of ranks match no axis of 2 x 4"):
        sent_by("%a = bf16[8,6]{1,0} all-to-all(%x), dimensions={0}", groups=groups)


def test_count_sent_rejects_a_loop_of_unknown_length():
    with pytest.raises(ValueError, match="a runs in a loop of unknown length"):
        sent_by("%a = bf16[8,6]{1,0} all-to-all(%x), dimensions={0}", trips="{}")


@pytest.mark.parametrize(
    ("scope", "line", "what"),
    [
        ("dispatch", "%a = f32[4]{0} all-to-all(%f)", "gates"),
        ("replica_fetch", "%a = f32[4]{0} all-to-all(%f)", "replicas"),
        ("return_gradients", "%a = f32[4]{0} all-to-all(%f)", "return"),
        ("attention", "%a = f32[4]{0} all-reduce(%f)", "dense"),
        ("attention", "%a = f32[32]{0} all-gather(%f)", "dense"),
        ("attention", "%a = f32[4]{0} all-to-all(%f)", "other"),
    ],
)
def test_count_sent_knows_contents_from_scopes(scope, line, what):
    found = sent_by(f"%f = f32[4]{{0}} copy(%i)\n  {line}", scope=scope)
    assert [name for name, _ in found] == [what]


def test_look_into_layers_finds_instructions_inside_layers():
    def inside(scope, line="%a = bf16[8,6]{1,0} all-to-all(%x), dimensions={0}"):
        line = f'{line}, replica_groups={LOCAL}, metadata={{op_name="step/{scope}/op"}}'
        trips = f'{{"known_trip_count":{{"n":"{LAYERS}"}}}}'
        return look_into_layers(program(line, trips=trips), LAYERS)

    assert inside("dispatch") == InLayers(1, 0, 0, {})
    assert inside("push_residents") == InLayers(1, 1, 0, {})
    assert inside("prepare_layer", "%a = bf16[8,6]{1,0} copy(%x)") == InLayers(1, 0, 1, {})
    assert inside("dispatch", "%a = bf16[8,6]{1,0} sort(%x), dimensions={0}") == InLayers(1, 0, 1, {})


SENT = {("push", "node"): 1000}
SOUND = {
    batch: MeasuredBatch(
        temporary=10**9 + (MOST_EXTRA if batch.resident_slots else 0),
        pushes={"push": 6.0 * batch.updates, "return": 24.0 * batch.updates},
        layers=InLayers(2, 0, 0, {2.0: 2}),
        sent=SENT,
        expected=SENT,
    )
    for batch in BATCHES
}


ONE, THREE = BATCHES[1], BATCHES[-1]


@pytest.mark.parametrize(
    ("batch", "change", "broken"),
    [
        (ONE, {}, []),
        (THREE, {"temporary": SOUND[THREE].temporary + 1}, ["no more temporary memory"]),
        (ONE, {"sent": {}}, ["MB sent"]),
        (ONE, {"pushes": {"push": 72.0, "return": 24.0}}, ["residents are pushed"]),
        (ONE, {"pushes": {"push": 6.0, "return": 25.0}}, ["residents are pushed"]),
        (ONE, {"layers": InLayers(2, 1, 0, {2.0: 2})}, ["residents are pushed"]),
        (ONE, {"layers": InLayers(2, 0, 3, {2.0: 2})}, ["layers contain no sort"]),
        (ONE, {"layers": InLayers(0, 0, 0, {2.0: 2})}, ["layers contain no sort"]),
        (ONE, {"layers": InLayers(2, 0, 0, {2.0: 3})}, ["layers contain only two loops"]),
        (ONE, {"temporary": 10**9 + MOST_EXTRA + 1}, ["temporary memory of residents"]),
    ],
)
def test_judge_batches_can_fail_every_requirement(batch, change, broken):
    findings = list(judge_batches(SOUND | {batch: SOUND[batch]._replace(**change)}))
    failed = [finding for finding in findings if finding.good is False]
    assert {finding.program for finding in failed} <= {batch.name}
    assert len(failed) == len(broken)
    for finding, requirement in zip(failed, broken, strict=True):
        assert finding.requirement.startswith(requirement)


def buffers(node, exports):
    """Return buffer sizes of which the lanes between nodes and the exports of replicas differ."""
    return Capacities(
        rows=0,
        flat=ExchangeSizes(pair=0, own=9, send=0, receive=0),
        node=ExchangeSizes(pair=node, own=9, send=0, receive=0),
        local=ExchangeSizes(pair=7, own=9, send=0, receive=0),
        exports=exports,
        export_copies=0,
        push=PushSizes(exports=5, pair=6, own=1),
    )


def test_expected_sent_counts_a_padded_update():
    topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=8, replica_slots=2, resident_slots=1)
    capacities = buffers(node=10, exports=3)
    parallel = ExpertParallel(
        mesh=expert_mesh(topology),
        topology=topology,
        capacities=capacities,
        path="hierarchical",
        exchange="padded",
        fetch="padded",
    )
    model = Model(width=16, expert_width=4, heads=1, top_k=2)
    expert = 3 * 16 * 4
    layers, runs = 4, 2 * 3 * 4
    assert expected_sent(model, parallel, layers=layers, micro_batches=3, updates=2) == {
        ("tokens", "node"): runs * 5 * 10 * 16 * 2,
        ("tokens", "local"): runs * 5 * 3 * 7 * 16 * 2,
        ("gates", "node"): runs * 3 * 10 * 2 * 4,
        ("gates", "local"): runs * 3 * 3 * 7 * 4,
        ("replicas", "local"): runs * 3 * (3 + 2) * expert * 2 * 3 // 4,
        ("push", "local"): 2 * (5 + 4) * expert * 2 * 3 // 4,
        ("push", "node"): 2 * 6 * expert * 2 // 4,
        ("return", "local"): 2 * (5 + 4) * expert * 4 * 3 // 4,
        ("return", "node"): 2 * 6 * expert * 4 // 4,
        ("dense", "all"): runs * 2 * (4 * 16 * 16 * 2 + 16 * 8 * 4) * 7 // 8,
    }


@pytest.mark.parametrize("fill", [0.6, 1.0])
def test_push_time_agrees_with_expected_sent_on_the_bytes_of_a_plan(fill):
    """They are equal where buffers are full: between two nodes, in the direction that sends more. Inside nodes, and for
    tokens, the buffers also send padding."""
    topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=1, resident_slots=2)
    rng, layers = np.random.default_rng(0), 3
    load = load_of(random_ids(rng, (2, layers, 8, 40), 16, 2), topology)
    plan = random_plan(rng, load, topology, fill=fill)
    capacities = count_capacities(layer_plans(plan, load), topology)
    ways = {"path": "flat", "exchange": "padded", "fetch": "padded"}
    parallel = ExpertParallel(mesh=expert_mesh(topology), topology=topology, capacities=capacities, **ways)
    model = Model(width=16, expert_width=4, heads=1, top_k=2)
    sent = expected_sent(model, parallel, layers=layers, micro_batches=2)

    nothing = dict.fromkeys(("token", "copy", "crossing", "spread", "move", "push", "push_inside"), 0.0)
    across, inside = (
        float(push_time(plan, topology, Price(**(nothing | {name: 1.0})))) for name in ("push", "push_inside")
    )
    expert = 3 * 16 * 4 * COMPUTE_BYTES
    assert sent["push", "node"] == round(expert * across)
    assert sent["push", "local"] == pytest.approx(expert * inside, rel=0.2)
    rows = count_traffic(layer_plans(plan, load), topology)
    rows = (np.asarray(rows.slow_sent) + np.asarray(rows.fast_sent)).sum((0, 1)).max()
    assert 5 * rows * 16 * 2 <= sent["tokens", "all"]


def priced_and_sent():
    """Return the bytes that the cost model prices for an update, and those that follow from the same buffers."""
    topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=2, resident_slots=1)
    capacities = buffers(node=11, exports=4)
    parallel = ExpertParallel(
        mesh=expert_mesh(topology),
        topology=topology,
        capacities=capacities,
        path="hierarchical",
        striped=True,
    )
    config = dataclasses.replace(TINY, dtype="bfloat16")
    sizes = {"width": config.width, "expert_width": config.expert_width, "top_k": config.top_k}
    model = Model(**sizes, heads=1, samples=2, positions=12)
    sent = expected_sent(model, parallel, layers=config.layers, micro_batches=3)
    return compare_bytes(sent, config, parallel, tokens=24, micro_batches=3, updates=1)


def test_cost_model_prices_what_an_update_sends_but_for_the_repeated_dispatch():
    ratios = {(each.content, each.axes): each.sent / each.priced for each in priced_and_sent() if each.priced}
    for network in ("node", "local"):
        assert ratios["tokens", network] == pytest.approx(5 / 4, rel=1e-3)
        assert ratios["residents", network] == pytest.approx(1, rel=1e-3)
    assert ratios["replicas", "local"] == pytest.approx(1, rel=1e-3)
    assert all(each.good for each in priced_and_sent())


def test_sums_of_residents_over_groups_are_not_priced_as_their_transfer():
    topology = Topology(num_nodes=2, ranks_per_node=4, num_experts=16, replica_slots=2, resident_slots=1)
    parallel = ExpertParallel(
        mesh=expert_mesh(topology), topology=topology, capacities=buffers(11, 4), path="hierarchical"
    )
    sent = {("return", "data"): 5, ("dense", "data"): 7}
    config = dataclasses.replace(TINY, dtype="bfloat16")
    compared = compare_bytes(sent, config, parallel, tokens=24, micro_batches=3, updates=1)
    (over_groups,) = (each for each in compared if each.axes == "data")
    assert (over_groups.content, over_groups.sent, over_groups.good) == ("dense", 12, True)


@pytest.mark.parametrize("factor", [0.8, 1.3])
def test_compared_bytes_can_be_too_few_and_too_many(factor):
    wrong = [
        each._replace(sent=factor * each.priced).good for each in priced_and_sent() if each.content in PRICED
    ]
    assert wrong == [False] * 5


def test_count_by_kind_knows_the_axes_of_copies():
    groups = "mesh['fsdp'=2,'node'=2,'local'=2] {'fsdp'}"
    line = f"%a = bf16[16,6]{{1,0}} all-gather(%x), dimensions={{0}}, replica_groups={groups}"
    axes = {"fsdp": 2, "node": 2, "local": 2}
    assert count_by_kind(program(line).transfers(), axes) == {("dense", "all-gather", "fsdp"): 480}
    both = line.replace("{'fsdp'}", "{'node','local'}").replace("16,6", "32,6")
    assert count_by_kind(program(both).transfers(), axes) == {("dense", "all-gather", "node+local"): 3 * 480}
    whole = line.replace("{'fsdp'}", "{'fsdp','node','local'}").replace("16,6", "64,6")
    assert count_by_kind(program(whole).transfers(), axes) == {("dense", "all-gather", "all"): 7 * 480}
