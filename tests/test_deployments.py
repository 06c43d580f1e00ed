"""Deployments of a rollout: the search against plain Python, simulated steps, and constraints at their limits."""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest
from support.costs import CLUSTER, MODEL
from support.ping_pong import run_schedule

from experiments.deploy.costs import attention_memory, expert_memory
from experiments.deploy.deployments import Deployment, score_deployments, search_deployment
from experiments.deploy.placements import contiguous_placement, even_placement, merge_rows, plan_placement
from experiments.deploy.serving import Grid, Serving
from experiments.deploy.simulated_step import simulate_deployment

MODEL = dataclasses.replace(MODEL, moe_layers=3, shared_width=2, expert_width=4, heads=8)
OTHER = dataclasses.replace(CLUSTER, memory=3e4, memory_bandwidth=9000.0, slow_bandwidth=300.0)
SERVING = Serving(
    model=MODEL,
    attention=OTHER,
    experts=CLUSTER,
    attention_price=3.0,
    expert_price=0.5,
    context=20.0,
    slo=1e9,
)
GRID = Grid(tensor_parallel=(1, 2, 4), attention_copies=(1, 3), micro_batches=(1, 2, 3), sequences=(2, 7, 30))
LOAD = np.random.default_rng(0).integers(0, 100, (2, 8)) ** 2
ROUTES = np.argsort(np.random.default_rng(4).random((50, 2, 8)), -1)[..., :2]
PLACEMENTS = [
    even_placement(2, 8, top_k=2),
    merge_rows(contiguous_placement(LOAD, 4), ROUTES),
    contiguous_placement(LOAD, 8),
]


def changed(**changes):
    return dataclasses.replace(SERVING, **changes)


def slow_score(at, serving, placements):
    """Step, throughput per price, and bytes of both kinds of devices of one deployment, in plain Python."""

    def rates(cluster):
        return (
            cluster.matmul_flops * cluster.matmul_efficiency,
            cluster.memory_bandwidth * cluster.memory_efficiency,
            cluster.fast_bandwidth * cluster.network_efficiency,
            cluster.slow_bandwidth * cluster.network_efficiency,
        )

    model, placement = serving.model, placements[at.placement]
    flops, read, fast, slow = rates(serving.attention)
    weights = model.attention_params + 3 * model.width * model.shared_width
    p, rows, width = at.attention_devices, at.sequences, model.width
    cache = 2 * model.cache_width * serving.context / min(p, model.cache_heads)
    attention = max(2 * weights * rows / flops, 2 * weights / read) / p
    attention += rows * max(2 * model.attention_width * serving.context / flops / p, cache / read)
    attention += rows * 2 * width / fast * 2 * (p - 1) / p
    send = rows * model.top_k * 2 * width / slow / p
    flops, read, fast, slow = rates(serving.experts)
    p, experts, exchange = at.expert_devices, [], []
    layers = zip(placement.hottest, placement.sent, placement.received, strict=True)
    for hottest, sent, received in itertools.islice(itertools.cycle(layers), model.moe_layers):
        copies = float(hottest) * rows * at.attention_copies * model.top_k
        product = max(
            2 * model.expert_params * copies / flops, 2 * model.expert_params * placement.slots / read
        )
        experts.append(product / p + copies * 2 * width / fast * 2 * (p - 1) / p)
        exchange.append(max(send * float(sent), copies * float(received) * 2 * width / slow / p))
    t_e, t_c = np.mean(experts), np.mean(exchange)
    times = np.ones((model.moe_layers, at.micro_batches))
    step = run_schedule(attention * times, t_e * times, t_c * times)
    price = at.attention_devices * at.attention_copies * serving.attention_price
    price += at.expert_devices * placement.groups * serving.expert_price
    per_price = at.micro_batches * at.attention_copies * rows / step / price
    attention_bytes = 2 * model.moe_layers * weights / at.attention_devices
    attention_bytes += model.moe_layers * at.micro_batches * rows * cache
    return step, per_price, attention_bytes, 2 * model.moe_layers * model.expert_params * placement.slots / p


def all_of(grid, placements):
    sizes = (grid.tensor_parallel, grid.attention_copies, grid.tensor_parallel, range(len(placements)))
    for each in itertools.product(*sizes, grid.micro_batches, grid.sequences):
        yield Deployment(*each)


