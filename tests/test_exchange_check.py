"""Tests of the check that lets ``exchange="auto"`` take a ragged exchange, with the emulated exchange in its place."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from pallas_kernels.verdicts import Verdict
from relibra_jax.contract.types import EMPTY, LayerPlan, Topology
from relibra_jax.execution import ExpertParallel, exchange_check, expert_mesh, parallel
from relibra_jax.execution.exchange import UPDATES, Exchange, Lanes, updates
from relibra_jax.execution.exchange_check import check_exchange, main
from relibra_jax.execution.exchange_verdicts import BEGAN, is_proven, read_verdict, write_verdict
from relibra_jax.execution.hop import make_hop
from relibra_jax.execution.prepared_layer import prepare_fetch
from relibra_jax.routing.sizes import ExchangeSizes, worst_case_capacities

TOPOLOGY = Topology(num_nodes=1, ranks_per_node=2, num_experts=16, replica_slots=0)
SMALL = {"tokens": 12, "width": 4, "exchange": "emulated"}


@pytest.fixture
def mesh(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    is_proven.cache_clear()
    yield expert_mesh(TOPOLOGY, devices=jax.devices()[:2])
    is_proven.cache_clear()


@pytest.fixture
def only_padded(monkeypatch):
    """Compare with the exchange that compiles fastest."""
    monkeypatch.setattr(exchange_check, "exchange_choices", lambda on_gpu: ("padded",))


@pytest.mark.parametrize(("seconds", "passed"), [(1.0, True), (3.0, False)])
def test_exchange_that_is_right_passes_if_it_is_the_fastest(monkeypatch, capsys, mesh, seconds, passed):
    times = {"emulated": seconds, "fitted": 2.0, "padded": 4.0}
    monkeypatch.setattr(exchange_check, "_median_seconds", lambda _: times)
    monkeypatch.setattr(exchange_check, "_step", lambda *_: lambda: (jnp.zeros(1),) * 3)
    assert not is_proven(mesh)
    assert "it was never checked on this machine" in capsys.readouterr().err
    verdict = check_exchange(mesh, **SMALL)
    assert not is_proven(mesh)  # programs keep the choice with which they began
    is_proven.cache_clear()
    assert verdict.passed == passed == is_proven(mesh)
    assert verdict == read_verdict(mesh)
    assert verdict.reason == ("" if passed else "it takes 3000.00 ms and another 2000.00 ms")


def test_emulated_exchange_gives_the_bits_of_the_padded_one(only_padded, mesh):
    reason = check_exchange(mesh, **SMALL).reason
    assert not reason or reason.startswith("it takes")


def test_exchange_that_puts_a_row_elsewhere_does_not_pass(monkeypatch, only_padded, mesh):
    def wrong(runs: Lanes) -> Lanes:
        right = updates(runs)
        return right._replace(receive_start=right.receive_start + (right.receive_start == 0))

    monkeypatch.setattr("relibra_jax.execution.hop.updates", wrong)
    verdict = check_exchange(mesh, tokens=16, width=4, exchange="emulated")
    assert verdict.reason == "run 0: the output differs from that of exchange='padded'"


def test_check_that_does_not_end_leaves_a_verdict_against_the_exchange(monkeypatch, mesh):
    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(exchange_check, "_step", die)
    with pytest.raises(KeyboardInterrupt):
        check_exchange(mesh, **SMALL)
    assert read_verdict(mesh) == BEGAN


def test_error_in_the_check_is_its_verdict(only_padded, mesh):
    reason = check_exchange(mesh, tokens=12, width=4).reason
    assert reason.startswith("ValueError: exchange='ragged' cannot run: XLA has none for CPUs")


def test_ragged_fetch_on_cpus_is_an_error(mesh):
    topology = dataclasses.replace(TOPOLOGY, replica_slots=1)
    slots = jnp.zeros((1, 2, topology.slots), jnp.int32)
    plan = LayerPlan(slots, jnp.arange(topology.num_experts), slots, None)
    with pytest.raises(ValueError, match="fetch='ragged' cannot run: XLA has none for CPUs"):
        prepare_fetch(plan, ExpertParallel(mesh=mesh, topology=topology, fetch="ragged"))
    without = jnp.zeros((1, 2, TOPOLOGY.slots), jnp.int32)  # without replica slots, nothing is fetched
    plan = LayerPlan(without, jnp.arange(TOPOLOGY.num_experts), without, None)
    assert (
        prepare_fetch(plan, ExpertParallel(mesh=mesh, topology=TOPOLOGY, fetch="ragged")).fetch_tables is None
    )


def test_command_says_what_it_cannot_check(capsys):
    assert main([]) == 0
    assert "exchange 'ragged': not checked, 8 devices of platform 'cpu'" in capsys.readouterr().out


def test_ragged_exchange_between_nodes_is_an_error():
    topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=1)
    mesh = expert_mesh(topology, devices=jax.devices()[:4])
    with pytest.raises(ValueError, match="exchange='ragged' works only inside a node"):
        ExpertParallel(mesh=mesh, topology=topology, exchange="ragged", path="flat")
    with pytest.raises(ValueError, match="exchange='ragged' works only inside a node"):
        ExpertParallel(mesh=mesh, topology=topology, exchange="ragged").token_exchanges(8, 1)
    alone = expert_mesh(TOPOLOGY, devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="on a single node it needs path='flat'"):
        ExpertParallel(mesh=alone, topology=TOPOLOGY, exchange="ragged", path="hierarchical")
    with pytest.raises(ValueError, match="fetch='ragged' works only inside a node"):
        ExpertParallel(mesh=mesh, topology=topology, fetch="ragged", across_nodes=True)
    hops, _ = ExpertParallel(mesh=mesh, topology=topology, exchange="ragged").token_exchanges(8, 2)
    assert [hop.kind for hop in hops] == ["fitted", "ragged"]


class Gpu(NamedTuple):
    """A described device."""

    id: int
    process_index: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100 80GB HBM3"
    client: Any = type("Client", (), {"platform_version": "cuda"})


def gpus(groups, processes):
    """Return a mesh of described GPUs, a group of one node with the GPUs of each of its processes."""
    places = np.empty(len(processes), object)
    places[:] = [Gpu(*each) for each in enumerate(processes)]
    names = ("data", "node", "local")
    return jax.sharding.Mesh(places.reshape(groups, 1, -1), names, axis_types=(AxisType.Auto,) * 3)


def test_verdict_holds_for_copies_of_the_group_and_not_for_other_processes(mesh):
    write_verdict(gpus(1, [0, 1]), Verdict(True, ""))
    assert read_verdict(gpus(2, [0, 1, 2, 3])) == Verdict(True, "")
    assert read_verdict(gpus(1, [0, 0])) is None


def test_mesh_of_some_processes_is_not_proven(monkeypatch, mesh):
    """The others would not take part in an agreement."""
    write_verdict(mesh, Verdict(True, ""))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert not is_proven(mesh)


def test_auto_is_ragged_inside_nodes_alone(monkeypatch):
    monkeypatch.setattr(parallel, "exchange_choices", lambda on_gpu, ragged: ("ragged", "fitted", "padded"))
    topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=8, replica_slots=0)
    settings = ExpertParallel(mesh=expert_mesh(topology, devices=jax.devices()[:4]), topology=topology)
    kinds = {top_k: [hop.kind for hop in settings.token_exchanges(8, top_k)[0]] for top_k in (1, 2)}
    assert kinds == {1: ["fitted"], 2: ["fitted", "ragged"]}
    assert {way.exchange for way in settings.ways(1)} == {"fitted", "padded"}


def test_settings_ask_for_the_verdict_before_a_program_is_traced(monkeypatch):
    """Processes cannot agree while they trace."""
    asked = []
    monkeypatch.setattr(parallel, "is_proven", lambda mesh: asked.append(mesh) or True)
    settings = ExpertParallel(mesh=gpus(1, [0, 0]), topology=TOPOLOGY)
    assert len(asked) == 1
    assert settings.kinds(8).exchange == "ragged"


def test_nothing_is_sent_that_does_not_fit(mesh):
    """XLA's kernel would write it over the memory behind the buffer of another rank."""
    counts = jnp.array([[[3], [2]], [[1], [2]]])

    def sent(receive):
        sizes = ExchangeSizes(pair=0, own=0, send=8, receive=receive)
        exchange = Exchange(kind="emulated", axes=("local",), ranks=2, sizes=sizes)

        @jax.jit
        @jax.shard_map(mesh=mesh, in_specs=jax.P(), out_specs=jax.P("local"))
        def tables(counts):
            return make_hop(counts, exchange, receive)[0].lanes.sent.sum()[None]

        return tables(counts).tolist()

    assert sent(4) == [5, 3]
    assert sent(3) == [0, 0]


