"""Processes that notice each other's end, here threads of one: what is heard of a process that died."""

import queue
import socket
import threading

import pytest

from experiments.rl.peers import Door, Peers, enter

SOON = 10


@pytest.fixture
def three():
    """The connections of three processes, and what each hears."""
    door = Door()
    admitted: dict[str, socket.socket] = {}
    waiting = threading.Thread(target=lambda: admitted.update(door.admit(2)))
    waiting.start()
    enter("127.0.0.1", door.port, "guessed", "process 9").close()
    entered = [enter("127.0.0.1", door.port, door.password, f"process {index}") for index in (1, 2)]
    waiting.join()
    heard = [queue.Queue() for _ in range(3)]
    sockets = [admitted, *({"process 0": connection} for connection in entered)]
    peers = [Peers(mine, said.put) for mine, said in zip(sockets, heard, strict=True)]
    yield peers, heard, sockets
    for connection in (*admitted.values(), *entered):
        connection.close()


def kill(connections):
    """What the kernel does for a process that is killed."""
    for connection in connections.values():
        connection.shutdown(socket.SHUT_RDWR)


def test_strangers_are_not_admitted(three):
    assert set(three[2][0]) == {"process 1", "process 2"}


def test_the_first_process_tells_who_died(three):
    _, heard, sockets = three
    kill(sockets[2])
    assert [heard[index].get(timeout=SOON) for index in (0, 1)] == ["process 2 died"] * 2


def test_the_end_of_the_first_process_is_noticed_by_all(three):
    peers, heard, sockets = three
    peers[0]._over.acquire()  # its threads die with it: they tell nobody that connections end
    kill(sockets[0])
    assert [heard[index].get(timeout=SOON) for index in (1, 2)] == ["process 0 died"] * 2


def test_an_error_is_told_to_all_others_and_once(three):
    peers, heard, _ = three
    assert peers[1].tell("process 1 stopped: no room")
    assert [heard[index].get(timeout=SOON) for index in (0, 2)] == ["process 1 stopped: no room"] * 2
    assert not peers[0].tell("process 0 stopped: it has heard of process 1")
    assert heard[1].empty()


def test_who_takes_leave_may_go(three):
    peers, heard, sockets = three
    peers[2].close()
    kill(sockets[2])
    kill(sockets[1])
    assert heard[0].get(timeout=SOON) == "process 1 died"
    assert heard[0].empty()
    assert heard[2].empty()
