"""Whole published models: the programs of a run, compiled for a cluster of described H100s.

    make aot-full                                  # the programs of `PROGRAMS`, half an hour
    python -m experiments.aot.whole --model Qwen3-30B-A3B --nodes 4 --tokens 8192 --shard-dense

The programs are those of `experiments.rl.step`, which a run compiles. An update pushes residents, scans micro-batches
of packed sequences with recorded routing, returns the residents' gradients, clips, and takes an AdamW step. A recompute
scans the same micro-batches for the log-probabilities of their tokens, without residents. With ``--live`` both route
live, as in a warm-up and in a recompute that records the routing. ``prefill`` and ``decode`` are the prompt pass and
the decoding steps of a wave (`experiments.aot.whole_generation`). Weights are float32, the computation is in bfloat16,
and everything runs as `relibra_jax.execution.ExpertParallel` chooses on such nodes. The memory of a device is XLA's own
count (`memory_analysis`): arguments, temporaries and outputs. No GPU is needed or used.
"""

import dataclasses
import json
import sys
import time
from collections import Counter
from typing import Final, NamedTuple

import jax
import tyro

from experiments.aot.bytes import count_by_kind
from experiments.aot.findings import read_compiled
from experiments.aot.hlo import Program
from experiments.aot.modelled_bytes import compare_bytes
from experiments.aot.whole_generation import generation_program
from experiments.aot.whole_settings import GENERATION_PROGRAMS, Whole, cluster_of, moments_of
from experiments.aot.whole_training import training_program
from relibra_jax.execution.memory import HOST

MOST_GB: Final = 75.0
"""The memory of an H100 that a program may take, in GB; the rest of the 80 GB is for the runtime."""
TRAINING: Final = ("tokens", "micro_batches", "replica_slots", "resident_slots")
"""The settings that change nothing in programs of generation."""
GENERATION: Final = ("samples", "responses", "prompt_tokens", "response_tokens")
"""The settings that change nothing in updates and recomputes."""
_SMALL: Final = Whole(model="Qwen3-30B-A3B", shard_dense=True)
_LARGE: Final = Whole(model="Qwen3-235B-A22B", fsdp=4, shard_dense=True, tokens=16384, resident_slots=1)
PROGRAMS: Final = (
    dataclasses.replace(_SMALL, shard_dense=False),
    _SMALL,
    dataclasses.replace(_SMALL, nodes=2, tokens=32768),
    dataclasses.replace(_SMALL, nodes=1, fsdp=4, tokens=16384, gather_once=True),
    dataclasses.replace(_SMALL, model="GLM-4.5-Air", moments="bfloat16"),
    _LARGE,
    dataclasses.replace(_LARGE, fsdp=1, data=5, state_memory=HOST, activation_memory=HOST),
    dataclasses.replace(_SMALL, nodes=2, tokens=32768, program="recompute"),
    dataclasses.replace(_SMALL, live=True),
    *(dataclasses.replace(_SMALL, program=program) for program in GENERATION_PROGRAMS),
    *(dataclasses.replace(_LARGE, program=program, samples=16) for program in GENERATION_PROGRAMS),
)
"""The largest programs of the tables in docs/guides/rl-run.md, of each kind and size of model."""


class Memory(NamedTuple):
    """The memory of a device for a compiled program in GB (1e9 bytes), without that of the host."""

    arguments: float
    temporary: float
    outputs: float
    """Outputs that no donated argument holds."""
    beside: float
    """AdamW's moments, if the program does not have them: they stay on the device unless a run moves them away."""

    @property
    def peak(self) -> float:
        """The memory of the program, as XLA's ``peak_memory_in_bytes`` says too."""
        return self.arguments + self.temporary + self.outputs

    @property
    def run(self) -> float:
        """The memory of a run while the program runs."""
        return self.peak + self.beside