@pytest.mark.slow
def test_no_replica_is_sent_that_is_not_among_the_exports(mesh):
    topology = Topology(num_nodes=1, ranks_per_node=2, num_experts=4, replica_slots=2)
    slots = jnp.array([[[0, 1, EMPTY, EMPTY], [2, 3, 0, 1]]])
    plan = LayerPlan(slots, jnp.arange(4), jnp.zeros_like(slots), None)
    for copies, sent in ((2, 2), (1, 0)):
        sizes = dataclasses.replace(worst_case_capacities(8, 2, topology), export_copies=copies)
        settings = ExpertParallel(mesh=mesh, topology=topology, capacities=sizes, fetch="emulated")
        tables = jax.jit(prepare_fetch, static_argnums=1)(plan, settings).fetch_tables
        assert (int(tables.updates.sent.sum()), bool(tables.fits.all())) == (sent, copies == 2)


@pytest.mark.parametrize(("slots", "number"), [(1, 64), (65, 128)])
def test_rows_arrive_in_the_order_of_slots(mesh, slots, number):
    """An oracle in NumPy: every update copies its rows from the sender's buffer into the receiver's."""
    ranks = 2
    counts = np.random.default_rng(0).integers(0, 4, (ranks, ranks, slots)).astype(np.int32)
    size = int(counts.sum())
    exchange = Exchange(
        kind="emulated",
        axes=("local",),
        ranks=ranks,
        sizes=ExchangeSizes(pair=0, own=0, send=size, receive=size),
    )

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=jax.P(), out_specs=jax.P("local"))
    def tables(counts):
        return jax.tree.map(lambda leaf: leaf[None], updates(exchange.runs(counts)))

    lanes = jax.device_get(tables(jnp.asarray(counts)))
    assert lanes.sent.shape == (ranks, ranks * number)
    assert number >= UPDATES
    received = np.full((ranks, size), -1)
    for sender in range(ranks):
        # A row is numbered by sender, receiver, slot and its place among them.
        rows = [
            ((sender * ranks + receiver) * slots + slot) * 10 + row
            for receiver in range(ranks)
            for slot in range(slots)
            for row in range(counts[sender, receiver, slot])
        ]
        for update in range(ranks * number):
            receiver, target = divmod(update, number)[0], lanes.peer_receive_start[sender, update]
            for row in range(lanes.sent[sender, update]):
                received[receiver, target + row] = rows[lanes.send_start[sender, update] + row]
    for receiver in range(ranks):
        expected = [
            ((sender * ranks + receiver) * slots + slot) * 10 + row
            for slot in range(slots)
            for sender in range(ranks)
            for row in range(counts[sender, receiver, slot])
        ]
        assert received[receiver][received[receiver] >= 0].tolist() == expected
        back = (
            lanes.received[receiver].sum(),
            lanes.sent[:, receiver * number : (receiver + 1) * number].sum(),
        )
        assert back[0] == back[1] == len(expected)
