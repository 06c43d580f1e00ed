"""Whole training runs: one for each seed, with checkpoints, stopping, resuming and a report."""

import contextlib
import dataclasses
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]
from rich.console import Console

from experiments.engines.protocol import EngineError
from experiments.rl.configs import Train
from experiments.rl.devices import compile_quickly, host_devices, overlap_exchanges
from experiments.rl.metrics import FAILURES, LEARN, WARM_UP
from experiments.rl.metrics_log import MetricsLog
from experiments.rl.process_group import ProcessGroup, join_processes
from experiments.rl.processes import check_same, is_first, on_any, process_count, wait_for_all
from experiments.rl.progress import COLUMNS_EXPLAINED, TimeLeft, heading, progress_bar, status_text
from experiments.rl.provenance import save_start
from experiments.rl.recording import describe_run, join_routing, save_routing
from experiments.rl.report import write_report
from experiments.rl.responses import whole_routes
from experiments.rl.run_folder import run_folder, save_config
from experiments.rl.settings import plain_settings
from experiments.rl.step_clock import profiled
from experiments.rl.tasks import Task
from experiments.rl.trainer import Trainer
from experiments.rl.writers import OpenWriter, find_writer, open_checked
from relibra_jax.contract.planner import PlanRequest
from relibra_jax.contract.types import RoutingReplay
from relibra_jax.models import save_pretrained
from relibra_jax.models.hf_config import saved_dtype

