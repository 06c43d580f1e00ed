"""Tests that expert state has one owner: what belongs to another plan, step or order is refused, or right, or NaN."""

import contextlib
import functools
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.expert_state import EXPERTS, PUSH, TOPOLOGY, WIDTH, Run, data, gradients_of

from relibra_jax.contract.types import EMPTY
from relibra_jax.execution import migration as migration_module
from relibra_jax.execution.migration import MoveError
from relibra_jax.nnx import from_logical, get_homes, logical_params, reorder_experts, set_homes
from relibra_jax.nnx.checks import check_experts_in_place
from relibra_jax.support.atomic_write import write_json
from relibra_jax.support.interrupts import signals_deferred


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


# The owner of moments, copies and orders


@pytest.mark.long
def test_prepare_needs_the_optimizer_once_it_was_given():
    """Without it, experts would move and their moments would not."""
    run = Run()
    run.train(0, 1)
    before, home = run.logical(), get_homes(run.model)
    with pytest.raises(
        ValueError, match="the state of an optimizer must move with the experts of this balancer: pass it"
    ):
        run.prepare(1, optimizer=False)
    assert_equal(run.logical(), before)
    run.prepare(1)
    assert (get_homes(run.model) != home).any()
    assert_equal(run.logical(), before)
    run.balancer.discard()
    run.train(2, 3)


def test_an_optimizer_with_moments_is_refused_after_batches_without_it():
    run = Run()
    run.prepare(0, optimizer=False)
    run.prepare(1)  # it has no moments yet
    run = Run()
    run.prepare(0, optimizer=False)
    run.optimizer.step[...] += 1
    with pytest.raises(
        ValueError, match="has made 1 steps, but an earlier batch moved the experts without its state"
    ):
        run.prepare(1)


def test_parameters_put_back_over_a_reorder_are_refused():
    run = Run()
    run.train(0, 1)
    physical, kept = jax.tree.map(jnp.copy, nnx.state(run.model, nnx.Param)), logical_params(run.model)
    homes = get_homes(run.model)
    run.train(1, 2)
    assert (get_homes(run.model) != homes).any()
    nnx.update(run.model, physical)
    with pytest.raises(
        ValueError, match=r"layer 0: the weights at the home of expert \d+ are those that expert"
    ):
        run.prepare(2)
    from_logical(run.model, kept)
    run.prepare(2)
    assert_equal(logical_params(run.model), kept)


@pytest.mark.slow
def test_training_is_never_taken_for_a_mistake():
    """Six batches in which every weight changes by as much as it is large in the mean."""
    run = Run()
    run.optimizer = nnx.Optimizer(run.model, optax.adam(0.2), wrt=nnx.Param)
    for number in range(6):
        run.step(run.prepare(number % 4), number % 4)


@pytest.mark.parametrize(("share", "refused"), [(0.15, True), (0.3, False)])
def test_the_marks_of_experts_tell_them_apart(share, refused):
    """Experts that swapped places are found if they have changed by less than a fifth of what tells them apart."""
    before = np.random.default_rng(0).normal(size=(2, 8, 64)).astype(np.float32)
    after = before.copy()
    after[1, [2, 5]] = before[1, [5, 2]] + share * (before[1, [2, 5]] - before[1, [5, 2]])
    if refused:
        with pytest.raises(
            ValueError, match="layer 1: the weights at the home of expert 2 are those that expert 5"
        ):
            check_experts_in_place(before, after)
    else:
        check_experts_in_place(before, after)
    check_experts_in_place(before, before + 0.1 * after)


