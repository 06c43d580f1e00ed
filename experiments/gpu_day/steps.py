"""The steps of the ladder, the most important first, in commands of at most ten minutes each."""

import os
import subprocess
import sys
import tempfile
from typing import Final, Literal

from experiments.ladder.steps import Step

type Command = Literal["smoke", "right", "speed", "why", "more"]

COMMANDS: Final[dict[Command, str]] = {
    "smoke": "test the kernels, and a layer over one, two and all GPUs of this host, in about two minutes",
    "right": "check that the kernels are correct: each kernel alone, all patterns of empty groups, races",
    "speed": "measure throughput, compared with baselines and the roofline, also with clusters",
    "why": "measure what times consist of: exchanges, a profile of the layer, stragglers, planning, copies",
    "more": "measure further models and sizes, longer attention, and all tile sizes",
}
"""The commands, with their descriptions, the most valuable first."""
PLAN: Final = "plan.npz"
"""The name of the file with the plan."""
SPEEDS: Final = (
    ("Qwen3-30B-A3B", 1024),
    ("Qwen3-235B-A22B", 1024),
    ("Qwen3-30B-A3B", 256),
    ("DeepSeek-V3", 1024),
    ("GPT-OSS-120B", 1024),
    ("GLM-4.5-106B-A12B", 1024),
)
"""The pairs of model and mean rows per group for which throughput is measured, the most important first. The first one
is part of ``speed``, the others of ``more``."""
ATTENTION_TOKENS: Final = (8192, 32768)
"""The lengths of the sequences for which attention is measured, the first one in ``speed``."""
COUNT_SECONDS: Final = 60
"""The time limit in seconds for counting the devices of the host."""
PARTS: Final = ("products", "MLPs")
"""The operations whose throughput is measured, each in a step of its own."""
TUNED_MODEL: Final = "Qwen3-30B-A3B"
"""The model for which layer and stragglers are measured and tile sizes are tuned."""
_CORRECTNESS: Final = "experiments.gpu_day.correctness"
_ENVIRONMENT: Final = Step("environment", f"{_CORRECTNESS}:describe_machine", seconds=60)
_CHOSEN: Final = Step("self-check", f"{_CORRECTNESS}:check_chosen", seconds=200, needs=("environment",))
EXAMPLE: Final = Step(
    "JAX's example", f"{_CORRECTNESS}:check_jax_example", seconds=60, needs=("environment",)
)
"""The step that runs one of JAX's own kernels."""

# The limits are about four times the seconds of an H100, where four checks ran at once.
_PRODUCT_CHECKS: Final = (
    Step("forward, 64 rows", f"{_CORRECTNESS}:check_product", (64, False, 1), 60),
    Step("forward, 128 rows", f"{_CORRECTNESS}:check_product", (128, False, 1), 60),
    Step("transposed", f"{_CORRECTNESS}:check_product", (128, True, 1), 60),
    Step("weight gradient, 64 rows", f"{_CORRECTNESS}:check_weight_gradient", (64, 1), 60),
    Step("weight gradient, 128 rows", f"{_CORRECTNESS}:check_weight_gradient", (128, 1), 60),
)
_MLP_CHECKS: Final = (
    Step("gate and up", f"{_CORRECTNESS}:check_gate_up", (), 60),
    Step("MLP with gradients", f"{_CORRECTNESS}:check_mlp", (), 100),
    Step("repeats", f"{_CORRECTNESS}:check_repeats", (), 90),
)
_PATTERN_CHECKS: Final = (
    Step("patterns, small tiles", "experiments.gpu_day.patterns:check_patterns", ("mosaic", 640, 256), 150),
    Step("patterns, large tiles", "experiments.gpu_day.patterns:check_patterns", ("mosaic", 8192, 1024), 150),
)
_CLUSTER_CHECKS: Final = (
    Step("forward, clusters", f"{_CORRECTNESS}:check_product", (128, False, 2), 60),
    Step("weight gradient, clusters", f"{_CORRECTNESS}:check_weight_gradient", (128, 2), 60),
)


def hopper_checks() -> tuple[Step, ...]:
    """Return the steps that check the Hopper kernels."""
    checks = (*_PRODUCT_CHECKS, *_MLP_CHECKS, *_PATTERN_CHECKS, *_CLUSTER_CHECKS)
    return tuple(step._replace(needs=("environment",)) for step in checks)


