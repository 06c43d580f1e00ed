"""Attacks on the state of a training loop in this process, for ``make attack``.

After each, the state must be whole: what it was before or after the step that was attacked, bit for bit; or one line
must have said what is wrong. An attack returns how it ended, in a few words.
"""

import concurrent.futures
import functools
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from relibra_jax import PLANNERS, Batch, place_experts, relibra, sample_load
from relibra_jax.contract.plan import resident_experts
from relibra_jax.execution import migration
from relibra_jax.nnx import (
    from_logical,
    get_homes,
    reorder_experts,
    restore_training,
    save_training,
    set_homes,
)
from support.expert_state import PUSH, TOPOLOGY, Run, data, gradients_of, train_step
from support.plans import compiled_planner

FAST = ("static", "eplb", "lplb", "ultraep", "moonep")
"""The planners that compile in a second."""
OURS = str(Path(__file__).parents[2] / "relibra_jax")


def is_ours(frame):
    """Return whether a call is of a function of ours, other than a check of types, of which there are many."""
    path = frame.f_code.co_filename
    return path.startswith(OURS) and not path.endswith("argument_types.py")


class Arena:
    """A run that is attacked again and again, and what its state must be at the start of every batch."""

    BATCHES = 3

    def __init__(self, make_run):
        self._make_run = make_run
        self.run = make_run()
        self.starts = []
        for number in range(self.BATCHES + 1):
            self.starts.append(self._kept())
            self.train(number)
        self.seconds = min(self._time_prepare(number) for number in range(self.BATCHES))

    def _time_prepare(self, number):
        self.reset(number)
        begin = time.perf_counter()
        self.run.prepare(number)
        return time.perf_counter() - begin

    def _kept(self):
        return (*self.run.logical(), np.array(self.run.optimizer.step[...]), self.run.balancer.state)

    def reset(self, number):
        """Put the run to the start of a batch."""
        run, (params, moments, step, state) = self.run, self.starts[number]
        from_logical(run.model, params, optimizer=run.optimizer, optimizer_state=moments)
        run.optimizer.step[...] = step
        reorder_experts(
            run.model, run.optimizer, state.home, mesh=run.mesh, topology=run.balancer.parallel.topology
        )
        run.balancer.state = state

    def rebuild(self):
        """Make a new run in place of one that is lost."""
        self.run = self._make_run()
        self.run.balancer.trains = True

    def train(self, number):
        """Run a batch whole."""
        self.run.balancer.discard()
        self.run.step(self.run.prepare(number), number)

    def where(self, number):
        """Return ``old`` or ``new`` if the state is whole at the start of a batch, with its experts moved or not."""
        home = get_homes(self.run.model)
        assert np.array_equal(home, self.run.balancer.state.home), "model and balancer disagree"
        homes = [self.starts[at][3].home for at in (number, number + 1)]
        place = next(
            (name for name, own in zip(("old", "new"), homes, strict=True) if np.array_equal(home, own)), None
        )
        assert place is not None, "experts are neither at their old homes nor at the new ones"
        assert same(self.run.logical(), self.starts[number][:2]), "weights or moments have changed"
        return place

    def ends_right(self, number, *, exactly):
        """Run a batch, and require the state that it has without an attack."""
        self.train(number)
        expected = self.starts[number + 1][:2]
        assert same(self.run.logical(), expected, exactly=exactly), "the next batch ends elsewhere"


def same(one, other, *, exactly=True):
    """Return whether two trees are equal, bit for bit or up to the order of sums."""

    def equal(a, b):
        return np.array_equal(a, b) if exactly else np.allclose(a, b, rtol=1e-3, atol=1e-5)

    return all(jax.tree.leaves(jax.tree.map(equal, one, other)))


class Injected(Exception):
    """An exception that an attack raises in our code."""


def comes_from(error, kind):
    """Return whether an error is of a kind, or wraps one: a failed move does, and JAX does for a planner's callback."""
    return any(isinstance(each, kind) for each in (error, error.__cause__)) or kind.__name__ in str(error)


def one_line(error):
    """Require that an error says something, in one line."""
    text = str(error)
    assert text.strip(), f"{type(error).__name__} says nothing"
    assert len(text.splitlines()) == 1, f"{type(error).__name__} has several lines: {text}"
    return "one line"


