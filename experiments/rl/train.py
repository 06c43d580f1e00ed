"""Whole training runs: one for each seed, with checkpoints, stopping, resuming and a report."""

import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from experiments.rl.compilations import tell_compilations
from experiments.rl.configs import Train
from experiments.rl.devices import compile_quickly, host_devices
from experiments.rl.metrics import FAILURES, WARM_UP
from experiments.rl.metrics_log import MetricsLog, OpenWriter, import_writer, open_checked
from experiments.rl.processes import (
    Group,
    check_same,
    is_first,
    join_processes,
    on_any,
    process_count,
    text_from_first,
    wait_for_all,
)
from experiments.rl.profiling import profiled
from experiments.rl.report import write_report
from experiments.rl.stop_signals import stop_signals
from experiments.rl.tasks import Task
from experiments.rl.trainer import Trainer
from relibra_jax.contract.planner import PlanRequest
from relibra_jax.contract.replay_files import load_replay, save_replay
from relibra_jax.contract.types import RoutingReplay
from relibra_jax.models import save_pretrained
from relibra_jax.models.hf_config import read_config
from relibra_jax.support.atomic_write import write_json

CHECKPOINTS_KEPT: Final = 2
"""The number of latest checkpoints that a run keeps."""
UNSAVED_SETTINGS: Final = ("out", "resume", "verify", "profile")
"""The settings that apply to one start of a run and are not saved for the next."""
COMPILED: Final = Path("out/compiled")
"""The folder of compiled programs for later processes, unless the user has set another one."""


def run_train(
    config: Train,
    console: Console,
    *,
    name: str = "rl",
    task: Task | None = None,
    writer: OpenWriter | None = None,
) -> Path:
    """Run or resume all seeds, then write the report. On SIGTERM or Ctrl-C the run saves a checkpoint and returns.

    On several processes (`experiments.rl.processes.join_processes`) all of them call this function. All write
    checkpoints, and the first one writes and prints everything else.

    Args:
        config: the settings of the run.
        console: the console for progress and the report.
        name: the name of the run, for its folder and the command that resumes it.
        task: the task. None uses the one that ``config`` names.
        writer: a function that opens an additional writer of metrics for every seed, for example
            ``lambda folder, settings: wandb.init(dir=folder, config=settings)``. None uses the one that ``config``
            names.

    Returns:
        The folder of the run, with ``config.json``, ``seed-*/metrics.jsonl``, checkpoints, figure and summary.

    Raises:
        ValueError: if the settings do not fit together or the planner rejects them, the writer does not exist, a
            checkpoint is damaged or belongs to another model, or training diverges.
    """
    with join_processes() as group:
        if is_first() and writer is None and config.writer is not None:
            writer = import_writer(config.writer)
        console = console if is_first() else Console(quiet=True)
        compile_quickly()
        host_devices(config.topology.num_ranks)
        _check_planner(config)
        _check_processes(config)
        folder = _folder(config, name)
        group.command = f"python -m experiments.run {name} --resume {folder}"
        keep_compiled()
        with stop_signals() as stop:
            for seed in config.seeds:
                if not _run_seed(config, seed, folder, console, stop, task, writer, group):
                    message = f"stopped and saved; resume with: {group.command}"
                    console.print(message, highlight=False, soft_wrap=True)
                    return folder
        if is_first():
            write_report(config, folder, console, name)
    return folder


