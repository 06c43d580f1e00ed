"""Payloads: what only single formats can contain, and the errors for damaged ones."""

import base64
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_encodings import (
    ENCODINGS,
    LEFT_PADDED,
    MODEL,
    assert_holds,
    b64,
    described,
    example,
    last_tokens,
    live,
    nemo_rl_wire,
    npy,
    sglang,
    stages,
    trace_lines,
    vllm,
    whole,
)

from relibra_jax.contract.types import EMPTY
from relibra_jax.rollout.ingest import replay_from_rollout


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(
        [
            "sglang",
            "vllm_http npy",
            "vllm_http described",
            "skyrl packed",
            "prime_rl answer",
            "prime_rl transport",
        ]
    ),
    data=st.data(),
)
def test_replay_from_rollout_never_gives_another_replay_of_a_cut_payload(name, data):
    layout, encode, _ = ENCODINGS[name]
    ids = example()
    source = encode(ids, LEFT_PADDED, 16)
    sample = data.draw(st.sampled_from([0, 2]))
    if layout == "vllm_http":
        holder, key = source[sample]["choices"][0], "routed_experts"
    elif name == "prime_rl transport":
        holder, key = vars(source[sample]), "data"
    else:
        holder, key = source[sample], "routed_experts" if layout == "sglang" else "data"
    if isinstance(holder[key], dict):
        holder, key = holder[key], "data"
    holder[key] = holder[key][: data.draw(st.integers(0, len(holder[key]) - 1))]
    with pytest.raises(ValueError, match=f"^layout '{layout}': sample {sample}"):
        replay_from_rollout(source, layout=layout, mask=LEFT_PADDED & ~last_tokens(LEFT_PADDED), **MODEL)


@pytest.mark.parametrize("layers", [[0, 1, 2, 3], [1, 3]])
def test_replay_from_rollout_tells_dense_layers_of_a_flat_buffer_by_size(layers):
    ids = example()
    replay = replay_from_rollout(
        sglang(ids[:, :, layers], LEFT_PADDED),
        layout="sglang",
        mask=LEFT_PADDED,
        moe_layers=[1, 3],
        start=0,
        fill="live",
        live_routing=live(ids[:, :, [1, 3]]),
        **MODEL,
    )
    np.testing.assert_array_equal(replay.expert_ids[LEFT_PADDED], ids[LEFT_PADDED][:, [1, 3]])


def test_replay_from_rollout_refuses_a_flat_buffer_with_two_readings():
    ids, mask = example(mask=np.ones((1, 9), bool)), np.ones((1, 9), bool)
    source = [{"routed_experts": b64(ids[0, :2].astype("int32").tobytes())}]
    with pytest.raises(ValueError, match=r"sample 0: 24 ids are not 8 rows .* of 4 layers or 2 MoE layers"):
        replay_from_rollout(
            source,
            layout="sglang",
            mask=mask,
            moe_layers=[1, 3],
            start=0,
            fill="live",
            live_routing=live(ids[:, :, 1::2]),
            **MODEL,
        )


def http(rows, prompt=None):
    return [{"prompt_routed_experts": prompt, "choices": [{"routed_experts": rows}]}]


def test_replay_from_rollout_reads_http_choices_that_share_their_prompt():
    mask = np.ones((2, 5), bool)
    ids = example(mask=mask)
    ids[1, :2] = ids[0, :2]
    rows = vllm(ids, mask, np.uint8)
    choices = [{"index": i, "routed_experts": npy(r[2:])} for i, r in enumerate(rows)]
    source = [{"prompt_routed_experts": npy(rows[0][:2]), "choices": choices}]
    replay = replay_from_rollout(
        source, layout="vllm_http", mask=mask, start=0, fill="live", live_routing=live(ids), **MODEL
    )
    assert_holds(replay, ids, mask)
    choices.reverse()
    with pytest.raises(ValueError, match="sample 0: choice 1 is at position 0"):
        replay_from_rollout(source, layout="vllm_http", mask=mask, **MODEL)


