"""The operations of a layer equal arithmetic done by hand, the price of batches, and a measured layer."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from support.costs import CLUSTER, MODEL

from experiments.layer_price.__main__ import LayerPrice, main
from experiments.layer_price.savings import price_savings
from experiments.program import run_program
from relibra_jax.contract.types import LayerPlan, Topology
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.hardware import CLUSTERS
from relibra_jax.cost.hop_rows import even_hops, visit_share
from relibra_jax.cost.layer_operations import Operation, layer_operations
from relibra_jax.cost.models import MODELS
from relibra_jax.cost.step_time import rank_time

ROOT = Path(__file__).parents[1]
H100 = ROOT / "experiments" / "results" / "kernels" / "h100.jsonl"
WHOLE = Topology(num_nodes=2, ranks_per_node=8, num_experts=128, replica_slots=0)
SMALL = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1)


def run_of(model="qwen3-30b-a3b", cluster="h100", **changes):
    return CostModel(cluster=CLUSTERS[cluster], model=MODELS[model], **changes)


def seconds(operations, cluster, **chosen):
    return sum(
        each.seconds(cluster)
        for each in operations
        if all(getattr(each, name) == value for name, value in chosen.items())
    )


def layer_seconds(cluster="h100", tokens=8192, topology=WHOLE, **changes):
    operations = layer_operations(run_of(cluster=cluster, **changes), topology, tokens)
    return sum(seconds(operations, CLUSTERS[cluster], during=each) for each in ("forward", "backward"))


def test_operations_of_a_small_flat_layer_equal_a_count_by_hand():
    """Two ranks have 8 tokens of 2 copies, in rows of 4 bfloat16 numbers; half of the 16 copies leave their rank."""
    topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=8, replica_slots=0)
    run = CostModel(cluster=CLUSTER, model=MODEL, path="flat", exchange="padded", spare_room=False)
    tables, *layer = layer_operations(run, topology, 8)
    assert (tables.during, tables.part) == ("batch", "small")
    forward = [each for each in layer if each.during == "forward"]
    # Both lanes have 8 rows, of which the own one is empty; the slots have room for 16 copies.
    pack = Operation("pack", "forward", "rows", "dispatch", 8 * 8, 16 * 8, launches=1)
    sent = {"read": 16 * 8, "written": 16 * 8, "inside": 8 * 8, "collectives": 1}
    gates = {"read": 32 * 4, "written": 32 * 4, "inside": 8 * 4, "launches": 2}
    # Four slots with 4 copies each fill a tile of 16 rows each; an expert has 60 weights.
    experts = {"read": 16 * 8 + 16 * 10 + 4 * 120, "written": 16 * 8 + 16 * 10, "flops": 64 * 2 * 60}
    assert forward == [
        pack,
        Operation("exchange", "forward", "links", "dispatch", **sent),
        Operation("gates", "forward", "small", "dispatch", **gates),
        Operation("pick", "forward", "rows", "dispatch", 16 * 8, 16 * 8, launches=1),
        Operation("checks", "forward", "small", read=16 * 4, launches=6, collectives=1),
        Operation("expert products", "forward", "experts", "experts", **experts, launches=2),
        pack._replace(name="pack back", scope="combine"),
        Operation("exchange back", "forward", "links", "combine", **sent),
        Operation("sum", "forward", "rows", "combine", 16 * 8, 8 * 8, launches=1),
    ]
    names = "pack exchange pick checks|expert products|pack back|exchange back|gates back|sum"
    backward = [each for each in layer if each.during == "backward"]
    assert [each.name for each in backward] == [*names.split("|")[0].split(), *names.split("|")[1:]]
    assert backward[4].flops == 2 * forward[5].flops
    assert [each.scope for each in backward[:3] + backward[5:]] == ["combine"] * 3 + ["dispatch"] * 4
    # 16 + 16 numbers of 8 bytes at 1,000 bytes/s take longer than 8 of them on the link at 500 bytes/s.
    assert forward[1].seconds(CLUSTER) == pytest.approx(2 * 16 * 8 / 1000)
    assert forward[5].seconds(CLUSTER) == pytest.approx((16 * 18 * 2 + 480) / 1000)


def test_launches_collectives_and_choices_take_their_own_time():
    cluster = dataclasses.replace(CLUSTER, launch_seconds=1.0, collective_seconds=10.0, choice_seconds=100.0)
    operation = Operation("any", "forward", "small", read=500.0, launches=3, collectives=2, choices=1)
    assert operation.seconds(cluster) == pytest.approx(0.5 + 3 + 20 + 100)


@pytest.mark.parametrize("exchange", ["padded", "fitted", "ragged"])
def test_operations_cost_what_the_price_of_batches_says(exchange):
    """The same layer as a plan: even load of 4 ranks, one replica on each, and visits as uniform routing has them."""
    cluster = dataclasses.replace(CLUSTERS["h100"], launch_seconds=0.0, collective_seconds=0.0)
    model = dataclasses.replace(MODELS["qwen3-30b-a3b"], num_experts=8, top_k=2)
    topology, tokens = SMALL, 480
    run = CostModel(cluster=cluster, model=model, exchange=exchange, path="hierarchical")
    copies, ranks = 2 * tokens, topology.num_ranks
    slot_expert = np.arange(8, dtype=np.int32).reshape(2, 2, 2)
    replica = slot_expert[:, ::-1, :1]
    plan = LayerPlan(
        slot_expert=np.concatenate([slot_expert, replica], -1)[None, None],
        home=np.arange(8, dtype=np.int32)[None, None],
        quota=np.full((1, 1, 2, 2, 3), copies // 3, np.int32),
        load=np.zeros((1, 1, 2, 2, 8), np.int32),
    )
    # Experts with a replica have two thirds of two slots' copies, spread evenly over the sources.
    share = np.where(np.arange(8) % 2 == 0, 2, 1) * copies // 3 // ranks
    plan = plan._replace(load=np.broadcast_to(share.astype(np.int32), (1, 1, 2, 2, 8)).copy())
    visits = jnp.full((1, 1, 4, 2), tokens * visit_share(topology, 2), jnp.float32)
    even = jnp.full((1, 1, 2, 2, 2, 2), copies / ranks, jnp.float32)
    time = rank_time(plan, jnp.zeros((1, 2, 2)), topology, run.price(topology), visits=visits, pairs=even)
    operations = [each for each in layer_operations(run, topology, tokens) if each.during != "batch"]
    priced = {name: float(np.max(value)) for name, value in time._asdict().items()}
    assert seconds(operations, cluster, part="experts") == pytest.approx(priced["compute"], rel=1e-5)
    links = {
        way: [each for each in operations if each.part == "links" and way(each)] for way in (_far, _near)
    }
    choices = seconds(operations, cluster, name="choice between nodes") * 2
    inside = seconds(links[_near], cluster) + choices * (exchange == "fitted")
    assert inside == pytest.approx(priced["inside"], rel=1e-5)
    between = seconds(links[_far], cluster) + choices * (exchange != "padded")
    assert between == pytest.approx(priced["between"], rel=1e-5)
    # The price leaves out that sums write the tokens of a rank, in two of four exchanges.
    rows = seconds(operations, cluster, part="rows") - 2 * tokens * 2 * 2048 / cluster.rates.memory
    assert rows == pytest.approx(priced["gather"], rel=1e-5)
    # The price has two fetches, and an even number of exports: two where a rank has one.
    again = layer_operations(run, topology, tokens, checkpointed=True)
    replicas = sum(each.inside for each in again if each.part == "replicas") / cluster.rates.fast
    assert replicas == pytest.approx(priced["fetch"] * 2 / 3, rel=1e-5)


def _far(operation):
    return operation.across > 0


def _near(operation):
    return operation.across == 0


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3-235b-a22b"])
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_ragged_layers_cost_less_than_fitted_ones_and_these_less_than_padded_ones(model, nodes):
    topology, path = dataclasses.replace(WHOLE, num_nodes=nodes), "flat" if nodes == 1 else "hierarchical"
    kinds = [
        layer_seconds(model=model, topology=topology, exchange=each, path=path)
        for each in ("ragged", "fitted", "padded")
    ]
    assert kinds[0] < min(kinds[1:])
    assert nodes == 1 or kinds == sorted(kinds), "inside one node, choices cost more than spare room"


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3-235b-a22b"])
def test_on_a_node_tokens_that_go_once_to_a_rank_cost_less_than_their_copies(model):
    topology = dataclasses.replace(WHOLE, num_nodes=1)
    for exchange in ("fitted", "padded"):
        once, copies = (
            layer_seconds(model=model, topology=topology, exchange=exchange, path=path)
            for path in ("hierarchical", "flat")
        )
        assert once < copies


def test_layers_take_longer_with_more_tokens_and_on_slower_clusters():
    times = [layer_seconds(tokens=tokens) for tokens in (1, 1024, 8192, 16384)]
    assert times == sorted(times)
    clusters = [layer_seconds(cluster) for cluster in ("gb200-nvl72", "b200", "h200", "h100", "a100")]
    assert clusters == sorted(clusters)
    assert layer_seconds(striped=True) > layer_seconds(striped=False)


def test_checkpointed_layers_dispatch_and_fetch_once_more():
    topology = dataclasses.replace(WHOLE, replica_slots=2)
    kept, again = (layer_operations(run_of(), topology, 8192, checkpointed=each) for each in (False, True))
    added = [each.name for each in again if each not in kept]
    assert added == [
        "replicas again, copies",
        "replicas again",
        *(
            f"{name} again {hop} nodes"
            for hop in ("between", "inside")
            for name in ("choice", "pack", "exchange", "gates", "pick")
        ),
    ]


def test_attention_is_one_line_of_the_price_of_its_positions_and_pairs():
    run, tokens = run_of(), 8192
    operations = layer_operations(run, WHOLE, tokens, sample_tokens=1024)
    price = run.price(WHOLE)
    expected = tokens * (float(price.token) + 1024 * float(price.pair))
    assert seconds(operations, run.cluster, part="attention") == pytest.approx(expected)


def test_a_single_rank_sends_nothing_and_gathers_as_fast_as_measured():
    """The profile of this layer on an H100 has four gathers; nothing is sent."""
    topology = Topology(num_nodes=1, ranks_per_node=1, num_experts=128, replica_slots=0)
    operations = layer_operations(run_of(spare_room=False), topology, 16384)
    assert not [each for each in operations if each.part == "links"]
    gathers = [each for each in operations if each.part == "rows"]
    assert [each.name for each in gathers] == ["pick", "sum"] * 2
    lines = map(json.loads, H100.read_text().splitlines())
    kernels = {line["kernel"]: line["milliseconds"] for line in lines if "kernel" in line}
    measured = sum(sorted(kernels.values())[-5:-1])  # all but the grouped products
    assert 1e3 * seconds(gathers, CLUSTERS["h100"]) == pytest.approx(measured, rel=0.05)


def test_even_hops_visit_as_uniform_routing_does():
    rng = np.random.default_rng(0)
    topology = Topology(num_nodes=4, ranks_per_node=2, num_experts=16, replica_slots=0)
    chosen = np.argsort(rng.random((20000, 16)), -1)[:, :3]
    for size, of_ranks in ((4, False), (2, True)):
        drawn = np.mean([(chosen // size == part).any(-1).mean() for part in range(16 // size)])
        assert visit_share(topology, 3, of_ranks=of_ranks) == pytest.approx(drawn, abs=0.01)
    model = dataclasses.replace(MODELS["qwen3-30b-a3b"], num_experts=16, top_k=3)
    run = CostModel(cluster=CLUSTERS["h100"], model=model, exchange="ragged").on(topology)
    between, inside = even_hops(run, topology, 1000)
    assert (between.kind, inside.kind) == ("fitted", "ragged")
    assert 3 / 4 * between.arriving <= between.across < 1.1 * 3 / 4 * between.arriving
    assert inside.arriving == 3000
    assert inside.inside == 1500


def test_savings_have_the_sign_that_the_gathers_of_each_exchange_give_them():
    """Ragged layers have no gather beside the products, and would need one for a row for each rank."""
    fitted, ragged = (
        price_savings(run_of(exchange=each).on(WHOLE), WHOLE, 8192) for each in ("fitted", "ragged")
    )
    assert min(fitted.values()) > 0
    assert ragged["gathers in products"] == 0
    assert ragged["row per rank"] < 0
    assert 0 < ragged["no zeros"] < fitted["no zeros"]
    # Dispatched gates follow their rows through the ragged exchange; all others travel beside gathers and products.
    alone = 1e3 * run_of(exchange="ragged").cluster.collective_seconds
    assert ragged["gates with rows"] == pytest.approx(fitted["gates with rows"] + alone)
    assert ragged["hops in one gather"] == 0
    assert ragged["no choices"] == pytest.approx(fitted["no choices"] / 2)


@pytest.mark.parametrize(
    ("changes", "tokens", "says"),
    [
        ({}, 0, "tokens=0 must be an integer of at least 1"),
        ({"pieces": 2}, 8, "pieces=2: operations are listed"),
        ({"exchange": "needed"}, 8, "exchange='needed': no layer runs it"),
        ({"path": "flat", "exchange": "ragged"}, 8, "exchange='ragged' works only inside a node"),
    ],
)
def test_layer_operations_refuses_what_it_cannot_list(changes, tokens, says):
    with pytest.raises(ValueError, match=says):
        layer_operations(run_of(**changes), WHOLE, tokens)


def layer_price(*args):
    return run_program(main, LayerPrice, list(map(str, args)))


def test_layer_price_prints_the_table_and_writes_figure_and_numbers(tmp_path, capsys):
    assert layer_price("qwen3-30b-a3b", "h100", "--savings", "--out", tmp_path) == 0
    text = capsys.readouterr().out
    assert "neither products nor links: " in text
    numbers = json.loads((tmp_path / "layer_price.json").read_text())
    assert numbers["milliseconds"] == pytest.approx(sum(numbers["parts"].values()))
    assert numbers["milliseconds"] == pytest.approx(1e3 * layer_seconds(striped=True), rel=1e-6)
    assert set(numbers["savings"]) >= {"row per rank", "no zeros"}
    for name in dict.fromkeys(each["name"] for each in numbers["operations"]):
        assert name in text or name == "tables"
    assert (tmp_path / "layer_price.png").stat().st_size > 10_000


def test_layer_price_has_the_times_of_a_profile_beside_its_own(capsys):
    one = ("--nodes", 1, "--ranks", 1, "--tokens", 16384, "--no-spare-room")
    assert layer_price("qwen3-30b-a3b", "h100", *one, "--profile", H100) == 0
    text = capsys.readouterr().out
    assert "2.57 + 5.69" in text, "the layer, of 8.26 ms with gradients"
    assert "1.74 + 4.8" in text, "its experts, of 6.56 ms"
    assert layer_price("qwen3-30b-a3b", "h100", "--tokens", 16384, "--profile", H100) == 0
    text = capsys.readouterr().out
    assert "1.74 + 4.8" in text
    assert "2.57 + 5.69" not in text, "one GPU sends nothing"


@pytest.mark.parametrize(
    ("options", "says"),
    {
        "qwen3-30b h100": "model='qwen3-30b' must be one of",
        "qwen3-30b-a3b h10": "cluster='h10' must be one of",
        "qwen3-30b-a3b h100 --exchange nccl": "exchange",
        "qwen3-30b-a3b h100 --tokens 0": "tokens=0 must be",
        "qwen3-30b-a3b h100 --ranks 0": "ranks=0 must be",
        "qwen3-30b-a3b h100 --ranks 16": "ranks=16: the fast network of h100 connects at most 8 ranks",
        "qwen3-30b-a3b h100 --profile none.jsonl": "profile=none.jsonl has no results",
        f"qwen3-30b-a3b h100 --profile {H100}": "is of a layer with tokens=16384, not 8192",
        f"deepseek-v3 h100 --tokens 16384 --profile {H100}": "width=2048, not 7168",
    }.items(),
)
def test_layer_price_reports_bad_input(options, says, capsys):
    assert layer_price(*options.split()) == 2
    assert says in capsys.readouterr().err
