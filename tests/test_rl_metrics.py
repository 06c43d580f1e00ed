"""The output of a run: metrics under stable names, writers, the profile of a step, and names of compiled programs."""

import dataclasses
import io
import re
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console
from support.layer import run_layer
from support.plans import load_of, random_ids, random_plan, random_routing
from support.runs import SMALL

from experiments.rl.balance import measure_copies
from experiments.rl.configs import Train
from experiments.rl.metrics import (
    ALGORITHM_METRICS,
    FAILURES,
    METRICS,
    lists_of,
    names_of,
    scalars_of,
)
from experiments.rl.metrics_log import read_metrics
from experiments.rl.progress import heading, status_text, tell_compilations
from experiments.rl.rewards import score_responses
from experiments.rl.step_clock import PLANNING, exposed_seconds
from experiments.rl.tasks import TASKS
from experiments.rl.tokens import BYTES
from experiments.rl.train import run_train
from experiments.rl.writers import find_writer
from experiments.run import main
from relibra_jax import Topology, eplb, static
from relibra_jax.contract.plan import replica_experts
from relibra_jax.contract.types import EMPTY, layer_plans
from relibra_jax.evaluation import Ranks
from relibra_jax.execution import ExpertParallel
from relibra_jax.execution.gating import GATINGS
from relibra_jax.nnx import Balancer, MoELayer, expert_mesh

PAGE = (Path(__file__).parents[1] / "docs" / "guides" / "metrics.md").read_text()
pytestmark = pytest.mark.usefixtures("smallest_policy")
SHORT = SMALL | {"steps": 1, "evaluation_batches": 1, "epochs": 1, "ranks": Ranks(resident_slots=1)}
SHORT |= {"price": "time", "pack_sequences": True}
WRITERS = """
    opened = []

    class Writer:
        def __init__(self, folder, settings):
            self.folder, self.settings, self.lines, self.finished = folder, settings, [], False
            opened.append(self)

        def log(self, metrics, step):
            self.lines.append((step, metrics))

        def finish(self):
            self.finished = True

    def nothing(folder, settings):
        return None

    def alone(folder):
        return Writer(folder, {})

    number = 3
"""
HOST = ("generate", "prepare", "plan", "size", "migrate", "recompute", "score", "score_wait", "update")
"""The names in a profile of phases on the host."""
SCOPES = (
    *("prepare_layer", "push_residents", "replica_fetch", "dispatch", "experts", "combine"),
    "return_gradients",
)
"""The names in a profile of operations in programs."""


@pytest.fixture(scope="module")
def writers(tmp_path_factory):
    """Write a user's module of writers, in the current folder and on the module path."""
    folder = tmp_path_factory.mktemp("module")
    (folder / "some_writers.py").write_text(textwrap.dedent(WRITERS))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield
    sys.modules.pop("some_writers", None)


@pytest.fixture(scope="module")
def ran(writers, tmp_path_factory):
    """Make a profiled run with a writer; return its folder, writer, names of compiled programs, and printed text."""
    out, names, shown = tmp_path_factory.mktemp("runs") / "run", [], io.StringIO()
    config = Train(**SHORT, writer="some_writers:Writer", profile=1, out=out)
    with tell_compilations(names.append):
        run_train(config, Console(file=shown, width=200))
    [writer] = sys.modules["some_writers"].opened
    return out / "seed-0", writer, set(names), shown.getvalue()


