"""Peers notice when one of them ends. Here threads of one process play three processes."""

import queue
import socket
import threading

import pytest

from experiments.rl.peers import Door, Peers, enter

SOON = 10


@pytest.fixture
def three():
    """Connect three processes; return their peers, a queue of the messages that each gets, and their connections."""
    door = Door()
    admitted: dict[str, socket.socket] = {}
    waiting = threading.Thread(target=lambda: admitted.update(door.admit(2)))
    waiting.start()
    enter("127.0.0.1", door.port, "guessed", "process 9").close()
    entered = [enter("127.0.0.1", door.port, door.password, f"process {index}") for index in (1, 2)]
    waiting.join()
    messages = [queue.Queue() for _ in range(3)]
    sockets = [admitted, *({"process 0": connection} for connection in entered)]
    peers = [Peers(connections, own.put) for connections, own in zip(sockets, messages, strict=True)]
    yield peers, messages, sockets
    for connection in (*admitted.values(), *entered):
        connection.close()


def kill(connections):
    """Close the connections of a process, as the kernel does when the process is killed."""
    for connection in connections.values():
        connection.shutdown(socket.SHUT_RDWR)


def test_strangers_are_not_admitted(three):
    assert set(three[2][0]) == {"process 1", "process 2"}


def test_the_first_process_tells_who_died(three):
    _, messages, sockets = three
    kill(sockets[2])
    assert [messages[index].get(timeout=SOON) for index in (0, 1)] == ["process 2 died"] * 2


def test_the_end_of_the_first_process_is_noticed_by_all(three):
    peers, messages, sockets = three
    peers[0]._over.acquire()  # its threads end with it and send no messages
    kill(sockets[0])
    assert [messages[index].get(timeout=SOON) for index in (1, 2)] == ["process 0 died"] * 2


def test_an_error_is_told_to_all_others_and_once(three):
    peers, messages, _ = three
    assert peers[1].tell("process 1 stopped: no room")
    assert [messages[index].get(timeout=SOON) for index in (0, 2)] == ["process 1 stopped: no room"] * 2
    assert not peers[0].tell("process 0 stopped: it has heard of process 1")
    assert messages[1].empty()


def test_who_takes_leave_may_go(three):
    peers, messages, sockets = three
    peers[2].close()
    kill(sockets[2])
    kill(sockets[1])
    assert messages[0].get(timeout=SOON) == "process 1 died"
    assert messages[0].empty()
    assert messages[2].empty()
