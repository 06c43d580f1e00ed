"""Every fault of real systems is an error, or a missing route that live_routing fills."""

import numpy as np
import pytest
from rollout_encodings import (
    LEFT_PADDED,
    MODEL,
    assert_holds,
    example,
    full,
    last_tokens,
    live,
    padded,
    sglang,
    slime,
    vllm,
    whole,
)

from relibra_jax.contract.replay import id_dtype
from relibra_jax.contract.types import EMPTY
from relibra_jax.rollout.ingest import replay_from_rollout


def test_replay_from_rollout_keeps_the_order_of_top_k():
    ids = np.sort(example(), axis=-1)[..., ::-1]
    np.testing.assert_array_equal(full(ids).expert_ids[LEFT_PADDED], ids[LEFT_PADDED])


def test_replay_from_rollout_refuses_a_physical_slot_of_a_balanced_engine():
    ids = example()
    ids[1, 4, 2, 1] = 17
    with pytest.raises(
        ValueError,
        match=r"^layout 'vllm': sample 1, token 4, layer 2: expert id 17 is outside 0\.\.15 \(a physical",
    ):
        full(ids)


def test_replay_from_rollout_refuses_an_expert_twice_in_a_row():
    ids = example()
    ids[1, 4, 2] = [5, 3, 5]
    with pytest.raises(
        ValueError, match=r"sample 1, token 4, layer 2: expert 5 appears twice in \[5, 3, 5\]"
    ):
        full(ids)


@pytest.mark.parametrize("top_k", [1, 3])
def test_replay_from_rollout_takes_zeros_of_prefix_caching_as_missing(top_k):
    model = {"num_experts": 2**12, "top_k": top_k}
    ids = example(**model)
    ids[2, :2] = 0
    with pytest.raises(
        ValueError, match=r"sample 2, token 0, layer 0: no route \(only zeros: a prefix-cached"
    ):
        full(ids, **model)
    filled = full(ids, fill="live", live_routing=live(example(**model)), **model)
    np.testing.assert_array_equal(filled.expert_ids[LEFT_PADDED], example(**model)[LEFT_PADDED])


def test_replay_from_rollout_keeps_top_1_zeros_that_chance_explains():
    ids = example(top_k=1)
    ids[2, 1] = 0
    np.testing.assert_array_equal(full(ids, top_k=1).expert_ids[2, 1], np.zeros((4, 1)))


def test_replay_from_rollout_takes_zero_padding_as_missing():
    ids = example()
    grid = padded(ids, LEFT_PADDED, 0)
    wider = LEFT_PADDED.copy()
    wider[0, 5] = True
    with pytest.raises(ValueError, match="sample 0, token 4, layer 0: no route"):
        replay_from_rollout(grid, layout="verl", mask=wider, **MODEL)


def test_replay_from_rollout_takes_a_top_1_zero_last_token_as_missing():
    ids = example(top_k=1)
    with pytest.raises(ValueError, match="sample 0, token 4, layer 0: no route"):
        replay_from_rollout(
            padded(ids, LEFT_PADDED, 0), layout="verl", mask=LEFT_PADDED, **(MODEL | {"top_k": 1})
        )


@pytest.mark.parametrize("extra", [1, 2, 5])
def test_replay_from_rollout_takes_padding_of_slime_as_missing(extra):
    ids = example()
    source = slime(ids, LEFT_PADDED, 16, extra)
    arguments = {"layout": "slime", "mask": LEFT_PADDED, "start": 0} | MODEL
    with pytest.raises(ValueError, match="layout 'slime': sample 0, token 4, layer 0: no route"):
        replay_from_rollout(source, **arguments)
    assert_holds(
        replay_from_rollout(source, fill="live", live_routing=live(ids), **arguments), ids, LEFT_PADDED
    )


@pytest.mark.parametrize("behind", [0, 2])
def test_replay_from_rollout_takes_made_up_routes_of_nemo_rl_as_missing(behind):
    """The placeholder 0..K-1 stands for the last token, and for tokens of an environment after the last generation."""
    ids = example()
    token = np.cumsum(LEFT_PADDED, axis=1)
    made_up = LEFT_PADDED & (token >= token[:, -1:] - behind)
    grid = np.where(made_up[..., None, None], np.arange(3), ids)
    for source in (grid, whole(grid, LEFT_PADDED)):
        seen = []
        replay = replay_from_rollout(
            source,
            layout="nemo_rl",
            mask=LEFT_PADDED,
            fill="live",
            live_routing=lambda missing, seen=seen: seen.append(missing) or live(ids)(missing),
            **MODEL,
        )
        assert_holds(replay, ids, LEFT_PADDED)
        np.testing.assert_array_equal(seen[0], made_up)


