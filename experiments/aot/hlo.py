"""Parse a compiled program: its collectives, how often they run, and the instructions that overlap with them.

XLA's optimised module is a text with computations, each of which lists instructions in the order of their schedule. An
asynchronous collective is a pair of instructions, ``x-start`` and ``x-done``; the instructions between them run while
the data are sent. This module only reads text and does not use JAX devices.
"""

import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod
from typing import Final, NamedTuple

COLLECTIVES: Final = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_NAME = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(
    r"\b(?:calls|body|to_apply|branch_computations|called_computations)=(\{[^}]*\}|%[\w.-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_PLACED = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\](\{[^}]*\})?")
_ON_HOST = "S(5)"
"""The part of a layout that says that an array is in host memory."""


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    """The names of instructions of the same computation."""
    attributes: str

    @property
    def op_name(self) -> str:
        """The origin in the Python program: transformations and named scopes. Empty if XLA dropped it."""
        match = _OP_NAME.search(self.attributes)
        return match[1] if match else ""

    @property
    def called(self) -> tuple[str, ...]:
        """The names of the computations that it runs; of several branches the last.

        That is the branch with the longest lanes of a fitted exchange.
        """
        names = tuple(name for group in _CALLED.findall(self.attributes) for name in _NAME.findall(group))
        return names[-1:] if self.opcode == "conditional" else names

    @property
    def arrays(self) -> list[tuple[str, tuple[int, ...]]]:
        """The dtype and dimensions of every array of its result."""
        return [
            (dtype, tuple(int(size) for size in sizes.split(",") if size))
            for dtype, sizes in _ARRAY.findall(self.shape)
        ]


@dataclass(frozen=True)
class Transfer:
    """One collective of a program."""

    kind: str
    """One of `COLLECTIVES`."""
    start: Instruction
    operands: tuple[tuple[str, tuple[int, ...]], ...]
    """The dtype and dimensions of every input array."""
    op_name: str
    """Its own ``op_name``, or that of the nearest producer that has one."""
    times: float
    """The number of executions in one run of the program; infinite inside a loop of unknown length."""
    asynchronous: bool
    between: tuple[Instruction, ...]
    """The instructions between start and done; empty if it is not asynchronous."""


class RowPasses(NamedTuple):
    """The rows of tokens and token copies that a program moves in its memory."""

    read: float
    """The rows that gathers read. Rows that they drop, and those of padding, count too."""
    written: float
    """The rows that the kernels with these gathers write."""
    copied: float
    """The rows of copied buffers of exchanges."""


@dataclass(frozen=True)
class HostCopy:
    """One asynchronous copy from host memory to the device."""

    array: tuple[str, tuple[int, ...]]
    """The dtype and dimensions of the copied array."""
    times: float
    """The number of executions in one run of the program."""
    between: tuple[Instruction, ...]
    """The instructions between start and done."""


@dataclass(frozen=True)
class Loop:
    """One while loop of a program."""

    op_name: str
    body: str
    """The name of the computation that it repeats."""
    trips: float
    """The number of iterations of one execution; infinite if unknown."""
    times: float
    """The number of executions of its body in one run of the program."""


