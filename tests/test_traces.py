"""Traces: the synthetic ones shift as training's do, files keep no padding."""

import numpy as np

from experiments.synthetic_traces import synthetic_trace
from relibra_jax.replay_files import save_replay
from relibra_jax.types import RoutingReplay


def test_synthetic_trace_is_uneven_and_shifts():
    trace = synthetic_trace()
    ids, mask = trace.replay
    assert (np.sort(ids[mask], axis=-1)[..., 1:] != np.sort(ids[mask], axis=-1)[..., :-1]).all(), (
        "k different experts"
    )
    hottest = set()
    for start in range(0, 256, 32):
        part = ids[start : start + 32][mask[start : start + 32]]
        count = np.bincount(part[:, 0].ravel(), minlength=trace.num_experts)
        assert count.max() > 1.5 * count.mean()
        hottest.add(int(count.argmax()))
    assert len(hottest) > 2, "the hottest expert moves"


def test_padding_of_the_replay_does_not_matter(tmp_path):
    trace = synthetic_trace(samples=32, mean_tokens=20, layers=2, num_experts=16, top_k=2)
    save_replay(tmp_path / "bare.npz", trace.replay, num_experts=16)
    ids = np.where(trace.replay.mask[..., None, None], trace.replay.expert_ids, 9)
    save_replay(tmp_path / "padded.npz", RoutingReplay(ids, trace.replay.mask), num_experts=16)
    with np.load(tmp_path / "bare.npz") as one, np.load(tmp_path / "padded.npz") as two:
        assert one.files == two.files
        for name in one:
            np.testing.assert_array_equal(one[name], two[name])
