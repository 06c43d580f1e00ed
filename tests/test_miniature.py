"""The miniature: its commands, its network and quota where this machine allows them, and what it leaves behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import run
from experiments.miniature.__main__ import Compare, Run, main
from experiments.miniature.attention import attend
from experiments.miniature.cluster import Miniature
from experiments.miniature.contenders import BALANCED, draw_batches, even_routing
from experiments.miniature.faults import Fault
from experiments.miniature.launch import run_on_ranks, why_not
from experiments.miniature.learn import LEARNED, MEDIANS, Learn, learn, make_table
from experiments.miniature.quota import MOUNT
from experiments.miniature.report import Speed, agreement, draw_speeds, make_tables, speeds
from experiments.miniature.twins import TWINS
from experiments.rl.config_file import read_config
from relibra_jax.traces.calibrated import GPT_OSS_20B, draw_trace

PRIVILEGES = why_not()
needs_privileges = pytest.mark.skipif(PRIVILEGES is not None, reason=f"no miniature here: {PRIVILEGES}")
SMALL = Miniature(nodes=2, ranks=1, slow="80mbit", fast="800mbit", core=0.5)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"nodes": 0}, "nodes=0 must be from 1 to 250"),
        ({"slow": "0mbit"}, "slow='0mbit' must be a rate above 0"),
        ({"fast": "fast"}, "'fast' is not a rate: a number and kbit, mbit or gbit"),
        ({"core": 0.0}, "core=0 for each of 4 ranks must be above 0"),
        ({"nodes": 100, "core": 1.0}, "core=1 for each of 200 ranks must be above 0 and need at most the"),
    ],
)
def test_miniature_refuses_impossible_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        Miniature(**sizes)


def test_a_command_must_be_given():
    with pytest.raises(ValueError, match="no command to run"):
        main(Run(command=()))


def test_compare_refuses_an_unknown_twin():
    with pytest.raises(ValueError, match="twin='qwen3-31b': no such twin; did you mean qwen3-30b"):
        main(Compare(twin="qwen3-31b"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"trace": "synthetic-128"},
            "synthetic-128 has 128 experts and top-8, but twin='gpt-oss-20b' has 32 and top-4",
        ),
        ({"samples": 8, "micro_batches": 16}, "micro_batches=16 exceeds the 8 samples of a batch"),
        ({"samples": 5000}, "has 1024 samples x 8 layers: a batch of samples=5000 needs at least one more"),
        ({"repeats": 0}, "repeats=0 must be an integer of at least 1"),
        ({"contenders": ("elpb",)}, "contenders=.'elpb'. are not among static, EPLB"),
        ({"nodes": 200}, "core=0.24 for each of 800 ranks must be above 0"),
    ],
)
def test_compare_refuses_what_does_not_fit(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        main(Compare(**{"trace": "synthetic-32"} | options, out=tmp_path / "out"))
    assert not list(tmp_path.glob("out/*"))


def test_miniature_says_in_one_line_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="the program 'ip' of iproute2 is missing"):
        run_on_ranks(SMALL, ["true"])


def remains():
    """Return what a miniature could leave on this machine: control groups, namespaces, interfaces, processes."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return (
        sorted(map(str, MOUNT.glob("**/relibra-*"))),
        sorted(os.listdir("/run/netns")) if Path("/run/netns").exists() else [],
        links,
        [line for line in processes.splitlines() if "miniature.inside" in line],
    )


PROBE = """
import json, os, pathlib, socket, time
rank = int(os.environ["JAX_PROCESS_ID"])
host = socket.gethostbyname(socket.gethostname())
if rank:
    server = socket.create_server((host, 7000))
    connection, _ = server.accept()
    while connection.recv(1 << 16):
        pass
else:
    time.sleep(0.5)
    link = socket.create_connection(("10.77.1.1", 7000))
    begin = time.perf_counter()
    link.sendall(bytes(4_000_000))
    sent = time.perf_counter() - begin
    begin, used = time.perf_counter(), time.process_time()
    while time.perf_counter() < begin + 1:
        pass
    share = time.process_time() - used
    print(json.dumps([socket.gethostname(), host, 4 / sent, share]))
"""


