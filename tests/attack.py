"""``make attack``: random attacks on the state of training runs, counted by how they end.

In the first kind, a small training loop is interrupted, its allocations fail, its disk is full, its files are damaged,
or it is given state of another step, plan, order or run. In the second kind, a run of ``experiments.run`` on one or two
processes is killed or stopped, and resumed. After every attack the state must be whole: what it was before or after the
step that was attacked, bit for bit; or one line must have said what is wrong. Everything else is counted as *wrong*,
printed, and fails the command. As root, the attacks run as another user.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = str(ROOT / "relibra_jax")
NOBODY = 65534

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# With fewer threads, two programs at once may wait for each other for ever.
os.environ.setdefault("NPROC", "16")


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
        import numpy as np

        return (*self.run.logical(), np.array(self.run.optimizer.step[...]), self.run.balancer.state)

    def reset(self, number):
        """Put the run to the start of a batch."""
        from relibra_jax.nnx import from_logical, reorder_experts

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
        import numpy as np

        from relibra_jax.nnx import get_homes

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
    import jax
    import numpy as np

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


# Attacks on a loop. Each returns how it ended.


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
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
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
        count[0] += event == "call" and frame.f_code.co_filename.startswith(OURS)

    sys.settrace(trace)
    try:
        arena.run.prepare(number)
    finally:
        sys.settrace(None)
    return count[0]


def failing_move(arena, rng):
    """Memory that runs out at a random one of the moves of experts."""
    from unittest import mock

    import jax

    from relibra_jax.execution import migration

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
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

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
    import jax
    import numpy as np
    from flax import nnx
    from support.expert_state import PUSH, data, gradients_of

    from relibra_jax.contract.plan import resident_experts

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
    import numpy as np
    from support import expert_state

    arena.reset(0)
    x, replay = expert_state.data()[0]
    x = np.array(x)
    x[rng.integers(len(x)), 0] = rng.choice([np.nan, np.inf])
    batch = arena.run.prepare(0)
    residents = expert_state.PUSH(arena.run.model, arena.run.optimizer, batch)
    expert_state.train_step(
        arena.run.model, arena.run.optimizer, batch, batch.to_ranks((x, replay)), residents
    )
    return refused(lambda: arena.run.prepare(1), ValueError)


def foreign_state(arena, rng):
    """Balancer state of other sizes, other homes, or with a way of running layers that does not exist."""
    import numpy as np

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
    from relibra_jax.nnx import get_homes, set_homes

    arena.reset(1)
    home = get_homes(arena.run.model)
    set_homes(arena.run.model, rng.permuted(home, axis=1))
    return refused(lambda: arena.run.prepare(1), ValueError)


def damaged_checkpoint(arena, rng):
    """A file of a checkpoint with a flipped bit, without its end, or missing."""
    import orbax.checkpoint as ocp

    from relibra_jax.nnx import restore_training, save_training

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
    import orbax.checkpoint as ocp

    from relibra_jax.nnx import restore_training, save_training

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


def planning_ahead(arena, rng):
    """`plan_ahead` in a thread that nobody waits for, or with a planner that cannot: the batch is right."""
    import numpy as np
    from support.expert_state import TOPOLOGY, data

    from relibra_jax import Batch, sample_load

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
    foreign_state,
    homes_by_hand,
    damaged_checkpoint,
    full_disk,
    planning_ahead,
)
"""The attacks on a loop; those at random moments come more often."""


# Attacks on runs of their own processes.


class Runs:
    """A run without attacks on one and on two processes, and copies of it that are attacked."""

    def __init__(self, folder):
        self.folder, self.whole, self.seconds = folder, {}, {}
        for count in (1, 2):
            for _ in range(2):
                shutil.rmtree(folder / f"whole{count}", ignore_errors=True)
                begin = time.monotonic()
                ended = self.start(count, "--out", folder / f"whole{count}")
                self.seconds[count] = time.monotonic() - begin
            assert all(status == 0 for _, status in ended), ended
            self.whole[count] = self.lines(folder / f"whole{count}")

    def rebuild(self):
        """Do nothing: every attack has a run of its own."""

    def start(self, count, *options, during=None):
        """Run to the end; return the last line of errors and the exit status of each process."""
        from test_rl_processes import killed_at_last, start

        shared = {"SHARED_PROGRAMS": "yes"} if count > 1 else {}
        with killed_at_last(start(count, *options, **shared)) as processes:
            if during is not None:
                during(processes)
            ends = [(process.communicate(timeout=300)[1], process.returncode) for process in processes]
        return [((error.strip().splitlines() or [""]), status) for error, status in ends]

    def lines(self, folder):
        from test_rl_processes import lines_of

        return lines_of(folder)


def ended_run(runs, rng, sent):
    """Send a signal to a process at a random moment of a run, then resume the run."""
    count = int(rng.integers(1, 3))
    folder = runs.folder / f"attacked{rng.integers(2**31)}"
    # Before that, Python imports modules, and prints a traceback if it is interrupted.
    moment = rng.uniform(0.4, 1) * runs.seconds[count]

    def attack(processes):
        time.sleep(moment)
        processes[int(rng.integers(count))].send_signal(sent)

    ends = runs.start(count, "--out", folder, during=attack)
    for lines, status in ends:
        if sent != signal.SIGKILL:
            assert len(lines) <= 1 or status == 0, f"{len(lines)} lines: {lines[-3:]}"
    if (folder / "config.json").exists():
        resumed = runs.start(count, "--resume", folder)
        assert all(status == 0 for _, status in resumed), resumed
        assert runs.lines(folder) == runs.whole[count], "resumed otherwise"
        return "resumed, bit for bit"
    return "ended before it began"


def killed_run(runs, rng):
    """SIGKILL to one process."""
    return ended_run(runs, rng, signal.SIGKILL)


def stopped_run(runs, rng):
    """SIGTERM or SIGINT to one process."""
    return ended_run(runs, rng, (signal.SIGTERM, signal.SIGINT)[int(rng.integers(2))])


RUNS = (killed_run, stopped_run)


@dataclasses.dataclass(frozen=True)
class Case:
    """An attack with its seed."""

    attack: object
    seed: int
    end: str


def arenas():
    """Make a run with a planner of random plans, and one with ReLibra's in two data-parallel groups."""
    from support.expert_state import Run

    from relibra_jax import place_experts, relibra

    planner = relibra(place=functools.partial(place_experts, steps=20))
    return Arena(Run), Arena(functools.partial(Run, planner, groups=2, cost="balance"))


