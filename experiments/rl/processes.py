"""A run on several processes: how they connect, exchange data, and end together.

Every process executes the same program on the same data: it draws the same prompts, gets all samples of a rollout, and
computes the same plan from them. The first process does what must happen only once: it scores rewards, and writes all
files except checkpoints. When one process ends, the others print one line that says so, and end as well.
"""

import contextlib
import ctypes
import dataclasses
import functools
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
from typing import Any, Final, NoReturn

import jax
import numpy as np
from jax._src.distributed import global_state
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from experiments.rl.launchers import Launch, find_launch
from experiments.rl.peers import Door, Peers, enter
from relibra_jax.execution import check_same_plan
from relibra_jax.execution.plan_agreement import processes_where
from relibra_jax.support.bad_input import exit_status

ARRIVE_SECONDS: Final = 45
"""The time that processes wait for each other at the start."""
HEARTBEAT_SECONDS: Final = 45
"""The time without a heartbeat after which JAX considers a process hung, and all others end."""
VERDICT_SECONDS: Final = 2.0
"""The time that an error waits for news that another process was lost, which may have caused it."""
STATUS: Final = 1
"""The exit status of a process that ends because another one did."""
LONGEST_REASON: Final = 300
"""The maximum number of characters of an error message that the other processes repeat."""
KEY: Final = "relibra_jax/door"
"""The key in JAX's key-value store under which the first process publishes its port, password and name."""


@dataclasses.dataclass
class Group:
    """What a process knows of its run, for the message when another process is lost."""

    command: str = ""
    """The command that resumes the run, to be started on every process."""
    resumable: bool = False
    """Whether the run has written what a resumed run needs."""
    log: Path = Path()
    """The file for the output of libraries below Python."""

    @property
    def advice(self) -> str:
        """What the user should do when a process is lost."""
        return "start all of them again" + (f" with: {self.command}" if self.resumable else "")


def process_count() -> int:
    """Return the number of processes. Unlike `jax.process_count` this starts no backend."""
    return global_state.num_processes


def is_first() -> bool:
    """Return whether this is the first process, which does what must happen only once."""
    return global_state.process_id == 0


@contextlib.contextmanager
def join_processes() -> Iterator[Group]:
    """Connect to the other processes that a launcher started with this one. A process that runs alone does nothing.

    In the block, this process ends when another one is lost. An error on this process ends the others, too. The process
    prints the error in one line, or with its traceback if it is a bug in the program, and exits. The output of
    libraries below Python goes to a file.

    Raises:
        ValueError: under the conditions of `experiments.rl.launchers.find_launch`, or if the processes cannot connect.
    """
    launch = None if jax.distributed.is_initialized() else find_launch(os.environ)
    if launch is None:
        yield Group()
        return
    group = Group()
    with _native_output_in_file() as group.log, _aborts_in_one_line(group):
        _initialize(launch)
        peers = _meet(group)
        try:
            yield group
            jax.distributed.shutdown()
        except BaseException as error:
            _fail(error, peers, group)
        peers.close()


def from_first[T](tree: T) -> T:
    """Return a tree of host arrays as the first process has it. All processes call it, with the same shapes."""
    return tree if process_count() == 1 else multihost_utils.broadcast_one_to_all(tree)


def text_from_first(text: str) -> str:
    """Return a text as the first process has it. All processes call it."""
    length = int(from_first(np.int32(len(text.encode()))))
    encoded = text.encode()[:length].ljust(length)
    return bytes(np.asarray(from_first(np.frombuffer(encoded, np.uint8)))).decode()


def on_any(flag: bool) -> bool:
    """Return whether ``flag`` is true on any process. All processes call it."""
    return flag if process_count() == 1 else processes_where(flag).size > 0


def check_same(tree: Any, name: str) -> None:
    """Raise ValueError on every process unless all have the same host arrays. ``name`` is their name in the message."""
    if process_count() > 1:
        check_same_plan(tree, what=name)


def wait_for_all(name: str) -> None:
    """Wait until all processes have reached the barrier of this name."""
    if process_count() > 1:
        multihost_utils.sync_global_devices(name)


