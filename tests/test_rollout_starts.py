"""Rows belong to the tokens that they were recorded for, also if the engine was asked to skip tokens before them.

vLLM (``routed_experts_prompt_start``) and SGLang (``routed_experts_start_len``) leave out the rows of a prompt's
first tokens and do not repeat in the answer how many.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_encodings import (
    LEFT_PADDED,
    MODEL,
    STARTS,
    assert_holds,
    example,
    flat_from,
    live,
    padded,
    routes,
    sglang,
    vllm,
)

from relibra_jax.contract.types import EMPTY
from relibra_jax.rollout.ingest import replay_from_rollout
from relibra_jax.rollout.layouts import LAYOUTS


@st.composite
def skipped_rows(draw):
    """Draw samples of 2 to 9 tokens, the skip of each, and whether training leaves the last token out."""
    lengths = draw(st.lists(st.integers(2, 9), min_size=1, max_size=3))
    starts = [draw(st.integers(0, length - 1)) for length in lengths]
    return lengths, starts, draw(st.booleans())


@settings(max_examples=400)
@given(
    name=st.sampled_from(sorted(STARTS)),
    batch=skipped_rows(),
    caller_says=st.booleans(),
    moe_layers=st.sampled_from([[0, 1, 2, 3], [1, 3]]),
    moe_rows=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_replay_from_rollout_never_shifts_a_row(name, batch, caller_says, moe_layers, moe_rows, seed):
    layout, encode, recording_says = STARTS[name]
    lengths, starts, without_last = batch
    # Sequences of the engine stand anywhere among 12 positions, in order.
    rng = np.random.default_rng(seed)
    sequence = np.zeros((len(lengths), 12), bool)
    for sample, length in enumerate(lengths):
        sequence[sample, rng.choice(12, length, replace=False)] = True
    token = np.where(sequence, np.cumsum(sequence, axis=1) - 1, EMPTY)
    last = token == np.array(lengths)[:, None] - 1
    mask = sequence & ~last if without_last else sequence
    recorded = (token >= np.array(starts)[:, None]) & ~last
    ids = routes(seed, mask, layers=4, num_experts=16, top_k=3)
    kept = moe_layers if moe_rows or LAYOUTS[layout].moe_only else [0, 1, 2, 3]
    source = [
        encode(ids[sample, real][:, kept], start)
        for sample, (real, start) in enumerate(zip(recorded, starts, strict=True))
    ]
    elsewhere = (ids + 1) % 16
    arguments = {"layout": layout, "mask": mask, "moe_layers": moe_layers} | MODEL
    try:
        replay = replay_from_rollout(
            source,
            fill="live",
            live_routing=lambda missing: elsewhere[:, :, moe_layers],
            **({"start": starts} if caller_says else {}),
            **arguments,
        )
    except ValueError as error:
        refusal = str(error)
    else:
        truth = np.where(recorded[..., None, None], ids, elsewhere)[:, :, moe_layers]
        np.testing.assert_array_equal(replay.expert_ids[mask], truth[mask])
        return
    # Raises if nothing says where rows start and a row is missing, or if a flat buffer allows two numbers of layers.
    asked = "pass start" in refusal and not caller_says and not recording_says and (recorded != mask).any()
    ambiguous = layout == "sglang" and "of 4 layers or 2 MoE layers" in refusal
    assert asked or ambiguous, refusal


def skipping(skipped, **changes):
    """Read vLLM's rows but the first ``skipped`` of samples of 4, 3 and 6 tokens."""
    rows = [sample[skipped:] for sample in vllm(example(), LEFT_PADDED)]
    return replay_from_rollout(rows, **({"layout": "vllm", "mask": LEFT_PADDED} | MODEL | changes))


def test_replay_from_rollout_names_the_sample_its_rows_and_start():
    message = (
        r"^layout 'vllm': sample 0: found 3 rows, expected 4, one for each real token,"
        r" and nothing says at which token they start; pass start, "
    )
    for arguments in ({}, {"fill": "live", "live_routing": live(example())}):
        with pytest.raises(ValueError, match=message):
            skipping(0, **arguments)


