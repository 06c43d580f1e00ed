"""Peculiarities of single engines: placeholders of missing routes, and arrays split into fields."""

import numpy as np
import pytest
from rollout_encodings import (
    LEFT_PADDED,
    MODEL,
    areal_response,
    areal_trajectories,
    assert_holds,
    b64,
    example,
    live,
    padded,
    prime_rl_answer,
    prime_rl_transport,
    selected_experts,
    skyrl_packed,
    vllm,
    whole,
)

from relibra_jax.contract.types import EMPTY
from relibra_jax.rollout.ingest import replay_from_rollout

ONE = np.ones((1, 5), bool)


def read(layout, source, mask=LEFT_PADDED, **changes):
    return replay_from_rollout(source, layout=layout, mask=mask, **(MODEL | changes))


def assert_missing(layout, source, ids, missing, mask=LEFT_PADDED):
    """Check that the source is rejected, and that live_routing is asked for these tokens alone."""
    with pytest.raises(ValueError, match=rf"^layout '{layout}': sample \d, token \d, layer 0: no route"):
        read(layout, source, mask)
    asked = []

    def route(tokens):
        asked.append(tokens)
        return live(ids)(tokens)

    assert_holds(read(layout, source, mask, fill="live", live_routing=route), ids, mask)
    np.testing.assert_array_equal(asked[0], missing)


def last_tokens(mask, count):
    """Mark the last ``count`` real tokens of every sample."""
    token = np.cumsum(mask, axis=1)
    return mask & (token > token[:, -1:] - count)


@pytest.mark.parametrize("behind", [1, 2])
def test_replay_from_rollout_takes_made_up_routes_of_skyrl_as_missing(behind):
    ids = example()
    missing = last_tokens(LEFT_PADDED, behind)
    batch = np.where((LEFT_PADDED & ~missing)[..., None, None], ids, np.arange(3)).astype(np.uint8)
    assert_missing("skyrl", batch, ids, missing)


def test_replay_from_rollout_takes_skyrl_rows_from_token_0_that_end_early():
    ids = example()
    rows = [sample[:-1] for sample in vllm(ids, LEFT_PADDED)]
    assert_missing("skyrl", list(map(skyrl_packed, rows)), ids, last_tokens(LEFT_PADDED, 2))
    with pytest.raises(
        ValueError, match="sample 0: start=1, but the recording says that its rows start at token 0"
    ):
        read("skyrl", rows, start=1)


@pytest.mark.parametrize("num_experts", [200, 300, 40_000])
@pytest.mark.parametrize(
    ("layout", "encode"),
    [
        ("skyrl", skyrl_packed),
        ("skyrl", lambda rows: rows.astype(skyrl_packed(rows)["dtype"])),
        ("prime_rl", prime_rl_answer),
        ("prime_rl", lambda rows: prime_rl_transport(rows, len(rows) + 1)),
    ],
)
def test_replay_from_rollout_infers_no_model_from_the_dtype_of_one_sample(layout, encode, num_experts):
    ids = example()
    ids[0, 1, 0] = [num_experts - 1, 0, 1]
    shorter = LEFT_PADDED & ~last_tokens(LEFT_PADDED, 1)
    source = [encode(rows) for rows in vllm(ids, LEFT_PADDED)]
    replay = read(layout, source, shorter, num_experts=num_experts)
    np.testing.assert_array_equal(replay.expert_ids[shorter], ids[shorter])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "uint16"}, "dtype 'uint16' must be one of uint8, int16, int32"),
        ({"shape": [4, 12]}, r"shape \[4, 12\] is not \[rows, layers, K\] of 48 ids"),
        ({"shape": [4, -4, -3]}, r"shape \[4, -4, -3\] is not \[rows, layers, K\] of 48 ids"),
        ({"shape": ["4", 4, 3]}, r"shape \['4', 4, 3\] is not \[rows, layers, K\] of 48 ids"),
        ({"shape": [True, 16, 3]}, r"shape \[True, 16, 3\] is not"),
        ({"data": b64(bytes(47))}, "is not .* of 47 ids"),
        ({"data": None}, "expected base64, found NoneType"),
        ({"data": "%%%"}, "not base64|Only base64 data|Non-base64|padding"),
    ],
)
def test_replay_from_rollout_names_a_damaged_part_of_skyrl(change, message):
    with pytest.raises(ValueError, match=rf"^layout 'skyrl': sample 0: .*({message})"):
        read("skyrl", [skyrl_packed(example()[0, 1:5]) | change], ONE)


@pytest.mark.parametrize("zeros", [0, 2])
def test_replay_from_rollout_takes_prime_rls_placeholder_row_as_missing(zeros):
    """The placeholder repeats the row before; a longer transport has zeros after it."""
    ids = example()
    rows = [sample[: len(sample) - zeros] for sample in vllm(ids, LEFT_PADDED)]
    lengths = LEFT_PADDED.sum(axis=1)
    source = [prime_rl_transport(part, tokens) for part, tokens in zip(rows, lengths, strict=True)]
    if zeros:
        # The repeated row is not the last one here, so a reader cannot detect that it is a placeholder.
        repeated = np.flatnonzero(LEFT_PADDED[0])[-1 - zeros]
        ids[0, repeated] = ids[0, repeated - 1]
        source, mask = source[:1], LEFT_PADDED[:1]
        assert_missing("prime_rl", source, ids[:1], last_tokens(mask, zeros), mask)
    else:
        assert_missing("prime_rl", source, ids, last_tokens(LEFT_PADDED, 1))


def test_replay_from_rollout_keeps_equal_last_rows_of_prime_rls_answer():
    """A response has only rows of the engine, and two tokens may have equal routes."""
    ids = example(mask=ONE)
    ids[0, 3] = ids[0, 2]
    replay = read("prime_rl", [prime_rl_answer(ids[0, :4])], ONE[:, :4])
    np.testing.assert_array_equal(replay.expert_ids[0], ids[0, :4])