def on_every_host[T](tree: T, mesh: Mesh) -> T:
    """Copy arrays on ``mesh`` to the host, as `jax.device_get` does. Every process gets the whole arrays."""
    return jax.device_get(tree if process_count() == 1 else _replicated(mesh)(tree))


@functools.cache
def _replicated(mesh: Mesh) -> Any:
    def gather(tree):
        return tree

    return jax.jit(gather, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _initialize(launch: Launch) -> None:
    # Otherwise JAX would handle SIGTERM itself.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            *(launch.coordinator, launch.num_processes, launch.process_id),
            cluster_detection_method=None if launch.detect else "deactivate",
            initialization_timeout=ARRIVE_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"the processes cannot connect: {error}") from error


def _meet(group: Group) -> Peers:
    """Connect the processes to each other, as JAX's own connections do not tell when a process died."""
    client, index, count = global_state.client, global_state.process_id, global_state.num_processes
    assert client is not None
    assert global_state.coordinator_address is not None
    own_name = f"process {index} of {count} on {socket.gethostname()}"
    try:
        if index == 0:
            door = Door()
            client.key_value_set(KEY, json.dumps([door.port, door.password, own_name]))
            connections = door.admit(count - 1)
        else:
            port, password, first_name = json.loads(client.blocking_key_value_get(KEY, ARRIVE_SECONDS * 1000))
            host = global_state.coordinator_address.rpartition(":")[0].strip("[]")
            connections = {first_name: enter(host, port, password, own_name)}
    except (OSError, jax.errors.JaxRuntimeError) as error:
        _end(group, f"{own_name} cannot reach the others ({error})")
    return Peers(connections, functools.partial(_end, group))


_ending = threading.Lock()


def _end(group: Group, reason: str, *, keep_log: bool = False) -> NoReturn:
    """Print one line and end this process at once, without waiting for its other threads."""
    if not _ending.acquire(blocking=False):
        threading.Event().wait()
    Console().show_cursor()  # a progress bar may have hidden it
    print(f"error: {reason}; {group.advice}", file=sys.stderr, flush=True)
    if not keep_log:
        group.log.unlink(missing_ok=True)
    os._exit(STATUS)


def _fail(error: BaseException, peers: Peers, group: Group) -> NoReturn:
    """End this process because of its own error, and the other processes with it."""
    time.sleep(VERDICT_SECONDS)
    where = f"process {global_state.process_id} of {global_state.num_processes} on {socket.gethostname()}"
    reason = textwrap.shorten(str(error), LONGEST_REASON, placeholder=" ...") or type(error).__name__
    if not peers.tell(f"{where} stopped: {reason}"):
        threading.Event().wait()  # another thread is ending this process already
    if isinstance(error, jax.errors.JaxRuntimeError) and re.search("gloo|nccl", str(error), re.IGNORECASE):
        _end(group, f"{where}: another process no longer takes part in a collective ({reason})")

    def fail() -> NoReturn:
        raise error

    try:
        status = exit_status(fail)
    except BaseException:
        traceback.print_exc()
        status = STATUS
    sys.stderr.flush()
    group.log.unlink(missing_ok=True)
    os._exit(status)


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
def _aborts_in_one_line(group: Group) -> Iterator[None]:
    """Turn JAX's aborts into one line.

    A thread of JAX aborts a process that cannot reach its coordinator. In the block, such an abort first waits for news
    of which process was lost, whose message then ends this process. Without news, the abort's own reason is printed.
    """

    def on_abort(_: int) -> None:
        time.sleep(VERDICT_SECONDS)
        _end(group, _abort_reason(group.log), keep_log=True)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(on_abort)
    ctypes.CDLL(None).signal(int(signal.SIGABRT), handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGABRT, signal.SIG_DFL)


def _abort_reason(path: Path) -> str:
    """Read from the output of JAX why it aborted this process."""
    text = path.read_text(errors="replace")
    if match := re.search(r"stopped sending heartbeats\):\s*(\d+)", text):
        reason = f"process {match[1]} has sent no heartbeat for {HEARTBEAT_SECONDS} s"
    elif "RegisterTask" in text:
        reason = f"not all processes have started within {ARRIVE_SECONDS} s"
    else:
        reason = "JAX has aborted this process"
    return f"{reason} (more in {path} on {socket.gethostname()})"