def test_replay_from_rollout_tells_made_up_nemo_rl_routes_from_chance():
    model = {"num_experts": 4, "top_k": 2}
    mask = np.ones((1, 4), bool)
    ids = example(mask=mask, **model)
    ids[0, 2:] = [0, 1]
    with pytest.raises(
        ValueError, match=r"token 3, layer 0: no route \(engines do not route the last.* 1 of 4 tokens"
    ):
        replay_from_rollout(ids, layout="nemo_rl", mask=mask, **(MODEL | model))


@pytest.mark.parametrize("shape", [(4, 0, 3), (1, 0, 3), (4, 4, 1)])
def test_replay_from_rollout_takes_no_rows_of_another_model_as_made_up(shape):
    with pytest.raises(ValueError, match=r"sample 0: rows have (0 layers|top-1), but the model has"):
        replay_from_rollout(
            [np.zeros(shape, int)],
            layout="nemo_rl",
            mask=np.ones((1, shape[0]), bool),
            fill="live",
            live_routing=live(example()[:1, : shape[0]]),
            **MODEL,
        )


def test_replay_from_rollout_takes_tokens_before_a_start_offset_as_missing():
    ids = example()
    cut = [{"rollout_routed_experts": r[2:], "routed_experts_start_len": 2} for r in vllm(ids, LEFT_PADDED)]
    for layout, source in (("sglang", sglang(ids, LEFT_PADDED, "uint8", 2)), ("slime", cut)):
        with pytest.raises(ValueError, match=r"sample 0, token 1, layer 0: no route \(not recorded\)"):
            replay_from_rollout(source, layout=layout, mask=LEFT_PADDED, **MODEL)
        seen = []
        replay = replay_from_rollout(
            source,
            layout=layout,
            mask=LEFT_PADDED,
            fill="live",
            live_routing=lambda missing, seen=seen: seen.append(missing) or live(ids)(missing),
            **MODEL,
        )
        assert_holds(replay, ids, LEFT_PADDED)
        first_two = LEFT_PADDED & (np.cumsum(LEFT_PADDED, axis=1) <= 2)
        np.testing.assert_array_equal(seen[0], first_two | last_tokens(LEFT_PADDED))


@pytest.mark.parametrize("start", [-1, 99, "2", 1.5])
def test_replay_from_rollout_refuses_a_start_outside_the_sample(start):
    source = sglang(example(), LEFT_PADDED)
    source[0]["routed_experts_start_len"], source[1]["routed_experts_start_len"] = 0, start
    with pytest.raises(
        ValueError, match=r"sample 1: routed_experts_start_len=.* must be an integer from 0 to its 3 tokens"
    ):
        replay_from_rollout(source, layout="sglang", mask=LEFT_PADDED, **MODEL)


@pytest.mark.parametrize("layout", ["maxtext", "tunix", "nemo_rl"])
def test_replay_from_rollout_names_or_fills_an_unset_token(layout):
    ids = example()
    grid = ids.astype(np.int32)
    grid[1, 4] = EMPTY
    with pytest.raises(ValueError, match=rf"^layout '{layout}': sample 1, token 4, layer 0: no route"):
        replay_from_rollout(grid, layout=layout, mask=LEFT_PADDED, **MODEL)
    replay = replay_from_rollout(
        grid, layout=layout, mask=LEFT_PADDED, fill="live", live_routing=live(ids), **MODEL
    )
    assert_holds(replay, ids, LEFT_PADDED)


def test_replay_from_rollout_fills_only_the_layer_that_has_no_route():
    ids, other = example(), example(seed=1)
    grid = ids.copy()
    grid[1, 4, 2] = EMPTY
    with pytest.raises(ValueError, match="sample 1, token 4, layer 2: no route"):
        full(grid)
    replay = full(grid, fill="live", live_routing=live(other))
    ids[1, 4, 2] = other[1, 4, 2]
    assert_holds(replay, ids, LEFT_PADDED)


