"""Every layout gives back the ids that went in, and every trap that real systems fell into is an error.

Each layout's encoder is written here from the description of the format, not from the decoder.
"""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from relibra_jax.replay import check_replay, id_dtype
from relibra_jax.replay_files import load_replay, save_replay
from relibra_jax.rollout import LAYOUTS, replay_from_rollout
from relibra_jax.types import EMPTY, RoutingReplay

LEFT_PADDED = np.array([[0, 1, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]], bool)


def routes(seed, mask, *, layers, num_experts, top_k):
    """Random rows ``[B, T, layers, K]`` of different experts, in no order; no token has only zeros."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((*mask.shape, layers, num_experts)), axis=-1)[..., :top_k]
    ids[(ids == 0).all(axis=(2, 3))] = num_experts - 1
    return ids


def b64(data):
    return base64.b64encode(data).decode()


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return b64(file.getvalue())


def described(array):
    return {
        "encoding": "base64",
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "data": b64(array.tobytes()),
    }


def sglang(ids, mask, dtype=None, start=None):
    """``meta_info`` of each sample; the last token has no row."""
    extra = {} if dtype is None else {"routed_experts_dtype": dtype}
    extra |= {} if start is None else {"routed_experts_start_len": start}
    return [
        {"routed_experts": b64(sample[real][start or 0 : -1].astype(dtype or "int32").tobytes()), **extra}
        for sample, real in zip(ids, mask, strict=True)
    ]


def vllm(ids, mask, dtype=np.int32):
    """Rows of each sample but its last token's."""
    return [sample[real][:-1].astype(dtype) for sample, real in zip(ids, mask, strict=True)]


def vllm_http(ids, mask, encode, prompt=2):
    """One response a sample: the prompt's rows, then those of generated tokens but the last."""
    return [
        {
            "prompt_routed_experts": encode(rows[:prompt]),
            "choices": [{"routed_experts": encode(rows[prompt:])}],
        }
        for rows in vllm(ids, mask, np.uint8)
    ]


def whole(ids, mask):
    """Rows of each sample, the last token's too."""
    return [sample[real] for sample, real in zip(ids, mask, strict=True)]


def padded(ids, mask, fill):
    """A grid whose padding, and the last token of each sample, hold ``fill``."""
    grid = np.where(mask[..., None, None], ids, fill).astype(np.int32)
    grid[lacking_last(mask)] = fill
    return grid


def lacking_last(mask):
    """True at the last real token of each sample, which engines do not route."""
    last = np.zeros_like(mask)
    for sample, real in enumerate(mask):
        last[sample, np.flatnonzero(real)[-1:]] = True
    return last


def slime(ids, mask, num_experts, extra=1):
    """Rows but the last token's, then ``extra`` rows of slime's padding."""
    pads = np.arange(extra * ids[0, 0].size).reshape(extra, *ids.shape[2:]) % num_experts
    return [np.concatenate([rows, pads]).astype(np.int32) for rows in vllm(ids, mask)]


def trace_lines(ids, layers, rank, *, steps=None):
    """One rank's lines for tokens ``[n, len(layers), K]``, in ``steps`` passes."""
    return [
        json.dumps(
            {
                "step": step,
                "stage": "pre_dispatch",
                "block": "decoder",
                "layer": layer,
                "rank": rank,
                "num_tokens": len(part),
                "topk": part.shape[2],
                "top_indices": part[:, position].tolist(),
            }
        )
        for step, part in enumerate(np.array_split(ids, steps or 1))
        for position, layer in enumerate(layers)
    ]


def stages(ids, mask):
    """Two pipeline stages of one data-parallel rank, two passes each, of a model of four layers."""
    rows = ids[mask]
    return [
        trace_lines(rows[:, :2], (0, 1), 0, steps=2),
        trace_lines(rows[:, 2:], (2, 3), 1, steps=2),
    ]