@pytest.mark.slow
def test_run_writes_exactly_the_listed_metrics(ran):
    lines = read_metrics(ran[0] / "metrics.jsonl")
    assert [line["kind"] for line in lines] == ["warm-up", "evaluation", "learn", "evaluation"]
    for line in lines:
        other_keys = {"step", "kind"} | ({FAILURES} if line["kind"] != "warm-up" else set())
        assert line.keys() - other_keys == names_of(line["kind"])
    metrics = lines[2]
    assert metrics["balance/residents"] > 0
    assert metrics["balance/replicas"] > 0
    # A token has two experts and one other node.
    assert 0 < metrics["balance/crossings_per_token"] < 1
    assert 0 < metrics["buffers/fill"] <= 1
    assert 1 <= metrics["response/tokens"] <= metrics["response/longest"] <= 7
    assert metrics["batch/tokens"] == pytest.approx(
        metrics["speed/tokens_per_second"] * metrics["time/step_seconds"]
    )
    exposed = {name: metrics[f"time/exposed_{name}_seconds"] for name in PLANNING}
    assert metrics["time/exposed_seconds"] == pytest.approx(sum(exposed.values()))
    assert all(0 <= exposed[name] <= metrics[f"time/{name}_seconds"] for name in PLANNING)
    assert metrics["time/exposed_seconds"] > 0
    parts = [
        value
        for name, value in metrics.items()
        if name.startswith("time/modelled_plan_") and name.count("_") > 2
    ]
    assert sum(parts) == pytest.approx(metrics["time/modelled_plan_seconds"], rel=1e-5)
    layers, static_layers = (
        metrics["balance/imbalance_by_layer"],
        metrics["balance/imbalance_static_by_layer"],
    )
    assert np.mean(layers) == pytest.approx(metrics["balance/imbalance"], rel=1e-5)
    assert np.mean(static_layers) == pytest.approx(metrics["balance/imbalance_static"], rel=1e-5)
    load, busy = metrics["balance/load_by_rank"], metrics["balance/busy_by_rank"]
    assert sum(load) == 2 * 2 * metrics["batch/tokens"], "two layers with two experts a token"
    assert np.argsort(load).tolist() == np.argsort(busy).tolist()
    assert max(busy) <= 1
    assert metrics["response/tokens_quantiles"][-1] == metrics["response/longest"]
    assert 0 <= metrics["reward/solved_by_all"] <= 1 - metrics["reward/solved_by_none"] <= 1


@pytest.mark.slow
def test_run_keeps_sample_texts_from_the_least_reward_to_the_largest(ran):
    [line] = read_metrics(ran[0] / "samples.jsonl")
    assert line["step"] == 1
    assert len(line["samples"]) == 4
    rewards = [sample["reward"] for sample in line["samples"]]
    assert rewards == sorted(rewards)
    for sample in line["samples"]:
        assert sample["prompt"]
        assert 1 <= sample["tokens"] <= 7


@pytest.mark.slow
def test_run_prints_a_line_for_every_step(ran):
    shown = [line for line in ran[3].splitlines() if line.startswith(("    1/2", "    2/2"))]
    assert [len(line.split()) for line in shown] == [13, 13]


@pytest.mark.slow
def test_writer_gets_all_numbers_by_name(ran):
    folder, writer, *_ = ran
    lines = read_metrics(folder / "metrics.jsonl")
    for (step, numbers), line in zip(writer.lines, lines, strict=True):
        entries = {
            f"{name}/{number}": value
            for name, values in lists_of(line).items()
            for number, value in enumerate(values)
            if value is not None
        }
        assert (step, numbers) == (line["step"], scalars_of(line) | entries)
    null = {
        *("balance/imbalance_live", "balance/imbalance_recompute"),
        *("time/plan_ahead_seconds", "time/count_seconds", "memory/device_bytes", "memory/device_peak_bytes"),
        *ALGORITHM_METRICS,
    }
    seen = {name for _, metrics in writer.lines for name in metrics}
    assert {name for name in seen if name in METRICS} == {
        name for name, metric in METRICS.items() if not metric.listed and name not in null
    }
    assert {"response/tokens_quantiles/0.5", "balance/load_by_rank/7", "balance/imbalance_by_layer/1"} <= seen
    assert (writer.folder, writer.settings["seed"], writer.settings["task"]) == (folder, 0, "copy")
    assert writer.settings["step"] == 0
    assert writer.finished


@pytest.mark.slow
def test_modelled_time_of_the_first_batch_is_printed_and_logged(ran):
    folder, *_, shown = ran
    [metrics] = [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "learn"]
    plan, staying, balanced = (
        metrics[f"time/modelled_{name}_seconds"] for name in ("plan", "staying", "balanced")
    )
    assert 0 < plan <= staying
    [share] = re.findall(r"(.*)% of the balanced run", shown)
    assert float(share) == pytest.approx(100 * balanced / plan, abs=0.06)
    assert shown.count("step 1: modelled time of this batch in seconds (a model, not a measurement)") == 1


@pytest.mark.slow
def test_profile_names_phases_and_layers(ran):
    [trace] = (ran[0] / "profile-1").rglob("*.xplane.pb")
    actual = trace.read_bytes()
    for name in (*HOST, *SCOPES):
        assert name.encode() in actual, name