@pytest.mark.parametrize("slo", [1.0, 3.0, 1e4])
def test_search_deployment_finds_the_best_of_brute_force(slo):
    serving = changed(slo=slo, memory_share=0.5)
    search = search_deployment(serving, PLACEMENTS, GRID)
    tried = list(all_of(GRID, PLACEMENTS))
    slow = [slow_score(deployment, serving, PLACEMENTS) for deployment in tried]
    np.testing.assert_allclose(search.scores.step, [each[0] for each in slow], rtol=1e-5)
    np.testing.assert_allclose(search.scores.per_price, [each[1] for each in slow], rtol=1e-5)
    fits = [
        step <= slo and attention <= OTHER.memory / 2 and experts <= CLUSTER.memory / 2
        for step, _, attention, experts in slow
    ]
    assert search.feasible.tolist() == fits
    assert 0 < sum(fits) < len(fits), "some deployments are feasible and some are not"
    best = max(per_price for (_, per_price, *_), fit in zip(slow, fits, strict=True) if fit)
    chosen = tried.index(search.best)
    assert fits[chosen]
    assert slow[chosen][1] == pytest.approx(best, rel=1e-5) == search.score.per_price


def one(**changes):
    """Return a grid of one deployment."""
    fields = {"tensor_parallel": (2,), "attention_copies": (3,), "micro_batches": (2,), "sequences": (7,)}
    return Grid(**fields | {name: (value,) for name, value in changes.items()})


def test_search_deployment_at_the_limit_of_memory():
    (attention,) = attention_memory([14], [2], SERVING)
    (experts,) = expert_memory([4], [2], SERVING)
    assert (attention, experts) == (3 * (2 * 74 / 2 + 14 * 2 * 6 * 20 / 2), 3 * 2 * 48 * 4 / 2)

    def search(attention, experts):
        memory = {
            "attention": dataclasses.replace(OTHER, memory=attention),
            "experts": dataclasses.replace(CLUSTER, memory=experts),
        }
        return search_deployment(changed(**memory, memory_share=0.5), PLACEMENTS[:1], one())

    search(2 * attention, 2 * experts)
    for side, memory in (
        ("attention", (2 * attention - 2, 2 * experts)),
        ("expert", (2 * attention, 2 * experts - 2)),
    ):
        with pytest.raises(
            ValueError, match=rf"an {side} device needs at least .* GB but may use .* GB, 0.00 GB too few"
        ):
            search(*memory)
    with pytest.raises(ValueError, match=r"needs at least .* GB but may use 0.00 GB"):
        search(1.0, 1.0)


def test_search_deployment_at_the_limit_of_the_slo():
    def seconds(slo):
        return search_deployment(changed(slo=slo), PLACEMENTS[:1], one()).score.step

    step = seconds(1e9)
    assert seconds(step) == step
    below = float(np.nextafter(np.float32(step), np.float32(0)))
    with pytest.raises(
        ValueError,
        match=r"the fastest that fits the memory takes .* ms between two tokens, 0.0% more than slo=",
    ):
        seconds(below)
    with pytest.raises(ValueError, match=r"takes .* ms between two tokens, 100.0% more than slo="):
        seconds(step / 2)


def test_search_deployment_prices_each_side_by_its_own_cluster():
    equal_prices = {"attention_price": 1.0, "expert_price": 1.0}
    before, after, dearer = (
        search_deployment(serving, PLACEMENTS[:1], one()).score
        for serving in (
            changed(attention=CLUSTER, **equal_prices),
            changed(**equal_prices),
            changed(**equal_prices | {"attention_price": 2.0}),
        )
    )
    assert after.attention < before.attention
    assert after.experts == before.experts
    # 6 attention devices and 4 expert devices; attention at twice the price makes 16 of 10.
    assert dearer.throughput == after.throughput
    assert dearer.per_price == pytest.approx(after.per_price * 10 / 16)
    # Faster attention pays for the devices at the same price, but not at twice the price.
    assert after.per_price > before.per_price > dearer.per_price


def test_search_deployment_gains_nothing_from_skew():
    per_price = []
    for extra in (0, 1, 5, 20, 100, 1000):
        skewed = np.full((2, 8), 10)
        skewed[:, 3] += extra
        placements = [contiguous_placement(skewed, groups) for groups in (2, 4, 8)]
        search = search_deployment(changed(slo=5.0), placements, GRID)
        per_price.append(search.score.per_price)
    assert per_price == sorted(per_price, reverse=True)
    assert per_price[-1] < 0.9 * per_price[0]