def test_logical_state_goes_to_other_homes_and_back():
    """Parameters and moments that are kept in logical order serve a model whose experts are elsewhere."""
    run, other = Run(), Run()
    run.train(0, 2)
    params, state = run.logical()
    other.train(2, 3)
    assert (get_homes(run.model) != get_homes(other.model)).any()
    from_logical(other.model, params, optimizer=other.optimizer, optimizer_state=state)
    assert_equal(other.logical(), (params, state))
    assert params["layers.0.experts"].shape == (EXPERTS, 3, WIDTH, 5)
    stored = run.model.layers[0].experts[...].reshape(EXPERTS, 3, WIDTH, 5)
    np.testing.assert_array_equal(params["layers.0.experts"], stored[get_homes(run.model)[0]])


def test_from_logical_shares_no_memory_with_what_it_takes():
    """Neither host arrays nor those of another mesh are donated, or seen by the model when they change later."""
    run, wide = Run(), Run(axes={"data": 2})
    for params in (jax.tree.map(np.array, logical_params(wide.model)), logical_params(wide.model)):
        from_logical(run.model, params)
        expected = run.logical()
        for name, array in params.items():
            if isinstance(array, np.ndarray):
                array *= 2
            else:
                assert np.isfinite(array).all(), name
        assert_equal(run.logical(), expected)


def test_from_logical_refuses_what_does_not_fit():
    run = Run()
    params = logical_params(run.model)
    before = run.logical()
    for change, message in (
        (
            {"layers.0.experts": params["layers.0.experts"][1:]},
            r"params, layers.0.experts: expected shape \(8, 3",
        ),
        ({"more": np.zeros(2)}, "params: more is not in the model"),
    ):
        with pytest.raises(ValueError, match=message):
            from_logical(run.model, params | change)
    del params["layers.1.router"]
    with pytest.raises(ValueError, match=r"params: layers\.1\.router is missing"):
        from_logical(run.model, params)
    with pytest.raises(ValueError, match="belong together"):
        from_logical(run.model, logical_params(run.model), optimizer=run.optimizer)
    assert_equal(run.logical(), before)


def test_copies_move_with_the_model():
    """A moving average of the weights stays in the order of the model, and so equals one in logical order."""
    run = Run()
    run.train(0, 1)
    average = nnx.clone(run.model)
    nnx.update(average, jax.tree.map(jnp.copy, nnx.state(average)))
    expected = jax.tree.map(np.asarray, logical_params(average))
    for number in (1, 2, 3):
        run.train(number, number + 1, copies=[average])
        params = nnx.state(run.model, nnx.Param)
        nnx.update(
            average,
            jax.tree.map(lambda old, new: 0.75 * old + 0.25 * new, nnx.state(average, nnx.Param), params),
        )
        new = jax.tree.map(np.asarray, logical_params(run.model))
        expected = jax.tree.map(
            lambda old, new: np.float32(0.75) * old + np.float32(0.25) * new, expected, new
        )
    actual = jax.tree.map(np.asarray, logical_params(average))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), actual, expected)
    left_behind = nnx.clone(run.model)
    set_homes(left_behind, np.roll(get_homes(run.model), 1, 1))
    with pytest.raises(ValueError, match=r"copies\[0\] has its experts at other homes"):
        run.prepare(0, copies=[left_behind])


# What belongs to another plan or step


def test_outdated_residents_give_nan_and_need_a_step():
    run = Run()
    batch = run.prepare(0)
    sequences = batch.to_ranks(data()[0])
    residents = PUSH(run.model, run.optimizer, batch)
    gradients = nnx.jit(gradients_of)
    step = run.optimizer.step[...]
    assert all_finite(gradients(run.model, batch, sequences, residents, step))
    assert has_nan(gradients(run.model, batch, sequences, residents, step + 1))
    with pytest.raises(ValueError, match=r"without step: pass step=optimizer.step"):
        gradients(run.model, batch, sequences, residents, None)
    with pytest.raises(ValueError, match="do not say when they were pushed"):
        gradients(run.model, batch, sequences, residents._replace(step=None), step)
    run.balancer.discard()
    other = run.prepare(1)
    experts = other.batch_plan.plan.slot_expert[0, ..., TOPOLOGY.home_slots : TOPOLOGY.held_slots]
    assert (np.asarray(experts) != np.asarray(residents.experts)).any()
    assert has_nan(gradients(run.model, other, other.to_ranks(data()[1]), residents, step))


