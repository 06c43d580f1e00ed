"""Peers notice when one of them ends. Here threads of one process play three processes."""

import queue
import socket
import threading

import pytest

from experiments.rl.peers import Listener, Peers, connect

SOON = 10


@pytest.fixture
def three():
    """Connect three processes; return their peers, a queue of the messages that each gets, and their connections."""
    listener = Listener()
    accepted: dict[str, socket.socket] = {}
    waiting = threading.Thread(target=lambda: accepted.update(listener.accept(2)))
    waiting.start()
    connect("127.0.0.1", listener.port, "guessed", "process 9").close()
    connected = [
        connect("127.0.0.1", listener.port, listener.password, f"process {index}") for index in (1, 2)
    ]
    waiting.join()
    messages = [queue.Queue() for _ in range(3)]
    sockets = [accepted, *({"process 0": connection} for connection in connected)]
    peers = [Peers(connections, own.put, 30) for connections, own in zip(sockets, messages, strict=True)]
    yield peers, messages, sockets
    for connection in (*accepted.values(), *connected):
        connection.close()


def kill(connections):
    """Close the connections of a process, as the kernel does when the process is killed."""
    for connection in connections.values():
        connection.shutdown(socket.SHUT_RDWR)


def test_listener_rejects_a_wrong_password(three):
    assert set(three[2][0]) == {"process 1", "process 2"}


def test_peers_tell_all_others_who_died(three):
    _, messages, sockets = three
    kill(sockets[2])
    assert [messages[index].get(timeout=SOON) for index in (0, 1)] == ["process 2 died"] * 2


def test_peers_all_notice_the_end_of_the_first_process(three):
    peers, messages, sockets = three
    peers[0]._over.acquire()  # its threads end with it and send no messages
    kill(sockets[0])
    assert [messages[index].get(timeout=SOON) for index in (1, 2)] == ["process 0 died"] * 2


def test_peers_tell_an_error_to_all_others_once(three):
    peers, messages, _ = three
    assert peers[1].tell("process 1 stopped: no room")
    assert [messages[index].get(timeout=SOON) for index in (0, 2)] == ["process 1 stopped: no room"] * 2
    assert not peers[0].tell("process 0 stopped: it has heard of process 1")
    assert messages[1].empty()


def test_peers_ignore_the_end_of_a_process_that_has_closed(three):
    peers, messages, sockets = three
    peers[2].close()
    kill(sockets[2])
    kill(sockets[1])
    assert messages[0].get(timeout=SOON) == "process 1 died"
    assert messages[0].empty()
    assert messages[2].empty()