def refused(call, *kinds):
    """Require that a call raises one of these errors, in one line."""
    try:
        call()
    except kinds as error:
        return one_line(error)
    raise AssertionError("accepted")


def interrupt(arena, rng):
    """Ctrl-C at a random moment of the preparation of a batch."""
    number = int(rng.integers(arena.BATCHES))
    arena.reset(number)

    def raise_interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, raise_interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, arena.seconds))
        arena.run.prepare(number)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except (KeyboardInterrupt, RuntimeError, ValueError) as error:
        if not comes_from(error, KeyboardInterrupt):
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    place = arena.where(number)
    arena.ends_right(number, exactly=place == "old")
    return place


def failing_call(arena, rng):
    """An exception at a random call of a function of ours, while a batch is prepared."""
    number = int(rng.integers(arena.BATCHES))
    arena.reset(number)
    left = [count_calls(arena, number)]
    arena.reset(number)
    left[0] = int(rng.integers(left[0]))

    def trace(frame, event, argument):
        if event == "call" and is_ours(frame):
            left[0] -= 1
            if left[0] < 0:
                sys.settrace(None)
                raise Injected(frame.f_code.co_qualname)

    try:
        sys.settrace(trace)
        arena.run.prepare(number)
    except Exception as error:
        if not comes_from(error, Injected):
            raise
    finally:
        sys.settrace(None)
    try:
        place = arena.where(number)
    except Exception:
        # Neither the old state nor the new one: then nothing may go on with it.
        end = refused(lambda: arena.train(number), ValueError, RuntimeError)
        arena.rebuild()
        return f"refused afterwards, {end}"
    arena.ends_right(number, exactly=place == "old")
    return place


def count_calls(arena, number):
    """Count the calls of our functions while a batch is prepared."""
    count = [0]

    def trace(frame, event, argument):
        count[0] += event == "call" and is_ours(frame)

    sys.settrace(trace)
    try:
        arena.run.prepare(number)
    finally:
        sys.settrace(None)
    return count[0]


def failing_move(arena, rng):
    """Memory that runs out at a random one of the moves of experts."""
    number, real = int(rng.integers(arena.BATCHES)), migration.migration_step
    arena.reset(number)
    left = [int(rng.integers(8))]

    def failing(sharding, *, stacked):
        left[0] -= 1
        if left[0] == -1:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return real(sharding, stacked=stacked)

    end = "it fitted"
    with mock.patch.object(migration, "migration_step", failing):
        try:
            arena.run.prepare(number)
        except migration.MoveError as error:
            end = one_line(error)
    place = arena.where(number)
    arena.ends_right(number, exactly=place == "old")
    return end


def without_optimizer(arena, rng):
    """A batch that is prepared without the optimizer of the ones before."""
    number = int(rng.integers(1, arena.BATCHES))
    arena.reset(number)
    end = refused(lambda: arena.run.prepare(number, optimizer=False), ValueError)
    arena.ends_right(number, exactly=True)
    return end


def put_back(arena, rng):
    """Parameters that were copied as they are before experts moved, and are put back after."""
    number = int(rng.integers(arena.BATCHES - 1))
    arena.reset(number)
    kept = jax.tree.map(jnp.copy, nnx.state(arena.run.model, nnx.Param))
    arena.train(number)
    nnx.update(arena.run.model, kept)
    if np.array_equal(arena.starts[number][3].home, arena.starts[number + 1][3].home):
        arena.run.prepare(number + 1)
        return "no expert moved"
    return refused(lambda: arena.run.prepare(number + 1), ValueError)


def outdated_batch(arena, rng):
    """A batch that is used after the next one was prepared."""
    arena.reset(0)
    first = arena.run.prepare(0)
    arena.run.step(first, 0)
    arena.run.prepare(1)
    return refused(lambda: arena.run.step(first, 0), ValueError)


