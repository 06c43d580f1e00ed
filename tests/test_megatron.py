"""Tests of reordering Megatron's local experts: state dicts, and moves between ranks."""

import copy

import numpy as np
import pytest

from relibra_jax.integrations.expert_order import logical_order, map_ids
from relibra_jax.integrations.megatron import expert_moves, reorder_state_dicts

LAYERS, EXPERTS, RANKS, WIDTH = 3, 8, 4, 6
LOCAL = EXPERTS // RANKS
NUMBERS = (1, 2, 5)  # decoder layers with experts; layer 0 is dense
LOGICAL = logical_order(LAYERS, EXPERTS)
RNG = np.random.default_rng(0)
FIRST, SECOND = (np.stack([RNG.permutation(EXPERTS) for _ in range(LAYERS)]) for _ in range(2))

SEQUENTIAL = "experts.local_experts.{local}.linear_fc1.weight"
GROUPED = "experts.linear_fc1.weight{local}"


def state_dicts(name=SEQUENTIAL, prefix="module."):
    """Return the state dicts of all ranks. The values of expert weights and router rows encode layer and expert."""

    def rank_state(rank):
        state = {f"{prefix}decoder.layers.0.mlp.linear_fc1.weight": np.ones(3)}
        for row, number in enumerate(NUMBERS):
            block = f"{prefix}decoder.layers.{number}.mlp."
            state[f"{block}router.weight"] = np.tile(np.arange(EXPERTS)[:, None] + 10.0 * row, WIDTH)
            state[f"{block}router.expert_bias"] = np.arange(EXPERTS) + 10.0 * row
            state[f"{block}shared_experts.linear_fc1.weight"] = np.ones(3)
            state[f"{block}experts.linear_fc1._extra_state"] = None
            for local in range(LOCAL):
                weight = np.full((2, WIDTH), rank * LOCAL + local + 10.0 * row)
                state[block + name.format(local=local)] = weight
        return state

    return [rank_state(rank) for rank in range(RANKS)]


def assert_same(result, expected):
    for a, b in zip(result, expected, strict=True):
        assert list(a) == list(b)
        assert all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", [SEQUENTIAL, GROUPED])
def test_reorder_state_dicts_puts_experts_and_router_rows_at_their_homes(name):
    old = state_dicts(name)
    new = reorder_state_dicts(old, LOGICAL, FIRST, layers=NUMBERS)
    for row, number in enumerate(NUMBERS):
        for expert, home in enumerate(FIRST[row]):
            rank, local = divmod(home, LOCAL)
            block = f"module.decoder.layers.{number}.mlp."
            assert (new[rank][block + name.format(local=local)] == expert + 10 * row).all()
            for state in new:
                assert (state[f"{block}router.weight"][home] == expert + 10 * row).all()
                assert state[f"{block}router.expert_bias"][home] == expert + 10 * row
    assert_same(old, state_dicts(name))
    twice = reorder_state_dicts(new, FIRST, SECOND, layers=NUMBERS)
    assert_same(twice, reorder_state_dicts(old, LOGICAL, SECOND, layers=NUMBERS))
    assert_same(reorder_state_dicts(twice, SECOND, LOGICAL, layers=NUMBERS), old)


def test_reorder_state_dicts_values_can_be_written_over_the_old_ones():
    live = state_dicts()
    expected = reorder_state_dicts(state_dicts(), LOGICAL, FIRST, layers=NUMBERS)
    for state, new in zip(live, reorder_state_dicts(live, LOGICAL, FIRST, layers=NUMBERS), strict=True):
        for name, value in new.items():
            if value is not None:
                state[name][...] = value
    assert_same(live, expected)


def test_expert_moves_give_ranks_the_experts_of_reorder_state_dicts():
    ranks = [{key: value for key, value in state.items() if ".experts." in key} for state in state_dicts()]
    moves = expert_moves(LOGICAL, FIRST, num_ranks=RANKS)

    def name(layer, local):
        return f"module.decoder.layers.{NUMBERS[layer]}.mlp.{SEQUENTIAL.format(local=local)}"

    # Each pair of ranks has a first-in first-out channel, as with send and receive.
    channels = {}
    for rank, state in enumerate(ranks):
        for layer, source, local, target, _ in zip(*moves, strict=True):
            if source == rank:
                channels.setdefault((source, target), []).append(state[name(layer, local)].copy())
    for rank, state in enumerate(ranks):
        for layer, source, _, target, local in zip(*moves, strict=True):
            if target == rank:
                state[name(layer, local)][...] = channels[source, target].pop(0)
    assert not any(channels.values())
    expected = reorder_state_dicts(state_dicts(), LOGICAL, FIRST, layers=NUMBERS)
    assert_same(ranks, [{key: state[key] for key in ranks[0]} for state in expected])


