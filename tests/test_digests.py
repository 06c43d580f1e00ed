"""Tests of digests: they depend on values and logical places only, not on the layout, and detect changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from relibra_jax.execution.digests import device_sums, logical_digests
from relibra_jax.execution.expert_labels import ExpertLeaf

LAYERS, EXPERTS = 3, 16
NO_HOMES = np.zeros((0, 0), int)
FOUR_BITS = ["int4", "uint4", "float4_e2m1fn"]
DTYPES = [
    *("bool", "int8", "uint16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64"),
    *("complex128", "float8_e4m3fn", "float8_e5m2", *FOUR_BITS),
]
SHAPES = [(), (5,), (3, 4), (0, 4), (2, 1, 3)]


def digest(array, layers=None, home=NO_HOMES):
    [actual] = logical_digests({"array": ExpertLeaf((), array, layers)}, home).values()
    return actual


def bits_of(dtype):
    """Return the number of bits of a value's lowest byte that its dtype uses."""
    return {"bool": 1, **dict.fromkeys(FOUR_BITS, 4)}.get(jnp.dtype(dtype).name, 8)


def random_bits(rng, shape, dtype):
    dtype = jnp.dtype(dtype)
    if dtype.itemsize == 1:
        return rng.integers(0, 2 ** bits_of(dtype), (*shape, 1), np.uint8).view(dtype)[..., 0]
    return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.reshape(jax.devices(), (2, 4)), ("node", "local"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_logical_digests_of_numpy_and_jax_agree(dtype):
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        array = np.asarray(random_bits(rng, shape, dtype))
        with jax.enable_x64(True):
            expected = digest(jnp.asarray(array))
        assert digest(array) == expected
        if jnp.dtype(dtype).name not in ("int64", "float64", "complex128"):
            assert digest(jnp.asarray(array)) == expected


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
@pytest.mark.parametrize(
    "spec", [P(), P(("node", "local")), P("local", None, "node"), P(None, ("local", "node"))], ids=str
)
def test_logical_digests_do_not_depend_on_sharding(spec, kind, mesh):
    array = random_bits(np.random.default_rng(1), (8, 16, 6), "bfloat16")
    sharding = NamedSharding(mesh, spec, memory_kind=kind)
    assert digest(jax.device_put(array, sharding)) == digest(array)


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
@pytest.mark.parametrize("layers", [1, range(1, 3)], ids=["one layer", "stacked"])
@pytest.mark.parametrize("ranks", [(2, 4), (4, 2), (1, 8)], ids=str)
def test_logical_digests_do_not_depend_on_homes_and_ranks(ranks, layers, kind):
    rng = np.random.default_rng(2)
    lead = (len(layers),) if isinstance(layers, range) else ()
    logical = random_bits(rng, (*lead, EXPERTS, 3, 5), "float32")
    mesh = Mesh(np.reshape(jax.devices(), ranks), ("node", "local"))
    sharding = NamedSharding(mesh, P(*[None] * len(lead), "node", "local"), memory_kind=kind)
    for _ in range(2):
        home = np.stack([rng.permutation(EXPERTS) for _ in range(LAYERS)])
        slots = np.empty_like(logical)
        if lead:
            for row, layer in enumerate(layers):
                slots[row, home[layer]] = logical[row]
        else:
            slots[home[layers]] = logical
        array = jax.device_put(slots.reshape(*lead, *ranks, -1, 3, 5), sharding)
        assert digest(array, layers, home) == digest(logical)


def test_logical_digests_of_large_arrays_in_blocks_agree(mesh):
    array = random_bits(np.random.default_rng(3), (700, 1000), "int8")
    assert digest(array) == digest(jnp.asarray(array))


@st.composite
def arrays(draw, dims):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=dims, max_size=3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return np.asarray(random_bits(rng, shape, draw(st.sampled_from(DTYPES))))


@given(st.data())
def test_logical_digests_change_with_any_bit(data):
    array = data.draw(arrays(0))
    raw = np.atleast_1d(array).copy()
    places = raw.reshape(-1).view(np.uint8)
    places[data.draw(st.integers(0, places.size - 1))] ^= 1 << data.draw(
        st.integers(0, bits_of(array.dtype) - 1)
    )
    assert digest(raw.reshape(array.shape)) != digest(array)


@given(st.data())
def test_logical_digests_change_with_swapped_rows(data):
    array = data.draw(arrays(1))
    axis = data.draw(st.integers(0, array.ndim - 1))
    one, other = (data.draw(st.integers(0, array.shape[axis] - 1)) for _ in range(2))
    order = np.arange(array.shape[axis])
    order[[one, other]] = order[[other, one]]
    swapped = np.take(array, order, axis)
    assert (digest(swapped) == digest(array)) == (swapped.tobytes() == array.tobytes())


@given(st.integers(0, 2**32), st.integers(1, 500))
def test_logical_digests_change_in_both_sums_with_noise(seed, size):
    """Noise changes each of the two sums, so a digest is as strong as 64 bits and not 32."""
    rng = np.random.default_rng(seed)
    one, other = (digest(random_bits(rng, (size,), "float32")) for _ in range(2))
    assert one[:8] != other[:8]
    assert one[8:] != other[8:]
    assert one[:8] != one[8:]


def test_device_sums_neither_copy_nor_gather(mesh):
    sharding = NamedSharding(mesh, P(None, "node", "local"))
    array = jax.ShapeDtypeStruct((4, 2, 4, 2, 64, 128), jnp.float32, sharding=sharding)
    experts = jax.ShapeDtypeStruct((4, 2, 4, 2), jnp.uint32)
    program = device_sums.lower(array, experts, np.int32(0), stacked=True, on_host=False).compile()
    share = 4 * 2 * 64 * 128 * 4
    assert program.memory_analysis().temp_size_in_bytes < share / 100
