"""What the blocks of a kernel do at barriers and to shared memory, as a machine of explicit states, and a search of it.

An agent is a warpgroup, or one of its warps, with the events that it performs in order. The machine follows NVIDIA's
PTX manual for barriers (mbarrier) and asynchronous copies, and JAX's Mosaic for what each operation counts:

- A phase of a barrier ends when its arrivals are complete, and all bytes that copies announced have landed. Waits test
  only the parity of the phase: an agent's n-th wait passes while the parity of the current phase differs from n's. So a
  wait that is a phase too late blocks, and one that is a phase too early passes.
- A copy lands at any time after its start, in any order, each share by itself.
- A product reads its buffers until its agent waits for it. That is the latest end that the hardware may choose, and no
  other agent can see an earlier one. A product is one operation of all warps of a warpgroup, with one start and one
  end, as CUTLASS's pipelines take it too.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

type Place = tuple[str, int]
"""The name of an array of buffers or barriers in shared memory, and an index."""


class Wait(NamedTuple):
    """Wait for the next phase of a barrier of this block."""

    barrier: Place


class Arrive(NamedTuple):
    """Arrive at a barrier, that of a cluster in all blocks."""

    barrier: Place


class Copy(NamedTuple):
    """Start a copy into a buffer, which arrives at a barrier and announces its bytes.

    A block sends its share of a multicast copy to all blocks.
    """

    buffer: Place
    barrier: Place
    number: int
    """The number of this content of the buffer."""
    multicast: bool = False
    source: int | None = None
    """The rank from whose memory the copy reads; None for this one's."""


class Read(NamedTuple):
    """Start a product, or a copy to global memory, that reads buffers."""

    contents: tuple[tuple[Place, int], ...]
    """The buffers, and the number of the content that each must have."""


class Finish(NamedTuple):
    """Wait until only so many of this agent's reads have not ended."""

    remaining: int


class Write(NamedTuple):
    """Write to a buffer."""

    buffer: Place
    number: int
    """The number of the content that is changed, or of the new content of the whole buffer."""
    part: int | None
    """The part that is written; None for the whole buffer."""


class Sync(NamedTuple):
    """Make what was written visible to products and copies, and wait for the other warps of the warpgroup."""


class Signal(NamedTuple):
    """Add 1 to the semaphore of the same block of a rank."""

    rank: int


class AwaitSignals(NamedTuple):
    """Wait until this block's semaphore has reached a value."""

    value: int


type Event = Wait | Arrive | Copy | Read | Finish | Write | Sync | Signal | AwaitSignals


class Agent(NamedTuple):
    """A warpgroup, or a warp of one, and what it does."""

    rank: int
    block: int
    """The number of its block on this rank."""
    events: Sequence[Event]
    warp: int = 0
    warps: int = 1
    """The number of agents that its warpgroup is divided into; they are neighbours in the list of agents."""

    @property
    def home(self) -> tuple[int, int]:
        """The block, counted on all ranks."""
        return self.rank, self.block


class Arrivals(NamedTuple):
    """What completes a phase of a barrier."""

    warpgroups: int
    """The number of arrivals of warpgroups; for a cluster, from each block."""
    cluster: bool = False
    """Whether one thread of each warpgroup arrives, in all blocks, instead of all threads in this one."""


class Fault(Exception):
    """What no order of events may do."""


class State(NamedTuple):
    """The state of all blocks."""

    at: tuple[int, ...]
    """The number of events that each agent has performed."""
    barriers: tuple[tuple[int, int, int], ...]
    """Of each barrier, the phase, the missing arrivals, and the announced shares that have not landed."""
    contents: tuple[tuple[int, ...], ...]
    """Of each buffer, the number of the content of every share, and the parts that were written since, as bits."""
    flying: frozenset[tuple[int, int, tuple[int, int]]]
    """The agent, the event and the target block of each share that has not landed."""
    signals: tuple[int, ...]
    """The semaphore of each block."""


