"""What figures show: a planner in one colour everywhere, and a timeline that agrees with the cost model."""

import dataclasses

import matplotlib.pyplot as plt
import numpy as np
import pytest

from experiments.claims.cells import CellResult
from experiments.claims.figures import draw_planners
from experiments.synthetic_traces import synthetic_trace
from relibra_jax.cli.batch_prices import count_visits, sample_lengths
from relibra_jax.cli.batching import make_batches
from relibra_jax.cli.figures import PARTS, compare_figure
from relibra_jax.cli.modelled_time import make_cost_model
from relibra_jax.cli.outcomes import Outcome, compare
from relibra_jax.cli.palette import planner_style
from relibra_jax.cli.planner_runs import Contender
from relibra_jax.cli.timeline import layer_timeline, timeline_figure
from relibra_jax.cost.step_time import attention_time, layer_time, rank_time
from relibra_jax.evaluation import Batching, Costs, Ranks
from relibra_jax.planning.planners import PLANNERS

OUTSIDE = "my_module:my_planner"


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn, which stay open until the test has ended."""
    drawn = []
    for module in ("figures", "claims.figures", "timeline"):
        monkeypatch.setattr(
            f"relibra_jax.cli.{module}.save_figure", lambda figure, path: drawn.append(figure)
        )
    yield drawn
    plt.close("all")


def bar_colours(axes):
    """Return the colour of the first bar on each line, by the line's label."""
    colours = {}
    for bar in axes.patches:
        line = round(bar.get_y() + bar.get_height() / 2)
        colours.setdefault(
            axes.get_yticklabels()[line].get_text(), plt.matplotlib.colors.to_hex(bar.get_facecolor())
        )
    return colours


class DrawnOutcome(Outcome):
    """An outcome of no run."""

    rank_load = np.arange(1, 17).reshape(2, 2, 2, 2)


def outcome(planner):
    numbers = {field.name: 1.2 for field in dataclasses.fields(Outcome)}
    parts = dict.fromkeys(PARTS, 0.2)
    return DrawnOutcome(**numbers | {"planner": planner, "modelled_parts": parts, "batches": []})


def test_a_planner_has_one_colour_in_every_figure(tmp_path, figures):
    """Whatever else is in the figure, and in whichever order."""
    compare_figure(tmp_path / "one.png", [outcome(name) for name in (*PLANNERS, OUTSIDE)], "all planners")
    compare_figure(tmp_path / "two.png", [outcome(name) for name in ("relibra", OUTSIDE, "static")], "three")
    setting = {
        "experts": 32,
        "costs": {"model": "gpt-oss-20b", "cluster": "h100"},
        "ranks": {"nodes": 2, "ranks_per_node": 8},
    }
    rows = {
        name: {"share_of_balanced": 0.9, "fits": True}
        for name in (*PLANNERS, "relibra, residents", "+ reorder")
    }
    rows["eplb_repacked"]["share_of_balanced"] = 0.95
    draw_planners(tmp_path / "claims.png", [CellResult("a trace", False, setting, rows)])
    everyone, three, claims = (bar_colours(figure.axes[0]) for figure in figures)
    assert everyone.keys() == {*PLANNERS, OUTSIDE}
    assert everyone | three == everyone
    assert claims["EPLB"] == claims["best rival"] == everyone["eplb"]
    assert claims["ReLibra"] == claims["ReLibra, one resident per rank"] == everyone["relibra"]
    lines = {line.get_label(): line.get_color() for line in figures[0].axes[2].lines[:-1]}
    assert {"static", "relibra", OUTSIDE} <= lines.keys()
    assert (
        {name: planner_style(name).colour for name in lines}
        == lines
        == {name: everyone[name] for name in lines}
    )


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["flat", "hierarchical"])
def test_the_timeline_agrees_with_the_cost_model(tmp_path, figures, dispatch):
    trace = synthetic_trace(samples=32, mean_tokens=20, layers=2, num_experts=16, top_k=2)
    topology = Ranks(nodes=2, ranks_per_node=2, replica_slots=1).topology(16)
    batches = make_batches(trace, Batching(micro_batches=2), topology)
    cost_model = make_cost_model(Costs(dispatch=dispatch), trace, batches, topology)
    contenders = {name: Contender(entry=PLANNERS[name]) for name in ("static", "eplb")}
    outcomes = compare(contenders, batches, topology, cost_model)
    for each in outcomes:
        batch = each.batches[-1]
        cost = cost_model.price(topology, updates=0, recompute=True)
        visits, (lengths, _) = count_visits(batch, topology, cost), sample_lengths(batch)
        attention, _ = attention_time(batch.batch_plan.assignment, lengths, cost)
        times = rank_time(batch.batch_plan.layer_plans(), attention, topology, cost, visits=visits)
        line = layer_timeline(batch, (1, 0), topology, cost_model)
        np.testing.assert_allclose(line.experts.sum(1), 1e3 * times.compute[1, 0].ravel(), rtol=1e-5)
        if dispatch == "flat":
            hop = np.maximum(line.inside, line.crossing)
            np.testing.assert_allclose(2 * hop, 1e3 * times.between[1, 0].ravel(), rtol=1e-5)
        else:
            np.testing.assert_allclose(2 * line.crossing, 1e3 * times.between[1, 0].ravel(), rtol=1e-5)
            np.testing.assert_allclose(2 * line.inside, 1e3 * times.inside[1, 0].ravel(), rtol=1e-5)
        np.testing.assert_allclose(line.ends[-1], 1e3 * layer_time(times).total[1, 0], rtol=1e-5)
        assert (line.experts[:, 2].sum() > 0) == (each.planner == "eplb"), "only EPLB has replicas"
        assert not line.experts[:, 1].any(), "there are no resident slots"
    timeline_figure(tmp_path / "timeline.png", outcomes, topology, cost_model)
    (figure,) = figures
    for axes in figure.axes:
        names = [label.get_text() for label in axes.get_yticklabels()]
        assert names == ["node 0  rank 0", "1", "node 1  rank 0", "1"]