def test_plan_placement_is_as_even_as_any():
    load = np.random.default_rng(1).integers(0, 1000, (5, 8))
    planned, contiguous = plan_placement(load, 2, key=jax.random.key(0)), contiguous_placement(load, 2)
    assert (planned.hottest <= contiguous.hottest).all()
    total = load.sum(-1)
    halves = [load[:, list(half)].sum(-1) for half in itertools.combinations(range(8), 4)]
    best = np.maximum(halves, total - halves).min(0) / total
    assert (planned.hottest >= best * (1 - 1e-6)).all()
    # The search may end slightly above the optimum.
    np.testing.assert_allclose(planned.hottest, best, rtol=5e-3)
    after, before = (
        search_deployment(changed(slo=1e4), [placement], GRID).score.per_price
        for placement in (planned, contiguous)
    )
    assert after >= before


# Reading weights takes almost no time, so the time of a group is proportional to its load.
FAST_READS = changed(experts=dataclasses.replace(CLUSTER, memory_bandwidth=1e9))
AT = Deployment(2, 4, 1, 0, 3, 6)  # 4 x 6 sequences are 48 copies: 6 for each of 8 experts
STACKED = Deployment(*(np.array([number]) for number in AT))


def test_simulate_deployment_is_the_score_at_the_loads_of_the_search():
    placement = even_placement(4, 8, top_k=2)
    even = simulate_deployment(FAST_READS, placement, AT, np.full((3, 3, 8), 6))
    (step,) = score_deployments(FAST_READS, [placement], STACKED).step
    assert float(even.schedule.seconds) == pytest.approx(step, rel=1e-5)
    assert even.busiest == 1.0
    assert even.group_idle == pytest.approx(even.expert_idle, abs=1e-5)
    load = np.random.default_rng(0).multinomial(48, [1 / 8] * 8, (3, 3))
    drawn = simulate_deployment(FAST_READS, placement, AT, load)
    assert drawn.busiest > 1
    assert drawn.group_idle > drawn.expert_idle >= 0
    assert float(drawn.schedule.seconds) > step


def test_scores_and_simulations_have_the_layers_of_the_model():
    load = np.full((4, 8), 6)
    load[3] = [48, 0, 0, 0, 0, 0, 0, 0]  # a fourth layer, which a model of three layers ignores
    placement, first = contiguous_placement(load, 4), contiguous_placement(load[:3], 4)
    scores = [score_deployments(FAST_READS, [each], STACKED) for each in (placement, first)]
    assert scores[0] == scores[1]
    step = simulate_deployment(FAST_READS, placement, AT, np.full((3, 3, 8), 6))
    assert float(step.schedule.seconds) == pytest.approx(scores[0].step.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_share": 0.0}, "memory_share=0.0 must be above 0 and at most 1"),
        ({"memory_share": math.nan}, "memory_share=nan must be above 0 and at most 1"),
        ({"slo": 0.0}, "slo=0.0 must be positive and finite"),
        ({"context": math.inf}, "context=inf must be positive and finite"),
        ({"expert_price": -1.0}, "expert_price=-1.0 must be positive and finite"),
    ],
)
def test_serving_checks_its_numbers(changes, message):
    with pytest.raises(ValueError, match=message):
        changed(**changes)


@pytest.mark.parametrize(
    ("placements", "grid", "message"),
    [
        (PLACEMENTS, dataclasses.replace(GRID, sequences=()), "sequences must have at least one value"),
        (PLACEMENTS, one(tensor_parallel=16), "tensor_parallel=16 must be at most the 8 devices of a node"),
        (PLACEMENTS, one(tensor_parallel=8), "tensor_parallel=8 must divide the model's expert width 4"),
        (PLACEMENTS, one(tensor_parallel=3), "tensor_parallel=3 must divide the model's heads 8"),
        (PLACEMENTS, one(micro_batches=0), "micro_batches=0 must be an integer of at least 1"),
        ([], GRID, "placements must have at least one placement"),
        (
            [even_placement(2, 4, top_k=2)],
            GRID,
            "placements: a placement has 4 experts, but the model has 8",
        ),
    ],
)
def test_search_deployment_reports_bad_input(placements, grid, message):
    with pytest.raises(ValueError, match=message):
        search_deployment(SERVING, placements, grid)


@pytest.mark.slow
def test_search_deployment_refuses_a_grid_too_large_for_this_machine(monkeypatch):
    monkeypatch.setattr("relibra_jax.support.limits.machine_memory", lambda: 2**30)
    grid = dataclasses.replace(GRID, sequences=(1,) * 10**5)
    with pytest.raises(ValueError, match="a grid of 16200000 deployments x 3 layers needs"):
        search_deployment(SERVING, PLACEMENTS, grid)