# name -> (layout, encoder(ids, mask, num_experts), whether the last token of each sample has no route)
ENCODINGS = {
    "sglang": ("sglang", lambda ids, mask, e: sglang(ids, mask), True),
    "sglang uint8": ("sglang", lambda ids, mask, e: sglang(ids, mask, "uint8", 0), True),
    "sglang uint16": ("sglang", lambda ids, mask, e: sglang(ids, mask, "uint16"), True),
    "vllm": ("vllm", lambda ids, mask, e: vllm(ids, mask), True),
    "vllm uint8": ("vllm", lambda ids, mask, e: vllm(ids, mask, np.uint8), True),
    "vllm_http npy": ("vllm_http", lambda ids, mask, e: vllm_http(ids, mask, npy), True),
    "vllm_http described": ("vllm_http", lambda ids, mask, e: vllm_http(ids, mask, described), True),
    "vllm_http lists": ("vllm_http", lambda ids, mask, e: vllm_http(ids, mask, np.ndarray.tolist), True),
    "verl": ("verl", lambda ids, mask, e: padded(ids, mask, 0), True),
    "slime": ("slime", lambda ids, mask, e: slime(ids, mask, e), True),
    "slime unpadded": ("slime", lambda ids, mask, e: vllm(ids, mask), True),
    "nemo_rl": ("nemo_rl", lambda ids, mask, e: padded(ids, mask, EMPTY), True),
    "nemo_rl ragged": ("nemo_rl", lambda ids, mask, e: whole(padded(ids, mask, EMPTY), mask), True),
    "maxtext": ("maxtext", lambda ids, mask, e: padded(ids, mask, EMPTY), True),
    "tunix": ("tunix", lambda ids, mask, e: padded(ids, mask, EMPTY), True),
    "tunix_layers_first": (
        "tunix_layers_first",
        lambda ids, mask, e: padded(ids, mask, EMPTY).swapaxes(1, 2),
        True,
    ),
    "megatron_inference": ("megatron_inference", lambda ids, mask, e: vllm(ids, mask), True),
    "megatron_router_tracer": ("megatron_router_tracer", lambda ids, mask, e: stages(ids, mask), False),
}


def live(ids):
    """A live forward pass that routes as ``ids`` where a route is missing and must not be read elsewhere."""
    return lambda missing: np.where(missing[..., None, None], ids, 10_000)


MODEL = {"num_experts": 16, "top_k": 3, "num_layers": 4}


def example(seed=0, mask=LEFT_PADDED, **changes):
    return routes(
        seed, mask, layers=4, num_experts=changes.get("num_experts", 16), top_k=changes.get("top_k", 3)
    )


def assert_holds(replay, ids, mask):
    check_replay(replay, num_experts=MODEL["num_experts"])
    assert replay.expert_ids.dtype == np.uint8
    np.testing.assert_array_equal(replay.mask, mask)
    np.testing.assert_array_equal(replay.expert_ids[mask], ids[mask])
    assert not replay.expert_ids[~mask].any()


def test_every_layout_has_a_round_trip():
    assert {layout for layout, _, _ in ENCODINGS.values()} | {"npz"} == set(LAYOUTS)


@pytest.mark.parametrize("name", ENCODINGS)
def test_round_trip(name):
    layout, encode, lacks_last = ENCODINGS[name]
    ids = example()
    source = encode(ids, LEFT_PADDED, 16)
    replay = replay_from_rollout(source, layout=layout, mask=LEFT_PADDED, live_routing=live(ids), **MODEL)
    assert_holds(replay, ids, LEFT_PADDED)
    if lacks_last:
        with pytest.raises(
            ValueError, match=rf"^layout '{layout}': sample 0, token 4, layer 0: no route .*last token"
        ):
            replay_from_rollout(source, layout=layout, mask=LEFT_PADDED, **MODEL)
    # Training that leaves the last token out needs no live pass.
    shorter = LEFT_PADDED & ~lacking_last(LEFT_PADDED) if lacks_last else LEFT_PADDED
    if name != "nemo_rl ragged":  # which has a row for the last token, saying that there is no route
        assert_holds(replay_from_rollout(source, layout=layout, mask=shorter, **MODEL), ids, shorter)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(sorted(ENCODINGS)),
    seed=st.integers(0, 2**32 - 1),
    samples=st.integers(1, 4),
    tokens=st.integers(3, 7),
    num_experts=st.sampled_from([8, 200, 256]),
    top_k=st.integers(1, 4),
)
def test_any_batch_goes_round(name, seed, samples, tokens, num_experts, top_k):
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
        live_routing=live(ids),
    )
    np.testing.assert_array_equal(replay.expert_ids[mask], ids[mask])


