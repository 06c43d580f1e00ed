"""The steps of the ladder, in the order of what is worth knowing first, in three commands of at most ten minutes."""

from typing import Final, Literal

from experiments.gpu_day.ladder import Step

type Command = Literal["right", "speed", "why"]

COMMANDS: Final[dict[Command, str]] = {
    "right": "are the kernels right: every one alone, all patterns of empty groups, races",
    "speed": "how fast are they: throughput beside peers and the roofline",
    "why": "what is it made of: stragglers, the layer rank by rank, sizes of tiles",
}
"""The commands, each with what it asks."""
SPEEDS: Final = (
    ("Qwen3-30B-A3B", 1024),
    ("Qwen3-235B-A22B", 1024),
    ("Qwen3-30B-A3B", 256),
    ("DeepSeek-V3", 1024),
    ("GPT-OSS-120B", 1024),
    ("GLM-4.5-106B-A12B", 1024),
)
"""Models and mean rows of a group whose throughput is measured, the most wanted first."""
TUNED: Final = "Qwen3-30B-A3B"
"""The model whose layer and stragglers are measured, and whose tiles are tuned."""
_RIGHT: Final = "experiments.gpu_day.correctness"


def hopper_checks() -> tuple[Step, ...]:
    """The checks of the Hopper kernels."""
    patterns = "experiments.gpu_day.patterns:check_patterns"
    checks = (
        Step("forward, 64 rows", f"{_RIGHT}:check_product", (64, False, 1)),
        Step("forward, 128 rows", f"{_RIGHT}:check_product", (128, False, 1)),
        Step("transposed", f"{_RIGHT}:check_product", (128, True, 1)),
        Step("weight gradient, 64 rows", f"{_RIGHT}:check_weight_gradient", (64, 1)),
        Step("weight gradient, 128 rows", f"{_RIGHT}:check_weight_gradient", (128, 1)),
        Step("gate and up", f"{_RIGHT}:check_gate_up"),
        Step("MLP with gradients", f"{_RIGHT}:check_mlp", seconds=150),
        Step("patterns, small tiles", patterns, ("mosaic", 640, 256), 150),
        Step("patterns, large tiles", patterns, ("mosaic", 8192, 1024), 150),
        Step("repeats", f"{_RIGHT}:check_repeats"),
        Step("forward, clusters", f"{_RIGHT}:check_product", (128, False, 2)),
        Step("weight gradient, clusters", f"{_RIGHT}:check_weight_gradient", (128, 2)),
    )
    return tuple(step._replace(needs=("environment",)) for step in checks)


def all_steps(folder: str, trace: str | None) -> dict[Command, tuple[Step, ...]]:
    """The steps of every command.

    Args:
        folder: where the plan is kept.
        trace: the trace that is planned, by name or path; None for the one of this project.
    """
    plan = Step("plan", "experiments.gpu_day.plan:make_plan", (folder, trace), 180, on_cpu=True)
    environment = Step("environment", f"{_RIGHT}:describe_machine", seconds=90)
    example = Step("JAX's example", f"{_RIGHT}:check_jax_example", needs=("environment",))
    checks = hopper_checks()
    chosen = Step("self-check", f"{_RIGHT}:check_chosen", seconds=300, needs=("environment",))
    right = (environment, plan, example, *checks, chosen)
    # Speeds of kernels that are wrong mean nothing.
    needs = ("plan", *(step.name for step in checks))
    speed = (
        plan,
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
    of_ranks = "experiments.gpu_day.ranks"
    why = (
        plan,
        Step("stragglers", f"{of_ranks}:measure_stragglers", (TUNED, folder, "mosaic"), 150, needs),
        Step("layer", f"{of_ranks}:measure_layer", (TUNED, folder, "mosaic"), 150, needs),
        Step("search", "experiments.gpu_day.search:check_search", (94, 128, 32), 150, ("environment",)),
        Step("tuning", "experiments.gpu_day.tuning:tune_model", (TUNED, folder), 240, needs),
    )
    return {"right": right, "speed": speed, "why": why}