def test_expert_moves_leave_out_what_stays():
    home = LOGICAL.copy()
    home[1, [2, 7]] = home[1, [7, 2]]
    moves = expert_moves(LOGICAL, home, num_ranks=RANKS)
    assert np.stack(moves, 1).tolist() == [[1, 3, 1, 1, 0], [1, 1, 0, 3, 1]]
    assert len(expert_moves(FIRST, FIRST, num_ranks=RANKS).layer) == 0


BLOCK = "module.decoder.layers.1.mlp."


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{BLOCK}experts.weight1": np.ones(2)}, "rank 1, .*experts.weight1: looks like"),
        ({f"{BLOCK}router.other": np.ones(8)}, "rank 1, .*router.other: looks like"),
        ({f"{BLOCK}experts.linear_fc1._extra_state": np.ones(4)}, "rank 1, .*_extra_state: looks like"),
        ({f"mtp.layers.0.mlp.{SEQUENTIAL.format(local=0)}": np.ones(2)}, "rank 1, mtp.layers.0.* looks like"),
        (
            {f"{BLOCK}{SEQUENTIAL.format(local=2)}": np.ones(2)},
            "rank 1, .*: a rank must have 2 local experts",
        ),
        (
            {f"{BLOCK}{SEQUENTIAL.format(local=0)}": None},
            r"rank 1, .*local_experts.\*.*: found 1 local experts, expected 2",
        ),
        ({f"{BLOCK}experts.linear_fc2.bias{i}": np.ones(2) for i in (0, 1)}, "which rank 1 needs as"),
        ({f"{BLOCK}router.weight": np.ones((4, 2))}, r"router.weight: expected 8 rows, found \[4, 2\]"),
        ({"decoder.layers.7.mlp.router.weight": np.ones(8)}, r"layer 7 is not in layers \[1, 2, 5\]"),
    ],
)
def test_reorder_state_dicts_names_unknown_values(changes, message):
    states = state_dicts()
    states[1] = {k: v for k, v in {**states[1], **changes}.items() if v is not None or k not in changes}
    with pytest.raises(ValueError, match=message):
        reorder_state_dicts(states, LOGICAL, FIRST, layers=NUMBERS)


@pytest.mark.parametrize(
    ("layers", "ranks", "message"),
    [
        ((1, 2), RANKS, r"layers=\[1, 2\]: expected 3 different numbers"),
        ((1, 2, 2), RANKS, r"layers=\[1, 2, 2\]: expected 3 different numbers"),
        ((1, 2, 5, 6), RANKS, "expected 3 different numbers"),
        (NUMBERS, 3, "8 experts must divide evenly over 3 ranks"),
    ],
)
def test_reorder_state_dicts_rejects_mismatched_layers_and_ranks(layers, ranks, message):
    with pytest.raises(ValueError, match=message):
        reorder_state_dicts(state_dicts()[:ranks], LOGICAL, FIRST, layers=layers)


def test_reorder_state_dicts_refuses_a_layer_without_experts():
    states = [{k: v for k, v in state.items() if "layers.5." not in k} for state in state_dicts()]
    with pytest.raises(ValueError, match="rank 0: layer 5 has neither a router nor experts"):
        reorder_state_dicts(states, LOGICAL, FIRST, layers=NUMBERS)


def test_torch_reorder_lets_a_model_train_on_bit_for_bit():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from experiments.examples import torch_reorder

    torch.manual_seed(0)
    ranks = torch_reorder.rank_modules(LAYERS, EXPERTS, RANKS)
    optimizer = torch_reorder.adam(ranks)
    x = torch.randn(200, torch_reorder.WIDTH)
    ids = np.stack([[RNG.choice(EXPERTS, 3, replace=False) for _ in range(LAYERS)] for _ in range(200)])
    torch_reorder.step(ranks, optimizer, x, ids)
    moved, moved_optimizer = copy.deepcopy((ranks, optimizer))
    before = LOGICAL
    for after in (FIRST, SECOND):
        torch_reorder.reorder(moved, moved_optimizer, before, after)
        expected = torch_reorder.step(ranks, optimizer, x, ids)
        result = torch_reorder.step(moved, moved_optimizer, x, map_ids(ids, LOGICAL, after))
        assert torch.equal(result, expected)
        before = after
    live = torch_reorder.training_state(moved, moved_optimizer)
    assert torch_reorder.differences(live, torch_reorder.training_state(ranks, optimizer)) > 0
    torch_reorder.reorder(moved, moved_optimizer, before, LOGICAL)
    back = torch_reorder.training_state(moved, moved_optimizer)
    assert torch_reorder.differences(back, torch_reorder.training_state(ranks, optimizer)) == 0


@pytest.mark.slow
def test_torch_reorder_finds_no_difference(capsys):
    pytest.importorskip("torch", reason="torch is not installed")
    from experiments.examples import torch_reorder

    counts = torch_reorder.main()
    assert (counts["outputs"], counts["state"]) == (0, 0)
    assert counts["unmapped"] > 0
    assert "0 of 131072" in capsys.readouterr().out