def all_finite(tree):
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(experts_of(tree)))


def has_nan(tree):
    """Return whether the gradient of every layer has NaN; that of an expert without tokens is zero."""
    return all(np.isnan(leaf).any() for leaf in jax.tree.leaves(experts_of(tree)))


def experts_of(gradients):
    return [layer["experts"][...] for layer in gradients["layers"].values()]


def test_experts_of_another_micro_batch_give_nan():
    """Replicas that were fetched under another micro-batch's plan, and residents that another plan has."""
    run = Run()
    batch = run.prepare(0)
    layers, (x, replay) = batch.layers(), batch.to_ranks(data()[0])
    residents = PUSH(run.model, run.optimizer, batch)._replace(step=None).layer(0)
    moe, parallel = run.model.layers[0], batch.parallel
    slots = np.asarray(layers.slot_expert)
    assert (slots[0, 0] != slots[1, 0]).any(), "the micro-batches must differ"

    @nnx.jit
    def call(moe, x, ids, mask, fetched, layer):
        experts, x = moe.fetch(x, fetched, parallel)
        return moe(x, ids, layer, parallel=parallel, experts=experts, mask=mask).output

    def run_layer(fetched, number=0):
        ids, mask = replay.expert_ids[number, ..., 0, :], replay.mask[number]
        layer = layers.layer(number).layer(0)._replace(residents=residents)
        return np.asarray(call(moe, x[number], ids, mask, fetched, layer))

    def prepared(number, residents=residents):
        return layers.layer(number).layer(0)._replace(residents=residents)

    assert np.isfinite(run_layer(prepared(0))).all()
    assert np.isnan(run_layer(prepared(1))).all()
    swapped = np.array(residents.experts)[:, ::-1]
    assert (swapped != np.asarray(residents.experts)).any()
    other = residents._replace(experts=jnp.asarray(swapped))
    assert np.isnan(run_layer(prepared(0, other))).all()


# Moves are transactions


def moved_homes(run):
    return np.roll(get_homes(run.model), 3, axis=1)


@pytest.mark.parametrize("fails_at", [0, 1, 5])
def test_a_move_that_fails_leaves_everything_as_it_was(monkeypatch, fails_at):
    """Whichever of the moves fails: parameters, moments and copies are at their old homes, bit for bit."""
    run = Run()
    run.train(0, 1)
    before, home, count = run.logical(), get_homes(run.model), iter(range(10**6))
    real = migration_module.migration_step

    def failing(sharding, *, stacked):
        step = real(sharding, stacked=stacked)

        def run_step(*arguments):
            if next(count) == fails_at:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
            return step(*arguments)

        return run_step

    monkeypatch.setattr(migration_module, "migration_step", failing)
    with pytest.raises(
        MoveError, match=r"^RESOURCE_EXHAUSTED.*at move .*; all of them are at their old homes"
    ):
        run.prepare(1)
    monkeypatch.undo()
    np.testing.assert_array_equal(get_homes(run.model), home)
    assert_equal(run.logical(), before)
    run.train(1, 3)


@pytest.mark.parametrize("donated", [False, True])
def test_a_move_that_cannot_be_undone_leaves_a_model_that_does_not_run(monkeypatch, donated):
    """A device that fails for good, before or after it has taken the memory of the experts that move."""
    run = Run()
    run.train(0, 1)
    real, calls = migration_module.migration_step, []

    def failing(sharding, *, stacked):
        step = real(sharding, stacked=stacked)
        calls.append(stacked)

        def run_step(*arguments):
            if len(calls) <= 2:
                return step(*arguments)
            if donated and len(calls) == 3:
                step(*arguments)
            raise jax.errors.JaxRuntimeError("INTERNAL: a device was lost")

        return run_step

    monkeypatch.setattr(migration_module, "migration_step", failing)
    with pytest.raises(
        MoveError, match="a device was lost; moving experts failed at move 3, and some of them are lost"
    ):
        run.prepare(1)
    assert (get_homes(run.model) == EMPTY).all()
    with pytest.raises(ValueError, match="the model has lost experts when they moved: restore"):
        run.prepare(1)


