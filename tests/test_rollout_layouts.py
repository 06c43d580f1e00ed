"""Every layout returns the encoded ids, at the tokens of the mask and the layers of the model."""

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from rollout_encodings import (
    ENCODINGS,
    LEFT_PADDED,
    MODEL,
    assert_holds,
    example,
    full,
    last_tokens,
    live,
    padded,
    routes,
    whole,
)

from relibra_jax.contract.replay_files import load_replay, save_replay
from relibra_jax.contract.types import EMPTY, RoutingReplay
from relibra_jax.rollout.ingest import replay_from_rollout
from relibra_jax.rollout.layouts import LAYOUTS


def test_layouts_all_have_a_round_trip():
    assert {layout for layout, _, _ in ENCODINGS.values()} | {"npz"} == set(LAYOUTS)


def has_unset_rows(source):
    """Tell if samples have a row of -1 for the last token, so that they are longer than a mask without this token."""
    return isinstance(source, list) and any(
        isinstance(rows, np.ndarray) and (rows == EMPTY).any() for rows in source
    )


@pytest.mark.parametrize("name", ENCODINGS)
def test_replay_from_rollout_returns_the_encoded_ids_of_every_layout(name):
    layout, encode, lacks_last = ENCODINGS[name]
    ids = example()
    source = encode(ids, LEFT_PADDED, 16)
    arguments = {"layout": layout, "mask": LEFT_PADDED, "start": 0} | MODEL
    assert_holds(
        replay_from_rollout(source, fill="live", live_routing=live(ids), **arguments), ids, LEFT_PADDED
    )
    if lacks_last:
        with pytest.raises(
            ValueError, match=rf"^layout '{layout}': sample 0, token 4, layer 0: no route .*last token"
        ):
            replay_from_rollout(source, **arguments)
    # If the mask leaves out the last token, neither live_routing nor start is needed.
    shorter = LEFT_PADDED & ~last_tokens(LEFT_PADDED) if lacks_last else LEFT_PADDED
    arguments = {"layout": layout, "mask": shorter} | MODEL
    if has_unset_rows(source):
        with pytest.raises(
            ValueError, match=rf"^layout '{layout}': sample 0: it has rows 0\.\.3, but only 3 real"
        ):
            replay_from_rollout(source, **arguments)
    else:
        assert_holds(replay_from_rollout(source, **arguments), ids, shorter)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(sorted(ENCODINGS)),
    seed=st.integers(0, 2**32 - 1),
    samples=st.integers(1, 4),
    tokens=st.integers(3, 7),
    num_experts=st.sampled_from([8, 200, 256]),
    top_k=st.integers(1, 4),
)
def test_replay_from_rollout_returns_the_ids_of_any_encoded_batch(
    name, seed, samples, tokens, num_experts, top_k
):
    rng = np.random.default_rng(seed)
    mask = rng.random((samples, tokens)) < 0.8
    assume((mask.sum(axis=1) >= 3).all())
    layout, encode, _ = ENCODINGS[name]
    ids = routes(seed, mask, layers=4, num_experts=num_experts, top_k=top_k)
    replay = replay_from_rollout(
        encode(ids, mask, num_experts),
        layout=layout,
        mask=mask,
        num_experts=num_experts,
        top_k=top_k,
        num_layers=4,
        start=0,
        fill="live",
        live_routing=live(ids),
    )
    np.testing.assert_array_equal(replay.expert_ids[mask], ids[mask])


@settings(max_examples=60, deadline=None)
@given(
    place=st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 3), st.integers(0, 2)),
    value=st.integers(-(2**31), 2**31 - 1),
)
def test_replay_from_rollout_keeps_any_changed_id_or_refuses_it(place, value):
    ids = example(mask=np.ones((3, 6), bool))
    ids[place] = value
    try:
        replay = replay_from_rollout(
            ids.astype(np.int32), layout="maxtext", mask=np.ones((3, 6), bool), **MODEL
        )
    except ValueError as error:
        sample, token, layer, _ = place
        if f"sample {sample}, token {token}, layer {layer}: expert" not in str(error):
            raise
    else:
        np.testing.assert_array_equal(replay.expert_ids, ids)


def test_replay_from_rollout_places_npz_at_the_mask(tmp_path):
    ids = example()
    save_replay(tmp_path / "a.npz", RoutingReplay(ids, LEFT_PADDED), num_experts=16)
    replay = replay_from_rollout(tmp_path / "a.npz", layout="npz", mask=LEFT_PADDED, **MODEL)
    assert_holds(replay, ids, LEFT_PADDED)
    with pytest.raises(ValueError, match="has samples of"):
        replay_from_rollout(tmp_path / "a.npz", layout="npz", mask=LEFT_PADDED[::-1], **MODEL)
    with pytest.raises(ValueError, match="has num_experts=16, not 32"):
        replay_from_rollout(
            tmp_path / "a.npz", layout="npz", mask=LEFT_PADDED, **(MODEL | {"num_experts": 32})
        )


