"""The steps of the ladder, the most important first, in commands of at most ten minutes each."""

import subprocess
import sys
from typing import Final, Literal

from experiments.ladder.steps import Step

type Command = Literal["smoke", "right", "speed", "why"]

COMMANDS: Final[dict[Command, str]] = {
    "smoke": "test the kernels, and a layer over one, two and all GPUs of this host, in about two minutes",
    "right": "check that the kernels are correct: each kernel alone, all patterns of empty groups, races",
    "speed": "measure throughput, compared with baselines and the roofline",
    "why": "measure what times consist of: stragglers, the layer rank by rank, tile sizes",
}
"""The commands, with their descriptions."""
SPEEDS: Final = (
    ("Qwen3-30B-A3B", 1024),
    ("Qwen3-235B-A22B", 1024),
    ("Qwen3-30B-A3B", 256),
    ("DeepSeek-V3", 1024),
    ("GPT-OSS-120B", 1024),
    ("GLM-4.5-106B-A12B", 1024),
)
"""The pairs of model and mean rows per group for which throughput is measured, the most important first."""
ATTENTION_TOKENS: Final = (8192, 32768)
"""The lengths of the sequences for which attention is measured."""
TUNED_MODEL: Final = "Qwen3-30B-A3B"
"""The model for which layer and stragglers are measured and tile sizes are tuned."""
_CORRECTNESS: Final = "experiments.gpu_day.correctness"
_PROFILE: Final = "experiments.gpu_day.layer_profile"
_ENVIRONMENT: Final = Step("environment", f"{_CORRECTNESS}:describe_machine", seconds=90)
_CHOSEN: Final = Step("self-check", f"{_CORRECTNESS}:check_chosen", seconds=300, needs=("environment",))


def hopper_checks() -> tuple[Step, ...]:
    """Return the steps that check the Hopper kernels."""
    patterns = "experiments.gpu_day.patterns:check_patterns"
    checks = (
        Step("forward, 64 rows", f"{_CORRECTNESS}:check_product", (64, False, 1)),
        Step("forward, 128 rows", f"{_CORRECTNESS}:check_product", (128, False, 1)),
        Step("transposed", f"{_CORRECTNESS}:check_product", (128, True, 1)),
        Step("weight gradient, 64 rows", f"{_CORRECTNESS}:check_weight_gradient", (64, 1)),
        Step("weight gradient, 128 rows", f"{_CORRECTNESS}:check_weight_gradient", (128, 1)),
        Step("gate and up", f"{_CORRECTNESS}:check_gate_up"),
        Step("MLP with gradients", f"{_CORRECTNESS}:check_mlp", seconds=150),
        Step("patterns, small tiles", patterns, ("mosaic", 640, 256), 150),
        Step("patterns, large tiles", patterns, ("mosaic", 8192, 1024), 150),
        Step("repeats", f"{_CORRECTNESS}:check_repeats"),
        Step("forward, clusters", f"{_CORRECTNESS}:check_product", (128, False, 2)),
        Step("weight gradient, clusters", f"{_CORRECTNESS}:check_weight_gradient", (128, 2)),
    )
    return tuple(step._replace(needs=("environment",)) for step in checks)


def smoke_steps(devices: int, *, rehearsal: bool) -> tuple[Step, ...]:
    """Return the steps that test a host with ``devices`` GPUs.

    They check the kernels that ``implementation=None`` chooses and the guide's Flax loop, and then a layer with
    replicas over one, two and all GPUs, with each kind of exchange, against a dense layer. A rehearsal, on two host
    devices, has no ragged exchange.
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
    return (_ENVIRONMENT, _CHOSEN, loop, *layers)


def count_devices() -> int:
    """Return the number of devices that JAX sees, or 1 if it fails.

    Another process counts them, so that this one does not occupy the GPUs.
    """
    code = "import jax; print(len(jax.devices()))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return int(process.stdout.split()[-1]) if process.returncode == 0 and process.stdout.split() else 1


def day_steps(folder: str, trace: str | None) -> dict[Command, tuple[Step, ...]]:
    """Return the steps of the commands that measure one GPU.

    Args:
        folder: the folder of the plan.
        trace: the name or path of the trace to plan. None stands for the trace in this project.
    """
    plan = Step("plan", "experiments.gpu_day.plan:make_plan", (folder, trace), 180, on_cpu=True)
    example = Step("JAX's example", f"{_CORRECTNESS}:check_jax_example", needs=("environment",))
    checks = hopper_checks()
    right = (_ENVIRONMENT, plan, example, *checks, _CHOSEN)
    # Measurements need all checks, since the speed of a wrong kernel means nothing.
    needs = ("plan", *(step.name for step in checks))
    speed = (
        plan,
        *(
            Step(
                f"attention, {tokens} tokens",
                "experiments.gpu_day.attention:measure_attention",
                (tokens,),
                150,
                ("self-check",),
            )
            for tokens in ATTENTION_TOKENS
        ),
        *(
            Step(
                f"speed of {model}, {rows} rows",
                "experiments.gpu_day.speed:measure_model",
                (model, rows, folder, "mosaic"),
                180,
                needs,
            )
            for model, rows in SPEEDS
        ),
    )
    ranks = "experiments.gpu_day.ranks"
    why = (
        plan,
        Step("ragged exchange", "experiments.gpu_day.ragged_pieces:measure_pieces", (), 40),
        Step("branches", "experiments.gpu_day.branches:measure_branches", (), 45),
        Step("stragglers", f"{ranks}:measure_stragglers", (TUNED_MODEL, folder, "mosaic"), 150, needs),
        Step("layer", f"{ranks}:measure_layer", (TUNED_MODEL, folder, "mosaic"), 150, needs),
        Step("layer of full size", f"{_PROFILE}:profile_layer", (TUNED_MODEL, folder, "mosaic"), 90, needs),
        Step("host copies", "experiments.gpu_day.host_copies:measure_host_copies", (), 40),
        Step("planning", "experiments.gpu_day.planning:measure_planning", (), 120),
        Step("tuning", "experiments.gpu_day.tuning:tune_model", (TUNED_MODEL, folder), 240, needs),
    )
    return {"right": right, "speed": speed, "why": why}