def outdated_residents(arena, rng):
    """Residents of an earlier step or of another batch."""
    arena.reset(0)
    run, other = arena.run, bool(rng.integers(2))
    batch = run.prepare(0)
    residents, step = PUSH(run.model, run.optimizer, batch), run.optimizer.step[...]
    number = 0
    if other:
        run.step(batch, 0)
        residents, step, number = residents._replace(step=run.optimizer.step[...]), run.optimizer.step[...], 1
        batch = run.prepare(1)
    else:
        step = step + int(rng.integers(1, 5))
    expected = resident_experts(batch.batch_plan.plan, run.balancer.parallel.topology)
    same_residents = other and np.array_equal(residents.experts, expected)
    gradients = nnx.jit(gradients_of)(run.model, batch, batch.to_ranks(data()[number]), residents, step)
    leaves = [leaf for leaf in jax.tree.leaves(gradients) if leaf.ndim == 6]
    assert leaves
    assert all(np.isnan(leaf).any() != same_residents for leaf in leaves), "finite"
    return "the same residents" if same_residents else "NaN"


def nan_tokens(arena, rng):
    """Inputs that are not finite: the next batch says so."""
    arena.reset(0)
    x, replay = data()[0]
    x = np.array(x)
    x[rng.integers(len(x)), 0] = rng.choice([np.nan, np.inf])
    batch = arena.run.prepare(0)
    residents = PUSH(arena.run.model, arena.run.optimizer, batch)
    train_step(arena.run.model, arena.run.optimizer, batch, batch.to_ranks((x, replay)), residents)
    return refused(lambda: arena.run.prepare(1), ValueError)


def nan_gates(arena, rng):
    """A router that is not finite, and so gates that are not: the next batch says so."""
    arena.reset(0)
    batch = arena.run.prepare(0)
    layers = arena.run.model.layers
    router = layers[int(rng.integers(len(layers)))].router
    router[...] = router[...].at[tuple(rng.integers(router.shape))].set(rng.choice([np.nan, np.inf]))
    arena.run.step(batch, 0)
    return refused(lambda: arena.run.prepare(1), ValueError)


def planners_together(_, rng):
    """Planners under vmap, and in x64: plans are those of single batches in single precision."""
    name = str(rng.choice(FAST))
    update, init = compiled_planner(name, TOPOLOGY), PLANNERS[name].planner.init
    load = rng.lognormal(3, 1.5, (4, 2, 2, TOPOLOGY.num_nodes, TOPOLOGY.ranks_per_node, TOPOLOGY.num_experts))
    load = load.astype(np.int32)
    state = init(TOPOLOGY, load.shape[2], key=jax.random.key(int(rng.integers(2**31))))
    alone = [update(each, state)[0] for each in load]
    together, _ = jax.jit(jax.vmap(update, (0, None)))(load, state)
    with jax.enable_x64(True):
        double = update(load[0], state)[0]
    for number, plan in enumerate(alone):
        assert same(plan, jax.tree.map(lambda leaf, number=number: leaf[number], together)), f"{name}: vmap"
    assert same(alone[0], double), f"{name}: x64"
    return "the same plans"


def foreign_state(arena, rng):
    """Balancer state of other sizes, other homes, or with a way of running layers that does not exist."""
    arena.reset(1)
    state = arena.run.balancer.state
    changes = [
        state._replace(home=state.home[:1]),
        state._replace(home=np.zeros_like(state.home)),
        state._replace(way=np.full(3, int(rng.integers(40, 99)), np.int32)),
        state._replace(key=state.key[:1]),
    ]
    change = changes[int(rng.integers(len(changes)))]

    def set_state():
        arena.run.balancer.state = change

    end = refused(set_state, ValueError)
    arena.ends_right(1, exactly=True)
    return end


def homes_by_hand(arena, rng):
    """Homes that are set without moving the weights."""
    arena.reset(1)
    home = get_homes(arena.run.model)
    set_homes(arena.run.model, rng.permuted(home, axis=1))
    return refused(lambda: arena.run.prepare(1), ValueError)