class Machine:
    """All agents of a cluster, or of some ranks."""

    def __init__(
        self, agents: Sequence[Agent], arrivals: Mapping[str, Arrivals], *, coarse: bool = True
    ) -> None:
        """Prepare a search.

        Args:
            agents: the agents.
            arrivals: what completes a phase of the barriers of each name.
            coarse: whether an agent performs several events at once, of which only the first may wait, and whether the
                copies of a phase land together. Lipton's reduction (CACM 18(12), 1975) permits this: an arrival only
                enables other agents, so nothing is lost if what precedes it happens right before.

        Raises:
            Fault: if an agent signals others after a write, or reads what it wrote, without `Sync` in between.
        """
        self.agents, self.coarse = agents, coarse
        for agent in agents:
            _check_synchronized(agent)
        self.warps = max(agent.warps for agent in agents)
        self.blocks = sorted({agent.home for agent in agents})
        events = [(agent.home, event) for agent in agents for event in agent.events]
        barriers = sorted({(home, event.barrier) for home, event in events if hasattr(event, "barrier")})
        self.barrier = {key: place for place, key in enumerate(barriers)}
        self.cluster = {name for name, count in arrivals.items() if count.cluster}
        # Of a barrier of its own block, every thread of a warpgroup counts.
        self.full = [
            arrivals[name].warpgroups * (len(self.blocks) if name in self.cluster else self.warps)
            for _, (name, _) in barriers
        ]
        buffers = sorted({(home, event.buffer) for home, event in events if isinstance(event, Copy | Write)})
        self.buffer = {key: place for place, key in enumerate(buffers)}
        self.multicast = {event.buffer for _, event in events if isinstance(event, Copy) and event.multicast}
        self.reading = [_reading(agent) for agent in agents]
        # Parts that some agents write must be there when any agent reads.
        self.parts: dict[tuple[tuple[int, int], Place, int], int] = {}
        for home, event in events:
            if isinstance(event, Write) and event.part is not None:
                key = home, event.buffer, event.number
                self.parts[key] = self.parts.get(key, 0) | 1 << event.part
        self.waits: list[list[int]] = []
        for agent in agents:
            counts: dict[Place, int] = {}
            self.waits.append([])
            for event in agent.events:
                number = counts.get(event.barrier, 0) if isinstance(event, Wait) else -1
                self.waits[-1].append(number)
                if isinstance(event, Wait):
                    counts[event.barrier] = number + 1

    def start(self) -> State:
        """Return the state before the first event."""
        barriers = tuple((0, full, 0) for full in self.full)
        contents = tuple((*(-1,) * self._shares(buffer), 0) for _, buffer in self.buffer)
        return State((0,) * len(self.agents), barriers, contents, frozenset(), (0,) * len(self.blocks))

    def successors(self, state: State) -> Iterator[State]:
        """Yield the states that the next events of agents, and landings of copies, lead to.

        Raises:
            Fault: if an event does what it may not, or if none is possible before all agents have ended.
        """
        stuck = not state.flying
        for number, agent in enumerate(self.agents):
            following = self._step(state, number)
            if following is None:
                continue
            stuck = False
            while self.coarse and not self._pauses(agent, following.at[number]):
                after = self._step(following, number)
                if after is None:
                    break
                following = after
            yield following
        together: dict[object, list[tuple[int, int, tuple[int, int]]]] = {}
        for share in state.flying:
            number, at, target = share
            copy = self.agents[number].events[at]
            assert isinstance(copy, Copy)
            key = (number, target, copy.barrier, copy.number) if self.coarse else share
            together.setdefault(key, []).append(share)
        for shares in together.values():
            yield self._land(state, shares)
        if stuck:
            self._check_end(state)

    def _pauses(self, agent: Agent, at: int) -> bool:
        """Return whether other agents must run before an agent's event, if the search is coarse."""
        if at == len(agent.events):
            return True
        previous, event = agent.events[at - 1 : at + 1]
        # The end of a read after an arrival comes after what the arrival permits.
        late = isinstance(event, Finish) and isinstance(previous, Arrive | Copy | Signal)
        return late or isinstance(event, Wait | AwaitSignals)

    def _step(self, state: State, number: int) -> State | None:
        """Return the state after an agent's next event; None if it must wait or has ended."""
        agent, at = self.agents[number], state.at[number]
        if at == len(agent.events):
            return None
        event = agent.events[at]
        if agent.warps > 1 and isinstance(event, Sync | Copy | Read):
            first = number - agent.warp
            if any(other < at for other in state.at[first : first + agent.warps]):
                return None
        barriers, contents, flying, signals = state[1:]
        match event:
            case Wait(barrier):
                phase = barriers[self.barrier[agent.home, barrier]][0]
                if (phase - self.waits[number][at]) % 2 == 0:
                    return None
            case Arrive((name, _) as barrier):
                if name not in self.cluster:
                    barriers = self._arrive(barriers, agent.home, barrier, self.warps // agent.warps)
                elif agent.warp == 0:
                    for home in self.blocks:
                        if self._ended(state, home):
                            raise Fault(f"arrival at {barrier} of block {home}, which has ended")
                        barriers = self._arrive(barriers, home, barrier, 1)
            case Copy():
                shares = self._shares(event.buffer)
                barriers = self._arrive(barriers, agent.home, event.barrier, self.warps, shares)
                targets = self.blocks if event.multicast else [agent.home]
                flying |= {(number, at, target) for target in targets}
            case Read() if agent.warp == 0:
                for buffer, content in event.contents:
                    *tags, parts = contents[self.buffer[agent.home, buffer]]
                    complete = parts == self.parts.get((agent.home, buffer, content), 0)
                    if not complete or any(tag != content for tag in tags):
                        raise Fault(f"{buffer} of block {agent.home} is read without its content")
            case Write():
                self._check_unread(state, agent.home, event.buffer)
                place = self.buffer[agent.home, event.buffer]
                *tags, parts = contents[place]
                if event.part is None:
                    tags, parts = [event.number] * len(tags), 0
                elif any(tag != event.number for tag in tags):
                    raise Fault(f"{event.buffer} of block {agent.home} is written without its content")
                else:
                    parts |= 1 << event.part
                contents = _replaced(contents, place, (*tags, parts))
            case Signal(rank):
                if self._left(state, rank):
                    raise Fault(f"signal to rank {rank}, which has ended")
                place = self.blocks.index((rank, agent.block))
                signals = _replaced(signals, place, signals[place] + 1)
            case AwaitSignals(value):
                if signals[self.blocks.index(agent.home)] < value:
                    return None
        return State(_replaced(state.at, number, at + 1), barriers, contents, flying, signals)

    def _land(self, state: State, shares: Sequence[tuple[int, int, tuple[int, int]]]) -> State:
        """Return the state after the landing of some shares."""
        barriers, contents = state.barriers, state.contents
        for number, at, target in shares:
            copy = self.agents[number].events[at]
            assert isinstance(copy, Copy)
            if self._ended(state, target):
                raise Fault(f"a copy lands in block {target}, which has ended")
            if copy.source is not None and self._left(state, copy.source):
                raise Fault(f"a copy reads from rank {copy.source}, which has ended")
            self._check_unread(state, target, copy.buffer)
            place = self.buffer[target, copy.buffer]
            share = self.blocks.index(self.agents[number].home) if copy.multicast else 0
            tags = _replaced(contents[place][:-1], share, copy.number)
            contents = _replaced(contents, place, (*tags, 0))
            barriers = self._arrive(barriers, target, copy.barrier, 0, -1)
        return state._replace(barriers=barriers, contents=contents, flying=state.flying.difference(shares))

    def _arrive(
        self,
        barriers: tuple[tuple[int, int, int], ...],
        home: tuple[int, int],
        barrier: Place,
        arrivals: int,
        shares: int = 0,
    ) -> tuple[tuple[int, int, int], ...]:
        place = self.barrier[home, barrier]
        phase, missing, announced = barriers[place]
        missing, announced = missing - arrivals, announced + shares
        if missing < 0:
            raise Fault(f"{barrier} of block {home} gets more arrivals than a phase has")
        ends = missing == announced == 0
        return _replaced(
            barriers, place, (phase + 1, self.full[place], 0) if ends else (phase, missing, announced)
        )

    def _shares(self, buffer: Place) -> int:
        return len(self.blocks) if buffer in self.multicast else 1

    def _ended(self, state: State, home: tuple[int, int]) -> bool:
        pairs = zip(self.agents, state.at, strict=True)
        return all(at == len(agent.events) for agent, at in pairs if agent.home == home)

    def _left(self, state: State, rank: int) -> bool:
        """Return whether all blocks of a rank have ended, after which its memory may be written."""
        return all(self._ended(state, home) for home in self.blocks if home[0] == rank)

    def _check_unread(self, state: State, home: tuple[int, int], buffer: Place) -> None:
        for agent, reading, at in zip(self.agents, self.reading, state.at, strict=True):
            if buffer in reading[at] and agent.home == home and agent.warp == 0:
                raise Fault(f"{buffer} of block {home} is overwritten while it is read")

    def _check_end(self, state: State) -> None:
        if any(at < len(agent.events) for agent, at in zip(self.agents, state.at, strict=True)):
            raise Fault("deadlock: no agent can go on")
        awaited: dict[tuple[tuple[int, int], Place], int] = {}
        for agent, waits in zip(self.agents, self.waits, strict=True):
            for event, number in zip(agent.events, waits, strict=True):
                if isinstance(event, Wait):
                    awaited[agent.home, event.barrier] = number + 1
        for key, place in self.barrier.items():
            if state.barriers[place] != (awaited.get(key, 0), self.full[place], 0):
                raise Fault(f"{key[1]} of block {key[0]} ends with an arrival that no agent has waited for")


def count_states(machine: Machine) -> int:
    """Search the states of a machine, breadth first, and return their number.

    Raises:
        Fault: the first one that is found.
    """
    start = machine.start()
    seen, queue = {start}, deque([start])
    while queue:
        for state in machine.successors(queue.popleft()):
            if state not in seen:
                seen.add(state)
                queue.append(state)
    return len(seen)


def _reading(agent: Agent) -> list[frozenset[Place]]:
    """Return the buffers that an agent reads before each of its events, and after the last."""
    started: list[tuple[Place, ...]] = []
    reading = [frozenset[Place]()]
    for event in agent.events:
        if isinstance(event, Read):
            started.append(tuple(buffer for buffer, _ in event.contents))
        elif isinstance(event, Finish):
            started = started[max(len(started) - event.remaining, 0) :]
        reading.append(frozenset(buffer for buffers in started for buffer in buffers))
    return reading


def _check_synchronized(agent: Agent) -> None:
    written = False
    for event in agent.events:
        if written and isinstance(event, Arrive | Read | Copy):
            raise Fault(f"{event} after a write that was not made visible")
        written = isinstance(event, Write) or (written and not isinstance(event, Sync))


def _replaced[T](values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])