@settings(max_examples=80, deadline=None)
@given(name=st.sampled_from(["sglang", "vllm_http npy", "vllm_http described"]), data=st.data())
def test_a_cut_payload_never_gives_another_replay(name, data):
    layout, encode, _ = ENCODINGS[name]
    ids = example()
    source = encode(ids, LEFT_PADDED, 16)
    sample = data.draw(st.sampled_from([0, 2]))
    holder, key = (
        (source[sample], "routed_experts")
        if layout == "sglang"
        else (source[sample]["choices"][0], "routed_experts")
    )
    if isinstance(holder[key], dict):
        holder, key = holder[key], "data"
    holder[key] = holder[key][: data.draw(st.integers(0, len(holder[key]) - 1))]
    with pytest.raises(ValueError, match=f"^layout '{layout}': sample {sample}"):
        replay_from_rollout(source, layout=layout, mask=LEFT_PADDED & ~lacking_last(LEFT_PADDED), **MODEL)


@settings(max_examples=60, deadline=None)
@given(
    place=st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 3), st.integers(0, 2)),
    value=st.integers(-(2**31), 2**31 - 1),
)
def test_any_changed_id_is_kept_as_it_is_or_refused(place, value):
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


def test_npz_is_placed_at_the_mask(tmp_path):
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


def full(ids, **changes):
    """Read rows of every token as vLLM's; a plain carrier for what is true of all layouts."""
    arguments = {"layout": "vllm", "mask": LEFT_PADDED} | MODEL | changes
    return replay_from_rollout(whole(ids, arguments["mask"]), **arguments)


def test_trap_left_padding_shifts_no_row():
    ids = example()
    assert_holds(full(ids), ids, LEFT_PADDED)


def test_trap_more_rows_than_real_tokens():
    mask = LEFT_PADDED.copy()
    mask[1, 3] = False
    with pytest.raises(ValueError, match=r"layout 'vllm': sample 1: rows 0\.\.2 for 2 real tokens"):
        replay_from_rollout(whole(example(), LEFT_PADDED), layout="vllm", mask=mask, **MODEL)


def test_trap_order_of_top_k_is_kept():
    ids = np.sort(example(), axis=-1)[..., ::-1]
    np.testing.assert_array_equal(full(ids).expert_ids[LEFT_PADDED], ids[LEFT_PADDED])


def test_trap_physical_slot_of_a_balanced_engine():
    ids = example()
    ids[1, 4, 2, 1] = 17
    with pytest.raises(
        ValueError,
        match=r"^layout 'vllm': sample 1, token 4, layer 2: expert id 17 is outside 0\.\.15 \(a physical",
    ):
        full(ids)


def test_trap_expert_twice_in_a_row():
    ids = example()
    ids[1, 4, 2] = [5, 3, 5]
    with pytest.raises(
        ValueError, match=r"sample 1, token 4, layer 2: expert 5 appears twice in \[5, 3, 5\]"
    ):
        full(ids)


@pytest.mark.parametrize("top_k", [1, 3])
def test_trap_prefix_cached_tokens_are_zeros(top_k):
    model = {"num_experts": 2**12, "top_k": top_k}
    ids = example(**model)
    ids[2, :2] = 0
    with pytest.raises(
        ValueError, match=r"sample 2, token 0, layer 0: no route \(only zeros: a prefix-cached"
    ):
        full(ids, **model)
    filled = full(ids, live_routing=live(example(**model)), **model)
    np.testing.assert_array_equal(filled.expert_ids[LEFT_PADDED], example(**model)[LEFT_PADDED])


