"""Bootstrap draws whole samples, from each domain in proportion to its size, for batches of any size."""

import numpy as np
import pytest

from relibra_jax.contract.types import RoutingReplay
from relibra_jax.evaluation import Batching, Ranks
from relibra_jax.evaluation.batches import make_batches
from relibra_jax.traces.bootstrap import bootstrap
from relibra_jax.traces.trace import make_trace

TOPOLOGY = Ranks(nodes=2, ranks_per_node=2).topology(32)


@pytest.fixture(scope="module")
def trace():
    """Return a trace of 20 samples of 1 to 20 tokens (14 maths, 5 code, 1 proof); tokens of sample i have expert i."""
    mask = np.arange(20) <= np.arange(20)[:, None]
    ids = np.broadcast_to(np.arange(20, dtype=np.uint8)[:, None, None, None], (20, 20, 2, 1))
    category = np.array(["maths"] * 14 + ["code"] * 5 + ["proof"])
    return make_trace(RoutingReplay(ids, mask), 32, "numbered", category=category)


def sources(replay):
    """Identify each drawn sample by its expert, and check that it is whole."""
    which = replay.expert_ids[:, 0, 0, 0]
    np.testing.assert_array_equal(replay.mask.sum(1), which + 1)
    assert (replay.expert_ids == which[:, None, None, None]).all()
    return which


@pytest.mark.parametrize(
    ("samples", "code", "maths", "proof"), [(20, 5, 14, 1), (100, 25, 70, 5), (7, 2, 5, 0), (1, 0, 1, 0)]
)
def test_bootstrap_keeps_the_shares_of_domains(trace, samples, code, maths, proof):
    """The numbers per domain are exact or rounded by the largest remainder: 7 samples are 4.9, 1.75 and 0.35."""
    drawn = bootstrap(trace, samples, seed=3)
    assert np.bincount(drawn.domain, minlength=3).tolist() == [code, maths, proof]
    np.testing.assert_array_equal(drawn.domain, trace.domain[sources(drawn.replay)])
    assert f"{samples} samples drawn with replacement from 20" in drawn.note


def test_bootstrap_repeats_some_samples_and_leaves_others_out(trace):
    drawn = sources(bootstrap(trace, 20, seed=0).replay)
    assert 5 < len(set(drawn)) < 20
    np.testing.assert_array_equal(drawn, sources(bootstrap(trace, 20, seed=0).replay))
    assert (drawn != sources(bootstrap(trace, 20, seed=1).replay)).any()


@pytest.mark.parametrize("order", ["given", "shuffled"])
def test_make_batches_draws_batches_larger_than_the_trace(trace, order):
    batching = Batching(batch_size=100, bootstrap=3, micro_batches=4, order=order)
    batches = make_batches(trace, batching, TOPOLOGY)
    assert (len(batches.replays), batches.history, batches.samples_left) == (3, 1, 0)
    drawn = [sources(replay) for replay in batches.replays]
    assert [np.bincount(trace.domain[part]).tolist() for part in drawn] == [[25, 70, 5]] * 3
    assert [(np.diff(part.astype(int)) >= 0).all() for part in drawn] == [order == "given"] * 3
    assert len({tuple(np.sort(part)) for part in drawn}) == 3, "each batch is drawn anew"
    again = make_batches(trace, batching, TOPOLOGY)
    np.testing.assert_array_equal(drawn, [sources(replay) for replay in again.replays])


def test_make_batches_and_bootstrap_reject_what_cannot_be_drawn(trace, monkeypatch):
    for options, message in (
        ({"bootstrap": 2}, "bootstrap=2 needs batch_size"),
        ({"bootstrap": 0, "batch_size": 4}, "bootstrap=0 must be an integer of at least 1"),
        ({"bootstrap": 1, "batch_size": 0}, "batch_size=0 must be an integer of at least 1"),
        (
            {"batch_size": 21},
            "batch_size=21 exceeds the 20 samples of numbered; set bootstrap to draw them",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make_batches(trace, Batching(**options), TOPOLOGY)
    monkeypatch.setattr("relibra_jax.support.limits.machine_memory", lambda: 2**20)
    with pytest.raises(
        ValueError, match="numbered: drawing 9 batches of 2000 samples x 20 tokens x 2 layers x top-1"
    ):
        make_batches(trace, Batching(bootstrap=9, batch_size=2000), TOPOLOGY)
    empty = make_trace(RoutingReplay(np.zeros((0, 1, 1, 1), np.uint8), np.zeros((0, 1), bool)), 4, "empty")
    with pytest.raises(ValueError, match="empty has no samples to draw from"):
        bootstrap(empty, 3, seed=0)
