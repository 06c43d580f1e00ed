"""Writers of metrics by name: TensorBoard, Weights & Biases and MLflow, each where its package is installed.

Calls and limits are those of their documentation:

    tensorboard  ``SummaryWriter``, ``add_scalar`` and ``add_histogram`` (tensorboardx.readthedocs.io)
    wandb        ``wandb.init``, ``Run.log`` and ``wandb.Histogram`` (docs.wandb.ai/models/ref/python)
    mlflow       ``start_run``, ``log_params``, ``log_metrics`` and ``end_run`` (mlflow.org/docs/latest/api_reference)

A run that resumes continues its run of W&B or MLflow, whose id is kept in the folder of the seed.
"""

import importlib
import importlib.util
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from experiments.rl.metrics import lists_of, scalars_of
from experiments.rl.settings import flat
from relibra_jax.support.atomic_write import write_atomically
from relibra_jax.support.outside import import_function
from relibra_jax.support.suggestions import look_up

type Lists = dict[str, list[int | float]]
"""Metrics that are lists, by name: a number for each layer, rank, micro-batch or part."""
PROJECT: Final = "relibra"
"""The project of W&B and the experiment of MLflow to which runs are written."""


@runtime_checkable
class Writer(Protocol):
    """An object that metrics are written to, such as a run of Weights & Biases.

    If it has a method ``log_lists(lists, step)``, that gets the metrics that are lists; otherwise ``log`` gets every
    entry as a number of its own. If it has a method ``finish()``, the log calls it at the end of the run.
    """

    def log(self, metrics: dict[str, int | float], step: int) -> object:
        """Write the metrics of a step, under the names of `experiments.rl.metrics.METRICS`."""


type OpenWriter = Callable[[Path, dict[str, Any]], Writer]
"""A function of the folder and the settings of one seed's run that opens its writer. The settings have ``seed``, and
``step``, the step at which the run starts or resumes."""


class TensorBoard:
    """Event files for TensorBoard in the folder of the seed; lists are histograms.

    Args:
        folder: the folder of one seed's run.
        settings: the settings of the run, with ``step``, from which on earlier events are dropped.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]):
        self._board = importlib.import_module("tensorboardX").SummaryWriter(
            str(folder), purge_step=settings["step"]
        )

    def log(self, metrics: dict[str, int | float], step: int) -> None:
        """Write numbers."""
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)

    def log_lists(self, lists: Lists, step: int) -> None:
        """Write a histogram of each list."""
        for name, values in lists.items():
            self._board.add_histogram(name, values, step)

    def finish(self) -> None:
        """Close the files."""
        self._board.close()


class WeightsAndBiases:
    """A run of Weights & Biases; lists are histograms.

    Args:
        folder: the folder of one seed's run.
        settings: the settings of the run, which become the run's ``config``.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]):
        self._wandb = importlib.import_module("wandb")
        run_id = _saved_id(folder, "wandb") or uuid.uuid4().hex[:8]
        self._run = self._wandb.init(
            project=PROJECT,
            name=_run_name(folder),
            dir=str(folder),
            config=settings,
            allow_val_change=True,
            id=run_id,
            resume="allow",
        )
        _save_id(folder, "wandb", run_id)

    def log(self, metrics: dict[str, int | float], step: int) -> None:
        """Write numbers."""
        self._run.log(metrics, step=step)

    def log_lists(self, lists: Lists, step: int) -> None:
        """Write a histogram of each list, into the step that `log` wrote."""
        self._run.log({name: self._wandb.Histogram(values) for name, values in lists.items()}, step=step)

    def finish(self) -> None:
        """End the run."""
        self._run.finish()