def test_top_1_zeros_that_chance_explains_are_routes():
    ids = example(top_k=1)
    ids[2, 1] = 0
    np.testing.assert_array_equal(full(ids, top_k=1).expert_ids[2, 1], np.zeros((4, 1)))


def test_trap_zero_padding_is_no_overload_of_expert_0():
    ids = example()
    grid = padded(ids, LEFT_PADDED, 0)
    wider = LEFT_PADDED.copy()
    wider[0, 5] = True
    with pytest.raises(ValueError, match="sample 0, token 4, layer 0: no route"):
        replay_from_rollout(grid, layout="verl", mask=wider, live_routing=None, **MODEL)


def test_trap_zero_of_the_last_token_is_no_route_even_for_top_1():
    ids = example(top_k=1)
    with pytest.raises(ValueError, match="sample 0, token 4, layer 0: no route"):
        replay_from_rollout(
            padded(ids, LEFT_PADDED, 0), layout="verl", mask=LEFT_PADDED, **(MODEL | {"top_k": 1})
        )


@pytest.mark.parametrize("extra", [1, 2, 5])
def test_trap_padding_of_slime_is_no_route(extra):
    ids = example()
    source = slime(ids, LEFT_PADDED, 16, extra)
    with pytest.raises(ValueError, match="layout 'slime': sample 0, token 4, layer 0: no route"):
        replay_from_rollout(source, layout="slime", mask=LEFT_PADDED, **MODEL)
    replay = replay_from_rollout(source, layout="slime", mask=LEFT_PADDED, live_routing=live(ids), **MODEL)
    assert_holds(replay, ids, LEFT_PADDED)


def test_trap_a_start_offset_leaves_the_tokens_before_it_missing():
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
            live_routing=lambda missing, seen=seen: seen.append(missing) or live(ids)(missing),
            **MODEL,
        )
        assert_holds(replay, ids, LEFT_PADDED)
        first_two = LEFT_PADDED & (np.cumsum(LEFT_PADDED, axis=1) <= 2)
        np.testing.assert_array_equal(seen[0], first_two | lacking_last(LEFT_PADDED))


@pytest.mark.parametrize("start", [-1, 99, "2", 1.5])
def test_a_start_outside_the_sample_is_refused(start):
    source = sglang(example(), LEFT_PADDED)
    source[1]["routed_experts_start_len"] = start
    with pytest.raises(ValueError, match=r"sample 1: routed_experts_start_len=.* is not one of its 3 tokens"):
        replay_from_rollout(source, layout="sglang", mask=LEFT_PADDED, **MODEL)


@pytest.mark.parametrize("layout", ["maxtext", "tunix", "nemo_rl"])
def test_trap_unset_token_is_named_or_filled(layout):
    ids = example()
    grid = ids.astype(np.int32)
    grid[1, 4] = EMPTY
    with pytest.raises(ValueError, match=rf"^layout '{layout}': sample 1, token 4, layer 0: no route"):
        replay_from_rollout(grid, layout=layout, mask=LEFT_PADDED, **MODEL)
    replay = replay_from_rollout(grid, layout=layout, mask=LEFT_PADDED, live_routing=live(ids), **MODEL)
    assert_holds(replay, ids, LEFT_PADDED)


def test_a_token_without_a_route_in_one_layer_is_named_and_only_that_layer_filled():
    ids, other = example(), example(seed=1)
    grid = ids.copy()
    grid[1, 4, 2] = EMPTY
    with pytest.raises(ValueError, match="sample 1, token 4, layer 2: no route"):
        full(grid)
    replay = full(grid, live_routing=live(other))
    ids[1, 4, 2] = other[1, 4, 2]
    assert_holds(replay, ids, LEFT_PADDED)


def test_a_row_that_is_partly_unset_is_corrupt():
    ids = example()
    ids[1, 4, 2, 1] = EMPTY
    with pytest.raises(ValueError, match=r"sample 1, token 4, layer 2: expert id -1 in \["):
        full(ids, live_routing=live(example()))