def test_replay_from_rollout_reads_prime_rls_start_and_needs_no_dtype():
    ids = example(mask=ONE)
    answer = prime_rl_answer(ids[0, 2:4], start=2)
    del answer["dtype"]
    missing = np.array([[True, True, False, False, True]])
    assert_missing("prime_rl", [answer], ids, missing, ONE)
    with pytest.raises(ValueError, match="sample 0: start=6 must be an integer from 0 to its 5 tokens"):
        read("prime_rl", [answer | {"start": 6}], ONE)
    with pytest.raises(ValueError, match="sample 0: expected base64, found NoneType"):
        read("prime_rl", [None], ONE)


def test_replay_from_rollout_refuses_prime_rls_bytes_of_the_wrong_width():
    transport = prime_rl_transport(example()[0, 1:5], 5)
    transport.dtype = "uint16"
    with pytest.raises(ValueError, match=r"sample 0: shape \[5, 4, 3\] is not .* of 30 ids"):
        read("prime_rl", [transport], ONE)
    transport.dtype = "int32"
    with pytest.raises(ValueError, match="sample 0: dtype 'int32' must be one of uint8, uint16"):
        read("prime_rl", [transport], ONE)


@pytest.mark.parametrize(("layout", "encode"), [("miles", lambda rows: rows), ("areal", areal_response)])
def test_replay_from_rollout_asks_for_the_start_of_fewer_rows(layout, encode):
    rows = [encode(sample[1:]) for sample in vllm(example(), LEFT_PADDED)]
    with pytest.raises(
        ValueError, match=rf"^layout '{layout}': sample 0: found 2 rows, expected 4, .*pass start"
    ):
        read(layout, rows)


def test_replay_from_rollout_starts_miles_at_0_and_drops_its_padding():
    ids = example()
    missing = last_tokens(LEFT_PADDED, 1)
    assert_missing("miles", vllm(ids, LEFT_PADDED), ids, missing)
    assert_missing("miles", whole(padded(ids, LEFT_PADDED, EMPTY), LEFT_PADDED), ids, missing)


def test_replay_from_rollout_takes_invalid_samples_of_areal_as_missing():
    ids = example()
    trajectories = areal_trajectories(ids, LEFT_PADDED)
    trajectories["r3_routing_valid"][1] = False
    missing = last_tokens(LEFT_PADDED, 1)
    missing[1] = LEFT_PADDED[1]
    assert_missing("areal", trajectories, ids, missing)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"routed_experts": None}, "no value for 'routed_experts'"),
        (
            areal_trajectories(example(), LEFT_PADDED) | {"r3_routing_valid": None},
            "no value for 'r3_routing_valid'",
        ),
        (
            areal_trajectories(example(), LEFT_PADDED) | {"r3_routing_valid": np.ones(3)},
            r"r3_routing_valid must be bool \[3\], not float64\[3\]",
        ),
        ([np.zeros((4, 13), int)] * 3, "sample 0: 13 ids of a token are not layers x top-3"),
        ([np.zeros((4, 4, 3), int)] * 3, "sample 0: expected integers of 2 axes"),
        # A resubmitted request returns its prefix again, and AReaL appends it as it comes.
        (
            [np.tile(areal_response(rows), (2, 1)) for rows in vllm(example(), LEFT_PADDED)],
            r"it has rows 0\.\.5, but only 4 real tokens",
        ),
    ],
)
def test_replay_from_rollout_names_a_source_that_is_not_areals(source, message):
    with pytest.raises(ValueError, match=rf"^layout 'areal': .*{message}"):
        read("areal", source)


@pytest.mark.parametrize("numbers", [[0, 1, 2, 3], [1, 3]])
def test_replay_from_rollout_tells_layers_of_transformers_by_their_numbers(numbers):
    ids, layers = example(), selected_experts(example())
    source = {number: layers[number] for number in reversed(numbers)}
    replay = read("transformers", source, moe_layers=[1, 3])
    np.testing.assert_array_equal(replay.expert_ids[LEFT_PADDED], ids[LEFT_PADDED][:, [1, 3]])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            dict(enumerate(selected_experts(example())[:3])),
            r"layers \[0, 1, 2\] are neither all 4 nor the MoE",
        ),
        (selected_experts(example())[:3], "sample 0: rows have 3 layers, but the model has 4 layers"),
        (selected_experts(example()[:, 1:]), r"array 0 of selected_experts is \[15, 3\], not .* \[18, 3\]"),
        (selected_experts(example(top_k=2)), r"array 0 of selected_experts is \[18, 2\], not .* \[18, 3\]"),
        ((), "selected_experts has no layers"),
        (7, "expected a sequence of layers, found int"),
    ],
)
def test_replay_from_rollout_names_layers_that_are_not_the_models(source, message):
    with pytest.raises(ValueError, match=rf"^layout 'transformers': {message}"):
        read("transformers", source)


def test_replay_from_rollout_reads_tensorrt_llm_rows_of_moe_layers_alone():
    ids, mask = example(), LEFT_PADDED & ~last_tokens(LEFT_PADDED, 1)
    replay = read("tensorrt_llm", vllm(ids[:, :, [1, 3]], LEFT_PADDED), mask, moe_layers=[1, 3])
    np.testing.assert_array_equal(replay.expert_ids[mask], ids[mask][:, [1, 3]])
    with pytest.raises(ValueError, match="sample 0: rows have 4 layers, but the model has 2 MoE layers"):
        read("tensorrt_llm", vllm(ids, LEFT_PADDED), mask, moe_layers=[1, 3])
