"""Missing routes are filled only if the caller asks for it, and with a warning."""

import logging

import numpy as np
import pytest
from rollout_encodings import LEFT_PADDED, MODEL, assert_holds, example, full, live, vllm

from relibra_jax.rollout.counts import sample_counts
from relibra_jax.rollout.ingest import replay_from_rollout

READERS = [replay_from_rollout, sample_counts]


def rows_read(reader, **changes):
    arguments = {"layout": "vllm", "mask": LEFT_PADDED, "start": 0} | MODEL | changes
    return reader(vllm(example(), LEFT_PADDED), **arguments)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"fill": "live"}, "fill='live' is given without live_routing"),
        ({"live_routing": live(example())}, "live_routing is given without fill='live'"),
        ({"fill": "zeros", "live_routing": live(example())}, "fill='zeros' must be 'live' or None"),
    ],
)
def test_live_routing_and_fill_are_refused_one_without_the_other(reader, wish, message):
    with pytest.raises(ValueError, match=rf"^{message}"):
        rows_read(reader, **wish)


@pytest.mark.parametrize("reader", READERS)
def test_live_routing_is_reported_with_the_tokens_and_samples_it_filled(reader, caplog):
    with caplog.at_level(logging.WARNING, logger="relibra_jax"):
        rows_read(reader, start=[0, 0, 0], fill="live", live_routing=live(example()))
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("relibra_jax", "WARNING")
    assert record.getMessage() == (
        "layout 'vllm': live_routing filled the routes of 3 of 13 tokens, in 3 of 3 samples"
        " (3 are the last of their sample, which engines do not route)"
    )


def test_live_routing_report_tells_routed_tokens_from_the_last_ones(caplog):
    ids = example()
    holes = ids.copy()
    holes[2, 1:3] = 0
    with caplog.at_level(logging.WARNING, logger="relibra_jax"):
        assert_holds(full(holes, fill="live", live_routing=live(ids)), ids, LEFT_PADDED)
    assert "2 of 13 tokens, in 1 of 3 samples (0 are the last" in caplog.text


def test_live_routing_is_not_reported_for_a_whole_recording(caplog):
    with caplog.at_level(logging.WARNING, logger="relibra_jax"):
        full(example(), fill="live", live_routing=live(example()))
    assert not caplog.records


def test_live_routing_is_not_reported_if_its_routes_are_refused(caplog):
    with pytest.raises(ValueError, match="expert id 16 is outside"):
        rows_read(replay_from_rollout, fill="live", live_routing=lambda missing: np.full((3, 6, 4, 3), 16))
    assert not caplog.records