@pytest.mark.parametrize(
    ("hole", "message"), [(0, "only zeros for every token"), (EMPTY, "no route for every")]
)
def test_trap_unmerged_pipeline_stage_is_not_filled(hole, message):
    ids = example()
    ids[:, :, 2] = hole
    grid = padded(ids, LEFT_PADDED, EMPTY)
    with pytest.raises(ValueError, match=rf"sample 0, token 1, layer 2: {message}.*pipeline stage"):
        replay_from_rollout(grid, layout="maxtext", mask=LEFT_PADDED, live_routing=live(example()), **MODEL)


def test_trap_dense_layers_with_and_without_rows():
    ids, moe_layers = example(), [1, 3]
    all_layers, moe_only = ids.copy(), ids[:, :, moe_layers]
    all_layers[:, :, [0, 2]] = 0
    for source in (all_layers, moe_only):
        replay = full(source, moe_layers=moe_layers)
        np.testing.assert_array_equal(replay.expert_ids[LEFT_PADDED], moe_only[LEFT_PADDED])
    with pytest.raises(
        ValueError, match="sample 0: rows have 3 layers, the model has 4 layers, 2 MoE layers"
    ):
        full(ids[:, :, :3], moe_layers=moe_layers)
    with pytest.raises(ValueError, match="sample 0: rows have 4 layers, the model has 2 MoE layers"):
        full(ids, layout="megatron_inference", moe_layers=moe_layers)
    with pytest.raises(ValueError, match=r"layer 0: only zeros for every token .* a dense layer"):
        full(all_layers)


def test_the_layer_of_an_error_is_the_layer_of_the_model():
    ids = example()
    ids[1, 4, 3] = 7
    with pytest.raises(ValueError, match="sample 1, token 4, layer 3: expert 7 appears twice"):
        full(ids, moe_layers=[1, 3])


@pytest.mark.parametrize("layers", [[0, 1, 2, 3], [1, 3]])
def test_dense_layers_of_a_flat_buffer_are_told_by_size(layers):
    ids = example()
    replay = replay_from_rollout(
        sglang(ids[:, :, layers], LEFT_PADDED),
        layout="sglang",
        mask=LEFT_PADDED,
        moe_layers=[1, 3],
        live_routing=live(ids[:, :, [1, 3]]),
        **MODEL,
    )
    np.testing.assert_array_equal(replay.expert_ids[LEFT_PADDED], ids[LEFT_PADDED][:, [1, 3]])


def test_a_flat_buffer_that_can_be_read_in_two_ways_is_refused():
    ids, mask = example(mask=np.ones((1, 9), bool)), np.ones((1, 9), bool)
    source = [{"routed_experts": b64(ids[0, :2].astype("int32").tobytes())}]
    with pytest.raises(ValueError, match=r"sample 0: 24 ids are not 8 rows .* of 4 layers or 2 MoE layers"):
        replay_from_rollout(
            source, layout="sglang", mask=mask, moe_layers=[1, 3], live_routing=live(ids[:, :, 1::2]), **MODEL
        )


def test_trap_uint8_cannot_hold_more_than_256_experts():
    ids = example().astype(np.uint8)
    with pytest.raises(ValueError, match="sample 0: uint8 cannot hold the ids of 257 experts"):
        full(ids, num_experts=257)
    with pytest.raises(ValueError, match="sample 0: int8 cannot hold the ids of 256 experts"):
        full(ids.astype(np.int8), num_experts=256)


def test_trap_minus_one_that_wrapped_to_255():
    ids = example().astype(np.uint8)
    ids[1, 4] = 255
    with pytest.raises(ValueError, match="sample 1, token 4, layer 0: expert 255 appears twice"):
        full(ids, num_experts=256)


@pytest.mark.parametrize("num_experts", [256, 257, 40_000, 70_000])
def test_ids_come_back_in_the_smallest_dtype_without_wrapping(num_experts):
    ids = example()
    ids[1, 4, 2] = [num_experts - 1, 0, 1]
    replay = full(ids, num_experts=num_experts)
    assert replay.expert_ids.dtype == id_dtype(num_experts)
    assert replay.expert_ids[1, 4, 2].tolist() == [num_experts - 1, 0, 1]


