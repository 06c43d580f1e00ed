"""Counts of a replay equal those of a plain loop, every row is checked, and files keep the replay without loss."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params

from relibra_jax.contract.replay import assigned_load, check_replay, expert_load, id_dtype, sample_load
from relibra_jax.contract.replay_files import load_replay, save_replay, stored_num_experts
from relibra_jax.contract.types import EMPTY, Assignment, RoutingReplay


def random_replay(seed, *, samples=5, tokens=7, layers=3, num_experts=8, top_k=2):
    """Return a valid replay whose padding, on either side, holds numbers that must not be read."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((samples, tokens, layers, num_experts)), axis=-1)[..., :top_k]
    mask = rng.random((samples, tokens)) < 0.7
    # One route without expert 0, so that no layer or token has only zeros.
    ids[mask & (ids == 0).all(axis=(2, 3))] = num_experts - 1
    ids[~mask] = 200
    return RoutingReplay(ids.astype(np.uint8), mask)


def loop_load(replay, assignment, num_experts):
    """Count the load with a plain loop over token copies, as a reference."""
    (m_, n_, g_, b_), layers = assignment.sample.shape, replay.expert_ids.shape[2]
    load = np.zeros((m_, layers, n_, g_, num_experts), np.int64)
    for m, n, g, b in np.ndindex(m_, n_, g_, b_):
        sample = assignment.sample[m, n, g, b]
        if sample == EMPTY:
            continue
        for token in np.flatnonzero(replay.mask[sample]):
            for layer in range(layers):
                for expert in replay.expert_ids[sample, token, layer]:
                    load[m, layer, n, g, expert] += 1
    return load


def assign(seed, samples, shape=(2, 2, 2, 2)):
    """Return an assignment of every sample once, with EMPTY elsewhere."""
    places = np.full(np.prod(shape), EMPTY)
    places[:samples] = np.arange(samples)
    return Assignment(np.random.default_rng(seed).permutation(places).reshape(shape))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_expert_load_equals_a_loop(top_k, jit):
    replay, assignment = random_replay(top_k, top_k=top_k), assign(top_k, 5)
    count = jax.jit(expert_load, static_argnames="num_experts") if jit else expert_load
    load = count(replay, assignment, num_experts=8)
    assert load.dtype == np.int32
    np.testing.assert_array_equal(load, loop_load(replay, assignment, 8))


def test_expert_load_is_conserved_in_every_layer():
    replay = random_replay(3)
    copies = replay.mask.sum() * 2
    load = np.asarray(expert_load(replay, assign(3, 5), num_experts=8))
    np.testing.assert_array_equal(load.sum(axis=(0, 2, 3, 4)), [copies] * 3)
    per_sample = np.asarray(sample_load(replay, num_experts=8)).sum(axis=2)
    np.testing.assert_array_equal(per_sample, np.repeat(replay.mask.sum(axis=1)[:, None] * 2, 3, axis=1))


def test_expert_load_counts_a_sample_in_two_places_twice_and_empty_never():
    replay = random_replay(4)
    once = np.asarray(sample_load(replay, num_experts=8))
    load = np.asarray(expert_load(replay, Assignment(np.array([[[[1, 1], [EMPTY, EMPTY]]]])), num_experts=8))
    np.testing.assert_array_equal(load[0, :, 0, 0], 2 * once[1])
    assert not load[0, :, 0, 1].any()


def test_assigned_load_counts_nothing_for_places_outside_the_batch():
    once = np.asarray(sample_load(random_replay(6), num_experts=8))
    places = np.array([[[[7, 0], [EMPTY, 2**31 - 1]]], [[[-5, 5], [4, 0]]]])
    load = np.asarray(assigned_load(once, Assignment(places)))
    np.testing.assert_array_equal(load[0, :, 0, 0], once[0])
    np.testing.assert_array_equal(load[1, :, 0, 1], once[4] + once[0])
    assert load.sum() == 2 * once[0].sum() + once[4].sum()


def test_assigned_load_counts_assignments_under_vmap():
    """The load of each micro-batch is independent of the others and of the number of samples."""
    once = np.asarray(sample_load(random_replay(7), num_experts=8))
    assignments = [assign(seed, samples) for seed, samples in enumerate((5, 3, 0))]
    together = jax.vmap(assigned_load, (None, 0))(
        once, jax.tree.map(lambda *leaf: np.stack(leaf), *assignments)
    )
    for load, assignment in zip(together, assignments, strict=True):
        np.testing.assert_array_equal(load, assigned_load(once, assignment))


