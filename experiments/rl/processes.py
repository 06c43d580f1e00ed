"""A run on several processes: how they come together, hand things to each other, and end together.

Every process executes the same program on the same data: it draws the same prompts, and gets all samples of a rollout,
from which it computes the same plan. What must happen once happens on the first process: rewards are scored, files
other than checkpoints are written. No process outlives another one: what is left says so in one line and ends.
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
from relibra_jax.cli.refusals import exit_status
from relibra_jax.execution import check_same_plan
from relibra_jax.execution.plan_agreement import processes_where

ARRIVE_SECONDS: Final = 45
"""So long processes wait for each other at the start."""
HEARTBEAT_SECONDS: Final = 45
"""A process that JAX has not heard of for so long, one that hangs, ends all others."""
VERDICT_SECONDS: Final = 2.0
"""How long an error waits for the news that another process was lost, of which it may be a consequence."""
STATUS: Final = 1
"""The exit status of a process that ends because another one did."""
LONGEST_REASON: Final = 300
"""So many characters of an error the other processes repeat."""
KEY: Final = "relibra_jax/door"
"""Under this name the first process tells the others, through JAX, where it waits for them."""


@dataclasses.dataclass
class Group:
    """The processes of a run, as this one sees them."""

    command: str = ""
    """What each of them is started with to go on."""
    resumable: bool = False
    """Whether the run has left what it takes to go on."""
    log: Path = Path()
    """Where what is printed below Python goes."""

    @property
    def advice(self) -> str:
        """What to do when one of them is lost."""
        return "start all of them again" + (f" with: {self.command}" if self.resumable else "")


def process_count() -> int:
    """The number of processes; unlike `jax.process_count` it starts no backend."""
    return global_state.num_processes


def is_first() -> bool:
    """Whether this process does what must happen once."""
    return global_state.process_id == 0


@contextlib.contextmanager
def joined() -> Iterator[Group]:
    """Come together with the processes that a launcher has started with this one, if it has.

    Within, this process ends when another one is lost, and an error on this one ends the others: it is told in one
    line, or with its traceback if it is a fault of the program, and the process exits. What libraries below Python
    print goes to a file. A single process notices nothing of all this.

    Raises:
        ValueError: if what launchers say does not fit, as `experiments.rl.launchers.find_launch` says.
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
    """A tree of host arrays as the first process has it; all call it, with arrays of the same shapes."""
    return tree if process_count() == 1 else multihost_utils.broadcast_one_to_all(tree)


def text_from_first(text: str) -> str:
    """A text as the first process has it."""
    length = int(from_first(np.int32(len(text.encode()))))
    encoded = text.encode()[:length].ljust(length)
    return bytes(np.asarray(from_first(np.frombuffer(encoded, np.uint8)))).decode()


def on_any(flag: bool) -> bool:
    """Whether ``flag`` is true on any process."""
    return flag if process_count() == 1 else processes_where(flag).size > 0


def check_same(tree: Any, what: str) -> None:
    """Raise ValueError on every process unless all hold the same host arrays; ``what`` names them."""
    if process_count() > 1:
        check_same_plan(tree, what=what)


def wait_for_all(what: str) -> None:
    """Go on when all processes have come to ``what``."""
    if process_count() > 1:
        multihost_utils.sync_global_devices(what)


def on_every_host[T](tree: T, mesh: Mesh) -> T:
    """`jax.device_get` of arrays that lie on ``mesh``: every process gets all of them."""
    return jax.device_get(tree if process_count() == 1 else _replicated(mesh)(tree))


@functools.cache
def _replicated(mesh: Mesh) -> Any:
    def gather(tree):
        return tree

    return jax.jit(gather, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _initialize(launch: Launch) -> None:
    # JAX would take SIGTERM for itself.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            *(launch.coordinator, launch.num_processes, launch.process_id),
            cluster_detection_method=None if launch.detect else "deactivate",
            initialization_timeout=ARRIVE_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"the processes cannot come together: {error}") from error


def _meet(group: Group) -> Peers:
    """Connect the processes beside JAX, whose connections say nothing of a process that died."""
    client, index, count = global_state.client, global_state.process_id, global_state.num_processes
    assert client is not None
    assert global_state.coordinator_address is not None
    me = f"process {index} of {count} on {socket.gethostname()}"
    try:
        if index == 0:
            door = Door()
            client.key_value_set(KEY, json.dumps([door.port, door.password, me]))
            connections = door.admit(count - 1)
        else:
            port, password, first = json.loads(client.blocking_key_value_get(KEY, ARRIVE_SECONDS * 1000))
            host = global_state.coordinator_address.rpartition(":")[0].strip("[]")
            connections = {first: enter(host, port, password, me)}
    except (OSError, jax.errors.JaxRuntimeError) as error:
        _end(group, f"{me} cannot reach the others ({error})")
    return Peers(connections, functools.partial(_end, group))


_ending = threading.Lock()


def _end(group: Group, what: str, *, keep_log: bool = False) -> NoReturn:
    """End this process now, whatever its other threads are at, with one line."""
    if not _ending.acquire(blocking=False):
        threading.Event().wait()
    Console().show_cursor()  # which a progress bar has hidden
    print(f"error: {what}; {group.advice}", file=sys.stderr, flush=True)
    if not keep_log:
        group.log.unlink(missing_ok=True)
    os._exit(STATUS)


def _fail(error: BaseException, peers: Peers, group: Group) -> NoReturn:
    """End this process because of an error of its own, and the others with it."""
    time.sleep(VERDICT_SECONDS)
    where = f"process {global_state.process_id} of {global_state.num_processes} on {socket.gethostname()}"
    reason = textwrap.shorten(str(error), LONGEST_REASON, placeholder=" ...") or type(error).__name__
    if not peers.tell(f"{where} stopped: {reason}"):
        threading.Event().wait()  # for the thread that is ending this process
    if isinstance(error, jax.errors.JaxRuntimeError) and re.search("gloo|nccl", str(error), re.IGNORECASE):
        _end(group, f"{where}: another process takes no part any more ({reason})")

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
    """Whatever is printed below Python goes to a temporary file: gloo's greetings, JAX's stack traces."""
    handle, name = tempfile.mkstemp(prefix="relibra-", suffix=".log")
    before = sys.stdout, sys.stderr
    for stream in before:
        stream.flush()
    kept = [os.dup(1), os.dup(2)]
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in kept)
    try:
        yield Path(name)
    finally:
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        sys.stdout.close()
        sys.stderr.close()
        sys.stdout, sys.stderr = before
        Path(name).unlink()


@contextlib.contextmanager
def _aborts_in_one_line(group: Group) -> Iterator[None]:
    """JAX aborts a process whose coordinator it cannot reach, from a thread of its own. Here the abort waits for the
    news which process was lost; when there are none, it is told as such."""

    def on_abort(_: int) -> None:
        time.sleep(VERDICT_SECONDS)
        _end(group, _last_words(group.log), keep_log=True)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(on_abort)
    ctypes.CDLL(None).signal(int(signal.SIGABRT), handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGABRT, signal.SIG_DFL)


def _last_words(path: Path) -> str:
    """What JAX aborted for."""
    text = path.read_text(errors="replace")
    if silent := re.search(r"stopped sending heartbeats\):\s*(\d+)", text):
        what = f"process {silent[1]} has given no sign of life for {HEARTBEAT_SECONDS} s"
    elif "RegisterTask" in text:
        what = f"not all processes have come within {ARRIVE_SECONDS} s"
    else:
        what = "JAX has ended this process"
    return f"{what} (more in {path} on {socket.gethostname()})"