@pytest.mark.slow
def test_tell_compilations_names_every_program(ran):
    """The progress line shows these names, for example those of the planner and of generation."""
    programs = {
        "prefill",
        "decode",
        "count",
        "plan_rounds",
        "count_visits",
        "prepare",
        "prepare_residents",
        "recompute",
        "update",
    }
    assert programs <= ran[2]


@pytest.mark.slow
def test_resumed_run_notes_a_profile_step_in_the_past(ran, tmp_path):
    shown = tmp_path / "shown"
    with shown.open("w") as file:
        run_train(Train(**SHORT, profile=1, resume=ran[0].parent), Console(file=file, width=200))
    assert "note: seed 0 resumes at step 2, after profile=1: no profile is written" in shown.read_text()


def metrics_table():
    """Return all metrics as the Markdown table of docs/guides/metrics.md."""
    rows = ["| name | unit | meaning | lines |", "|---|---|---|---|"]
    for name, metric in METRICS.items():
        unit = f"{metric.unit}, a list" if metric.listed else metric.unit
        rows.append(f"| `{name}` | {unit} | {metric.meaning} | {', '.join(metric.kinds)} |")
    return "\n".join(rows)


def test_metrics_page_has_the_metrics_table():
    assert metrics_table() in PAGE
    for name in (*HOST, *SCOPES):
        assert f"`{name}`" in PAGE


