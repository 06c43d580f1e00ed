"""Bad input to the programs: exit status 2, one line on standard error with place and numbers, nothing written."""

import dataclasses
import functools
import json
import os

import jax
import numpy as np
import pytest
import tyro

from experiments import (
    bench,
    bench_attention,
    bench_counts,
    bench_exposed,
    bench_kernels,
    bench_layer,
    bench_sampler,
    bench_transformers,
    bench_warm_start,
    count_buffers,
    model_memory,
    stragglers,
)
from experiments.deploy.__main__ import Deploy
from experiments.deploy.__main__ import main as deploy
from experiments.program import run_program
from experiments.rl.config_file import config_names
from experiments.rl.configs import Train
from experiments.run import main as run_training
from relibra_jax.cli.main import main
from relibra_jax.support.bad_input import exit_status
from relibra_jax.support.parsing import one_line, parse_options

GIB = 2**30
SMALL = ["--nodes", "2", "--ranks-per-node", "2", "--replica-slots", "1"]
LENGTHS = np.array([5, 3, 7, 4] * 4)
ROWS = np.argsort(np.random.default_rng(0).random((LENGTHS.sum(), 2, 16)), axis=-1)[..., :2].astype(np.uint8)
TRACE = {"num_experts": np.int32(16), "routed_experts": ROWS, "lengths": LENGTHS}


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "small.npz"
    np.savez(path, **TRACE)
    return path


@pytest.fixture
def memory(monkeypatch):
    """Return a function that makes this machine's memory look as small as a test needs."""
    return lambda size: monkeypatch.setattr("relibra_jax.support.limits.machine_memory", lambda: size)


