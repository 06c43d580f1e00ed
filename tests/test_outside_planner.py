"""Planners of users: the example of the guide runs, and planners that break the contract raise errors."""

import re
import textwrap
from pathlib import Path

import numpy as np
import pytest

from relibra_jax.cli.main import main
from relibra_jax.cli.outside_planner import import_planner
from relibra_jax.evaluation import Batching, Ranks, make_setting, run_planner
from relibra_jax.planning.metrics import batch_imbalance
from relibra_jax.traces.read import read_trace

GUIDE = (Path(__file__).parents[1] / "docs" / "guides" / "write-a-planner.md").read_text()

OTHERS = """
from relibra_jax import Planner, static
from relibra_jax.planning.planners import PlannerEntry

number = 3
guess = PlannerEntry(planner=static(), summary="guesses", foresight=False, forecast="histery")
entry = PlannerEntry(planner=static(), summary="contiguous", across_nodes=True)

def altered(change):
    def update(load, state, topology):
        plan, state = static().update(load, state, topology)
        return change(plan, state)
    return Planner(static().init, update)

def too_many():
    return altered(lambda plan, state: (plan._replace(quota=plan.quota.at[1, 2, 0, 0, 0].add(1)), state))

def no_state():
    return altered(lambda plan, state: plan)

def branches():
    return altered(lambda plan, state: (plan, state) if plan.quota.sum() > 0 else None)

def starts(topology, layers, *, key):
    raise KeyError("none")

def no_start():
    return static()._replace(init=starts)

def broken():
    return 1 / 0
"""


@pytest.fixture(scope="module")
def run():
    """Return the function ``run(entry) -> (imbalance of its plan, imbalance of static placement)``."""
    trace, topology = read_trace(None), Ranks(nodes=2, ranks_per_node=2).topology(16)
    setting = make_setting(trace, topology, batching=Batching(micro_batches=2, batch_size=512))

    def imbalance(entry):
        outcome = run_planner("a planner", entry, setting, timed_runs=0)
        load = np.asarray(outcome.batches[0].batch_plan.load)
        at_home = load.sum((2, 3)).reshape(2, -1, 2, 2, 4).sum(-1)
        return outcome.imbalance, float(batch_imbalance(at_home))

    return imbalance


@pytest.fixture
def folder(tmp_path, monkeypatch):
    code = re.search(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    (tmp_path / "planner_of_the_guide.py").write_text(code[1])
    (tmp_path / "other_planners.py").write_text(textwrap.dedent(OTHERS))
    (tmp_path / "needs_more.py").write_text("import not_there")
    (tmp_path / "ends.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_run_planner_balances_with_the_planner_of_the_guide(folder, run):
    imbalance, static = run(import_planner("planner_of_the_guide:my_planner"))
    assert imbalance < static


def test_import_planner_keeps_the_settings_of_an_entry(folder):
    entry = import_planner("other_planners:entry")
    assert entry.across_nodes
    assert entry.summary == "contiguous"


@pytest.mark.parametrize(
    ("name", "says"),
    {
        "too_many": "for batch 0 is not valid: micro-batch 1, layer 2, expert 0: the quotas sum to ",
        "no_state": r"planner 'other_planners:no_state': update must return \(Plan, state\), not Plan",
        "branches": r"^planner 'other_planners:branches': update raised TracerBoolConversionError: Attempted boolean"
        r" conversion of traced array with shape bool\[\]\.* \(\S*other_planners\.py:\d+\)",
        "no_start": r"^planner 'other_planners:no_start': init raised KeyError: 'none' \(\S*other_planners\.py:\d+\)$",
    }.items(),
)
def test_run_planner_names_the_broken_rule(folder, run, name, says):
    with pytest.raises(ValueError, match=says):
        run(import_planner(f"other_planners:{name}"))


@pytest.mark.parametrize(
    ("option", "says"),
    {
        "--planner=planner": "planner 'planner' must be written module:attribute",
        "--planner=not_here:planner": "no module 'not_here'",
        "--planner=other_planners:too_much": "no 'too_much'; did you mean too_many?",
        "--planner=other_planners:number": "has type int; it must be a Planner or a PlannerEntry",
        "--planner=os:getenv": "planner 'os:getenv' cannot be called without arguments",
        "--planner=other_planners:broken": "'other_planners:broken' raised ZeroDivisionError: division by zero (",
        "--planner=needs_more:planner": "the import of needs_more raised ModuleNotFoundError: No module named ",
        "--planner=ends:planner": "the import of ends raised SystemExit: 3 (",
        "--planner=other_planners:guess": "forecast='histery' must be one of ",
        "--rows=statik": "row 'statik' must be one of ",
    }.items(),
)
def test_compare_reports_planners_that_it_cannot_use_in_one_line(folder, capsys, option, says):
    assert main(["compare", option, "--out", str(folder / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert not (folder / "out").exists()
