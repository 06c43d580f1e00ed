"""The miniature's sizes, and the commands that build its network.

Every rank has a network namespace with one interface. A switch, which is a bridge in a namespace around them, joins the
interfaces. What a rank sends and what it receives is limited by HTB (`man tc-htb`): to the rate of the fast network for
the other ranks of its node, and to that of the slow network for all other ranks, at the same time in both directions.
"""

import dataclasses
import os
import re
from typing import Final

NETWORK: Final = "10.77"
"""The first two numbers of all addresses. The namespaces are not connected to any other network."""
PORT: Final = 9000
"""The port of the first rank at which the processes meet. Its namespace has no other program."""
SOCKETS: Final = {"tcp_limit_output_bytes": 65536, "tcp_slow_start_after_idle": 0}
"""Settings of the kernel that keep connections at the rate of their link: short queues, so that the receipts of one
direction do not wait behind the data of the other, and no slow start after a pause."""
_RATE: Final = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit")
_UNITS: Final = {"k": 1e3, "m": 1e6, "g": 1e9}
_BURST: Final = "64kb"
"""What a link may send at once after a pause: one packet of the kernel's largest size."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Miniature:
    """The sizes of a miniature cluster.

    Raises:
        ValueError: if a number is out of its range, or the ranks need more cores than there are.

    >>> Miniature(nodes=2, ranks=1, slow="100mbit", core=0.5).slow_bytes
    12500000.0
    """

    nodes: int = 2
    """The number of nodes."""
    ranks: int = 2
    """The number of ranks of a node."""
    slow: str = "100mbit"
    """The rate at which a rank sends to other nodes, and at the same time receives: a number and kbit, mbit or gbit."""
    fast: str = "800mbit"
    """The same for the other ranks of its node."""
    core: float = 0.24
    """The share of a core that each rank's process has."""
    threads: int = 1
    """The number of threads on which a rank's process computes and exchanges."""

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks", "threads"):
            if not 1 <= getattr(self, name) <= 250:
                raise ValueError(f"{name}={getattr(self, name)} must be from 1 to 250")
        for name in ("slow", "fast"):
            if rate_of(getattr(self, name)) <= 0:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} must be a rate above 0, for example 100mbit"
                )
        cores = len(os.sched_getaffinity(0))
        if not 0 < self.core * self.size <= cores:
            raise ValueError(
                f"core={self.core:g} for each of {self.size} ranks must be above 0 and need at most the {cores} cores"
                f" of this machine, so at most {cores / self.size:.3g}"
            )

    @property
    def size(self) -> int:
        """The number of ranks of all nodes."""
        return self.nodes * self.ranks

    @property
    def slow_bytes(self) -> float:
        """The bytes per second of the slow network, for each rank and direction."""
        return rate_of(self.slow)

    @property
    def fast_bytes(self) -> float:
        """The bytes per second of the fast network, for each rank and direction."""
        return rate_of(self.fast)

    def address(self, rank: int) -> str:
        """Return the address of a rank."""
        return f"{NETWORK}.{rank // self.ranks}.{rank % self.ranks + 1}"

    def hosts(self) -> str:
        """Return the contents of ``/etc/hosts`` for all ranks. Gloo looks up the address of its own host name."""
        names = [f"{self.address(rank)} {host_name(rank)}" for rank in range(self.size)]
        return "\n".join(["127.0.0.1 localhost", *names, ""])

    def environment(self, rank: int) -> dict[str, str]:
        """Return the variables with which a rank's process finds the others, and the number of its threads."""
        return {
            "JAX_COORDINATOR_ADDRESS": f"{self.address(0)}:{PORT}",
            "JAX_NUM_PROCESSES": str(self.size),
            "JAX_PROCESS_ID": str(rank),
            "JAX_PLATFORMS": "cpu",
            "NPROC": str(self.threads),
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
        }

    def network_commands(self) -> list[str]:
        """Return the commands that build the network inside an empty network namespace."""
        commands = ["ip link set lo up", "ip link add switch type bridge", "ip link set switch up"]
        for rank in range(self.size):
            host, port = host_name(rank), port_name(rank)
            commands += [
                f"ip netns add {host}",
                f"ip link add {port} type veth peer name eth0 netns {host}",
                f"ip link set {port} master switch up",
                f"ip -n {host} link set lo up",
                f"ip -n {host} address add {self.address(rank)}/16 dev eth0",
                f"ip -n {host} link set eth0 up",
                *self._limit(f"tc -n {host}", "eth0", "dst", rank),
                *self._limit("tc", port, "src", rank),
                *(
                    f"nsenter --net=/run/netns/{host} sysctl -q -w net.ipv4.{name}={value}"
                    for name, value in SOCKETS.items()
                ),
            ]
        return commands

    def rate_commands(self, tc: str, device: str, *, change: str = "add", share: float = 1.0) -> list[str]:
        """Return the commands that set the rates of a device.

        Args:
            tc: the command in the device's namespace.
            device: the name of the device.
            change: ``add`` for a new device, ``change`` for one that has rates.
            share: the share of its rates that the device gets.
        """
        return [
            f"{tc} class {change} dev {device} parent 1: classid 1:{number} htb rate {share * 8 * rate:.0f}bit"
            f" burst {_BURST} cburst {_BURST} quantum 60000"
            for number, rate in ((_FAST, self.fast_bytes), (_SLOW, self.slow_bytes))
        ]

    def queue_commands(self, device: str, *, packets: int) -> tuple[list[str], list[str]]:
        """Return the commands that limit the queues of a device to a number of packets, and those that end that."""
        queues = [f"dev {device} parent 1:{number}" for number in (_FAST, _SLOW)]
        return (
            [f"tc qdisc add {queue} pfifo limit {packets}" for queue in queues],
            [f"tc qdisc del {queue}" for queue in queues],
        )

    def _limit(self, tc: str, device: str, end: str, rank: int) -> list[str]:
        """Return the commands that limit the rates of a device by the other end of the connection."""
        node = f"{NETWORK}.{rank // self.ranks}.0/24"
        return [
            f"{tc} qdisc add dev {device} root handle 1: htb default {_SLOW}",
            *self.rate_commands(tc, device),
            f"{tc} filter add dev {device} parent 1: protocol ip u32 match ip {end} {node} flowid 1:{_FAST}",
        ]


_FAST, _SLOW = 1, 2


def host_name(rank: int) -> str:
    """Return the host name of a rank, which is also the name of its network namespace."""
    return f"rank{rank}"


def port_name(rank: int) -> str:
    """Return the name of the switch's interface for a rank."""
    return f"port{rank}"


def rate_of(rate: str) -> float:
    """Return the bytes per second of a rate, for example ``100mbit``."""
    match = _RATE.fullmatch(rate)
    if not match:
        raise ValueError(f"{rate!r} is not a rate: a number and kbit, mbit or gbit, for example 100mbit")
    return float(match[1]) * _UNITS[match[2]] / 8
