"""The settings of requests to an engine's servers."""

import dataclasses
from pathlib import Path
from typing import Final

from relibra_jax.support.limits import check_integer, check_positive

BAD_ANSWERS: Final = ("stop", "drop")
"""What a run does with a sample whose answers are all bad."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineRequests:
    """Requests to the servers of ``--engine``."""

    at_once: int = 64
    """The largest number of requests that a server has at the same time."""
    retries: int = 3
    """The number of times that a sample is asked for again after a bad answer."""
    seconds: float = 600.0
    """The seconds after which a request without an answer goes to another server."""
    patience: float = 120.0
    """The seconds without any server after which the run saves its state and ends."""
    bad_answers: str = "stop"
    """What to do with a sample whose answers are all bad: stop the run, or drop it from the batch."""
    weights: Path | None = None
    """The folder for the weights that are sent, which the servers' hosts see under the same path.
    None takes memory of this host."""

    def __post_init__(self) -> None:
        check_integer("at_once", self.at_once, least=1)
        check_integer("retries", self.retries, least=0)
        for name in ("seconds", "patience"):
            check_positive(name, getattr(self, name))
        if self.bad_answers not in BAD_ANSWERS:
            raise ValueError(f"bad_answers {self.bad_answers!r} must be one of {', '.join(BAD_ANSWERS)}")
