"""What a reinforcement-learning run can be told, and the runs that have names."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, Literal

import tyro

from relibra_jax.cli.options import Cluster
from relibra_jax.cli.suggestions import suggest_names
from experiments.rl.policy import POLICIES, PolicyConfig
from experiments.rl.step import Clip
from relibra_jax.planning.placement import place_experts
from relibra_jax.planning.planners import PLANNERS, PlannerEntry
from relibra_jax.planning.relibra import relibra
from relibra_jax.planning.replication import replicate_experts
from relibra_jax.types import Topology

TUNABLE: Final = ("relibra", "relibra_across")
"""Planners that take `Reorder` and `Replicate`; the variants of the others are planners of their own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reorder:
    """How ReLibra's planners place experts between batches: `relibra_jax.planning.placement.place_experts`."""

    method: Literal["anneal", "descent", "lpt"] = "anneal"
    steps: int = 2_000
    """Of the search; more experts and layers want more."""
    move_cost: float = 0.02
    """The imbalance that moving all experts must gain."""
    crossing_cost: float = 0.3
    """The imbalance worth accepting for no token copy to cross nodes."""
    smoothing: float = 0.0
    """Of the maximum; 0 is the maximum itself."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replicate:
    """How ReLibra's planners copy experts inside a batch: `relibra_jax.planning.replication.replicate_experts`."""

    mode: Literal["joint", "placement", "splitting"] = "joint"
    min_tokens: int = 1
    """Least token copies that are worth a replica."""
    tile: int = 1
    """Replicas compute whole tiles of so many token copies."""
    exact: bool = False
    """Bring all ranks of a domain within one tile of each other, not just the fullest down."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Reinforcement learning with routing replay: a supervised warm-up, then rollouts and balanced updates.

    Raises:
        ValueError: a name that is in no table, or numbers that do not fit each other.
    """

    task: str = "count"
    """A built-in task (copy, reverse, add, count), or one of reasoning-gym's."""
    policy: str = "tiny"
    """A named model."""
    planner: str = "relibra"
    """A name from the table that ``compare`` prints."""
    reorder: Reorder = dataclasses.field(default_factory=Reorder)
    replicate: Replicate = dataclasses.field(default_factory=Replicate)
    anneal_steps: int = 50
    """Of assigning samples to micro-batches and ranks; 0 keeps samples in order."""
    cluster: Annotated[Cluster, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Cluster)
    seeds: tuple[int, ...] = (0,)
    """One run each: of the weights, the prompts and the sampling."""
    warmup_steps: int = 100
    """Supervised updates before the first rollout."""
    steps: int = 40
    """Rollouts, each learned from once the rewards are there."""
    prompts: int = 32
    """Of a batch."""
    group: int = 8
    """Answers to each prompt."""
    micro_batches: int = 4
    """Of a batch M."""
    prompt_tokens: int = 24
    """Room for a prompt; examples that need more are passed over."""
    response_tokens: int = 4
    """The longest response, its end included; examples with longer answers are passed over."""
    temperature: float = 1.0
    top_p: float = 1.0
    epochs: int = 4
    """Updates from one batch."""
    clip: Clip = dataclasses.field(default_factory=Clip)
    token_level: bool = True
    """Every token counts the same in the loss (DAPO), rather than every answer (GRPO)."""
    balance: float = 0.02
    """Of the load-balancing loss over the whole batch, without which tiny routers send all tokens to few experts."""
    replay: bool = True
    """Update under the rollout's routing; without it on live routing, and what differs is counted."""
    learning_rate: float = 3e-4
    warmup_learning_rate: float = 3e-3
    evaluation_batches: int = 4
    """Batches of prompts, the same for all seeds, that are scored after the warm-up and at the end."""
    checkpoint_every: int = 20
    """Steps, of the warm-up too."""
    record: int = 0
    """Save the routing of the last so many rollouts as a trace, ``replay.npz``."""
    out: Path | None = None
    """Where everything goes; a new folder in ``out`` when not given."""
    resume: Path | None = None
    """A folder that a run has left: go on there, with its settings where the command line gives none."""

    def __post_init__(self) -> None:
        for name, value, table in (
            ("policy", self.policy, POLICIES),
            ("planner", self.planner, PLANNERS),
        ):
            if value not in table:
                raise ValueError(f"{name} {value!r} must be one of {', '.join(table)}{suggest_names(value, table)}")
        changed = [part for part in (self.reorder, self.replicate) if part != type(part)()]
        if changed and self.planner not in TUNABLE:
            raise ValueError(f"planner={self.planner}, and {changed[0]} is for {' and '.join(TUNABLE)} alone")
        for name, least in (
            *(
                ("warmup_steps", 0),
                ("steps", 0),
                ("evaluation_batches", 0),
                ("record", 0),
                ("anneal_steps", 0),
            ),
            *(("prompts", 1), ("group", 2), ("micro_batches", 1), ("epochs", 1), ("checkpoint_every", 1)),
            *(("prompt_tokens", 1), ("response_tokens", 1)),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} must be positive")
        topology = self.topology
        if self.samples % (topology.num_ranks * self.micro_batches):
            raise ValueError(
                f"prompts={self.prompts} x group={self.group} = {self.samples} samples must divide evenly over"
                f" {topology.num_ranks} ranks x micro_batches={self.micro_batches}"
            )
        if not self.seeds:
            raise ValueError("seeds: at least one")
        if self.resume is not None and self.out is not None:
            raise ValueError(f"resume={self.resume} goes on in that folder, and out={self.out} is another")

    @property
    def samples(self) -> int:
        """B."""
        return self.prompts * self.group

    @property
    def model(self) -> PolicyConfig:
        """Sizes of the policy."""
        return POLICIES[self.policy]

    @property
    def topology(self) -> Topology:
        """The ranks with the model's experts."""
        return self.cluster.topology(self.model.num_experts)

    @property
    def row(self) -> PlannerEntry:
        """The planner with its settings."""
        row = PLANNERS[self.planner]
        return _tuned(row, self.reorder, self.replicate) if self.planner in TUNABLE else row


@functools.cache
def _tuned(row: PlannerEntry, reorder: Reorder, replicate: Replicate) -> PlannerEntry:
    """One object for equal settings, as jit wants it."""
    planner = relibra(
        place=functools.partial(place_experts, **dataclasses.asdict(reorder)),
        replicate=functools.partial(
            replicate_experts, across_nodes=not row.intra_node, **dataclasses.asdict(replicate)
        ),
    )
    return dataclasses.replace(row, planner=planner)


CONFIGS: Final[Mapping[str, Train]] = MappingProxyType(
    {
        "demo": Train(),
        "learn": Train(seeds=(0, 1, 2), steps=80),
    }
)
"""Runs with names: ``python -m experiments.run NAME``."""

SUMMARIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "demo": "RL quickstart: 2 x 4 host devices, a tiny model, under five minutes",
        "learn": "the same on three seeds, about fifteen minutes",
    }
)


def saved_config(folder: Path) -> Train:
    """The settings that a run in ``folder`` was last started with.

    Raises:
        ValueError: there is no run, or its settings cannot be read.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: no run to resume, there is no config.json")
    try:
        saved = json.loads(path.read_text())
        kinds = {"cluster": Cluster, "clip": Clip, "reorder": Reorder, "replicate": Replicate}
        parts = {name: kind(**saved[name]) for name, kind in kinds.items()}
        return Train(**{**saved, **parts, "seeds": tuple(saved["seeds"])})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not the settings of a run ({error!r})") from error
