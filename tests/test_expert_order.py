"""Tests of homes as an order of experts: positions, ids, and sequences of reorders."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relibra_jax.integrations.expert_order import logical_order, map_ids, source_positions

LAYERS, EXPERTS = 3, 8
RNG = np.random.default_rng(0)
LOGICAL = logical_order(LAYERS, EXPERTS)


def some_homes():
    return np.stack([RNG.permutation(EXPERTS) for _ in range(LAYERS)]).astype(np.int32)


FIRST, SECOND = some_homes(), some_homes()
IDS = np.stack([[RNG.choice(EXPERTS, 2, replace=False) for _ in range(LAYERS)] for _ in range(20)])


def test_source_positions_put_an_expert_at_its_home():
    order = source_positions(LOGICAL, FIRST)
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            assert order[layer, FIRST[layer, expert]] == expert


def test_source_positions_of_two_reorders_equal_those_of_one():
    experts = np.take_along_axis(LOGICAL, source_positions(LOGICAL, FIRST), -1)
    experts = np.take_along_axis(experts, source_positions(FIRST, SECOND), -1)
    assert np.array_equal(experts, source_positions(LOGICAL, SECOND))


def test_map_ids_names_the_same_experts_under_other_homes():
    mapped = map_ids(IDS, LOGICAL, FIRST)
    assert mapped.dtype == IDS.dtype
    for layer in range(LAYERS):
        assert np.array_equal(mapped[:, layer], FIRST[layer][IDS[:, layer]])
    assert np.array_equal(map_ids(mapped, FIRST, SECOND), map_ids(IDS, LOGICAL, SECOND))
    assert np.array_equal(map_ids(mapped, FIRST, LOGICAL), IDS)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32])
def test_map_ids_keeps_dtype_and_empty_entries(dtype):
    ids = IDS.astype(dtype)
    if np.issubdtype(dtype, np.signedinteger):
        ids[3:7] = -1
    mapped = map_ids(ids, LOGICAL, FIRST)
    assert mapped.dtype == dtype
    assert np.array_equal(mapped == -1, ids == -1)
    on_device = jax.jit(map_ids)(jnp.asarray(ids), LOGICAL, FIRST)
    assert on_device.dtype == dtype
    assert np.array_equal(on_device, mapped)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (LOGICAL, FIRST[:2], "before has 3 layers and after has 2"),
        (LOGICAL[:, :4], FIRST, r"before: expected integers \[L, 8\], found int32\[3, 4\]"),
        (LOGICAL, FIRST * 0, "after, layer 0, home slot 0: owned by 8 experts, not by one"),
        (LOGICAL - 1, FIRST, r"before, layer 0: home slot -1 is outside 0..7"),
    ],
)
def test_source_positions_rejects_mismatched_homes(before, after, message):
    with pytest.raises(ValueError, match=message):
        source_positions(before, after)


@pytest.mark.parametrize("wrong", [8, -2])
def test_map_ids_rejects_an_id_that_is_not_an_expert(wrong):
    ids = IDS.copy()
    ids[4, 1, 0] = wrong
    with pytest.raises(ValueError, match=rf"ids\[4, 1, 0\]: {wrong} is outside 0..7 and not -1"):
        map_ids(ids, LOGICAL, FIRST)


@pytest.mark.parametrize(
    ("ids", "actual"), [(IDS[:, :2], r"int64\[20, 2, 2\]"), (IDS * 1.0, r"float64\[20, 3, 2\]")]
)
def test_map_ids_refuses_ids_of_another_shape_or_dtype(ids, actual):
    with pytest.raises(ValueError, match=rf"ids: expected integers \[..., L=3, K\], found {actual}"):
        map_ids(ids, LOGICAL, FIRST)
