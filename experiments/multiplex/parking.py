"""What it takes to park a run in host memory: the bytes of its state, and the seconds of moving it, both measured.

In RollMux (arXiv 2512.11306) the states of all jobs of a group stay in host memory, and each phase of a job begins by
bringing its state to the devices. `experiments.multiplex.park` measures that of a run and writes ``parking.json`` into
the folder of the run, which jobs of this run are then planned with.
"""

import math
from pathlib import Path
from typing import Any, Final, NamedTuple

from experiments.multiplex.jobs import BYTES_MAX, SECONDS_MAX
from experiments.multiplex.run_metrics import StepDurations
from relibra_jax.support.json_text import parse_json

PARKING_FILE: Final = "parking.json"
"""The file of measured moves in the folder of a run."""


class Move(NamedTuple):
    """Arrays that move to host memory and back."""

    bytes: int
    """The bytes of the arrays on all devices together."""
    out_seconds: float
    """The seconds from the devices to host memory, the median of several moves."""
    back_seconds: float
    """The seconds from host memory to the devices, likewise."""


class Parking(NamedTuple):
    """The measured moves of a run."""

    weights: Move
    """The weights of the policy, all that a rollout needs."""
    state: Move
    """The whole state: weights, optimizer, and the critic and the reference if the run has them."""
    device: str
    """The kind of device on which it was measured."""
    devices: int
    """The number of devices."""

    def added_to(self, durations: StepDurations) -> StepDurations:
        """Return the durations of steps whose phases begin and end with moves, which nothing hides.

        A rollout brings in the weights, and drops them, because it does not change them. Training brings in the whole
        state and parks it again.

        Args:
            durations: the durations of steps of a run that had its devices to itself.

        >>> import numpy as np
        >>> steps = StepDurations(rollout=np.array([9.0]), training=np.array([8.0]), seeds=1)
        >>> moves = Move(4, 0.5, 0.25), Move(12, 2.0, 1.0)
        >>> Parking(*moves, device="cpu", devices=1).added_to(steps)
        StepDurations(rollout=array([9.25]), training=array([11.]), seeds=1)
        """
        moved = self.state.back_seconds + self.state.out_seconds
        return durations._replace(
            rollout=durations.rollout + self.weights.back_seconds, training=durations.training + moved
        )

    def node_bytes(self, *, training_nodes: int) -> dict[str, int]:
        """Return the bytes on each node: every rollout node holds the weights, and training nodes share the state.

        Args:
            training_nodes: the number of training nodes.

        >>> Parking(Move(4, 1.0, 1.0), Move(13, 1.0, 1.0), "cpu", 1).node_bytes(training_nodes=2)
        {'rollout_bytes': 4, 'training_bytes': 7}
        """
        return {
            "rollout_bytes": self.weights.bytes,
            "training_bytes": math.ceil(self.state.bytes / training_nodes),
        }

    def numbers(self) -> dict[str, Any]:
        """Return the contents of the file."""
        return self._asdict() | {name: getattr(self, name)._asdict() for name in ("weights", "state")}


def read_parking(folder: Path) -> Parking | None:
    """Read the measured moves of a run; None if they have not been measured.

    Args:
        folder: the folder of the run.

    Raises:
        ValueError: if the file is not one that `experiments.multiplex.park` writes.
    """
    path = folder / PARKING_FILE
    if not path.exists():
        return None
    try:
        numbers = parse_json(path.read_text())
        moves = {name: Move(**numbers[name]) for name in ("weights", "state")}
        parking = Parking(**(numbers | moves))
        fits = all(
            type(move.bytes) is int
            and 0 < move.bytes <= BYTES_MAX
            and all(0 <= seconds <= SECONDS_MAX for seconds in move[1:])
            for move in moves.values()
        )
    except (KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise ValueError(
            f"{path} has no measured moves; write it with python -m experiments.multiplex.park {folder}"
        )
    return parking
