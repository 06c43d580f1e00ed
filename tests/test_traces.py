"""Traces: synthetic ones change over time like training, files have no padding, names and domains are read."""

import numpy as np
import pytest

from experiments.synthetic_traces import synthetic_trace
from relibra_jax.contract.replay_files import save_replay
from relibra_jax.contract.types import RoutingReplay
from relibra_jax.traces.read import read_trace


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


def test_save_replay_ignores_padding_of_the_replay(tmp_path):
    trace = synthetic_trace(samples=32, mean_tokens=20, layers=2, num_experts=16, top_k=2)
    save_replay(tmp_path / "bare.npz", trace.replay, num_experts=16)
    ids = np.where(trace.replay.mask[..., None, None], trace.replay.expert_ids, 9)
    save_replay(tmp_path / "padded.npz", RoutingReplay(ids, trace.replay.mask), num_experts=16)
    with np.load(tmp_path / "bare.npz") as one, np.load(tmp_path / "padded.npz") as two:
        assert one.files == two.files
        for name in one:
            np.testing.assert_array_equal(one[name], two[name])


ROWS = {"routed_experts": np.arange(8, dtype=np.uint8).reshape(4, 1, 2), "lengths": np.array([1, 2, 1])}
CATEGORY, DATASET = np.array(["maths", "code", "maths"]), np.array(["a", "b", "c"])


@pytest.mark.parametrize(
    ("labels", "domains", "domain"),
    [
        ({}, ("all",), [0, 0, 0]),
        ({"dataset": DATASET}, ("a", "b", "c"), [0, 1, 2]),
        ({"dataset": DATASET, "category": CATEGORY}, ("code", "maths"), [1, 0, 1]),
    ],
    ids=["none", "dataset", "category"],
)
def test_read_trace_takes_the_category_of_a_sample_as_its_domain(tmp_path, labels, domains, domain):
    np.savez(tmp_path / "trace.npz", **ROWS, **labels)
    trace = read_trace(tmp_path / "trace.npz")
    assert (trace.domains, trace.domain.tolist(), trace.synthetic) == (domains, domain, False)


@pytest.mark.parametrize(
    ("category", "message"),
    [
        (CATEGORY[:2], r"category must be strings \[3\], not <U5\[2\]"),
        (np.arange(3), r"category must be strings \[3\], not int64\[3\]"),
        (CATEGORY.astype(object), "Object arrays cannot be loaded"),
    ],
    ids=["too few", "numbers", "pickled"],
)
def test_read_trace_refuses_categories_that_are_none(tmp_path, category, message):
    np.savez(tmp_path / "trace.npz", **ROWS, category=category)
    with pytest.raises(ValueError, match=message) as refusal:
        read_trace(tmp_path / "trace.npz")
    assert str(refusal.value).startswith(f"{tmp_path / 'trace.npz'}: ")


def test_read_trace_takes_a_name_for_a_trace_and_a_path_for_a_file(tmp_path, monkeypatch):
    """A file may have the name of a trace; a Path always means the file."""
    monkeypatch.chdir(tmp_path)
    np.savez("recorded.npz", **ROWS)
    (tmp_path / "recorded.npz").rename(tmp_path / "recorded")
    assert read_trace("recorded").num_experts == 16
    assert read_trace("./recorded").num_experts == read_trace(tmp_path / "recorded").num_experts == 8
    monkeypatch.setenv("RELIBRA_TRACE", "./recorded")
    assert read_trace(None).num_experts == 8


def test_read_trace_refuses_a_name_that_nothing_has():
    with pytest.raises(
        ValueError, match=r"^recordd: no such trace, neither a file nor one of .*mean recorded\?$"
    ):
        read_trace("recordd")
    with pytest.raises(ValueError, match=r"^recordd\.npz: no such trace$"):
        read_trace("recordd.npz")