def test_replay_from_rollout_needs_whole_http_rows_if_the_prompt_has_none():
    mask = np.ones((1, 5), bool)
    ids = example(mask=mask)
    arguments = {"layout": "vllm_http", "mask": mask, "fill": "live", "live_routing": live(ids)} | MODEL
    assert_holds(replay_from_rollout(http(npy(ids[0, :4])), start=0, **arguments), ids, mask)
    with pytest.raises(ValueError, match=r"sample 0: found 2 rows, expected 5, .*pass start"):
        replay_from_rollout(http(npy(ids[0, 2:4])), **arguments)
    with pytest.raises(ValueError, match="sample 0: it has neither routed_experts nor prompt_routed"):
        replay_from_rollout(http(None), **arguments)


def test_replay_from_rollout_reads_the_empty_http_list_of_one_token():
    mask = np.ones((1, 3), bool)
    ids = example(mask=mask)
    replay = replay_from_rollout(
        http([], ids[0, :2].tolist()),
        layout="vllm_http",
        mask=mask,
        start=0,
        fill="live",
        live_routing=live(ids),
        **MODEL,
    )
    assert_holds(replay, ids, mask)


ROWS = example()[0, :4].astype(np.uint8)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("%%%", "not base64|Only base64 data|Non-base64"),
        (b64(b"not an array"), "not base64 of an .npy"),
        (b64(base64.b64decode(npy(ROWS)) + b"more"), "4 bytes follow the array"),
        (npy(np.array([None], object)), "not base64 of an .npy .*allow_pickle"),
        (described(ROWS) | {"encoding": "zlib"}, "encoding 'zlib' is not 'base64'"),
        (described(ROWS) | {"dtype": "float32"}, "dtype 'float32' must be one of"),
        (described(ROWS) | {"shape": [4, 4, 2]}, r"shape \[4, 4, 2\] is not \[rows, layers, K\] of 48 ids"),
        (described(ROWS) | {"data": None}, "expected base64, found NoneType"),
        ([[[0, 1, 2]], [[1, 2]]], "nested lists of unequal length"),
        (7, "expected integers of 3 axes"),
    ],
)
def test_replay_from_rollout_names_a_damaged_http_payload(rows, message):
    with pytest.raises(ValueError, match=rf"^layout 'vllm_http': sample 0: .*({message})"):
        replay_from_rollout(http(rows), layout="vllm_http", mask=np.ones((1, 5), bool), **MODEL)


def test_replay_from_rollout_needs_http_prompt_and_rows_of_one_kind():
    source = http(ROWS[2:, :, :2].tolist(), ROWS[:2].tolist())
    with pytest.raises(
        ValueError, match=r"prompt rows are int64\[4, 3\], but generated rows are int64\[4, 2\]"
    ):
        replay_from_rollout(source, layout="vllm_http", mask=np.ones((1, 5), bool), **MODEL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"routed_experts_dtype": "float16"},
            "routed_experts_dtype 'float16' must be one of int32, uint16, uint8",
        ),
        ({"routed_experts": b64(b"abc")}, "3 bytes are not whole int32 items"),
        ({"routed_experts": b64(bytes(8))}, "2 ids are not 3 rows"),
        ({"routed_experts": None}, "no value for 'routed_experts'"),
        # Ids of one byte read as four bytes are numbers far outside the experts.
        ({"routed_experts": b64(bytes(range(1, 49)))}, "outside 0..15"),
    ],
)
def test_replay_from_rollout_names_a_damaged_sglang_payload(change, message):
    source = sglang(example(), LEFT_PADDED, start=0)
    source[0] |= change
    with pytest.raises(ValueError, match=rf"^layout 'sglang': sample 0.*{message}"):
        replay_from_rollout(source, layout="sglang", mask=LEFT_PADDED, **MODEL)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32"])
def test_replay_from_rollout_reads_a_wire_string_of_nemo_rl_beside_arrays(dtype):
    ids = example()
    ids[1, 4] = EMPTY
    rows = whole(ids, LEFT_PADDED)
    source = [nemo_rl_wire(rows[0], dtype), nemo_rl_wire(rows[1], dtype), rows[2]]
    replay = replay_from_rollout(
        source, layout="nemo_rl", mask=LEFT_PADDED, fill="live", live_routing=live(example()), **MODEL
    )
    assert_holds(replay, example(), LEFT_PADDED)