def test_replay_from_rollout_shifts_no_row_by_left_padding():
    ids = example()
    assert_holds(full(ids), ids, LEFT_PADDED)


def test_replay_from_rollout_refuses_more_rows_than_real_tokens():
    mask = LEFT_PADDED.copy()
    mask[1, 3] = False
    with pytest.raises(
        ValueError, match=r"layout 'vllm': sample 1: it has rows 0\.\.2, but only 2 real tokens"
    ):
        replay_from_rollout(whole(example(), LEFT_PADDED), layout="vllm", mask=mask, **MODEL)


def test_replay_from_rollout_reads_dense_layers_with_and_without_rows():
    ids, moe_layers = example(), [1, 3]
    all_layers, moe_only = ids.copy(), ids[:, :, moe_layers]
    all_layers[:, :, [0, 2]] = 0
    for source in (all_layers, moe_only):
        replay = full(source, moe_layers=moe_layers)
        np.testing.assert_array_equal(replay.expert_ids[LEFT_PADDED], moe_only[LEFT_PADDED])
    with pytest.raises(
        ValueError, match="sample 0: rows have 3 layers, but the model has 4 layers, 2 MoE layers"
    ):
        full(ids[:, :, :3], moe_layers=moe_layers)
    with pytest.raises(ValueError, match="sample 0: rows have 4 layers, but the model has 2 MoE layers"):
        full(ids, layout="megatron_inference", moe_layers=moe_layers)
    with pytest.raises(ValueError, match=r"layer 0: only zeros for every token .* a dense layer"):
        full(all_layers)


def test_replay_from_rollout_names_the_layer_of_the_model_in_errors():
    ids = example()
    ids[1, 4, 3] = 7
    with pytest.raises(ValueError, match="sample 1, token 4, layer 3: expert 7 appears twice"):
        full(ids, moe_layers=[1, 3])


def test_replay_from_rollout_never_guesses_the_axis_order():
    grid = padded(example(), LEFT_PADDED, EMPTY)
    with pytest.raises(ValueError, match=r"expected \[3, 6\] samples and tokens, found \[3, 4\]"):
        replay_from_rollout(grid.swapaxes(1, 2), layout="tunix", mask=LEFT_PADDED, **MODEL)
    with pytest.raises(ValueError, match=r"expected \[3, 6\] samples and tokens, found \[3, 4\]"):
        replay_from_rollout(grid, layout="tunix_layers_first", mask=LEFT_PADDED, **MODEL)


def test_replay_from_rollout_answers_an_unknown_layout_with_the_nearest_name():
    with pytest.raises(
        ValueError, match=r"layout 'sgl' must be one of sglang, vllm, .*; the nearest is 'sglang'"
    ):
        replay_from_rollout([], layout="sgl", mask=LEFT_PADDED, **MODEL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 0}, r"top_k=0 must be in 1\.\.num_experts=16"),
        ({"top_k": 17}, "top_k=17 must be in"),
        ({"top_k": 2}, "sample 0: rows have top-3, but the model has top-2"),
        ({"moe_layers": [2, 1]}, r"moe_layers=\[2, 1\] must be ascending layers in 0\.\.3"),
        ({"moe_layers": [4]}, r"moe_layers=\[4\] must be"),
        ({"num_layers": 0}, r"moe_layers=\[\] must be"),
        (
            {"mask": np.ones((3, 6), bool), "moe_layers": [0]},
            "layout 'vllm': the source has 2 samples, but the mask has 3",
        ),
    ],
)
def test_replay_from_rollout_names_a_model_that_does_not_fit(change, message):
    arguments = {"layout": "vllm", "mask": LEFT_PADDED} | MODEL | change
    source = whole(example(), LEFT_PADDED)[: 2 if "mask" in change else 3]
    with pytest.raises(ValueError, match=message):
        replay_from_rollout(source, **arguments)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", [{"routed_experts": "AAAA"}, "AAAA", 7])
def test_replay_from_rollout_refuses_a_source_of_the_wrong_kind(layout, source):
    with pytest.raises((ValueError, OSError)):
        replay_from_rollout(source, layout=layout, mask=LEFT_PADDED, **MODEL)


def test_replay_from_rollout_reads_the_real_trace_as_vllm_and_as_npz(shared):
    path = shared / "traces" / "gptoss20b_rollouts.npz"
    replay, _ = load_replay(path)
    model = {"num_experts": 32, "top_k": 4, "num_layers": 24}
    samples = [ids[real] for ids, real in zip(*replay, strict=True)]
    for source, layout in ((samples, "vllm"), (path, "npz")):
        again = replay_from_rollout(source, layout=layout, mask=replay.mask, **model)
        np.testing.assert_array_equal(again.expert_ids, replay.expert_ids)