@pytest.mark.parametrize(
    ("options", "says"),
    {
        (
            "--writer=tensorbord",
        ): "writer 'tensorbord' must be one of tensorboard, wandb, mlflow; did you mean tensorb",
        ("--writer=not_here:writer",): "writer 'not_here:writer': no module 'not_here'",
        ("--writer=some_writers:Writr",): "no 'Writr'; did you mean Writer?",
        (
            "--writer=some_writers:number",
        ): "writer 'some_writers:number' must be a function of (folder, settings): ",
        ("--writer=some_writers:alone",): "(folder, settings): too many positional arguments",
        (
            "--writer=some_writers:nothing",
        ): "writer nothing returned a NoneType: it must return an object with log(metrics",
        (
            "--profile=1",
        ): "profile=1 must be a learning step: at least warmup_steps=100 and below warmup_steps + steps",
        ("--profile=140",): "= 140",
    }.items(),
)
def test_main_rejects_bad_writers_and_profile_steps(writers, capsys, tmp_path, options, says):
    assert main(["demo", f"--out={tmp_path / 'out'}", *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    # A busy machine says what it compiles.
    (line,) = (each for each in lines if not each.startswith("relibra_jax: compiling "))
    assert says in line
    assert not list(tmp_path.rglob("config.json"))


def test_find_writer_accepts_any_function_of_two_arguments(writers):
    assert find_writer("builtins:divmod") is divmod


def test_status_lines_fit_80_characters():
    """Every column is under its heading, whatever the size of the numbers."""
    names = [name for name in METRICS if name != "reward/mean"]
    for size in (0.000123, 1.2345, 98765.4):
        line = dict.fromkeys(names, size) | {"kind": "learn", "reward/mean": None}
        text = status_text(line, step=120, total=140, left=size)
        assert len(text) <= 80
        assert len(text.split()) == len(heading().split()), text
    warm_up = {
        "kind": "warm-up",
        "warmup/loss": 2.345,
        "time/update_seconds": 0.5,
        "speed/tokens_per_second": 9.0,
    }
    assert status_text(warm_up, step=1, total=9, left=None).split() == [
        *("1/9", "-", "2.345", "-", "-", "9.000", "-", "-", "-", "0.50", "-", "-", "-"),
    ]


@pytest.mark.parametrize(
    ("recompute", "score", "exposed"),
    [
        (4.0, 0.5, (2.0, 0.5, 1.0)),
        (4.0, 5.0, (1.0, 0.5, 1.0)),
        (4.0, 6.25, (0.0, 0.25, 1.0)),
        (4.0, 7.0, (0.0, 0.0, 0.5)),
        (4.0, 9.0, (0.0, 0.0, 0.0)),
        (1.0, 2.0, (1.0, 0.5, 1.0)),
    ],
)
def test_exposed_seconds_are_what_scoring_does_not_hide(recompute, score, exposed):
    phases = {"plan": 2.0, "size": 0.5, "migrate": 1.0, "recompute": recompute, "score": score}
    wait = max(score - 3.5 - recompute, 0.0)
    assert exposed_seconds({**phases, "score_wait": wait}) == dict(zip(PLANNING, exposed, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_score_responses_masks_and_counts_rewards_that_are_not_finite(value):
    task = dataclasses.replace(
        TASKS["copy"], score=lambda completion, example: value if example.prompt == "b" else 1.0
    )
    examples = [
        example._replace(prompt=prompt)
        for prompt, example in zip("abc", TASKS["copy"].sample(0, 3), strict=True)
    ]
    tokens = BYTES.pad_sequences([BYTES.encode_prompt("a") + [65]] * 3, 8)
    rewards = score_responses(task, examples, tokens, tokens == 65)
    assert rewards.scored.tolist() == [True, False, True]
    assert rewards.reward.tolist() == [1, 0, 1]
    [failure] = rewards.failures
    assert failure.text.startswith("sample 1: prompt 'b', response 'A': ")


LAYERS, EXPERTS = 2, 8


@pytest.mark.slow
@pytest.mark.parametrize("path", ["flat", "hierarchical"])
@pytest.mark.parametrize(("planner", "slots"), [(static(), 0), (eplb(), 1)], ids=["static", "eplb"])
def test_measure_copies_equals_counts_of_plan_and_routes(path, planner, slots):
    topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=EXPERTS, replica_slots=slots)
    gating, mesh = (
        dataclasses.replace(GATINGS["qwen3-moe"], top_k=2),
        expert_mesh(topology, devices=jax.devices()[:4]),
    )
    model = nnx.List([MoELayer(topology, 4, 4, gating, rngs=nnx.Rngs(0)) for _ in range(LAYERS)])
    options = {"num_layers": LAYERS, "num_micro_batches": 2, "assign": None, "key": jax.random.key(0)}
    balancer = Balancer(planner, ExpertParallel(mesh=mesh, topology=topology, path=path), **options)
    sizes = {"samples": 8, "tokens": 6, "layers": LAYERS, "experts": EXPERTS, "top_k": 2}
    replay = random_routing(np.random.default_rng(0), **sizes)
    batch = balancer.prepare(model, None, replay)
    tokens, plan = int(replay.mask.sum()), batch.batch_plan.plan
    actual = measure_copies([batch], jax.device_get(batch.batch_plan), tokens)
    assert actual["balance/replicas"] == (replica_experts(plan, topology) != EMPTY).sum() / (2 * LAYERS)
    assert (actual["balance/replicas"] > 0) == (slots > 0)
    assert actual["balance/residents"] == 0
    assert actual["buffers/fill"] == np.asarray(plan.quota).sum(-1).max() / batch.parallel.capacities.rows
    if not slots:
        sample = np.asarray(batch.batch_plan.assignment.sample)  # [M N G b]
        node = {int(each): place[1] for place, each in np.ndenumerate(sample) if each != EMPTY}
        of = np.array([node[each] for each in range(8)])[:, None, None, None]
        away = (replay.expert_ids // (EXPERTS // 2) != of) & replay.mask[..., None, None]
        crossings = away.any(-1) if path == "hierarchical" else away
        assert actual["balance/crossings_per_token"] == pytest.approx(crossings.sum() / tokens / LAYERS)


@pytest.mark.slow
def test_compiled_programs_name_the_parts_of_a_layer():
    topology = Topology(num_nodes=2, ranks_per_node=2, num_experts=EXPERTS, replica_slots=1, resident_slots=1)
    parallel = ExpertParallel(mesh=expert_mesh(topology, devices=jax.devices()[:4]), topology=topology)
    rng = np.random.default_rng(0)
    ids = random_ids(rng, (1, 1, topology.num_ranks, 6), EXPERTS, 2)
    load = load_of(ids, topology)
    plan = jax.tree.map(lambda leaf: leaf[0, 0], layer_plans(random_plan(rng, load, topology), load))
    tokens, experts = np.ones((24, 4), np.float32), np.ones((2, 2, topology.home_slots, 3, 4, 4), np.float32)
    ids = ids.reshape(24, 2)

    def loss_of(x, experts):
        return run_layer(x, ids, np.ones(ids.shape, np.float32), experts, plan, parallel).sum()

    program = jax.jit(jax.grad(loss_of, (0, 1))).lower(tokens, experts).compile().as_text()
    for scope in set(SCOPES) - {"return_gradients"}:
        assert re.search(f'op_name="[^"]*[/(]{scope}[/)]', program), scope