@pytest.fixture
def refused(capsys, tmp_path):
    """Return a function that runs a program on bad input and returns its error message."""

    def run(program, args, *, out=None):
        out = tmp_path / "out" if out is None else out
        assert program([*map(str, args), *(["--out", str(out)] if out else [])]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith("error: ")
        assert shown.err.index("\n") == len(shown.err) - 1
        assert not (tmp_path / "out").exists()
        return shown.err[len("error: ") : -1]

    return run


UNKNOWN = "Unrecognized options: "
NAMED = f"must be a file with the ending .toml or one of {', '.join(config_names())}"
INTEGER = "must be an integer of at least"
OPTIONS = {
    "no command": (
        main,
        [],
        "command '' must be one of compare, plan, inspect, advise",
    ),
    "another command": (
        main,
        ["comapre"],
        "command 'comapre' must be one of compare, plan, inspect, advise; did you mean compare?",
    ),
    "option for a command": (main, ["--foo"], f"{UNKNOWN}--foo"),
    "misplaced option": (
        main,
        ["--seed"],
        "Unrecognized or misplaced options: --seed (applied to relibra)",
    ),
    "unknown option": (main, ["plan", "--sead", "3"], f"{UNKNOWN}--sead, 3; did you mean --seed?"),
    "another command's option": (main, ["plan", "--rows", "static"], f"{UNKNOWN}--rows, static"),
    "unknown argument": (main, ["inspect", "a.npz", "b.npz"], f"{UNKNOWN}b.npz"),
    "long argument": (main, ["inspect", "a.npz", "far/" * 60 + "b.npz"], f"{UNKNOWN}{'far/' * 60}b.npz"),
    "no value": (main, ["plan", "--seed"], "Missing value for argument '--seed'. Expected 1 values."),
    "word for a number": (
        main,
        ["plan", "--seed", "abc"],
        "--seed INT: invalid literal for int() with base 10: 'abc'",
    ),
    "word for a float": (
        main,
        ["compare", "--context", "x"],
        "--context FLOAT: could not convert string to float: 'x'",
    ),
    "word for an optional number": (
        main,
        ["plan", "--batch-size", "x"],
        "--batch-size {None}|INT: no type matching {None}|INT could be instantiated from ['x'].",
    ),
    "no choice": (
        main,
        ["plan", "--order", "up"],
        "invalid choice 'up' for argument '--order'. Expected one of ('given', 'shuffled').",
    ),
    "no run": (run_training, [], f"configuration '' {NAMED}"),
    "another run": (
        run_training,
        ["compare"],
        f"configuration 'compare' {NAMED}",
    ),
    "a run's unknown option": (
        run_training,
        ["demo", "--token-weight"],
        f"{UNKNOWN}--token-weight; did you mean --token-weights?",
    ),
    "a run's value": (
        run_training,
        ["demo", "--reorder.steps", "x"],
        "--reorder.steps INT: invalid literal for int() with base 10: 'x'",
    ),
    "a run's missing value": (
        run_training,
        ["demo", "--resume"],
        "Missing value for argument '--resume'. Expected 1 values.",
    ),
    "a run's flag": (run_training, ["demo", "--replay", "3"], f"{UNKNOWN}3"),
    "no seeds": (run_training, ["demo", "--seeds"], "seeds is empty: give at least one seed"),
}


@pytest.mark.parametrize("fault", OPTIONS)
def test_main_and_run_training_refuse_bad_options_in_one_line(refused, fault):
    program, args, message = OPTIONS[fault]
    assert refused(program, args, out="") == message


SETTINGS = {
    "--nodes=3": "num_experts=16 must divide evenly over 6 ranks (nodes=3 x ranks_per_node=2);"
    " they divide over 1, 2, 4, 8, 16 ranks",
    "--nodes=0": f"nodes=0 {INTEGER} 1 and at most 2147483647",
    "--ranks-per-node=-1": f"ranks_per_node=-1 {INTEGER} 1 and at most 2147483647",
    f"--nodes={2**31}": f"nodes={2**31} {INTEGER} 1 and at most 2147483647",
    "--replica-slots=-1": f"replica_slots=-1 {INTEGER} 0 and at most 2147483647",
    "--replica-slots=17": "replica_slots=17 must be at most num_experts=16: a rank holds no expert twice",
    f"--replica-slots={2**31}": f"replica_slots={2**31} must be at most num_experts=16",
    f"--replica-slots={2**64}": f"replica_slots={2**64} must be at most num_experts=16",
    "--resident-slots=-1": f"resident_slots=-1 {INTEGER} 0 and at most 2147483647",
    "--resident-slots=17": "resident_slots=17 must be at most num_experts=16: a rank holds no expert twice",
    "--resident-slots=1 --model=deepseek-v3": "resident_slots=1: a rank needs 279.9 GB (homes 183.9, residents 15.3,",
    "--seed=-1": f"seed=-1 {INTEGER} 0 and at most 4294967295",
    f"--seed={2**32}": f"seed={2**32} {INTEGER} 0 and at most 4294967295",
    f"--seed={2**63}": f"seed={2**63} {INTEGER} 0 and at most 4294967295",
    "--micro-batches=0": f"micro_batches=0 {INTEGER} 1 and at most 2147483647",
    "--micro-batches=9": "micro_batches=9 exceeds the 8 samples of a batch",
    "--token-budget=0": f"token_budget=0 {INTEGER} 1 and at most 2147483647",
    "--token-budget=6": "token_budget=6 is less than the 7 tokens of the longest sample",
    "--micro-batches=2 --token-budget=9": "micro_batches=2 and token_budget=9 exclude each other: give only one",
    "--batch-size=0": f"batch_size=0 {INTEGER} 1 and at most 2147483647",
    "--batch-size=17": "batch_size=17 exceeds the 16 samples of small.npz; set bootstrap to draw them with replacement",
    "--bootstrap=3": "bootstrap=3 needs batch_size, the number of samples to draw for each batch",
    f"--batch-size={2**64}": f"batch_size={2**64} {INTEGER} 1",
    "--planner=elpb": "planner 'elpb' must be one of static,",
}
COSTS = {
    "--updates=0": f"updates=0 {INTEGER} 1 and at most 2147483647",
    "--updates=2": "updates=2 exceeds micro_batches=1",
    "--shards=0": f"shards=0 {INTEGER} 1 and at most 2147483647",
    "--resident-slots=12": "resident_slots=12: a rank needs 90.0 GB (homes 43.0, residents 43.0, replicas 0.1,",
    "--cluster=h1000": "cluster='h1000' must be one of h100",
    "--exchange=pad": "invalid choice 'pad' for argument '--exchange'."
    " Expected one of ('auto', 'padded', 'fitted', 'ragged', 'needed').",
    "--context=0": "context=0.0 must be positive and finite",
    "--context=nan": "context=nan must be positive and finite",
    "--context=inf": "context=inf must be positive and finite",
    "--tokens-per-rank=1e400": "tokens_per_rank=inf must be positive and finite",
    "--tokens-per-rank=1e-30": "tokens_per_rank=1e-30 must be above 1.3e-06 for a trace of 9.5 tokens per rank and",
    "--exchange=ragged --dispatch=flat": "exchange='ragged' on 2 nodes needs dispatch='hierarchical', not 'flat', or",
    "--nodes=1 --exchange=ragged --dispatch=hierarchical": "exchange='ragged' on 1 node needs dispatch='flat', not",
    "--tokens-per-rank=1e30": "context=4096.0 and tokens_per_rank=1e+30 give ",
}


BENCHMARKS = (
    *(
        bench,
        model_memory,
        bench_attention,
        bench_counts,
        bench_exposed,
        bench_kernels,
        bench_layer,
        bench_sampler,
    ),
    *(bench_transformers, bench_warm_start, count_buffers, stragglers),
)


@pytest.mark.parametrize("module", BENCHMARKS, ids=lambda module: module.__name__)
def test_run_program_refuses_unknown_options_of_benchmarks_in_one_line(refused, module):
    (options,) = (
        kind
        for kind in vars(module).values()
        if getattr(kind, "__module__", "") == module.__name__ and dataclasses.is_dataclass(kind)
    )
    program = functools.partial(run_program, module.main, options)
    assert refused(program, ["--wdith", "3"], out="").startswith(f"{UNKNOWN}--wdith, 3")


@pytest.mark.parametrize("option", SETTINGS)
def test_plan_refuses_settings_that_do_not_fit(refused, trace, option):
    assert refused(main, ["plan", trace, *SMALL, *option.split()]).startswith(SETTINGS[option])


def test_plan_accepts_settings_at_their_limits(trace, tmp_path):
    options = ["--seed=4294967295", "--order=shuffled", "--replica-slots=16", "--planner=static"]
    assert main(["plan", str(trace), *SMALL, *options, "--out", str(tmp_path / "plan.npz")]) == 0


@pytest.mark.parametrize("option", COSTS)
def test_compare_refuses_costs_that_do_not_fit(refused, trace, option):
    assert refused(main, ["compare", trace, *SMALL, *option.split()]).startswith(COSTS[option])


TRAINING = {
    f"--seeds={2**32}": f"seeds={2**32} {INTEGER} 0 and at most 4294967295",
    f"--steps={2**63}": f"steps={2**63} {INTEGER} 0 and at most 2147483647",
    "--epochs=0": f"epochs=0 {INTEGER} 1 and at most 2147483647",
    "--learning-rate=nan": "learning_rate=nan must be at least 0 and at most 1e+09",
    "--balance=-1": "balance=-1.0 must be at least 0 and at most 1e+09",
    "--temperature=inf": "temperature=inf must be at least 0 and at most 1e+09",
    "--temperature=0": "temperature=0.0 must be positive and finite",
    "--top-p=1.5": "top_p=1.5 must be above 0 and at most 1",
    "--clip.low=-3": "clip.low=-3.0 must be at least 0 and at most 1",
    "--clip.high=nan": "clip.high=nan must be at least 0",
    "--prompts=1073741824": "generating 1073741824 samples of 28 tokens at a time on each rank (wave_samples) needs",
    f"--anneal-steps={2**50}": f"anneal_steps={2**50} {INTEGER} 0 and at most 2147483647",
    f"--reorder.steps={2**60}": f"reorder.steps={2**60} needs 8589934592 GiB of memory, but this machine has",
    "--reorder.steps=0": f"steps=0 {INTEGER} 1 and at most 2147483647",
    f"--replicate.min-tokens={2**31}": f"min_tokens={2**31} {INTEGER} 1 and at most 2147483647",
    f"--replicate.tile={2**63}": f"tile={2**63} {INTEGER} 1 and at most 2147483647",
    f"--replica-slots={2**63}": f"replica_slots={2**63} must be at most num_experts=16",
}


@pytest.mark.parametrize("option", TRAINING)
def test_run_training_refuses_settings_that_do_not_fit(refused, option):
    assert refused(run_training, ["demo", option]).startswith(TRAINING[option])


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        (None, "steps", 1.5, "steps=1.5 must be of type int"),
        (None, "steps", True, "steps=True must be of type int"),
        (None, "seeds", ["a"], "seeds='a' must be of type int"),
        ("reorder", "steps", "x", "reorder.steps='x' must be of type int"),
        ("replicate", "tile", [1], "replicate.tile=[1] must be of type int"),
        ("clip", "low", None, "clip.low=None must be of type float"),
        ("ranks", "replica_slots", 2**63, f"replica_slots={2**63} must be at most num_experts=16"),
    ],
)
def test_run_training_refuses_saved_settings_of_other_types(refused, tmp_path, part, name, value, message):
    settings = json.loads(json.dumps(vars(Train()), default=vars))
    (settings if part is None else settings[part])[name] = value
    (tmp_path / "config.json").write_text(json.dumps(settings))
    error = refused(run_training, ["demo", "--resume", tmp_path], out="")
    assert error.startswith(f"{tmp_path / 'config.json'}: not the settings of a run: ")
    assert message in error