# 5 tokens x 4 layers x 3 ids of two bytes: 120 bytes, 160 characters.
WIRE = nemo_rl_wire(example()[0, 1:], "int16")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nrlre1:", "nrlre2:", r"4 fields that begins 'nrlre2:int16:5x4', expected nrlre1:<dtype>:"),
        ("nrlre1:", "", r"3 fields that begins 'int16:5x4x3:.*', expected nrlre1:<dtype>:"),
        ("nrlre1:", "nrlre1:2:", "5 fields that begins .* expected nrlre1:<dtype>:"),
        ("int16", "uint16", "dtype 'uint16', expected one of int8, int16, int32"),
        ("int16", "int32", "found 120 bytes, expected 240 for 5x4x3 of int32"),
        ("5x4x3", "5x12", "shape '5x12', expected <tokens>x<layers>x<K>"),
        ("5x4x3", "5x-4x-3", "shape '5x-4x-3', expected <tokens>x<layers>x<K>"),
        ("5x4x3", "6x4x3", "found 120 bytes, expected 144 for 6x4x3 of int16"),
        ("5x4x3", "5x3x4", "rows have top-4, but the model has top-3"),
        (WIRE[-4:], "", "found 117 bytes, expected 120 for 5x4x3 of int16"),
        (WIRE[-1:], "", r"found 159 characters that are not base64 \(.*padding.*\), expected 160 for 5x4x3"),
        (WIRE[-4:], "%%%%", "found 160 characters that are not base64 .* expected 160 for 5x4x3"),
        (WIRE[-4:], "AAAAAAAA", "found 123 bytes, expected 120 for 5x4x3 of int16"),
    ],
)
def test_replay_from_rollout_names_a_damaged_wire_string_of_nemo_rl(old, new, message):
    head, _, tail = WIRE.rpartition(old)
    with pytest.raises(ValueError, match=rf"^layout 'nemo_rl': sample 0: .*{message}"):
        replay_from_rollout([head + new + tail], layout="nemo_rl", mask=np.ones((1, 5), bool), **MODEL)


def traced(source, mask=LEFT_PADDED, **changes):
    return replay_from_rollout(source, layout="megatron_router_tracer", mask=mask, **(MODEL | changes))


def test_replay_from_rollout_reads_router_traces_of_data_parallel_ranks():
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


def test_replay_from_rollout_reads_router_traces_from_open_files(tmp_path):
    ids = example()
    path = Path(tmp_path / "router_trace_rank0.jsonl")
    path.write_text("\n".join(trace_lines(ids[LEFT_PADDED], range(4), 0)))
    with path.open() as file:
        assert_holds(traced([file]), ids, LEFT_PADDED)


def test_replay_from_rollout_refuses_router_traces_of_other_layers():
    ids = example()
    one, two = stages(ids, LEFT_PADDED)
    with pytest.raises(ValueError, match=r"no records of layers \[2, 3\], extra ones of \[\]"):
        traced([one])
    from_one = [trace_lines(ids[LEFT_PADDED], range(1, 5), 0)]
    with pytest.raises(ValueError, match=r"no records of layers \[0\], extra ones of \[4\]"):
        traced(from_one)
    with pytest.raises(ValueError, match=r"layer 2 has \(step, tokens\) .* layer 0 has"):
        traced([one, two[:2]])
    with pytest.raises(
        ValueError, match=r"stream 1 has records of ranks .*, but a stream must have one rank"
    ):
        traced([one, one, two])


def test_replay_from_rollout_refuses_router_traces_of_another_batch():
    ids = example()
    with pytest.raises(ValueError, match="26 tokens per layer, but the batch has 13 real tokens in 18"):
        traced([trace_lines(np.tile(ids[LEFT_PADDED], (2, 1, 1)), range(4), 0)])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"top_indices": [[', '"top_indices": [[0, ', "nested lists of unequal length"),
        ('"num_tokens": 13', '"num_tokens": 12', r"top_indices are \[13, 3\], not \[12, 3\]"),
        ('"layer"', '"level"', "missing key 'layer'"),
        ("]}", "", "delimiter"),
    ],
)
def test_replay_from_rollout_names_a_damaged_router_trace(old, new, message):
    lines = trace_lines(example()[LEFT_PADDED], range(4), 0)
    lines[2] = lines[2].replace(old, new)
    with pytest.raises(ValueError, match=rf"^layout 'megatron_router_tracer': stream 0, line 3: .*{message}"):
        traced([lines])
    with pytest.raises(ValueError, match="stream 0, line 2: expected a line of text, found ndarray"):
        traced([[lines[0], np.zeros((2, 3), int)]])
