"""Faults that a miniature causes on purpose: a link that is down, slow or loses packets, or a rank that is stopped."""

import os
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple, get_args

from experiments.miniature.cluster import Miniature, host_name, port_name

Kind = Literal["down", "slow", "lose", "stop"]
"""A link that sends nothing, a link at a tenth of its rates, a link that loses packets, or a rank's process that is
stopped (SIGSTOP)."""
SLOWER: Final = 0.1
"""The share of its rate that a slow link has."""
LOSSY: Final = 0.02
"""The share of its rate at which a link that loses packets brings them to its rank. One can wait; others are lost. The
messages of small models are lost only on so slow a link."""
_FAULT: Final = re.compile(r"(\w+):(\d+)@(\d+(?:\.\d+)?)(?:\+(\d+(?:\.\d+)?))?")


class Fault(NamedTuple):
    """A fault of one rank."""

    kind: Kind
    """What happens."""
    rank: int
    """The rank to which it happens."""
    after: float
    """The seconds after the start of the ranks."""
    seconds: float | None
    """How long it lasts; None for good."""

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Read a fault from text: a kind, a rank, the seconds before it, and how long it lasts.

        Args:
            text: ``down:1@20+10`` for rank 1's link, down from 20 s to 30 s; ``down:1@20`` for good.

        Raises:
            ValueError: if it is not a fault.

        >>> Fault.parse("stop:3@20+10")
        Fault(kind='stop', rank=3, after=20.0, seconds=10.0)
        """
        match = _FAULT.fullmatch(text)
        if not match or match[1] not in get_args(Kind):
            kinds = ", ".join(get_args(Kind))
            raise ValueError(
                f"fault {text!r} is not KIND:RANK@SECONDS or KIND:RANK@SECONDS+SECONDS, with {kinds}"
            )
        kind, rank, after, seconds = match.groups()
        return cls(kind, int(rank), float(after), float(seconds) if seconds else None)  # type: ignore[arg-type]

    def check(self, miniature: Miniature) -> None:
        """Raise ValueError if the miniature has no such rank."""
        if self.rank >= miniature.size:
            raise ValueError(f"fault of rank {self.rank}: there are only ranks 0 to {miniature.size - 1}")

    def commands(self, miniature: Miniature) -> tuple[list[str], list[str]]:
        """Return the commands that cause the fault of a link and those that end it; none for a stopped rank."""
        if self.kind == "down":
            device = f"ip link set {port_name(self.rank)}"
            return [f"{device} down"], [f"{device} up"]
        if self.kind == "lose":
            port = port_name(self.rank)
            slower, usual = (
                miniature.rate_commands("tc", port, change="change", share=share) for share in (LOSSY, 1.0)
            )
            begin, end = miniature.queue_commands(port, packets=1)
            # It prints how many were lost.
            return [*begin, *slower], [f"tc -s qdisc show dev {port}", *end, *usual]
        if self.kind == "slow":
            return list(self._rates(miniature, SLOWER)), list(self._rates(miniature, 1.0))
        return [], []

    def _rates(self, miniature: Miniature, share: float) -> Iterator[str]:
        for tc, device in (("tc", port_name(self.rank)), (f"tc -n {host_name(self.rank)}", "eth0")):
            yield from miniature.rate_commands(tc, device, change="change", share=share)


def cause(faults: Sequence[Fault], miniature: Miniature, processes: Sequence[subprocess.Popen]) -> None:
    """Cause faults at their times, while the ranks run.

    Args:
        faults: the faults.
        miniature: the sizes of the miniature.
        processes: the processes of the ranks.
    """
    for fault in faults:
        begin, end = fault.commands(miniature)
        steps = [(fault.after, begin, signal.SIGSTOP)]
        if fault.seconds is not None:
            steps.append((fault.after + fault.seconds, end, signal.SIGCONT))
        for moment, commands, to_rank in steps:
            number = to_rank if fault.kind == "stop" else None
            timer = threading.Timer(moment, _step, (commands, processes[fault.rank], number))
            timer.daemon = True
            timer.start()


def _step(commands: Sequence[str], process: subprocess.Popen, number: signal.Signals | None) -> None:
    for command in commands:
        subprocess.run(shlex.split(command), check=True)
    if number is not None and process.poll() is None:
        os.kill(process.pid, number)
