"""The processes of a run: how they connect, and how all of them end when one does.

JAX connects the processes for their computations, and notices by heartbeats when one hangs. Additional connections
(`experiments.rl.peers`) tell at once when one has ended. The others then print one line that says so, and end as well.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import re
import signal
import socket
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn

import jax
from jax._src.distributed import global_state
from rich.console import Console

from experiments.rl.launchers import Launch, find_launch
from experiments.rl.peers import Listener, Peers, connect
from relibra_jax.support.bad_input import exit_status

ARRIVE_SECONDS: Final = 45
"""The time that processes wait for each other at the start."""
PATIENCE_SECONDS: Final = 30
"""The time without an answer from the host of a process after which the others end, unless a run sets another."""
HUNG_SECONDS: Final = 300
"""The time without a heartbeat after which a process counts as hung, unless a run sets another."""
VERDICT_SECONDS: Final = 2.0
"""The time that an error waits for news that another process was lost, which may have caused it."""
STATUS: Final = 1
"""The exit status of a process that ends because another one did."""
LONGEST_REASON: Final = 300
"""The maximum number of characters of an error message that the other processes repeat."""
KEY: Final = "relibra_jax/listener"
"""The key in JAX's key-value store under which the first process publishes its port, password and name."""


@dataclasses.dataclass
class ProcessGroup:
    """The processes of a run, as one of them sees them, and how this one ends if another one is lost."""

    command: str = ""
    """The command that resumes the run, to be started on every process."""
    resumable: bool = False
    """Whether the run has written what a resumed run needs."""
    log: Path = Path()
    """The file for the output of libraries below Python."""
    heartbeat: int = 0
    """The seconds without a heartbeat after which a process counts as hung."""
    _ending: threading.Semaphore = dataclasses.field(default_factory=threading.Semaphore)

    def end(self, reason: str, *, keep_log: bool = False) -> NoReturn:
        """Print one line and end this process at once, without waiting for its other threads."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()
        Console().show_cursor()  # a progress bar may have hidden it
        advice = "start all of them again" + (f" with: {self.command}" if self.resumable else "")
        print(f"error: {reason}; {advice}", file=sys.stderr, flush=True)
        if not keep_log:
            self.log.unlink(missing_ok=True)
        os._exit(STATUS)

    def fail(self, error: BaseException, peers: Peers) -> NoReturn:
        """End this process because of its own error, and the other processes with it."""
        time.sleep(VERDICT_SECONDS)
        reason = textwrap.shorten(str(error), LONGEST_REASON, placeholder=" ...") or type(error).__name__
        if not peers.tell(f"{_own_name()} stopped: {reason}"):
            threading.Event().wait()  # another thread is ending this process already
        if isinstance(error, jax.errors.JaxRuntimeError) and re.search(
            "gloo|nccl", str(error), re.IGNORECASE
        ):
            self.end(f"{_own_name()}: another process no longer takes part in a collective ({reason})")

        def fail() -> NoReturn:
            raise error

        try:
            status = exit_status(fail)
        except BaseException:
            traceback.print_exc()
            status = STATUS
        sys.stderr.flush()
        self.log.unlink(missing_ok=True)
        os._exit(status)


@contextlib.contextmanager
def join_processes(
    patience: int = PATIENCE_SECONDS, hung_after: int = HUNG_SECONDS
) -> Iterator[ProcessGroup]:
    """Connect to the other processes that a launcher started with this one. A process that runs alone does nothing.

    In the block, this process ends when another one is lost. An error on this process ends the others, too. The process
    prints the error in one line, or with its traceback if it is a bug in the program, and exits. The output of
    libraries below Python goes to a file.

    Args:
        patience: the seconds without an answer from the host of a process after which it counts as lost.
        hung_after: the seconds without a heartbeat after which a process on a host that answers counts as hung.

    Raises:
        ValueError: under the conditions of `experiments.rl.launchers.find_launch`, or if the processes cannot connect.
    """
    launch = None if jax.distributed.is_initialized() else find_launch(os.environ)
    group = ProcessGroup(heartbeat=hung_after)
    if launch is None:
        yield group
        return
    with _native_output_in_file() as group.log, _aborts_in_one_line(group):
        _initialize(launch, group.heartbeat)
        peers = _connect(group, patience)
        try:
            yield group
            jax.distributed.shutdown()
        except BaseException as error:
            group.fail(error, peers)
        peers.close()


def _initialize(launch: Launch, heartbeat: int) -> None:
    # Otherwise JAX would handle SIGTERM itself.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            launch.coordinator,
            launch.num_processes,
            launch.process_id,
            cluster_detection_method=None if launch.detect else "deactivate",
            initialization_timeout=ARRIVE_SECONDS,
            heartbeat_timeout_seconds=heartbeat,
        )
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"the processes cannot connect: {error}") from error


def _own_name() -> str:
    return f"process {global_state.process_id} of {global_state.num_processes} on {socket.gethostname()}"


def _connect(group: ProcessGroup, patience: int) -> Peers:
    """Connect the processes to each other, as JAX's own connections do not tell when a process died."""
    client, name = global_state.client, _own_name()
    assert client is not None
    assert global_state.coordinator_address is not None
    try:
        if global_state.process_id == 0:
            listener = Listener()
            client.key_value_set(KEY, json.dumps([listener.port, listener.password, name]))
            connections = listener.accept(global_state.num_processes - 1)
        else:
            port, password, first_name = json.loads(client.blocking_key_value_get(KEY, ARRIVE_SECONDS * 1000))
            host = global_state.coordinator_address.rpartition(":")[0].strip("[]")
            connections = {first_name: connect(host, port, password, name)}
    except (OSError, jax.errors.JaxRuntimeError) as error:
        group.end(f"{name} cannot reach the others ({error})")
    return Peers(connections, group.end, patience)