CHECKPOINTS_KEPT: Final = 2
"""The number of latest checkpoints that a run keeps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """What the runs of all seeds share."""

    config: Train
    folder: Path
    console: Console
    task: Task | None
    open_writer: OpenWriter | None
    group: ProcessGroup
    stop: threading.Event


def run_train(
    config: Train,
    console: Console,
    *,
    name: str = "rl",
    task: Task | None = None,
    writer: OpenWriter | None = None,
) -> Path:
    """Run or resume all seeds, then write the report. On SIGTERM or Ctrl-C the run saves a checkpoint and returns.

    On several processes (`experiments.rl.process_group.join_processes`) all of them call this function. All write
    checkpoints, and the first one writes and prints everything else.

    Args:
        config: the settings of the run.
        console: the console for progress and the report.
        name: the name or file of the configuration, for the folder and for the command that resumes the run.
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
    with join_processes(config.patience, config.hung_after) as group:
        if is_first() and writer is None and config.writer is not None:
            writer = find_writer(config.writer)
        console = console if is_first() else Console(quiet=True)
        _check_model(config)
        compile_quickly()
        overlap_exchanges()
        host_devices(config.num_ranks)
        check_planner(config)
        _check_processes(config)
        folder = run_folder(config, name)
        group.command = f"python -m experiments.run {name} --resume {folder}"
        with stop_signals() as stop:
            run = _Run(
                config=config,
                folder=folder,
                console=console,
                task=task,
                open_writer=writer if is_first() else None,
                group=group,
                stop=stop,
            )
            for seed in config.seeds:
                if not _run_seed(run, seed):
                    message = f"stopped and saved; resume with: {group.command}"
                    console.print(message, highlight=False, soft_wrap=True)
                    return folder
        if is_first():
            write_report(config, folder, console, name)
    return folder


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM or Ctrl-C sets, so that a run can finish and save the step in progress.

    The first signal restores the previous handlers, so that a second one stops the process at once.
    """
    stop = threading.Event()
    previous_handlers: dict[signal.Signals, Any] = {}

    def restore() -> None:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)

    def request_stop(*_: object) -> None:
        stop.set()
        restore()

    for number in (signal.SIGTERM, signal.SIGINT):
        previous_handlers[number] = signal.signal(number, request_stop)
    try:
        yield stop
    finally:
        restore()


def _run_seed(run: _Run, seed: int) -> bool:
    """Run or resume one seed; return False if it was stopped before its end."""
    config, folder = run.config, run.folder / f"seed-{seed}"
    with contextlib.closing(Trainer(config, seed, task=run.task)) as trainer:
        return _run_trainer(run, seed, trainer, folder)


def _run_trainer(run: _Run, seed: int, trainer: Trainer, folder: Path) -> bool:
    """Run or resume one seed with its trainer."""
    config = run.config
    recorded = range(max(config.warmup_steps, trainer.total_steps - config.record), trainer.total_steps)
    options = ocp.CheckpointManagerOptions(max_to_keep=CHECKPOINTS_KEPT, create=True)
    with ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options) as manager:
        if manager.latest_step() is not None:
            trainer.restore(manager, verify=config.verify)
        with _open_log(run, seed, folder, trainer.state.step) as log:
            try:
                _train(run, trainer, folder, manager, log, recorded)
            except EngineError as error:
                # No step has begun to change the state, so nothing is lost.
                if manager.latest_step() != trainer.state.step:
                    trainer.state.save(manager)
                    manager.wait_until_finished()
                saved = f"saved step {trainer.state.step}; resume with: {run.group.command}"
                raise EngineError(f"{error}; {saved}") from None
        if manager.latest_step() != trainer.state.step:
            trainer.state.save(manager)
    finished = trainer.state.step == trainer.total_steps
    if finished and config.model is not None:
        _save_model(trainer, folder, run.console)
    # After the last checkpoint: a run that is killed before this point gets here again, with all parts still there.
    if finished and is_first():
        join_routing(folder, recorded, describe_run(config, seed, run.task))
    return finished


@contextlib.contextmanager
def _open_log(run: _Run, seed: int, folder: Path, step: int) -> Iterator[MetricsLog | None]:
    """Save the settings and open the log of a seed that starts or resumes at ``step``, on the first process only."""
    config = run.config
    if config.profile is not None and config.profile < step:
        run.console.print(
            f"note: seed {seed} resumes at step {step}, after profile={config.profile}: no profile is written"
        )
    writer = None
    if run.open_writer is not None:
        writer = open_checked(run.open_writer, folder, {**plain_settings(config), "seed": seed, "step": step})
    # Only now, so that settings that the checkpoint or the writer rejects are not saved.
    if is_first():
        save_config(config, run.folder, run.console)
        save_start(run.folder, seed=seed, step=step)
    wait_for_all("settings")
    run.group.resumable = True
    with MetricsLog(folder, step, writer) if is_first() else contextlib.nullcontext() as log:
        yield log


def _train(
    run: _Run,
    trainer: Trainer,
    folder: Path,
    manager: ocp.CheckpointManager,
    log: MetricsLog | None,
    recorded: range,
) -> None:
    """Make the steps of one seed until its end or a signal, with evaluations, checkpoints and a progress bar."""
    config, state, total = run.config, trainer.state, trainer.total_steps
    described = False
    warm_up_left = max(config.warmup_steps - state.step, 0)
    time_left = TimeLeft({WARM_UP: warm_up_left, LEARN: total - state.step - warm_up_left})
    with progress_bar(run.console, f"seed {trainer.seed}", total=total) as (bar, task_id):

        def report(metrics: dict[str, Any], step: int) -> None:
            if log is not None:
                log.write(step, metrics)
            for failure in metrics.get(FAILURES, ()):
                bar.console.print(f"step {step}: {failure}", style="red", markup=False)

        def show(text: str) -> None:
            bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

        if state.step < total:
            show(f"{COLUMNS_EXPLAINED}\n\nseed {trainer.seed}\n{heading()}")
        while state.step < total and not on_any(run.stop.is_set()):
            step, learning = state.step, state.step >= config.warmup_steps
            if config.evaluates_before(step):
                report(trainer.evaluate(), step)
            with profiled(folder / f"profile-{step}" if is_first() and step == config.profile else None):
                metrics = trainer.learn() if learning else trainer.warm_up()
            report(metrics, step)
            show(status_text(metrics, step=state.step, total=total, left=time_left.seconds_after(metrics)))
            if learning and log is not None:
                log.write_samples(step, trainer.texts)
            if learning and not described and trainer.summary is not None:
                bar.console.print(f"step {step}: {trainer.summary}", highlight=False, soft_wrap=True)
                described = True
            bar.update(task_id, completed=state.step)
            if step in recorded and trainer.responses is not None:
                replay = RoutingReplay(whole_routes(trainer.responses), trainer.responses.mask)
                if is_first():
                    experts = config.model_config.num_experts
                    save_routing(folder, step, replay, trainer.recording, num_experts=experts)
            if state.step % config.checkpoint_every == 0:
                state.save(manager)
        if state.step == total and config.evaluation_batches:
            report(trainer.evaluate(), total)


def _save_model(trainer: Trainer, folder: Path, console: Console) -> None:
    """Save the trained model as a Hugging Face checkpoint, in the format and dtype of the one that it started from."""
    trained = folder / f"model-{trainer.state.step}"
    source = trainer.config.model
    assert source is not None
    if not on_any(trained.exists()):
        save_pretrained(trainer.state.agent.policy, trained, source=source, dtype=saved_dtype(source))
    console.print(f"trained model: {trained}", highlight=False, soft_wrap=True)


def _check_model(config: Train) -> None:
    """Check that the folder of the model exists."""
    if config.lacks_checkpoint:
        raise ValueError(
            f"model={config.model}: there is no such folder; a run needs the checkpoint with its config.json and"
            " tokenizer, and only --dry goes without"
        )


def check_planner(config: Train) -> None:
    """Trace the planner, so that it rejects bad settings now and not after the warm-up."""
    topology, planner, layers = config.topology, config.planner_entry.planner, config.model_config.moe_layers
    ranks = topology.num_nodes, topology.ranks_per_node

    def plan(key: jax.Array) -> Any:
        load = jnp.zeros((config.micro_batches, layers, *ranks, topology.num_experts), jnp.int32)
        return planner.update(PlanRequest(load), planner.init(topology, layers, key=key), topology)

    jax.eval_shape(plan, jax.random.key(0))


def _check_processes(config: Train) -> None:
    """Check that ranks fit the processes, and that all processes have the same settings."""
    processes, local = process_count(), config.topology.ranks_per_node
    nodes = config.num_ranks // local
    if nodes % processes and processes % nodes:
        raise ValueError(
            f"nodes={nodes} x ranks_per_node={local} do not fit {processes} processes: each process must hold whole"
            " nodes, or each node whole processes"
        )
    settings = json.dumps(plain_settings(config), sort_keys=True).encode()
    check_same(np.frombuffer(settings, np.uint8), "settings")