def test_interrupts_wait_until_experts_have_moved(monkeypatch):
    """Ctrl-C at every moment of a move leaves the new state, whole; the batch's homes and the balancer's agree."""
    run = Run()
    run.train(0, 1)
    before = run.logical()
    real, homes, updates = migration_module.migration_step, [get_homes(run.model)], nnx.update

    def interrupted(sharding, *, stacked):
        signal.raise_signal(signal.SIGINT)
        return real(sharding, stacked=stacked)

    def interrupted_update(*arguments):
        signal.raise_signal(signal.SIGINT)
        updates(*arguments)

    monkeypatch.setattr(migration_module, "migration_step", interrupted)
    monkeypatch.setattr("relibra_jax.nnx.homes.nnx.update", interrupted_update)
    with pytest.raises(KeyboardInterrupt):
        run.prepare(1)
    monkeypatch.undo()
    homes.append(get_homes(run.model))
    assert (homes[0] != homes[1]).any()
    np.testing.assert_array_equal(run.balancer.state.home, homes[1])
    assert_equal(run.logical(), before)
    run.balancer.discard()
    run.train(2, 3)


def test_reorder_experts_moves_back_what_another_balancer_moved():
    """The advice of the error: experts go back to where their optimizer's state is."""
    run = Run()
    run.train(0, 1)
    before = run.logical()
    reorder_experts(run.model, None, moved_homes(run), mesh=run.mesh, topology=TOPOLOGY)
    with pytest.raises(
        ValueError, match=r"where its optimizer state is; .*\(reorder_experts\(model, None, balancer"
    ):
        run.prepare(1)
    reorder_experts(run.model, None, run.balancer.state.home, mesh=run.mesh, topology=TOPOLOGY)
    assert_equal(run.logical(), before)
    run.prepare(1)


# Signals and files


def test_signals_wait_for_the_end_of_a_block():
    order = []
    before = signal.signal(signal.SIGALRM, lambda *_: order.append("handler"))
    try:
        with contextlib.suppress(KeyError), signals_deferred():
            signal.raise_signal(signal.SIGALRM)
            order.append("block")
            raise KeyError
        assert order == ["block", "handler"]
        thread = threading.Thread(target=lambda: signals_deferred().__enter__())
        thread.start()
        thread.join()
        signal.raise_signal(signal.SIGALRM)
        assert order == ["block", "handler", "handler"]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_only_regular_files_are_replaced(tmp_path):
    file, link, dangling = tmp_path / "file", tmp_path / "link", tmp_path / "dangling"
    file.write_text("old")
    file.chmod(0o600)
    link.symlink_to(file)
    dangling.symlink_to(tmp_path / "new")
    write_json(link, [1])
    write_json(dangling, [2])
    assert link.is_symlink()
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == ("[\n 1\n]\n", 0o600)
    assert (tmp_path / "new").read_text() == "[\n 2\n]\n"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_json(pipe, [3])
    reader.join()
    assert read == ["[\n 3\n]\n"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    write_json("/dev/null", [4])
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(IsADirectoryError):
        write_json(tmp_path, [5])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file", "link", "new", "pipe"]


@pytest.mark.long
def test_attacks_end_right():
    """A few of the attacks of ``make attack``, in a process of their own."""
    program = Path(__file__).with_name("attack.py")
    shown = subprocess.run(
        [sys.executable, program, "--cases", "20", "--processes", "0"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "20 attacks" in shown.stdout