def smoke_steps(devices: int, *, rehearsal: bool) -> tuple[Step, ...]:
    """Return the steps that test a host with ``devices`` GPUs.

    They check the kernels that ``implementation=None`` chooses and the guide's Flax loop, and then a layer with
    replicas over one, two and all GPUs, with each kind of exchange, against a dense layer. At last they check whether
    a ragged exchange is faster. A rehearsal, on two host devices, has no ragged exchange.
    """
    counts = sorted({1, min(2, devices), devices})
    layers = (
        Step(
            f"layer over {count}, {exchange}",
            "experiments.gpu_day.group_layer:check_group",
            (count, exchange),
            150,
            ("environment",),
        )
        for count in counts
        for exchange in (("padded",) if count == 1 or rehearsal else ("fitted", "padded", "ragged", "remote"))
    )
    loop = Step("Flax loop", "experiments.gpu_day.flax_step:train", (3,), 120, ("environment",))
    prove = "experiments.gpu_day.group_layer:prove_exchange"
    proof = Step(f"ragged exchange over {devices}", prove, (devices,), 150, ("environment",))
    return (_ENVIRONMENT, _CHOSEN, loop, *layers, *([] if devices == 1 or rehearsal else [proof]))


def count_devices() -> int:
    """Return the number of devices that JAX sees, or 1 if it fails.

    Another process counts them, so that this one does not occupy the GPUs.
    """
    code = "import jax; print(len(jax.devices()))"
    with tempfile.TemporaryFile("w+") as output:
        # A process that waits for a driver may outlive SIGKILL, so nobody waits for its end.
        process = subprocess.Popen([sys.executable, "-c", code], stdout=output, stderr=subprocess.DEVNULL)
        try:
            failed = process.wait(COUNT_SECONDS) != 0
        except subprocess.TimeoutExpired:
            process.kill()
            return 1
        output.seek(0)
        words = output.read().split()
    return 1 if failed or not words else int(words[-1])


def day_steps(folder: str, trace: str | None) -> dict[Command, tuple[Step, ...]]:
    """Return the steps of the commands that measure one GPU, in the order of their value.

    Args:
        folder: the folder of the plan.
        trace: the name or path of the trace to plan. None stands for the trace in this project.
    """
    make_plan = "experiments.gpu_day.plan:make_plan"
    plan = Step("plan", make_plan, (folder, trace), 180, on_cpu=True, file=os.path.join(folder, PLAN))
    # A measurement needs the checks of its own operations, since the speed of a wrong kernel means nothing.
    products = ("plan", *(step.name for step in _PRODUCT_CHECKS))
    mlps = (*products, *(step.name for step in _MLP_CHECKS))
    needs = {"products": products, "MLPs": mlps}
    measure = "experiments.gpu_day.speed:measure_model"

    def speeds(model: str, rows: int) -> tuple[Step, ...]:
        return tuple(
            Step(
                speed_name(model, rows, what),
                measure,
                (model, rows, what, folder, "mosaic"),
                120,
                needs[what],
            )
            for what in PARTS
        )

    def attention(tokens: int) -> Step:
        function = "experiments.gpu_day.attention:measure_attention"
        return Step(f"attention, {tokens} tokens", function, (tokens,), 150, ("self-check",))

    model, rows = SPEEDS[0]
    tuning = "experiments.gpu_day.tuning"
    table, tiles = os.path.join(folder, "cluster_tiles.json"), os.path.join(folder, "tile_sizes.json")
    paired = (*mlps, *(step.name for step in _CLUSTER_CHECKS))
    clusters = (
        Step("clusters", f"{tuning}:tune_clusters", (model, rows, table), 120, paired, file=table),
        *(
            Step(
                f"{speed_name(model, rows, what)}, clusters",
                measure,
                (model, rows, what, folder, "mosaic", table),
                90,
                ("clusters",),
            )
            for what in PARTS
        ),
    )
    ranks, of_model = "experiments.gpu_day.ranks", (TUNED_MODEL, folder, "mosaic")
    profile = "experiments.gpu_day.layer_profile:profile_layer"
    why = (
        Step("ragged exchange", "experiments.gpu_day.ragged_pieces:measure_pieces", (), 40),
        Step("branches", "experiments.gpu_day.branches:measure_branches", (), 45),
        Step("layer of full size", profile, of_model, 120, mlps),
        Step("layer", f"{ranks}:measure_layer", of_model, 150, mlps),
        Step("stragglers", f"{ranks}:measure_stragglers", of_model, 90, mlps),
        Step("planning", "experiments.gpu_day.planning:measure_planning", (), 120),
        Step("host copies", "experiments.gpu_day.host_copies:measure_host_copies", (), 40),
    )
    more = (
        *(step for pair in SPEEDS[1:] for step in speeds(*pair)),
        *(attention(tokens) for tokens in ATTENTION_TOKENS[1:]),
        Step("tuning", f"{tuning}:tune_model", (TUNED_MODEL, tiles), 240, paired, file=tiles),
    )
    return {
        "right": (_ENVIRONMENT, plan, EXAMPLE, _CHOSEN, *hopper_checks()),
        "speed": (plan, *speeds(model, rows), *clusters, attention(ATTENTION_TOKENS[0])),
        "why": (plan, *why),
        "more": (plan, *more),
    }


def speed_name(model: str, rows: int, what: str) -> str:
    """Return the name of the step that measures the throughput of ``products`` or ``MLPs``."""
    return f"speed of {model}, {rows} rows: {what}"