def run_cases(attacks, targets, count, seed):
    """Run attacks in turn on the targets in turn, and yield how each ended."""
    import numpy as np

    for number in range(count):
        attack, target = attacks[number % len(attacks)], targets[number // len(attacks) % len(targets)]
        case_seed = seed * 100_000 + number
        try:
            end = attack(target, np.random.default_rng(case_seed))
        except Exception as error:
            traceback.print_exc()
            target.rebuild()
            end = f"wrong: {type(error).__name__}: {error}"
        print(f"{attack.__name__}, seed {case_seed}: {end}", file=sys.stderr, flush=True)
        yield Case(attack, case_seed, end)


def as_nobody():
    """Run this program again as an unprivileged user, if it is root's and that user can."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return
    drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    if subprocess.run([*drop, sys.executable, "-c", "import jax"], cwd=ROOT, capture_output=True).returncode:
        print("note: an unprivileged user cannot run this environment, so the attacks run as root")
        return
    with tempfile.TemporaryDirectory() as home:
        os.chown(home, NOBODY, NOBODY)
        variables = {"HOME": home, "TMPDIR": home, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [*drop, sys.executable, __file__, *sys.argv[1:]]
        sys.exit(subprocess.run(command, cwd=ROOT, env=os.environ | variables).returncode)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=300, help="the number of attacks")
    parser.add_argument(
        "--runs", type=int, default=8, help="how many of them are on runs; each takes two minutes"
    )
    parser.add_argument("--seed", type=int, default=0, help="the seed of all attacks")
    options = parser.parse_args()
    as_nobody()
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # Orbax's writers
    begin, counts, wrong = time.monotonic(), collections.Counter(), []
    cases = []
    if loops := options.cases - options.runs:
        cases += run_cases(LOOP, arenas(), loops, options.seed)
        print(f"{loops} attacks on loops in {time.monotonic() - begin:.0f} s", flush=True)
    if options.runs:
        with tempfile.TemporaryDirectory() as folder:
            cases += run_cases(RUNS, [Runs(Path(folder))], options.runs, options.seed)
    for case in cases:
        end = case.end.split(":")[0]
        counts[case.attack.__name__.replace("_", " "), end] += 1
        if end == "wrong":
            wrong.append(case)
    for (attack, end), count in sorted(counts.items()):
        print(f"{attack:20} {end:30} {count:4}")
    print(f"{len(cases)} attacks in {time.monotonic() - begin:.0f} s, {len(wrong)} ended wrong")
    for case in wrong:
        print(f"  {case.attack.__name__}, seed {case.seed}: {case.end}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