class MLflow:
    """A run of MLflow at the tracking server of its environment variables; a list is written number by number.

    Args:
        folder: the folder of one seed's run.
        settings: the settings of the run, which become the parameters of the MLflow run, once: they cannot change.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]):
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.set_experiment(PROJECT)
        run_id = _saved_id(folder, "mlflow")
        if run_id is not None:
            self._mlflow.start_run(run_id=run_id)
            return
        run = self._mlflow.start_run(run_name=_run_name(folder))
        self._mlflow.log_params(flat(settings))
        _save_id(folder, "mlflow", run.info.run_id)

    def log(self, metrics: dict[str, int | float], step: int) -> None:
        """Write numbers."""
        self._mlflow.log_metrics(metrics, step=step)

    def finish(self) -> None:
        """End the run."""
        self._mlflow.end_run()


class NamedWriter(NamedTuple):
    """A writer that `find_writer` finds by its name."""

    open: Callable[[Path, dict[str, Any]], Writer]
    """The function of a folder and settings that opens it."""
    module: str
    """The module that it needs."""
    package: str
    """The package to install for that."""


NAMED_WRITERS: Final[Mapping[str, NamedWriter]] = MappingProxyType(
    {
        "tensorboard": NamedWriter(TensorBoard, "tensorboardX", "tensorboardX"),
        "wandb": NamedWriter(WeightsAndBiases, "wandb", "wandb"),
        "mlflow": NamedWriter(MLflow, "mlflow", "mlflow"),
    }
)
"""The writers by name."""


def find_writer(name: str) -> OpenWriter:
    """Find a writer of `NAMED_WRITERS`, or import a function that opens one.

    Args:
        name: the name of a writer, or a function as ``module:function``, in the current folder or on Python's module
            path.

    Returns:
        The function of a folder and settings that opens the writer.

    Raises:
        ValueError: if the package of a named writer is not installed, or raises an error when it opens; if there is no
            such name, module or function; or if the function does not take a folder and settings.
    """
    if ":" not in name:
        writer = look_up("writer ", name, NAMED_WRITERS)
        if importlib.util.find_spec(writer.module) is None:
            raise ValueError(
                f"writer {name!r} is not installed; install it with: pip install {writer.package}"
            )

        def open_named(folder: Path, settings: dict[str, Any]) -> Writer:
            try:
                return writer.open(folder, settings)
            except Exception as error:  # packages have errors of their own, for example without a login
                raise ValueError(f"writer {name!r} does not open: {error}") from error

        return open_named
    return import_function("writer", name, "folder", "settings")


def open_checked(open_writer: OpenWriter, folder: Path, settings: dict[str, Any]) -> Writer:
    """Open a writer and check that it can log.

    Args:
        open_writer: the function that opens the writer.
        folder: the folder of the run.
        settings: the settings of the run.

    Returns:
        The writer.

    Raises:
        ValueError: if the function returns an object without ``log``.
    """
    writer = open_writer(folder, settings)
    if not isinstance(writer, Writer):
        name = getattr(open_writer, "__qualname__", repr(open_writer))
        raise ValueError(
            f"writer {name} returned a {type(writer).__name__}: it must return an object with log(metrics, step=)"
        )
    return writer


def write_line(writer: Writer, line: Mapping[str, Any], step: int) -> None:
    """Pass the numbers and lists of a line of metrics to a writer, without null."""
    numbers, lists = scalars_of(line), lists_of(line)
    if not hasattr(writer, "log_lists"):
        for name, values in lists.items():
            numbers |= {f"{name}/{number}": each for number, each in enumerate(values) if each is not None}
        writer.log(numbers, step=step)
        return
    writer.log(numbers, step=step)
    whole = {name: [each for each in values if each is not None] for name, values in lists.items()}
    writer.log_lists({name: values for name, values in whole.items() if values}, step=step)


def _run_name(folder: Path) -> str:
    """Name a run after its folder and its seed."""
    return f"{folder.absolute().parent.name}/{folder.name}"


def _saved_id(folder: Path, writer: str) -> str | None:
    path = folder / f"{writer}.id"
    return path.read_text().strip() if path.exists() else None


def _save_id(folder: Path, writer: str, run_id: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with write_atomically(folder / f"{writer}.id") as part:
        part.write_text(f"{run_id}\n")