def test_assigned_load_takes_no_memory_for_room_on_ranks():
    """No array in the program is larger than the argument or the result, however many entries are EMPTY."""

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (variable.aval.size for variable in equation.outvars)
            for inner in jaxprs_in_params(equation.params):
                yield from sizes(inner)

    load, sample = np.zeros((5, 3, 8), np.int32), np.full((2, 2, 2, 50), EMPTY)
    program = jax.make_jaxpr(assigned_load)(load, Assignment(sample))
    assert max(sizes(program.jaxpr)) == sample.size


def test_sample_load_counts_ids_of_256_experts_in_uint8_as_themselves():
    ids = np.array([[[[255, 0]]]], np.uint8)
    load = np.asarray(sample_load(RoutingReplay(ids, np.array([[True]])), num_experts=256))
    assert np.flatnonzero(load[0, 0]).tolist() == [0, 255]


def test_sample_load_never_counts_an_id_outside_the_range_for_another():
    ids = np.array([[[[-1, 1]], [[4, 2]]]])
    load = sample_load(RoutingReplay(ids, np.array([[True, True]])), num_experts=4)
    assert np.asarray(load).tolist() == [[[0, 1, 1, 0]]]


def broken(change, **shape):
    """Return a valid replay with its ids changed in place."""
    replay = random_replay(0, **shape)
    ids, mask = replay.expert_ids.astype(np.int32), np.ones_like(replay.mask)
    ids = np.where((ids > 100), np.arange(ids.shape[3], dtype=np.int32) + 1, ids)
    change(ids)
    return RoutingReplay(ids, mask)


def put(place, value):
    def change(ids):
        ids[place] = value

    return change