@pytest.mark.parametrize("value", [2**8, 2**16, 2**32, -(2**8), -(2**32)])
def test_ids_that_would_wrap_to_an_expert_are_refused(value):
    ids = example().astype(np.int64)
    ids[1, 4, 2, 0] += value
    with pytest.raises(ValueError, match=r"sample 1, token 4, layer 2: expert id .* is outside"):
        full(ids)


@pytest.mark.parametrize("kind", [float, bool])
def test_ids_that_are_not_integers_are_refused(kind):
    with pytest.raises(ValueError, match="sample 0: expected integers of 3 axes"):
        full(example().astype(kind))


def test_trap_axis_order_is_never_guessed():
    grid = padded(example(), LEFT_PADDED, EMPTY)
    with pytest.raises(ValueError, match=r"expected \[3, 6\] samples and tokens, found \[3, 4\]"):
        replay_from_rollout(grid.swapaxes(1, 2), layout="tunix", mask=LEFT_PADDED, **MODEL)
    with pytest.raises(ValueError, match=r"expected \[3, 6\] samples and tokens, found \[3, 4\]"):
        replay_from_rollout(grid, layout="tunix_layers_first", mask=LEFT_PADDED, **MODEL)


def http(rows, prompt=None):
    return [{"prompt_routed_experts": prompt, "choices": [{"routed_experts": rows}]}]


def test_http_samples_are_choices_and_share_their_prompt():
    mask = np.ones((2, 5), bool)
    ids = example(mask=mask)
    ids[1, :2] = ids[0, :2]
    rows = vllm(ids, mask, np.uint8)
    choices = [{"index": i, "routed_experts": npy(r[2:])} for i, r in enumerate(rows)]
    source = [{"prompt_routed_experts": npy(rows[0][:2]), "choices": choices}]
    replay = replay_from_rollout(source, layout="vllm_http", mask=mask, live_routing=live(ids), **MODEL)
    assert_holds(replay, ids, mask)
    choices.reverse()
    with pytest.raises(ValueError, match="sample 0: choice 1 is at position 0"):
        replay_from_rollout(source, layout="vllm_http", mask=mask, **MODEL)


def test_http_without_prompt_rows_must_be_the_whole_sequence():
    mask = np.ones((1, 5), bool)
    ids = example(mask=mask)
    arguments = {"layout": "vllm_http", "mask": mask, "live_routing": live(ids)} | MODEL
    assert_holds(replay_from_rollout(http(npy(ids[0, :4])), **arguments), ids, mask)
    with pytest.raises(ValueError, match="sample 0: 2 rows for 5 tokens and no prompt_routed_experts"):
        replay_from_rollout(http(npy(ids[0, 2:4])), **arguments)
    with pytest.raises(ValueError, match="sample 0: no rows for 5 tokens"):
        replay_from_rollout(http(None), **arguments)


def test_http_one_generated_token_has_an_empty_list():
    mask = np.ones((1, 3), bool)
    ids = example(mask=mask)
    replay = replay_from_rollout(
        http([], ids[0, :2].tolist()), layout="vllm_http", mask=mask, live_routing=live(ids), **MODEL
    )
    assert_holds(replay, ids, mask)


ROWS = example()[0, :4].astype(np.uint8)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("%%%", "not base64|Only base64 data|Non-base64"),
        (b64(b"not an array"), "not base64 of an .npy"),
        (b64(base64.b64decode(npy(ROWS)) + b"more"), "4 bytes behind the array"),
        (npy(np.array([None], object)), "not base64 of an .npy .*allow_pickle"),
        (described(ROWS) | {"encoding": "zlib"}, "encoding 'zlib' is not 'base64'"),
        (described(ROWS) | {"dtype": "float32"}, "dtype 'float32' is none of"),
        (described(ROWS) | {"shape": [4, 4, 2]}, r"shape \[4, 4, 2\] is not \[rows, layers, K\] of 48 ids"),
        (described(ROWS) | {"data": None}, "expected base64, found NoneType"),
        ([[[0, 1, 2]], [[1, 2]]], "nested lists of unequal length"),
        (7, "expected integers of 3 axes"),
    ],
)
def test_a_damaged_http_payload_is_named(rows, message):
    with pytest.raises(ValueError, match=rf"^layout 'vllm_http': sample 0: .*({message})"):
        replay_from_rollout(http(rows), layout="vllm_http", mask=np.ones((1, 5), bool), **MODEL)