@pytest.mark.slow
@needs_privileges
def test_ranks_have_the_rates_and_the_share_of_a_core_that_they_should(tmp_path, capfd):
    before, program = remains(), tmp_path / "probe.py"
    program.write_text(PROBE)
    assert run_on_ranks(SMALL, [sys.executable, str(program)]) == 0
    name, host, megabytes, share = json.loads(capfd.readouterr().out)
    assert (name, host) == ("rank0", "10.77.0.1")
    # What the sockets still hold when the last byte is accepted has not crossed yet.
    assert 9 < megabytes < 40, "10 MB/s and full buffers"
    assert 0.3 < share < 0.7
    assert remains() == before


@pytest.mark.slow
@needs_privileges
def test_miniature_ends_with_the_status_of_a_rank_that_fails():
    assert run_on_ranks(SMALL, ["sh", "-c", "exit $((3 * JAX_PROCESS_ID))"]) == 3


@pytest.mark.slow
@needs_privileges
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_miniature_leaves_nothing_behind(ending, tmp_path):
    before, started = remains(), tmp_path / "started"
    command = ["run", "--nodes", "2", "--ranks", "1", "--core", "0.5", "--"]
    # Programs in the background inherit that SIGINT is ignored; a signal with a handler is at its default in a child.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.miniature", *command, "sh", "-c", f"touch {started}; sleep 1000"],
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    signal.signal(signal.SIGINT, handler)
    with process:
        try:
            while not started.exists():
                assert process.poll() is None
                time.sleep(0.05)
            # A terminal interrupts all processes of the group; everything else reaches one.
            (os.killpg if ending == signal.SIGINT else os.kill)(process.pid, ending)
            process.wait(timeout=30)
        finally:
            process.kill()
    deadline = time.monotonic() + 10
    while remains() != before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert remains() == before


@pytest.mark.slow
@needs_privileges
def test_miniature_ends_if_a_rank_is_killed():
    before = remains()
    status = run_on_ranks(SMALL, ["sh", "-c", "test $JAX_PROCESS_ID = 0 || kill -9 $$; sleep 2"])
    assert status == -signal.SIGKILL % 256
    assert remains() == before


ROUND_TRIPS = """
import json, os, socket, time
if os.environ["JAX_PROCESS_ID"] == "1":
    connection, _ = socket.create_server(("10.77.1.1", 7000)).accept()
    while connection.recv(100_000, socket.MSG_WAITALL):
        connection.sendall(b"x")
else:
    time.sleep(0.5)
    link, times = socket.create_connection(("10.77.1.1", 7000)), []
    end = time.monotonic() + 4
    while time.monotonic() < end:
        begin = time.monotonic()
        link.sendall(bytes(100_000))
        link.recv(1)
        times.append(time.monotonic() - begin)
    print(json.dumps(times))
"""


@pytest.mark.slow
@needs_privileges
@pytest.mark.parametrize(
    ("fault", "least"), [("down:1@2+1", 0.8), ("stop:1@2+1", 0.8), ("slow:0@2", 0.08), ("slow:0@30", 0.0)]
)
def test_faults_delay_what_ranks_send_and_lose_nothing(fault, least, tmp_path, capfd):
    program = tmp_path / "round_trips.py"
    program.write_text(ROUND_TRIPS)
    assert run_on_ranks(SMALL, [sys.executable, str(program)], faults=[Fault.parse(fault)]) == 0
    times = json.loads(capfd.readouterr().out)
    assert np.median(times[:50]) > 0.008, "10 ms on the wire at 80 Mbit/s"
    if least:
        assert max(times) > least
    else:
        assert np.median(times) < 0.08, "a slow link needs 100 ms"