FAULTS = {
    "range": (put((1, 4, 2, 0), 8), r"^sample 1, token 4, layer 2: expert id 8 is outside 0\.\.7 \(a phys"),
    "empty": (put((1, 4, 2, 0), EMPTY), r"^sample 1, token 4, layer 2: expert id -1 is outside 0\.\.7$"),
    "twice": (put((1, 4, 2), 6), r"^sample 1, token 4, layer 2: expert 6 appears twice in \[6, 6\]"),
    "zero layer": (put(np.s_[:, :, 1], 0), "^sample 0, token 0, layer 1: only zeros for every token"),
    "zero token": (put((3, 0), 0), "^sample 3, token 0, layer 0: only zeros in every layer"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_check_replay_names_a_fault_with_sample_token_and_layer(name):
    change, message = FAULTS[name]
    with pytest.raises(ValueError, match=message):
        check_replay(broken(change), num_experts=8)


def test_check_replay_places_a_fault_by_position_behind_left_padding():
    mask = np.array([[False, True], [False, True]])
    ids = np.array([[[[9, 9]], [[0, 1]]], [[[9, 9]], [[2, 2]]]])
    with pytest.raises(ValueError, match="sample 1, token 1, layer 0: expert 2 appears twice"):
        check_replay(RoutingReplay(ids, mask), num_experts=4)


def test_check_replay_accepts_only_top_1_zeros_that_chance_explains():
    few, many = np.zeros((1, 2, 1, 1), np.uint8), np.zeros((4, 20, 1, 1), np.uint8)
    check_replay(RoutingReplay(few, np.ones((1, 2), bool)), num_experts=8)
    with pytest.raises(ValueError, match="layer 0: only zeros for every token"):
        check_replay(RoutingReplay(many, np.ones((4, 20), bool)), num_experts=8)
    with pytest.raises(ValueError, match="token 1, layer 0: only zeros in every layer"):
        check_replay(broken(put((0, 1), 0), layers=24, top_k=1), num_experts=8)


@pytest.mark.parametrize(
    ("ids", "num_experts", "message"),
    [
        (np.zeros((1, 2, 1, 1)), 4, "must be integers"),
        (np.zeros((1, 2, 1, 5), int), 4, "expert_ids has 1 layers of top-5, but needs at least"),
        (np.zeros((1, 2, 0, 1), int), 4, "0 layers of top-1"),
        (np.zeros((1, 3, 1, 1), int), 4, r"mask must be bool\[1, 3\] like expert_ids, not bool\[1, 2\]"),
        (np.zeros((1, 2, 1, 1), np.uint8), 257, "uint8 cannot hold the ids of num_experts=257"),
    ],
)
def test_check_replay_names_axes_and_dtypes_that_do_not_fit(ids, num_experts, message):
    with pytest.raises(ValueError, match=message):
        check_replay(RoutingReplay(ids, np.ones((1, 2), bool)), num_experts=num_experts)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    samples=st.integers(1, 4),
    tokens=st.integers(0, 5),
    num_experts=st.sampled_from([2, 8, 256, 257, 70_000]),
)
def test_load_replay_restores_any_saved_replay(tmp_path_factory, seed, samples, tokens, num_experts):
    rng = np.random.default_rng(seed)
    mask = rng.random((samples, tokens)) < 0.6
    first = rng.integers(0, num_experts, (samples, tokens, 2))
    ids = np.stack([first, (first + rng.integers(1, num_experts, first.shape)) % num_experts], axis=-1)
    path = tmp_path_factory.mktemp("replay") / "batch.npz"
    save_replay(path, RoutingReplay(ids, mask), num_experts=num_experts)
    loaded, loaded_experts = load_replay(path)
    assert (loaded_experts, stored_num_experts(path)) == (num_experts, num_experts)
    assert loaded.expert_ids.dtype == id_dtype(num_experts)
    np.testing.assert_array_equal(loaded.expert_ids[loaded.mask], ids[mask])
    np.testing.assert_array_equal(loaded.mask.sum(axis=1), mask.sum(axis=1))
    assert (np.diff(loaded.mask.astype(int), axis=1) <= 0).all()


@pytest.fixture
def saved(tmp_path):
    replay = random_replay(1)
    save_replay(tmp_path / "batch.npz", replay, num_experts=8)
    return replay, tmp_path / "batch.npz"


def test_save_replay_leaves_nothing_beside_the_file(saved):
    _, path = saved
    assert [entry.name for entry in path.parent.iterdir()] == ["batch.npz"]


def test_save_replay_keeps_the_old_file_if_interrupted(saved, monkeypatch):
    replay, path = saved
    before = path.read_bytes()
    monkeypatch.setattr(np, "savez_compressed", lambda file, **_: file.write(b"half") and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_replay(path, replay, num_experts=8)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["batch.npz"]


def test_save_replay_does_not_save_an_invalid_replay(tmp_path):
    with pytest.raises(ValueError, match="appears twice"):
        save_replay(tmp_path / "batch.npz", broken(put((0, 0, 0), 3)), num_experts=8)
    assert not list(tmp_path.iterdir())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_load_replay_never_gives_another_replay_from_a_damaged_file(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("replay") / "batch.npz"
    save_replay(path, random_replay(1), num_experts=9)
    whole, original = path.read_bytes(), load_replay(path)
    if data.draw(st.booleans(), label="truncate"):
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    else:
        place = data.draw(st.integers(0, len(whole) - 1))
        flipped = whole[place] ^ data.draw(st.integers(1, 255))
        path.write_bytes(whole[:place] + bytes([flipped]) + whole[place + 1 :])
    try:
        replay, num_experts = load_replay(path)
    except ValueError as error:
        if str(path) not in str(error):
            raise
    else:
        np.testing.assert_array_equal(replay.expert_ids, original[0].expert_ids)
        np.testing.assert_array_equal(replay.mask, original[0].mask)
        assert num_experts == original[1]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"lengths": [1]}, "there is no array routed_experts"),
        ({"routed_experts": np.zeros((2, 1, 1), int), "lengths": [1]}, "lengths sum to 1, .* has 2 rows"),
        (
            {"routed_experts": np.zeros((1, 1, 1), int), "lengths": [2, -1]},
            "sample 0 has length 2, .* has 1 rows",
        ),
        ({"routed_experts": np.zeros((1, 1)), "lengths": [1]}, "routed_experts must be integers of 3 axes"),
        ({"routed_experts": np.zeros((0, 1, 1), int), "lengths": [0]}, "neither num_experts nor an id"),
        (
            {"routed_experts": np.array([[[1, 1]]]), "lengths": [1]},
            "token 0, layer 0: expert 1 appears twice",
        ),
        (
            {"routed_experts": np.array([[[1, 2]]]), "lengths": [1], "num_experts": 2},
            "expert id 2 is outside",
        ),
        ({"routed_experts": np.array([[[None]]]), "lengths": [1]}, "not a whole .npz file"),
    ],
)
def test_load_replay_refuses_a_file_that_is_no_replay_by_name(tmp_path, arrays, message):
    path = tmp_path / "other.npz"
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=rf"other\.npz: .*{message}"):
        load_replay(path)


def test_load_replay_raises_an_os_error_for_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_replay(tmp_path / "none.npz")


def test_stored_num_experts_is_none_if_load_replay_infers_the_number(tmp_path):
    path = tmp_path / "trace.npz"
    np.savez(path, routed_experts=np.array([[[2, 5]]], np.uint8), lengths=[1], dataset=["one"])
    assert load_replay(path)[1] == 6
    assert stored_num_experts(path) is None


@pytest.mark.slow
def test_load_replay_loads_the_real_trace_whose_load_is_conserved(shared):
    path = shared / "traces" / "gptoss20b_rollouts.npz"
    replay, num_experts = load_replay(path)
    assert (num_experts, stored_num_experts(path)) == (32, None)
    assert replay.expert_ids.shape == (352, 511, 24, 4)
    load = np.asarray(sample_load(replay, num_experts=32))
    np.testing.assert_array_equal(load.sum(axis=(0, 2)), [106_359 * 4] * 24)