def place(value, dtype=np.int64):
    rows = ROWS.astype(dtype)
    rows[3, 1, 1] = value
    return {"routed_experts": rows}


def sized(rows, lengths, num_experts=16):
    return {"routed_experts": rows, "lengths": np.array(lengths), "num_experts": num_experts}


INFERRED = {"num_experts": None}
TRACES = {
    "axis order": (
        {"routed_experts": ROWS.swapaxes(0, 1)},
        "sample 0 has length 5, but routed_experts has 2 rows",
    ),
    "repeated": (place(ROWS[3, 1, 0]), "sample 0, token 3, layer 1: expert"),
    "lengths": ({"lengths": LENGTHS + 1}, "lengths sum to 92, but routed_experts has 76 rows"),
    "id above": (place(200), "sample 0, token 3, layer 1: expert id 200 is outside 0..15"),
    "id of 64 bits": (place(2**64 - 1, np.uint64), f"expert id {2**64 - 1} is outside 0..15"),
    "inferred from 40 bits": (
        place(2**40) | INFERRED,
        f"num_experts={2**40 + 1} {INTEGER} 1 and at most 2147",
    ),
    "inferred from 64 bits": (place(2**63, np.uint64) | INFERRED, f"num_experts={2**63 + 1} {INTEGER} 1"),
    "no experts": ({"num_experts": 0}, f"num_experts=0 {INTEGER} 1"),
    "too many experts": (place(1) | {"num_experts": 2**31}, f"num_experts={2**31} {INTEGER} 1"),
    "a trillion rows of nothing": (
        sized(np.zeros((2**40, 1, 0), np.uint8), [2**40]),
        "routed_experts has 1 layers of top-0, but needs at least 1 of both",
    ),
    "no layers": (sized(ROWS[:, :0], LENGTHS), "routed_experts has 0 layers of top-2"),
    "negative length": (sized(ROWS[:0], [8, -8]), "sample 0 has length 8, but routed_experts has 0 rows"),
    "lengths that wrap": (
        sized(ROWS[:0], np.array([2**63, 2**63], np.uint64)),
        f"sample 0 has length {2**63}, but routed_experts has 0 rows",
    ),
    "floats": ({"lengths": LENGTHS.astype(float)}, "lengths must be integers of 1 axes, not float64[16]"),
}