@pytest.mark.parametrize("start", [2, [2, 2, 2], np.array([2, 2, 2])])
def test_replay_from_rollout_names_or_fills_tokens_before_the_start(start):
    ids = example()
    with pytest.raises(ValueError, match=r"sample 0, token 1, layer 0: no route \(not recorded\)"):
        skipping(2, start=start)
    assert_holds(skipping(2, start=start, fill="live", live_routing=live(ids)), ids, LEFT_PADDED)


def test_replay_from_rollout_takes_a_start_of_rows_that_end_early():
    """Tokens of a tool after the last generation have no rows."""
    ids = example()
    rows = [sample[:-1] for sample in vllm(ids, LEFT_PADDED)]
    replay = replay_from_rollout(
        rows, layout="vllm", mask=LEFT_PADDED, start=0, fill="live", live_routing=live(ids), **MODEL
    )
    assert_holds(replay, ids, LEFT_PADDED)


def test_replay_from_rollout_needs_no_start_of_a_sample_without_rows():
    ids, mask = example(), np.ones((1, 1), bool)
    replay = replay_from_rollout(
        [ids[0, :0]], layout="vllm", mask=mask, fill="live", live_routing=live(ids[:1, :1]), **MODEL
    )
    assert_holds(replay, ids[:1, :1], mask)


def test_replay_from_rollout_asks_for_a_start_that_decides_the_layers():
    """4 rows of 4 layers from token 4 on are as many ids as 8 rows of the 2 MoE layers."""
    mask = np.ones((1, 8), bool)
    ids = example(mask=mask)
    arguments = {
        "layout": "sglang",
        "mask": mask,
        "moe_layers": [1, 3],
        "fill": "live",
        "live_routing": live(ids[:, :, 1::2]),
    }
    source = [flat_from(ids[0, 4:], 4)]
    with pytest.raises(
        ValueError,
        match=r"sample 0: found 4 or 8 rows of 4 layers or 2 MoE layers x top-3 for 8 real tokens, .*pass start",
    ):
        replay_from_rollout(source, **arguments, **MODEL)
    replay = replay_from_rollout(source, start=4, **arguments, **MODEL)
    np.testing.assert_array_equal(replay.expert_ids, ids[:, :, 1::2])


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (
            [0, 0],
            r"start must be an integer that int64 holds, or 3 of them, one for each sample, not int64\[2\]",
        ),
        ([0, -1, 0], "sample 1: start=-1 is outside its 3 real tokens"),
        (4, "sample 1: start=4 is outside its 3 real tokens"),
        ([0, 2, 0], r"sample 1: it has rows 2\.\.3, but only 3 real tokens"),
    ],
)
def test_replay_from_rollout_names_a_start_that_does_not_fit(start, message):
    with pytest.raises(ValueError, match=message):
        skipping(0, start=start, fill="live", live_routing=live(example()))


def test_replay_from_rollout_rejects_a_boolean_start():
    with pytest.raises(TypeError, match=r"start must be an integer, .*, found True"):
        skipping(0, start=True, fill="live", live_routing=live(example()))


@pytest.mark.parametrize(
    ("layout", "source"),
    [
        ("sglang", sglang(example(), LEFT_PADDED, start=0)),
        ("maxtext", padded(example(), LEFT_PADDED, EMPTY)),
        ("verl", padded(example(), LEFT_PADDED, 0)),
    ],
)
def test_replay_from_rollout_refuses_a_start_against_the_recording(layout, source):
    arguments = {
        "layout": layout,
        "mask": LEFT_PADDED,
        "fill": "live",
        "live_routing": live(example()),
    } | MODEL
    assert_holds(replay_from_rollout(source, start=0, **arguments), example(), LEFT_PADDED)
    with pytest.raises(
        ValueError, match="sample 2: start=1, but the recording says that its rows start at token 0"
    ):
        replay_from_rollout(source, start=[0, 0, 1], **arguments)