def test_replay_from_rollout_refuses_a_row_that_is_partly_unset():
    ids = example()
    ids[1, 4, 2, 1] = EMPTY
    with pytest.raises(ValueError, match=r"sample 1, token 4, layer 2: expert id -1 in \["):
        full(ids, fill="live", live_routing=live(example()))


@pytest.mark.parametrize(
    ("hole", "message"), [(0, "only zeros for every token"), (EMPTY, "no token has a route")]
)
def test_replay_from_rollout_does_not_fill_an_unmerged_pipeline_stage(hole, message):
    ids = example()
    ids[:, :, 2] = hole
    grid = padded(ids, LEFT_PADDED, EMPTY)
    with pytest.raises(ValueError, match=rf"sample 0, token 1, layer 2: {message}.*pipeline stage"):
        replay_from_rollout(
            grid, layout="maxtext", mask=LEFT_PADDED, fill="live", live_routing=live(example()), **MODEL
        )


def test_replay_from_rollout_refuses_uint8_for_more_than_256_experts():
    ids = example().astype(np.uint8)
    with pytest.raises(ValueError, match="sample 0: uint8 cannot hold the ids of 257 experts"):
        full(ids, num_experts=257)
    with pytest.raises(ValueError, match="sample 0: int8 cannot hold the ids of 256 experts"):
        full(ids.astype(np.int8), num_experts=256)


def test_replay_from_rollout_refuses_minus_one_that_wrapped_to_255():
    ids = example().astype(np.uint8)
    ids[1, 4] = 255
    with pytest.raises(ValueError, match="sample 1, token 4, layer 0: expert 255 appears twice"):
        full(ids, num_experts=256)


@pytest.mark.parametrize("num_experts", [256, 257, 40_000, 70_000])
def test_replay_from_rollout_returns_the_smallest_dtype_without_wrapping(num_experts):
    ids = example()
    ids[1, 4, 2] = [num_experts - 1, 0, 1]
    replay = full(ids, num_experts=num_experts)
    assert replay.expert_ids.dtype == id_dtype(num_experts)
    assert replay.expert_ids[1, 4, 2].tolist() == [num_experts - 1, 0, 1]


@pytest.mark.parametrize("value", [2**8, 2**16, 2**32, -(2**8), -(2**32)])
def test_replay_from_rollout_refuses_ids_that_would_wrap_to_an_expert(value):
    ids = example().astype(np.int64)
    ids[1, 4, 2, 0] += value
    with pytest.raises(ValueError, match=r"sample 1, token 4, layer 2: expert id .* is outside"):
        full(ids)


@pytest.mark.parametrize("kind", [float, bool])
def test_replay_from_rollout_refuses_ids_that_are_not_integers(kind):
    with pytest.raises(ValueError, match="sample 0: expected integers of 3 axes"):
        full(example().astype(kind))


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (lambda missing: np.zeros((3, 6, 4, 2), int), r"^live_routing: expected integers \[3, 6, 4, 3\]"),
        (
            lambda missing: np.full((3, 6, 4, 3), 16),
            "^live_routing: sample 0, token 4, layer 0: expert id 16",
        ),
        (
            lambda missing: np.full((3, 6, 4, 3), EMPTY),
            "^live_routing: sample 0, token 4, layer 0: expert id -1",
        ),
        (
            lambda missing: np.full((3, 6, 4, 3), 5),
            "^live_routing: sample 0, token 4, layer 0: expert 5 appears",
        ),
    ],
)
def test_live_routing_is_checked_like_recorded_routes(routing, message):
    with pytest.raises(ValueError, match=message):
        replay_from_rollout(
            vllm(example(), LEFT_PADDED),
            layout="vllm",
            mask=LEFT_PADDED,
            start=0,
            fill="live",
            live_routing=routing,
            **MODEL,
        )


def test_live_routing_is_not_called_when_nothing_is_missing():
    full(example(), fill="live", live_routing=lambda missing: pytest.fail("called"))


def test_replay_from_rollout_reports_recorded_faults_despite_live_routing():
    ids = example()
    ids[1, 4, 2] = 6
    with pytest.raises(ValueError, match="sample 1, token 4, layer 2: expert 6 appears twice"):
        replay_from_rollout(
            vllm(ids, LEFT_PADDED),
            layout="vllm",
            mask=LEFT_PADDED,
            start=0,
            fill="live",
            live_routing=live(ids),
            **MODEL,
        )