def test_http_prompt_and_generated_rows_must_be_of_one_kind():
    source = http(ROWS[2:, :, :2].tolist(), ROWS[:2].tolist())
    with pytest.raises(ValueError, match=r"prompt rows are int64\[4, 3\], generated rows int64\[4, 2\]"):
        replay_from_rollout(source, layout="vllm_http", mask=np.ones((1, 5), bool), **MODEL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"routed_experts_dtype": "float16"},
            "routed_experts_dtype 'float16' is none of int32, uint16, uint8",
        ),
        ({"routed_experts": b64(b"abc")}, "3 bytes are not whole int32 items"),
        ({"routed_experts": b64(bytes(8))}, "2 ids are not 3 rows"),
        ({"routed_experts": None}, "there is no 'routed_experts' among"),
        # Ids of one byte read as four bytes are numbers far outside the experts.
        ({"routed_experts": b64(bytes(range(1, 49)))}, "outside 0..15"),
    ],
)
def test_a_damaged_sglang_payload_is_named(change, message):
    source = sglang(example(), LEFT_PADDED)
    source[0] |= change
    with pytest.raises(ValueError, match=rf"^layout 'sglang': sample 0.*{message}"):
        replay_from_rollout(source, layout="sglang", mask=LEFT_PADDED, **MODEL)


def traced(source, mask=LEFT_PADDED, **changes):
    return replay_from_rollout(source, layout="megatron_router_tracer", mask=mask, **(MODEL | changes))


def test_router_trace_of_data_parallel_ranks_padding_and_prediction_blocks():
    ids = example()
    first, rest = LEFT_PADDED.copy(), LEFT_PADDED.copy()
    first[1:], rest[0] = False, False
    ranks = [trace_lines(ids[first], range(4), 0), trace_lines(ids[rest], range(4), 1, steps=2)]
    assert_holds(traced(ranks), ids, LEFT_PADDED)
    ranks[0].insert(1, '{"block": "mtp", "mtp_idx": 0, "layer": 0}')
    ranks[1].append("\n")
    assert_holds(traced(ranks), ids, LEFT_PADDED)
    every_position = [trace_lines(ids.reshape(-1, 4, 3), range(4), 0)]
    assert_holds(traced(every_position), ids, LEFT_PADDED)


def test_router_trace_reads_open_files(tmp_path):
    ids = example()
    path = Path(tmp_path / "router_trace_rank0.jsonl")
    path.write_text("\n".join(trace_lines(ids[LEFT_PADDED], range(4), 0)))
    with path.open() as file:
        assert_holds(traced([file]), ids, LEFT_PADDED)


def test_trap_router_trace_without_one_stage_or_with_its_own_numbers():
    ids = example()
    one, two = stages(ids, LEFT_PADDED)
    with pytest.raises(ValueError, match=r"no records of layers \[2, 3\], extra ones of \[\]"):
        traced([one])
    from_one = [trace_lines(ids[LEFT_PADDED], range(1, 5), 0)]
    with pytest.raises(ValueError, match=r"no records of layers \[0\], extra ones of \[4\]"):
        traced(from_one)
    with pytest.raises(ValueError, match=r"layer 2 has \(step, tokens\) .* layer 0 has"):
        traced([one, two[:2]])
    with pytest.raises(ValueError, match=r"stream 1 has records of rank .*: a stream is one rank, once"):
        traced([one, one, two])