def compile_program(setting: Whole) -> tuple[jax.stages.Compiled, Memory, float]:
    """Compile the program; return it with its memory and the seconds that took."""
    cluster = cluster_of(setting)
    build = generation_program if setting.program in GENERATION_PROGRAMS else training_program
    begin = time.perf_counter()
    lowered = build(setting, cluster)
    compiled = lowered.program.lower(*lowered.arguments).compile()
    seconds = time.perf_counter() - begin
    return compiled, memory_of(compiled, setting, lowered.on_host), seconds


def memory_of(compiled: jax.stages.Compiled, setting: Whole, on_host: int) -> Memory:
    """Return the memory of a device for a compiled program, ``on_host`` bytes of whose arguments are the host's."""
    memory = compiled.memory_analysis()
    assert memory is not None
    kept = memory.output_size_in_bytes - memory.alias_size_in_bytes
    beside = 0 if setting.program == "update" or setting.state_memory == HOST else moments_of(setting)
    sizes = (memory.argument_size_in_bytes - on_host, memory.temp_size_in_bytes, kept, beside)
    return Memory(*(size / 1e9 for size in sizes))


def bytes_of(program: Program, setting: Whole) -> tuple[dict[str, float], dict[str, float], list[str]]:
    """Count what a device sends in an update or a recompute, and what the cost model prices, in GB.

    Returns:
        The bytes sent by content, kind of collective and network; the bytes priced by content and network; and the
        contents whose bytes sent are not near those priced.
    """
    config, parallel, _ = cluster_of(setting)
    by_kind = count_by_kind(program.transfers(), parallel.mesh.shape)
    sent: Counter = Counter()
    for (content, _, axes), size in by_kind.items():
        sent[content, axes] += size
    sizes = {"tokens": setting.tokens, "micro_batches": setting.micro_batches}
    updates = int(setting.program == "update")
    # Only plans have a price.
    compared = [] if setting.live else compare_bytes(dict(sent), config, parallel, **sizes, updates=updates)
    return (
        {" ".join(key): round(size / 1e9, 3) for key, size in sorted(by_kind.items())},
        {f"{each.content} {each.axes}": round(each.priced / 1e9, 3) for each in compared},
        [f"{each.content} ({each.axes})" for each in compared if not each.good],
    )


def compile_and_measure(setting: Whole) -> bool:
    """Compile, print one line, and add it to the record.

    Returns:
        Whether the program fits a device during a run, and sends about what the cost model prices.
    """
    compiled, memory, seconds = compile_program(setting)
    program, _ = read_compiled(compiled)
    collectives = Counter(transfer.kind for transfer in program.transfers())
    left_out = {"record", *(TRAINING if setting.program in GENERATION_PROGRAMS else GENERATION)}
    result = {
        **{name: value for name, value in dataclasses.asdict(setting).items() if name not in left_out},
        **{f"{name}_gb": round(value, 1) for name, value in memory._asdict().items()},
        "peak_gb": round(memory.peak, 1),
        "run_gb": round(memory.run, 1),
        "compile_seconds": round(seconds),
        "collectives": dict(collectives),
    }
    outside: list[str] = []
    if setting.program not in GENERATION_PROGRAMS:
        result["sent_gb"], result["priced_gb"], outside = bytes_of(program, setting)
    line = json.dumps(result)
    print(line, flush=True)
    if setting.record is not None:
        with setting.record.open("a") as file:
            file.write(line + "\n")
    if outside:
        print(f"sends other bytes than the cost model prices: {', '.join(outside)}", flush=True)
    return memory.run <= MOST_GB and not outside


def main(setting: Whole) -> int:
    """Compile one program or all; return 1 if one of them does not fit, or sends other bytes than are priced."""
    settings = [setting]
    if setting.model is None:
        settings = [dataclasses.replace(each, record=setting.record) for each in PROGRAMS]
    good = [compile_and_measure(each) for each in settings]
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Whole, prog="python -m experiments.aot.whole")))