@pytest.mark.parametrize("command", ["inspect", "plan"])
@pytest.mark.parametrize("fault", TRACES)
def test_inspect_and_plan_refuse_malformed_traces(refused, tmp_path, command, fault):
    changes, message = TRACES[fault]
    path = tmp_path / "bad.npz"
    np.savez(path, **{name: array for name, array in (TRACE | changes).items() if array is not None})
    error = refused(main, [command, path], out="" if command == "inspect" else None)
    assert error.startswith(f"{path}: ")
    assert message in error


def test_inspect_and_plan_refuse_files_that_are_not_traces(refused, trace, tmp_path):
    path = tmp_path / "bad.npz"
    assert refused(main, ["inspect", path], out="") == f"{path}: no such trace"
    assert refused(main, ["inspect", tmp_path], out="") == f"{tmp_path}: not a file"
    for content in (b"", b"routing", trace.read_bytes()[:1000]):
        path.write_bytes(content)
        assert refused(main, ["plan", path]).startswith(f"{path}: not a whole .npz file (")
    with path.open("wb") as file:
        np.save(file, ROWS)
    assert refused(main, ["inspect", path], out="").startswith(f"{path}: not a whole .npz file (")


def run_deploy(args):
    return run_program(deploy, Deploy, args)


@pytest.mark.parametrize("folder", ["file", "file/out"])
@pytest.mark.parametrize("command", ["compare", "advise", "deploy"])
def test_programs_refuse_a_file_in_place_of_a_folder_before_they_read_a_trace(
    refused, tmp_path, command, folder
):
    (tmp_path / "file").write_text("kept")
    program, args = (run_deploy, []) if command == "deploy" else (main, [command])
    error = refused(program, [*args, tmp_path / "none.npz"], out=tmp_path / folder)
    assert error == f"out={tmp_path / folder}: {tmp_path / 'file'} is not a folder"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_plan_refuses_output_that_cannot_be_written_before_it_reads_a_trace(refused, tmp_path):
    (tmp_path / "file").write_text("kept")
    args, inside = ["plan", tmp_path / "none.npz"], tmp_path / "file" / "plan.npz"
    assert refused(main, args, out=inside) == f"out={inside}: {tmp_path / 'file'} is not a folder"
    assert refused(main, args, out=tmp_path).startswith(f"out={tmp_path} is a folder; name a file in it")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_inspect_and_plan_check_memory_before_they_use_it(refused, memory, tmp_path):
    path = tmp_path / "wide.npz"
    np.savez_compressed(path, **sized(np.full((20_000, 1, 1), 3, np.uint8), [20_000] + [0] * 9_999))
    memory(GIB // 4)
    error = refused(main, ["inspect", path], out="")
    assert (
        error
        == f"{path}: padding 10000 samples to 20000 tokens needs 1 GiB of memory, but this machine has 0 GiB"
    )
    memory(GIB // 2)
    counting = "counting 10000 samples x 1 layers x (20000 tokens x top-1 + 16 experts) needs 1 GiB of memory"
    assert f"{path}: {counting}" in refused(main, ["inspect", path], out="")
    memory(50_000)
    assert f"{path}: unpacking it needs 1 GiB" in refused(main, ["inspect", path], out="")
    np.savez(path, **sized(ROWS, LENGTHS, num_experts=256))
    memory(2**22)
    options = ["--nodes=16", "--ranks-per-node=16", "--micro-batches=8", "--planner=static"]
    error = refused(main, ["plan", path, *options])
    assert error.startswith(
        "a plan of 8 micro-batches x 2 layers x 256 ranks x 3 slots needs 1 GiB of memory"
    )


def test_exit_status_reports_running_out_of_memory_in_one_line(capsys):
    def fail(error):
        raise error

    for error in (
        MemoryError("Unable to allocate 9 TiB"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 9 bytes."),
    ):
        assert exit_status(functools.partial(fail, error)) == 2
        assert capsys.readouterr().err == f"error: {error}\n".replace("memory\n", "memory ")
    with pytest.raises(jax.errors.JaxRuntimeError):
        exit_status(functools.partial(fail, jax.errors.JaxRuntimeError("INTERNAL: a bug in the library")))


@pytest.mark.parametrize(("lengths", "samples"), [([0, 0, 0], 3), ([], 0)])
def test_inspect_shows_a_trace_without_tokens_and_plan_refuses_it(
    refused, tmp_path, capsys, lengths, samples
):
    path = tmp_path / "empty.npz"
    np.savez(path, **sized(ROWS[:0], np.array(lengths, int)))
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    cells = dict(line.strip("│ ").split("│") for line in shown.out.splitlines() if line.startswith("│"))
    cells = {name.strip(): value.strip() for name, value in cells.items()}
    assert (cells["samples"], cells["tokens"]) == (str(samples), "0")
    assert cells["load of the hottest expert / mean"] == "none, because there are no tokens"
    assert cells["experts never used"] == "32 of 32 over all layers"
    error = refused(main, ["plan", path, *SMALL])
    assert error == f"empty.npz has no tokens in its {samples} samples, so there is no load to balance"


def test_main_and_run_training_keep_the_width_of_their_help(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    for program, args in ((main, []), (main, ["plan"]), (run_training, ["demo"])):
        with pytest.raises(SystemExit) as stop:
            program([*args, "--help"])
        assert stop.value.code == 0
        shown = capsys.readouterr().out
        assert "usage:" in shown
        assert max(len(line) for line in shown.splitlines() if line.startswith(" ")) == 60
    assert os.environ["COLUMNS"] == "60"


def test_parse_options_restores_the_terminal_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    with pytest.raises(ValueError, match="Unrecognized options: --no"):
        parse_options(functools.partial(tyro.cli, Train), ["--no"])
    assert "COLUMNS" not in os.environ


BOXES = {
    "colours and lines": """\x1b[31m╭─ Value error ───────────────╮
│ \x1b[1mError parsing --seed:\x1b[0m no     │
│ number                      │
│ ─────────────────────────── │
│ Argument helptext:          │
│     --seed INT              │
╰─────────────────────────────╯""",
    "letters alone": """ Value error
 -----------------------------
  Error parsing --seed: no
  number
  ---------------------------
  Argument helptext:
      --seed INT
""",
}


@pytest.mark.parametrize("terminal", BOXES)
def test_one_line_reads_error_boxes_of_any_terminal(terminal):
    assert one_line(BOXES[terminal]) == "--seed INT: no number"


def test_one_line_keeps_text_without_a_box():
    assert one_line("usage: x\n") == "usage: x"