@dataclass(frozen=True)
class Program:
    """A scheduled HLO module.

    >>> text = '''HloModule m, is_scheduled=true
    ... ENTRY %main (a: f32[8]) -> f32[8] {
    ...   %a = f32[8]{0} parameter(0)
    ...   ROOT %sum = f32[8]{0} all-reduce(%a), replica_groups={{0,1}}, metadata={op_name="jit(f)/psum"}
    ... }'''
    >>> [(transfer.kind, transfer.times, transfer.op_name) for transfer in Program.parse(text).transfers()]
    [('all-reduce', 1.0, 'jit(f)/psum')]
    """

    computations: dict[str, list[Instruction]]
    entry: str

    @classmethod
    def parse(cls, text: str) -> "Program":
        """Parse the text that ``compiled.as_text()`` returns.

        Raises:
            ValueError: if the text is not a scheduled module, or a line of a computation cannot be parsed.
        """
        if not text.startswith("HloModule") or "is_scheduled=true" not in text.split("\n", 1)[0]:
            raise ValueError("not a scheduled HloModule: the order of its instructions has no meaning")
        computations: dict[str, list[Instruction]] = {}
        entry, body = "", None
        for line in text.splitlines():
            head = _HEAD.match(line)
            if head:
                body = computations[head[2]] = []
                entry = head[2] if head[1] else entry
            elif line == "}":
                body = None
            elif body is not None:
                body.append(_instruction(line))
        if not entry:
            raise ValueError("the module has no ENTRY computation")
        return cls(computations, entry)

    @cached_property
    def executions(self) -> dict[str, float]:
        """The number of executions of each computation in one run of the program."""
        counts: dict[str, float] = dict.fromkeys(self.computations, 0)

        def visit(name: str, times: float) -> None:
            counts[name] += times
            for instruction in self.computations[name]:
                for called in instruction.called:
                    visit(called, times * _trips(instruction))

        visit(self.entry, 1.0)
        return counts

    def loops(self, within: Set[str] | None = None) -> Iterator[Loop]:
        """Yield the loops that the program runs, or only those in the computations ``within``."""
        for _, body in self._executed(within):
            for one in body:
                if one.opcode == "while":
                    (repeated,) = one.called
                    yield Loop(one.op_name, repeated, _trips(one), self.executions[repeated])

    def reached_from(self, names: Iterable[str]) -> set[str]:
        """Return the given computations and all computations that they run, directly or not."""
        reached, queue = set(), list(names)
        while queue:
            name = queue.pop()
            if name not in reached:
                reached.add(name)
                queue.extend(called for one in self.computations[name] for called in one.called)
        return reached

    def transfers(self, within: Set[str] | None = None) -> Iterator[Transfer]:
        """Yield the collectives that the program runs, or only those in the computations ``within``."""
        for name, body in self._executed(within):
            if name in self._wrapped:
                continue
            for place, instruction in enumerate(body):
                kind = self._kind(instruction)
                if kind is None:
                    continue
                asynchronous = instruction.opcode.endswith("-start")
                between = tuple(self._until_done(body, place)) if asynchronous else ()
                sync = '"is_sync":true' in instruction.attributes
                op_name = self._op_name(body, instruction)
                times = self.executions[name]
                shapes = {one.name: one.arrays for one in body if one.name in instruction.operands}
                operands = tuple(array for operand in instruction.operands for array in shapes[operand])
                yield Transfer(
                    kind, instruction, operands, op_name, times, asynchronous and not sync, between
                )

    def host_copies(self) -> Iterator[HostCopy]:
        """Yield the copies from host memory that run on a stream of their own: of whole arrays, or of slices."""
        for name, body in self._executed(None):
            for place, one in enumerate(body):
                if name in self._wrapped or one.opcode not in ("copy-start", "fusion-start", "async-start"):
                    continue
                arrays = _PLACED.findall(one.shape)
                # A copy lists its result first; others list operands, result and context.
                result = arrays.pop(0 if one.opcode == "copy-start" else -2)
                if _ON_HOST in result[2] or not any(_ON_HOST in memory for *_, memory in arrays):
                    continue
                dims = tuple(int(size) for size in result[1].split(",") if size)
                between = tuple(self._until_done(body, place))
                yield HostCopy((result[0], dims), self.executions[name], between)

    def row_passes(self, width: int) -> RowPasses:
        """Count the rows of ``width`` numbers that a run gathers and copies."""

        def rows(one: Instruction) -> float:
            return sum(prod(shape) / width for _, shape in one.arrays if shape[-1:] == (width,))

        every = [(name, one) for name, body in self.computations.items() for one in body]
        executed = [each for each in every if each[0] not in self._wrapped]
        return RowPasses(
            read=sum(self.executions[name] * rows(one) for name, one in every if one.opcode == "gather"),
            written=sum(
                self.executions[name] * rows(one) for name, one in executed if self.gathers(one, width)
            ),
            # Arrays of rows have two axes, as those of exchanges; the tokens of a layer have more.
            copied=sum(
                self.executions[name] * rows(one)
                for name, one in executed
                if one.opcode == "copy" and len(one.arrays[0][1]) == 2
            ),
        )

    def gathers(self, instruction: Instruction, width: int) -> bool:
        """Return whether an instruction gathers rows of ``width`` numbers, in a fusion too."""
        if instruction.opcode == "fusion":
            return any(
                self.gathers(inner, width) for name in instruction.called for inner in self.computations[name]
            )
        return instruction.opcode == "gather" and instruction.arrays[0][1][-1:] == (width,)

    def is_gemm(self, instruction: Instruction) -> bool:
        """Return whether an instruction is a matrix product: a library call, a dot, or a fusion that contains one."""
        if instruction.opcode == "custom-call":
            return (
                re.search(r'custom_call_target="[^"]*(gemm|matmul)', instruction.attributes, re.I) is not None
            )
        if instruction.opcode == "fusion":
            return any(
                inner.opcode == "dot" for name in instruction.called for inner in self.computations[name]
            )
        return instruction.opcode == "dot"

    def is_kernel(self, instruction: Instruction) -> bool:
        """Return whether an instruction is a Pallas kernel for Hopper GPUs, or a fusion that contains one."""
        if instruction.opcode == "fusion":
            return any(
                self.is_kernel(inner) for name in instruction.called for inner in self.computations[name]
            )
        return instruction.opcode == "custom-call" and "mosaic_gpu" in instruction.attributes

    def kernels(self) -> Iterator[tuple[str, float]]:
        """Yield the ``op_name`` of each Pallas kernel for Hopper GPUs, and how often a run of the program runs it."""
        for name, body in self._executed(None):
            for one in body:
                if one.opcode == "custom-call" and self.is_kernel(one):
                    yield one.op_name, self.executions[name]

    def is_attention(self, instruction: Instruction) -> bool:
        """Return whether an instruction is a Triton kernel of `pallas_kernels.flash_attention`."""
        return instruction.opcode == "custom-call" and "flash_attention" in instruction.op_name

    @cached_property
    def _wrapped(self) -> set[str]:
        """The computations inside fusions and async pairs, whose collectives are counted at their callers."""
        return {
            name
            for body in self.computations.values()
            for instruction in body
            if instruction.opcode not in ("while", "conditional")
            for name in instruction.called
        }

    def _executed(self, within: Set[str] | None) -> Iterator[tuple[str, list[Instruction]]]:
        """Yield the computations that a run executes."""
        for name, body in self.computations.items():
            if self.executions[name] and (within is None or name in within):
                yield name, body

    def _kind(self, instruction: Instruction) -> str | None:
        """Return the kind of collective that an instruction is, starts or wraps; None for other instructions."""
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in COLLECTIVES:
            return opcode
        if opcode in ("async", "fusion", "call"):
            inner = (self._kind(inner) for name in instruction.called for inner in self.computations[name])
            return next((kind for kind in inner if kind), None)
        return None

    def _until_done(self, body: list[Instruction], start: int) -> Iterator[Instruction]:
        open_names = {body[start].name}
        for instruction in body[start + 1 :]:
            if open_names.intersection(instruction.operands):
                if instruction.opcode.endswith("-done"):
                    return
                if instruction.opcode.endswith("-update"):
                    open_names.add(instruction.name)
                    continue
            yield instruction
        raise ValueError(f"{body[start].name} has no done instruction in its computation")

    def _op_name(self, body: list[Instruction], instruction: Instruction) -> str:
        by_name = {one.name: one for one in body}
        seen, queue = {instruction.name}, [instruction]
        for one in queue:
            if one.op_name:
                return one.op_name
            new = [name for name in one.operands if name in by_name and name not in seen]
            seen.update(new)
            queue.extend(by_name[name] for name in new)
        return ""


def _trips(instruction: Instruction) -> float:
    """Return how often one execution of an instruction runs the computations that it calls."""
    if instruction.opcode != "while":
        return 1.0
    match = _TRIPS.search(instruction.attributes)
    return float(match[1]) if match else inf


def _instruction(line: str) -> Instruction:
    try:
        name, rest = line.strip().removeprefix("ROOT ").removeprefix("%").split(" = ", 1)
        shape, rest = _split(rest)
        opcode, rest = rest.split("(", 1)
        operands, attributes = _split("(" + rest)
    except ValueError:
        raise ValueError(f"not an HLO instruction: {line.strip()[:120]}") from None
    return Instruction(name, shape, opcode.strip(), tuple(_NAME.findall(operands)), attributes)


def _split(text: str) -> tuple[str, str]:
    """Split a text at the first space or comma outside brackets."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if not depth and letter in " ,":
            return text[:place], text[place + 1 :]
    return text, ""
