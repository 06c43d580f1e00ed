"""What figures show: a planner in one colour everywhere, and a timeline that agrees with the cost model."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from experiments.claims.cells import CellResult
from experiments.claims.figures import draw_planners
from experiments.synthetic_traces import synthetic_trace
from relibra_jax.cli.figures import PARTS, compare_figure
from relibra_jax.cli.palette import planner_style
from relibra_jax.cli.timeline import timeline_figure
from relibra_jax.cost.step_time import attention_time, layer_time, rank_time
from relibra_jax.evaluation import COLUMNS, Batching, Costs, Outcome, Ranks, compare
from relibra_jax.evaluation.layer_timeline import layer_timeline
from relibra_jax.planning.planners import PLANNERS

OUTSIDE = "my_module:my_planner"


@pytest.fixture
def figures(monkeypatch):
    """Collect the figures that are drawn, which stay open until the test has ended."""
    drawn = []
    for module in ("relibra_jax.cli.figures", "experiments.claims.figures", "relibra_jax.cli.timeline"):
        monkeypatch.setattr(f"{module}.save_figure", lambda figure, path: drawn.append(figure))
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


def shown_texts(figure):
    """Return the texts that stand in the axes of a figure."""
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def outcome(planner):
    """Return an outcome of no run, whose numbers are given instead of computed."""
    numbers = dict.fromkeys((each.name for each in COLUMNS), 1.2)
    numbers |= {
        "modelled_parts": dict.fromkeys(PARTS, 0.2),
        "rank_load": np.arange(1, 17).reshape(2, 2, 2, 2),
    }
    made = object.__new__(Outcome)
    vars(made).update(numbers, planner=planner)
    return made


def test_planner_style_gives_one_colour_in_every_figure(tmp_path, figures):
    """A planner keeps its colour whatever else is in the figure, and in whichever order."""
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
def test_layer_timeline_agrees_with_the_cost_model(tmp_path, figures, dispatch):
    trace = synthetic_trace(samples=32, mean_tokens=20, layers=2, num_experts=16, top_k=2)
    topology = Ranks(nodes=2, ranks_per_node=2, replica_slots=1).topology(16)
    planners = {name: PLANNERS[name] for name in ("static", "eplb")}
    batching, cost = Batching(micro_batches=2), Costs(dispatch=dispatch)
    outcomes = compare(planners, trace, topology, batching=batching, cost=cost, timed_runs=0)
    for each in outcomes:
        batch, visits = each.batches[-1], each.visits[-1]
        price = each.cost_model.price(topology, updates=0, recompute=True)
        attention, _ = attention_time(batch.batch_plan.assignment, batch.lengths, price)
        times = rank_time(batch.batch_plan.layer_plans(), attention, topology, price, visits=visits)
        line = layer_timeline(each, (1, 0))
        np.testing.assert_allclose(line.experts.sum(1), 1e3 * times.compute[1, 0].ravel(), rtol=1e-5)
        if dispatch == "flat":
            hop = np.maximum(line.inside, line.crossing)
            np.testing.assert_allclose(2 * hop, 1e3 * times.between[1, 0].ravel(), rtol=1e-5)
        else:
            np.testing.assert_allclose(2 * line.crossing, 1e3 * times.between[1, 0].ravel(), rtol=1e-5)
            np.testing.assert_allclose(2 * line.inside, 1e3 * times.inside[1, 0].ravel(), rtol=1e-5)
        np.testing.assert_allclose(line.ends[-1], 1e3 * layer_time(times, price).total[1, 0], rtol=1e-5)
        assert (line.experts[:, 2].sum() > 0) == (each.planner == "eplb"), "only EPLB has replicas"
        assert not line.experts[:, 1].any(), "there are no resident slots"
    timeline_figure(tmp_path / "timeline.png", outcomes)
    (figure,) = figures
    for axes in figure.axes:
        names = [label.get_text() for label in axes.get_yticklabels()]
        assert names == ["node 0  rank 0", "1", "node 1  rank 0", "1"]
    totals = [float(text.removesuffix(" ms")) for text in shown_texts(figure) if text.endswith(" ms")]
    assert figure.axes[0].get_xlim() == (0, pytest.approx(max(totals), abs=0.05)), "it ends with the slowest"
    if max(totals) - min(totals) > 0.1 * max(totals):
        assert any(text.endswith(" ms less\nthan static") for text in shown_texts(figure))