@pytest.mark.slow
@needs_privileges
def test_fault_of_lost_packets_loses_some_and_tcp_sends_them_again(tmp_path, capfd):
    program = tmp_path / "round_trips.py"
    program.write_text(ROUND_TRIPS)
    assert run_on_ranks(SMALL, [sys.executable, str(program)], faults=[Fault.parse("lose:1@2+1")]) == 0
    *statistics, times = capfd.readouterr().out.splitlines()
    lost = re.findall(r"qdisc pfifo.*\n.*dropped (\d+)", "\n".join(statistics))
    assert sum(map(int, lost)) > 0
    assert json.loads(times), "every message was answered; how late depends on when TCP sends again"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("down", "fault 'down' is not KIND:RANK@SECONDS"),
        ("burn:1@2", "with down, slow, lose, stop"),
        ("down:7@2", "fault of rank 7: there are only ranks 0 to 1"),
    ],
)
def test_faults_that_cannot_be_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        run_on_ranks(SMALL, ["true"], faults=[Fault.parse(text)])


@pytest.mark.long
@needs_privileges
def test_compare_measures_and_models_every_contender(tmp_path):
    options = Compare(
        trace="synthetic-32",
        nodes=2,
        ranks=1,
        core=0.9,
        layers=1,
        samples=32,
        micro_batches=2,
        contenders=("static", "ReLibra, 1 resident", BALANCED),
        repeats=2,
        out=tmp_path,
    )
    assert main(options) == 0
    report = json.loads((tmp_path / "gpt-oss-20b-2x1-2.json").read_text())
    assert list(report["rows"]) == list(options.contenders)
    for row in report["rows"].values():
        assert len(row["seconds"]) == 2
        assert sum(row["slow_bytes"]) > row["needed"]["slow"] > 0
        assert row["predicted"] == pytest.approx(sum(row["modelled"].values()), rel=0.05)
        assert row["phases"]["experts"][0] > 0
    assert (tmp_path / "gpt-oss-20b-2x1-2.png").stat().st_size > 0


@pytest.mark.parametrize("lengths", [[300, 1, 129, 200], [7], [128, 128]])
def test_attend_equals_dense_attention_in_values_and_gradients(lengths):
    tokens, rng = sum(lengths) + 5, np.random.default_rng(0)
    segments = np.pad(np.repeat(np.arange(len(lengths)), lengths), (0, 5), constant_values=-1)
    first = np.pad(np.repeat(np.cumsum(lengths) - lengths, lengths), (0, 5))
    query, key, value, weight = rng.normal(size=(4, tokens, 2, 8)).astype(np.float32)
    query, key = (part / np.linalg.norm(part, axis=-1, keepdims=True) for part in (query, key))
    seen = (segments[:, None] == segments) & (segments[:, None] >= 0) & np.tri(tokens, dtype=bool)

    def dense(query, key, value):
        weights = jnp.exp(jnp.einsum("qhd,khd->qkh", query, key)) * seen[..., None]
        return jnp.einsum("qkh,khd->qhd", weights, value) / jnp.maximum(weights.sum(1), 1e-9)[..., None]

    def blocked(query, key, value):
        return attend(query, key, value, jnp.asarray(segments), jnp.asarray(first))

    results = [
        jax.jit(jax.value_and_grad(lambda *qkv, f=f: (f(*qkv) * weight).sum(), argnums=(0, 1, 2)))(
            query, key, value
        )
        for f in (blocked, dense)
    ]
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_batches_have_no_common_sample_and_even_routing_is_even():
    trace = draw_trace(GPT_OSS_20B, samples=12, layers=2)
    before, batch = draw_batches(trace, samples=8, layers=2, seed=0)
    assert (len(before.tokens), len(batch.tokens)) == (4, 8)
    ids = [np.asarray(draw.replay.expert_ids) for draw in (before, batch)]
    assert not any(np.array_equal(one, other) for one in ids[0] for other in ids[1])
    even, mask = even_routing(batch, 32).replay
    for layer in range(2):
        assert np.ptp(np.bincount(np.asarray(even)[np.asarray(mask), layer].ravel(), minlength=32)) <= 1
    with pytest.raises(
        ValueError, match="has 12 samples x 2 layers: a batch of samples=12 needs at least one more"
    ):
        draw_batches(trace, samples=12, layers=2, seed=0)


