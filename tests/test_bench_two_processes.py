"""The benchmark of two processes: its update on two devices of one process, and its counts of bytes."""

import json
import socket
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from experiments.bench_two_processes import crossing_bytes, report, runs
from experiments.contenders import draw_samples, even_samples, plan_contender
from experiments.synthetic_traces import synthetic_trace
from relibra_jax.contract.types import EMPTY, Topology
from relibra_jax.execution import expert_mesh

TRACE = synthetic_trace(samples=16, mean_tokens=24, layers=2, num_experts=8, top_k=2, skew=1.5)
NODES = Topology(num_nodes=2, ranks_per_node=1, num_experts=8, replica_slots=0)
SIZES = {"width": 16, "hidden": 4}


@pytest.fixture
def samples():
    return draw_samples(TRACE, NODES, micro_batches=2, samples_per_rank=2, layers=2)


@pytest.mark.long
def test_run_path_has_the_same_gradient_with_residents_as_without(monkeypatch):
    settings = runs.Settings(
        micro_batches=(2,), layers=2, resident_slots=2, repeats=1, timed_paths=("flat",), **SIZES
    )
    entrants = runs.entrants(settings)
    entrant_subset = {name: entrants[name] for name in ("static", "ReLibra + residents", "balanced")}
    monkeypatch.setattr(runs, "entrants", lambda _: entrant_subset)
    lines = {line.contender: line for line in runs.run_path(TRACE, "flat", settings, lambda _: None)}
    static, resident, balanced = lines.values()
    np.testing.assert_allclose(resident.gradient_norm, static.gradient_norm, rtol=runs.TOLERANCE)
    assert resident.bytes_needed["residents"] > 0
    assert resident.bytes_needed["rows"] < static.bytes_needed["rows"]
    assert balanced.rows_imbalance < 1.1 < static.rows_imbalance
    for line in lines.values():
        assert line.bytes_of_program >= sum(line.bytes_needed.values())
        assert len(line.seconds) == 1
    console = Console(record=True, width=120)
    for table in report.make_tables(list(lines.values())):
        console.print(table)
    assert console.export_text().count("ReLibra + residents") == 2
    monkeypatch.setattr("sys.argv", ["bench", "a/trace.npz", "--repeats", "1", "--as-process", "0", "4711"])
    report_data = json.loads(json.dumps(report.make_report(list(lines.values()), settings)))
    assert [line["contender"] for line in report_data["lines"]] == list(entrant_subset)
    assert report_data["command"] == "python -m experiments.bench_two_processes trace.npz --repeats 1"


def test_check_norms_rejects_a_different_gradient():
    with pytest.raises(ValueError, match=r"EPLB: the gradient norm is 1\.1, but that of static is 1\.0"):
        runs._check_norms({"static": 1.0, "ReLibra": 1.0 + 1e-6, "EPLB": 1.1})


@pytest.mark.parametrize("hierarchical", [False, True])
def test_needed_bytes_equal_a_count_token_by_token(samples, hierarchical):
    contender = plan_contender(samples, "static", NODES)
    ids = contender.expert_ids
    away = (ids != EMPTY) & (ids // 4 != np.arange(2)[:, None, None])
    rows = away.any(-1).sum() if hierarchical else away.sum()
    needed = crossing_bytes.needed_bytes(contender, NODES, hierarchical=hierarchical, **SIZES)
    assert needed == (rows * 4 * 16 * 4, 0, 0)


def test_route_evenly_gives_all_experts_the_same_number_of_tokens(samples):
    even = even_samples(samples, 8)
    assert ((even.expert_ids != EMPTY).all((2, 3)) == samples.mask).all()
    for layer in range(2):
        ids = even.expert_ids[samples.mask, layer]
        assert np.ptp(np.bincount(ids.ravel(), minlength=8)) <= 1
        assert (ids[:, 0] != ids[:, 1]).all()
        # At random, both experts of a token are on the same node in three of seven cases.
        assert 0.3 < (ids[:, 0] // 4 == ids[:, 1] // 4).mean() < 0.6


def test_program_bytes_are_those_of_its_collectives():
    mesh = expert_mesh(NODES, devices=jax.devices()[:2])
    shard_map = {"mesh": mesh, "in_specs": jax.P("node"), "out_specs": jax.P("node")}

    @jax.jit
    @lambda function: jax.shard_map(function, **shard_map)
    def program(x):
        def exchange(x, _):
            return jax.lax.all_to_all(x, "node", 0, 0, tiled=True), None

        x, _ = jax.lax.scan(exchange, x, length=3)
        return x + jax.lax.psum(x, "node") + jax.lax.psum(x, "local")

    compiled = program.lower(jnp.zeros((4, 100))).compile()
    # Each device sends one of its two rows three times, and then adds up both.
    assert crossing_bytes.program_bytes(compiled) == 2 * (3 * 100 + 200) * 4


def test_loopback_bytes_include_what_a_socket_sends():
    before = crossing_bytes.loopback_bytes()
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = threading.Thread(target=_send, args=(server.getsockname(),))
        sender.start()
        with server.accept()[0] as connection:
            received = sum(map(len, iter(lambda: connection.recv(1 << 16), b"")))
        sender.join()
    assert received == 1 << 22
    assert crossing_bytes.loopback_bytes() - before >= 1 << 22


def _send(address):
    with socket.create_connection(address) as connection:
        connection.sendall(bytes(1 << 22))
