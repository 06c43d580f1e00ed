"""The expert layers of MaxText and Tunix in the miniature: what is replaced in them, and what is counted for them."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.miniature.__main__ import main
from experiments.miniature.compare import Compare
from experiments.miniature.peers import PEERS, _lanes, count_needs, why_no_peer
from experiments.miniature.report import agreement, make_tables, speeds


def test_needs_are_the_longest_lane_and_the_fullest_rank():
    """Positions without a token are sent, to the experts in turn, but need no room in MaxText's buffer."""
    ids = np.array([[[[0], [1], [2]], [[3], [3], [3]]]])[..., None, :]  # two sequences of three tokens, top-1
    mask = np.array([[[True, True, True], [True, True, False]]])
    needs = count_needs(ids, mask, 2, 4)
    assert needs.lane == 3  # of rank 1 to itself; its third position goes to expert 2, which is there as well
    assert needs.buffer == pytest.approx((3 + 1) / 3)


def test_lanes_do_what_a_ragged_exchange_does():
    """Ranks send the first and the last rows of a buffer; each receives what the others sent, one after another."""
    ranks, rows = 4, 12
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:ranks]), ("expert",))
    counts = np.random.default_rng(0).integers(0, 4, size=(ranks, ranks)).astype(np.int32)
    data = np.arange(ranks * rows * 2, dtype=np.float32).reshape(ranks * rows, 2)

    def on_rank(data, sent, received, start, there):
        one = jax.tree.map(lambda each: each[0], (start, sent, there, received))
        with _lanes(True, int(counts.max())):
            return jax.lax.ragged_all_to_all(data, jnp.full((20, 2), 7.0), *one, axis_name="expert")

    begin = np.cumsum(counts, 1) - counts  # in the buffer of the sender
    arrive = np.cumsum(counts, 0) - counts  # in the buffer of the receiver
    run = jax.shard_map(
        on_rank, mesh=mesh, in_specs=jax.P("expert"), out_specs=jax.P("expert"), check_vma=False
    )
    result = np.asarray(jax.jit(run)(data, counts, counts.T, begin, arrive)).reshape(ranks, 20, 2)
    for receiver in range(ranks):
        parts = [
            data[sender * rows + begin[sender, receiver] :][: counts[sender, receiver]]
            for sender in range(ranks)
        ]
        expected = np.concatenate([*parts, np.full((20 - counts[:, receiver].sum(), 2), 7.0)])
        np.testing.assert_array_equal(result[receiver], expected)


@pytest.mark.parametrize("name", PEERS)
def test_compare_refuses_a_peer_that_is_not_installed(name, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    assert why_no_peer(name)
    with pytest.raises(ValueError, match=f"contenders: '{name}' needs the package '{PEERS[name]}'"):
        main(Compare(trace="synthetic-32", contenders=(name,), out=tmp_path / "out"))


def test_tables_have_peers_without_a_modelled_speed():
    row = {"slow_bytes": [1e6], "fast_bytes": [0], "needed": {"slow": 1, "fast": 0}, "phases": None}
    rows = {
        name: row | {"seconds": [seconds], "modelled": modelled, "predicted": modelled and modelled["all"]}
        for name, seconds, modelled in (
            ("static", 4.0, {"all": 4.0}),
            ("Tunix", 8.0, None),
            ("forced balanced", 2.0, {"all": 2.0}),
        )
    }
    report = {"rows": rows, "there": {}, "here": {}, "settings": {"twin": "gpt-oss-20b"}}
    assert speeds(rows)["Tunix"] == (0.25, 0.25, 0.25, None, None)
    assert agreement(speeds(rows)).largest_error == 0.0
    _, table, _ = make_tables(report)
    assert [list(column.cells)[1] for column in table.columns] == [
        "Tunix",
        "8.00",
        "25.0%",
        "25.0% to 25.0%",
        "",
        "",
        "",
    ]