@contextlib.contextmanager
def _native_output_in_file() -> Iterator[Path]:
    """Redirect to a temporary file what libraries below Python print: gloo's greetings, JAX's stack traces."""
    handle, name = tempfile.mkstemp(prefix="relibra-", suffix=".log")
    streams = sys.stdout, sys.stderr
    for stream in streams:
        stream.flush()
    terminal = [os.dup(1), os.dup(2)]
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in terminal)
    try:
        yield Path(name)
    finally:
        os.dup2(terminal[0], 1)
        os.dup2(terminal[1], 2)
        sys.stdout.close()
        sys.stderr.close()
        sys.stdout, sys.stderr = streams
        Path(name).unlink()


@contextlib.contextmanager
def _aborts_in_one_line(group: ProcessGroup) -> Iterator[None]:
    """Turn JAX's aborts into one line.

    A thread of JAX aborts a process that cannot reach its coordinator. In the block, such an abort first waits for news
    of which process was lost, whose message then ends this process. Without news, the abort's own reason is printed.
    """

    def on_abort(_: int) -> None:
        time.sleep(VERDICT_SECONDS)
        group.end(_abort_reason(group.log, group.heartbeat), keep_log=True)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(on_abort)
    ctypes.CDLL(None).signal(int(signal.SIGABRT), handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGABRT, signal.SIG_DFL)


def _abort_reason(path: Path, heartbeat: int) -> str:
    """Read from the output of JAX why it aborted this process."""
    text = path.read_text(errors="replace")
    if match := re.search(r"stopped sending heartbeats\):\s*(\d+)", text):
        reason = f"process {match[1]} has sent no heartbeat for {heartbeat} s"
    elif "RegisterTask" in text:
        reason = f"not all processes have started within {ARRIVE_SECONDS} s"
    else:
        reason = "JAX has aborted this process"
    return f"{reason} (more in {path} on {socket.gethostname()})"