def keep_compiled() -> None:
    """Make JAX keep compiled programs on disk for later processes, unless the user has set a cache."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(COMPILED.absolute()))


def _run_seed(
    config: Train,
    seed: int,
    run: Path,
    console: Console,
    stop: threading.Event,
    task: Task | None,
    open_writer: OpenWriter | None,
    group: Group,
) -> bool:
    """Run or resume one seed; return False if it was stopped before its end."""
    folder, trainer = run / f"seed-{seed}", Trainer(config, seed, task=task)
    recorded = range(max(config.warmup_steps, trainer.total_steps - config.record), trainer.total_steps)
    options = ocp.CheckpointManagerOptions(max_to_keep=CHECKPOINTS_KEPT, create=True)
    with ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options) as manager:
        if manager.latest_step() is not None:
            trainer.restore(manager, verify=config.verify)
        if config.profile is not None and config.profile < trainer.state.step:
            console.print(
                f"note: seed {seed} resumes at step {trainer.state.step}, after profile={config.profile}: no profile is"
                " written"
            )
        settings = {**_plain(config), "seed": seed}
        writer = None
        if is_first() and open_writer is not None:
            writer = open_checked(open_writer, folder, settings)
        # Only now, so that settings that the checkpoint or the writer rejects are not saved.
        if is_first():
            _note_changes(config, run, console)
        wait_for_all("settings")
        group.resumable = True
        with (
            MetricsLog(folder, trainer.state.step, writer) if is_first() else contextlib.nullcontext() as log,
            _progress(console, f"seed {seed}", total=trainer.total_steps) as (bar, task_id),
        ):

            def report(step: int, metrics: dict[str, Any]) -> None:
                if log is not None:
                    log.write(step, metrics)
                for failure in metrics.get(FAILURES, ()):
                    bar.console.print(f"step {step}: {failure}", style="red", markup=False)

            described = False
            while trainer.state.step < trainer.total_steps and not on_any(stop.is_set()):
                step, learning = trainer.state.step, trainer.state.step >= config.warmup_steps
                if config.evaluates_before(step):
                    report(step, trainer.evaluate())
                with profiled(folder / f"profile-{step}" if is_first() and step == config.profile else None):
                    metrics = trainer.learn() if learning else trainer.warm_up()
                report(step, metrics)
                if learning and not described and trainer.summary is not None:
                    bar.console.print(f"step {step}: {trainer.summary}", highlight=False, soft_wrap=True)
                    described = True
                bar.update(task_id, completed=trainer.state.step, status=_status(metrics))
                if is_first() and step in recorded and trainer.replay is not None:
                    save_replay(
                        _routing(folder, step), trainer.replay, num_experts=config.model_config.num_experts
                    )
                if trainer.state.step % config.checkpoint_every == 0:
                    trainer.state.save(manager)
            finished = trainer.state.step == trainer.total_steps
            if finished and config.evaluation_batches:
                report(trainer.state.step, trainer.evaluate())
        if manager.latest_step() != trainer.state.step:
            trainer.state.save(manager)
    if finished and config.model is not None:
        _save_model(trainer, folder, console)
    # After the last checkpoint: a run that is killed before this point gets here again, with all parts still there.
    if finished and is_first():
        _join_routing(folder, [_routing(folder, step) for step in recorded])
    return finished


def _save_model(trainer: Trainer, folder: Path, console: Console) -> None:
    """Save the trained model as a Hugging Face checkpoint, in the format and dtype of the one that it started from."""
    trained = folder / f"model-{trainer.state.step}"
    source = trainer.config.model
    assert source is not None
    if not on_any(trained.exists()):
        fields = read_config(source)
        dtype = fields.get("dtype") or fields.get("torch_dtype")
        save_pretrained(trainer.state.agent.policy, trained, source=source, dtype=dtype)
    console.print(f"trained model: {trained}", highlight=False, soft_wrap=True)


def _routing(folder: Path, step: int) -> Path:
    return folder / f"routing-{step}.npz"


def _join_routing(folder: Path, parts: list[Path]) -> None:
    """Join the recorded routing of several batches into one trace, and delete the parts."""
    parts = [part for part in parts if part.exists()]
    if parts:
        replays, num_experts = zip(*map(load_replay, parts), strict=True)
        save_replay(folder / "replay.npz", join_replays(replays), num_experts=num_experts[0])
    for part in parts:
        part.unlink()


def join_replays(replays: Sequence[RoutingReplay]) -> RoutingReplay:
    """Join the samples of several replays into one, padded to the longest.

    >>> short, long = (RoutingReplay(np.ones((2, n, 1, 1), np.uint8), np.ones((2, n), bool)) for n in (3, 5))
    >>> join_processes = join_replays([short, long])
    >>> join_processes.expert_ids.shape, join_processes.mask.sum(1).tolist()
    ((4, 5, 1, 1), [3, 3, 5, 5])
    """
    longest = max(replay.mask.shape[1] for replay in replays)

    def widen(leaf: np.ndarray) -> np.ndarray:
        return np.pad(leaf, [(0, 0), (0, longest - leaf.shape[1]), *[(0, 0)] * (leaf.ndim - 2)])

    return RoutingReplay(
        *(np.concatenate([widen(leaf) for leaf in leaves]) for leaves in zip(*replays, strict=True))
    )


def _check_planner(config: Train) -> None:
    """Trace the planner, so that it rejects bad settings now and not after the warm-up."""
    topology, planner, layers = config.topology, config.planner_entry.planner, config.model_config.moe_layers
    ranks = topology.num_nodes, topology.ranks_per_node

    def plan(key: jax.Array) -> Any:
        load = jnp.zeros((config.micro_batches, layers, *ranks, topology.num_experts), jnp.int32)
        return planner.update(PlanRequest(load), planner.init(topology, layers, key=key), topology)

    jax.eval_shape(plan, jax.random.key(0))


def _check_processes(config: Train) -> None:
    """Check that ranks fit the processes, and that all processes have the same settings."""
    processes, topology = process_count(), config.topology
    nodes = topology.num_nodes
    if nodes % processes and processes % nodes:
        raise ValueError(
            f"nodes={nodes} x ranks_per_node={topology.ranks_per_node} do not fit {processes} processes: each process"
            " must hold whole nodes, or each node whole processes"
        )
    settings = json.dumps(_plain(config), sort_keys=True).encode()
    check_same(np.frombuffer(settings, np.uint8), "settings")


def _folder(config: Train, name: str) -> Path:
    """Choose the folder of the run, and check that all processes see it."""
    folder = _new_folder(config, name) if is_first() else Path()
    if process_count() > 1:
        if is_first():
            folder.mkdir(parents=True, exist_ok=True)
        folder = Path(text_from_first(str(folder)))
        if on_any(not folder.is_dir()):
            raise ValueError(
                f"{folder} must be on a file system that all {process_count()} processes see, but some do not find it"
            )
    return folder


def _new_folder(config: Train, name: str) -> Path:
    if config.resume is not None:
        return config.resume
    folder = config.out or Path("out") / name / datetime.now().strftime("%Y-%m-%d-%H%M%S")
    if (folder / "config.json").exists():
        raise ValueError(
            f"{folder} contains a run already: resume it with --resume {folder}, or choose another --out"
        )
    return folder


def _note_changes(config: Train, folder: Path, console: Console) -> None:
    """Save the settings, and print how they differ from those that a resumed run had before."""
    settings = {key: value for key, value in _plain(config).items() if key not in UNSAVED_SETTINGS}
    path = folder / "config.json"
    previous = json.loads(path.read_text()) if path.exists() else settings
    for key, value in settings.items():
        if previous.get(key) != value:
            console.print(
                f"note: {key} was {previous.get(key)} and is now {value}", highlight=False, soft_wrap=True
            )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, settings)


def _plain(config: Train) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


@contextlib.contextmanager
def _progress(console: Console, name: str, *, total: int) -> Iterator[tuple[Progress, TaskID]]:
    """Show a progress bar, which names the programs that are being compiled; yield it and its only task."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    status = TextColumn("{task.fields[status]}")
    with Progress(*columns, status, console=console, transient=True) as bar:
        task_id = bar.add_task(name, total=total, status="")

        def show(program: str) -> None:
            bar.update(task_id, status=f"compiling {program}" if program else "")

        with tell_compilations(show):
            yield bar, task_id


def _status(metrics: dict[str, Any]) -> str:
    speed = f"{metrics['speed/tokens_per_second']:.0f} tokens/s"
    if metrics["kind"] == WARM_UP:
        return f"warm-up, loss {metrics['warmup/loss']:.3f}, {speed}"
    reward = "none" if metrics["reward/mean"] is None else f"{metrics['reward/mean']:.3f}"
    balance = (
        f"imbalance {metrics['balance/imbalance']:.3f} (static {metrics['balance/imbalance_static']:.3f})"
    )
    return f"reward {reward}, {balance}, {speed}"