@pytest.mark.parametrize("name", TWINS)
def test_twins_links_have_the_real_ratios(name):
    twin, flops = TWINS[name], 1e10
    slow, fast = twin.links(flops)
    real = twin.real_ratios()
    # Of one token copy: three passes of three products, and four crossings of a row.
    copy, crossing = 3 * 6 * twin.width * twin.expert_width / flops, 4 * 4 * twin.width / slow
    assert crossing / copy == pytest.approx(real.crossing)
    assert fast / slow == pytest.approx(real.links)


def rows(**seconds):
    phases = {"experts": [1.0, 2.0]}
    counts = {"slow_bytes": [1e6, 3e6], "fast_bytes": [0, 0], "needed": {"slow": 2e6, "fast": 0}}
    return {
        name.replace("_", " "): counts
        | {
            "seconds": [value, 1.1 * value, 0.9 * value],
            "modelled": {"all": value},
            "predicted": value,
            "phases": phases,
        }
        for name, value in seconds.items()
    }


def test_learn_compares_steps_that_do_not_compile_and_gradients():
    row = {name: [9.0, 9.0, 2.0, 4.0, 3.0] for name in MEDIANS}
    results = {
        "static": row | {"policy/gradient_norm": [0.5, 0.0]},
        "ReLibra": row | {"policy/gradient_norm": [0.25, 0.0]},
    }
    cells = [list(column.cells) for column in make_table(results).columns]
    assert [column[0] for column in cells[1:]] == ["3", "3", "3", "3", "0.0e+00"]
    assert cells[-1][1] == "5.0e-01"


def test_learn_reads_the_run_of_every_variant(tmp_path, monkeypatch, capsys):
    """Each variant is made as `experiments.run` makes one, in a folder of its own."""
    folders = []

    def run_variant(name, config, console):
        folders.append(config.out)
        line = {name: float(len(folders)) for name in (*MEDIANS, *LEARNED)}
        (config.out / "seed-0").mkdir(parents=True)
        lines = [{"kind": "learn", "step": step, **line} for step in range(config.steps)]
        (config.out / "seed-0" / "metrics.jsonl").write_text(
            "".join(json.dumps(each) + "\n" for each in lines)
        )

    monkeypatch.setattr("experiments.run.run_variant", run_variant)
    monkeypatch.setattr(
        "experiments.miniature.learn.run_on_ranks", lambda sizes, command: run.main(command[3:])
    )
    sizes = Miniature(nodes=2, ranks=2, core=0.25)
    assert (
        learn(Learn(miniature=sizes, config="replay", steps=3, out=tmp_path, settings=("--epochs", "1"))) == 0
    )
    variants = list(read_config("replay").variants)
    assert folders == [tmp_path / name for name in variants]
    rows = json.loads((tmp_path / "learn.json").read_text())["rows"]
    assert {name: row["reward/mean"] for name, row in rows.items()} == {
        name: [float(number)] * 3 for number, name in enumerate(variants, 1)
    }
    assert "live-gspo" in capsys.readouterr().out


def test_report_shows_speed_and_agreement(tmp_path):
    results = rows(static=4.0, ReLibra=2.5, forced_balanced=2.0)
    results["static"]["modelled"]["all"] = 5.0
    of = speeds(results)
    assert of["static"] == pytest.approx(Speed(0.5, 0.5, 0.5, 0.4, 0.5))
    assert agreement(of) == (1.0, 0.1, 0.2)
    report = {
        "rows": results,
        "settings": {"twin": "gpt-oss-20b"},
        "there": {"crossing": 2.0},
        "here": {"crossing": 1.5},
    }
    assert [table.row_count for table in make_tables(report)] == [1, 3, 3, 3]
    draw_speeds(tmp_path / "speeds.png", report)
    assert (tmp_path / "speeds.png").stat().st_size > 0