def test_trap_router_trace_of_another_batch():
    ids = example()
    with pytest.raises(ValueError, match="26 tokens a layer, but the batch has 13 real tokens in 18"):
        traced([trace_lines(np.tile(ids[LEFT_PADDED], (2, 1, 1)), range(4), 0)])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"top_indices": [[', '"top_indices": [[0, ', "nested lists of unequal length"),
        ('"num_tokens": 13', '"num_tokens": 12', r"top_indices are \[13, 3\], not \[12, 3\]"),
        ('"layer"', '"level"', "there is no 'layer'"),
        ("]}", "", "delimiter"),
    ],
)
def test_a_damaged_router_trace_is_named(old, new, message):
    lines = trace_lines(example()[LEFT_PADDED], range(4), 0)
    lines[2] = lines[2].replace(old, new)
    with pytest.raises(ValueError, match=rf"^layout 'megatron_router_tracer': stream 0, line 3: .*{message}"):
        traced([lines])


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
def test_live_routes_are_checked_like_recorded_ones(routing, message):
    with pytest.raises(ValueError, match=message):
        replay_from_rollout(
            vllm(example(), LEFT_PADDED), layout="vllm", mask=LEFT_PADDED, live_routing=routing, **MODEL
        )


def test_live_routing_is_not_called_when_nothing_is_missing():
    full(example(), live_routing=lambda missing: pytest.fail("called"))


def test_recorded_faults_are_reported_although_a_live_pass_could_route_the_rest():
    ids = example()
    ids[1, 4, 2] = 6
    with pytest.raises(ValueError, match="sample 1, token 4, layer 2: expert 6 appears twice"):
        replay_from_rollout(
            vllm(ids, LEFT_PADDED), layout="vllm", mask=LEFT_PADDED, live_routing=live(ids), **MODEL
        )


def test_an_unknown_layout_is_answered_with_all_names_and_the_nearest():
    with pytest.raises(
        ValueError, match=r"layout 'sgl' is none of sglang, vllm, .*; the nearest is 'sglang'"
    ):
        replay_from_rollout([], layout="sgl", mask=LEFT_PADDED, **MODEL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 0}, r"top_k=0 must be in 1\.\.num_experts=16"),
        ({"top_k": 17}, "top_k=17 must be in"),
        ({"top_k": 2}, "sample 0: rows have top-3, the model has top-2"),
        ({"moe_layers": [2, 1]}, r"moe_layers=\[2, 1\] must be ascending layers in 0\.\.3"),
        ({"moe_layers": [4]}, r"moe_layers=\[4\] must be"),
        ({"num_layers": 0}, r"moe_layers=\[\] must be"),
        ({"mask": np.ones((3, 6), bool), "moe_layers": [0]}, "layout 'vllm': 2 samples, the mask has 3"),
    ],
)
def test_a_model_that_does_not_fit_is_named(change, message):
    arguments = {"layout": "vllm", "mask": LEFT_PADDED} | MODEL | change
    source = whole(example(), LEFT_PADDED)[: 2 if "mask" in change else 3]
    with pytest.raises(ValueError, match=message):
        replay_from_rollout(source, **arguments)


@pytest.mark.parametrize("layout", ["sglang", "vllm", "vllm_http", "slime", "megatron_router_tracer", "npz"])
@pytest.mark.parametrize("source", [{"routed_experts": "AAAA"}, "AAAA", 7])
def test_a_source_of_the_wrong_kind_is_refused(layout, source):
    with pytest.raises((ValueError, OSError)):
        replay_from_rollout(source, layout=layout, mask=LEFT_PADDED, **MODEL)


def test_the_real_trace_reads_as_vllm_and_as_npz(shared):
    path = shared / "traces" / "gptoss20b_rollouts.npz"
    replay, _ = load_replay(path)
    model = {"num_experts": 32, "top_k": 4, "num_layers": 24}
    samples = [ids[real] for ids, real in zip(*replay, strict=True)]
    for source, layout in ((samples, "vllm"), (path, "npz")):
        again = replay_from_rollout(source, layout=layout, mask=replay.mask, **model)
        np.testing.assert_array_equal(again.expert_ids, replay.expert_ids)