def damaged_checkpoint(arena, rng):
    """A file of a checkpoint with a flipped bit, without its end, or missing."""
    arena.reset(1)
    run = arena.run
    with tempfile.TemporaryDirectory() as folder:
        with ocp.CheckpointManager(folder) as manager:
            save_training(manager, 1, run.model, run.optimizer, run.balancer)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file() and path.stat().st_size)
        path = files[int(rng.integers(len(files)))]
        content = bytearray(path.read_bytes())
        match int(rng.integers(3)):
            case 0:
                content[int(rng.integers(len(content)))] ^= 1 << int(rng.integers(8))
                path.write_bytes(content)
            case 1:
                path.write_bytes(content[: int(rng.integers(len(content)))])
            case 2:
                path.unlink()
        arena.reset(2)
        with ocp.CheckpointManager(folder) as manager:
            try:
                restore_training(manager, run.model, run.optimizer, run.balancer)
            except ValueError as error:
                end = one_line(error)
                arena.where(2)
                arena.ends_right(2, exactly=True)
                return end
    arena.where(1)
    arena.ends_right(1, exactly=True)
    return "right"


def full_disk(arena, rng):
    """A disk that fills up while a checkpoint is saved: the one before stays."""
    arena.reset(1)
    run, end = arena.run, "it fitted"
    with tempfile.TemporaryDirectory() as folder:
        with ocp.CheckpointManager(folder) as manager:
            save_training(manager, 1, run.model, run.optimizer, run.balancer)
        arena.reset(2)
        limits, before = (
            resource.getrlimit(resource.RLIMIT_FSIZE),
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
        )
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(rng.integers(1, 4096)), limits[1]))
            with ocp.CheckpointManager(folder) as manager:
                save_training(manager, 2, run.model, run.optimizer, run.balancer)
                manager.wait_until_finished()
        except Exception as error:
            end = f"{type(error).__name__}"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, before)
        arena.where(2)
        with ocp.CheckpointManager(folder) as manager:
            step, _ = restore_training(manager, run.model, run.optimizer, run.balancer)
        assert step == (2 if end == "it fitted" else 1), f"step {step} after: {end}"
        arena.where(step)
        arena.ends_right(step, exactly=True)
    return end


def closed_folder(arena, rng):
    """A folder of checkpoints that may not be written to any more: the one before stays."""
    arena.reset(1)
    run = arena.run
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "checkpoints")
        with ocp.CheckpointManager(folder) as manager:
            save_training(manager, 1, run.model, run.optimizer, run.balancer)
        arena.reset(2)
        folder.chmod(0o500)
        try:
            with ocp.CheckpointManager(folder) as manager:
                save_training(manager, 2, run.model, run.optimizer, run.balancer)
                manager.wait_until_finished()
        except OSError as error:
            end = type(error).__name__
        else:
            raise AssertionError("saved")
        finally:
            folder.chmod(0o700)
        arena.where(2)
        with ocp.CheckpointManager(folder) as manager:
            step, _ = restore_training(manager, run.model, run.optimizer, run.balancer)
        assert step == 1
        arena.ends_right(1, exactly=True)
    return end


def planning_ahead(arena, rng):
    """`plan_ahead` in a thread that nobody waits for, or with a planner that cannot: the batch is right."""
    arena.reset(0)
    balancer, replay = arena.run.balancer, data()[1][1]
    load = np.asarray(sample_load(replay, num_experts=TOPOLOGY.num_experts))
    arguments = (Batch(load, replay.mask.sum(1).astype(np.int32)), np.ones(len(load), bool))
    if balancer.planner.reorder is None:
        return refused(lambda: balancer.plan_ahead(*arguments), ValueError)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        ahead = pool.submit(balancer.plan_ahead, *arguments)
        time.sleep(rng.uniform(0, arena.seconds))
        arena.ends_right(0, exactly=False)
        ahead.result()
    return "right"


LOOP = (
    interrupt,
    interrupt,
    interrupt,
    failing_call,
    failing_call,
    failing_move,
    without_optimizer,
    put_back,
    outdated_batch,
    outdated_residents,
    nan_tokens,
    nan_gates,
    planners_together,
    foreign_state,
    homes_by_hand,
    damaged_checkpoint,
    full_disk,
    closed_folder,
    planning_ahead,
)
"""The attacks on a loop; those at random moments come more often."""


def arenas():
    """Make runs of random plans, without and with an FSDP axis, and one of ReLibra's plans in two groups."""
    planner = relibra(place=functools.partial(place_experts, steps=20))
    runs = (
        Run,
        functools.partial(Run, axes={"fsdp": 2}),
        functools.partial(Run, planner, {"data": 2}, "balance"),
    )
    return tuple(map(Arena, runs))
