"""What a reinforcement-learning run can be told."""

import dataclasses
import functools
from pathlib import Path
from typing import Annotated, Final

import tyro

from experiments.rl.algorithms import ALGORITHMS, AlgorithmEntry, Critic
from experiments.rl.dapo import Dapo
from experiments.rl.generation import check_sampling
from experiments.rl.planner_settings import TUNABLE, Reorder, Replicate, annealed, tuned_planner
from experiments.rl.policy import POLICIES
from experiments.rl.step import Clip
from relibra_jax.cli.options import Ranks
from relibra_jax.hot_ranks import HotRanks
from relibra_jax.limits import check_integer, check_memory, check_not_negative, check_positive, check_seed
from relibra_jax.models import ModelConfig
from relibra_jax.models.hf_config import load_config
from relibra_jax.planning.planners import PLANNERS, PlannerEntry
from relibra_jax.planning.turns import Assign
from relibra_jax.suggestions import suggest_names
from relibra_jax.types import Topology

DTYPES: Final = ("float32", "bfloat16")
ROUTINGS: Final = ("rollout", "recompute")

AT_LEAST_ZERO: Final = ("warmup_steps", "steps", "evaluation_batches", "record", "anneal_steps")
AT_LEAST_ONE: Final = (
    "prompts",
    "updates",
    "micro_batches",
    "epochs",
    "checkpoint_every",
    "prompt_tokens",
    "response_tokens",
    "watch_every",
)
NOT_NEGATIVE: Final = ("learning_rate", "warmup_learning_rate", "balance")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Reinforcement learning with routing replay: a supervised warm-up, then balanced updates from sampled responses.

    Raises:
        ValueError: if a name is in no table, a number is out of its range, numbers do not fit each other, or samples do
            not fit this machine's memory.
    """

    task: str = "count"
    """A built-in task (copy, reverse, add, count, numbers), or one of reasoning-gym's."""
    policy: str = "tiny"
    """The name of a model that is trained from nothing."""
    model: Path | None = None
    """A checkpoint in Hugging Face's format to start from in place of a policy, with the tokenizer beside it."""
    dtype: str = "float32"
    """The dtype of the computation, float32 or bfloat16; parameters and optimizer state are float32."""
    algorithm: str = "grpo"
    """What the policy learns by: grpo, dapo, ppo or tppo."""
    critic: Critic = dataclasses.field(default_factory=Critic)
    dapo: Dapo = dataclasses.field(default_factory=Dapo)
    planner: str = "relibra"
    """A name from the table that ``relibra compare`` prints."""
    reorder: Reorder = dataclasses.field(default_factory=Reorder)
    replicate: Replicate = dataclasses.field(default_factory=Replicate)
    anneal_steps: int = 50
    """The steps of each turn of assigning samples to micro-batches and ranks; 0 keeps samples in order."""
    ranks: Annotated[Ranks, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Ranks)
    seeds: tuple[int, ...] = (0,)
    """The seeds of weights, prompts and sampling; one run each."""
    warmup_steps: int = 100
    """The supervised updates before the first responses are sampled."""
    steps: int = 40
    """The batches of responses that are learned from."""
    prompts: int = 32
    """The prompts of a batch."""
    responses_per_prompt: int = 8
    """The responses to each prompt, whose rewards GRPO and DAPO compare."""
    updates: int = 1
    """The optimizer updates that the samples of a batch are split into; responses to one prompt stay together."""
    micro_batches: int = 4
    """The micro-batches of each update M."""
    recompute_micro_batches: int | None = None
    """The micro-batches in which old log-probabilities are recomputed, from all samples of a batch and by a plan of
    their own; the updates' micro-batches and plans when not given."""
    prompt_tokens: int = 24
    """The room for a prompt; examples that need more are passed over."""
    response_tokens: int = 4
    """The longest response, its end included; examples with longer answers are passed over."""
    window: int | None = None
    """The tokens that a rollout adds to a response before T-PPO learns from it, of which ``response_tokens`` is a
    multiple; the next rollout goes on with responses that have not ended."""
    temperature: float = 1.0
    """What divides the logits of sampling."""
    top_p: float = 1.0
    """Only the likeliest tokens whose probabilities reach this sum are sampled."""
    pack_rows: bool = False
    """Whether updates and planned recomputes hold several samples in a row, one behind the other."""
    plan_ahead: float = 0.75
    """The share of responses that must have ended for ReLibra's planners to begin their search, while the others are
    still generated; with 1 it begins behind the rollout."""
    watch_every: int = 16
    """The tokens between two looks at which responses have ended; shorter ones are planned behind the rollout."""
    epochs: int = 4
    """The passes over a batch, each of so many ``updates``."""
    clip: Clip = dataclasses.field(default_factory=Clip)
    token_level: bool = True
    """Whether every token counts the same in the loss (DAPO), rather than every response (GRPO)."""
    balance: float = 0.02
    """The factor of the load-balancing loss over the whole batch, without which tiny routers send all tokens to few
    experts."""
    replay: bool = True
    """Whether to update under the recorded routing; without it on live routing, and what differs is counted."""
    routing: str = "rollout"
    """Where the routing that updates replay is recorded: rollout (R3), and the recompute replays it too; or recompute
    (R2), which then routes live and unplanned."""
    float8_above: float | None = None
    """Ranks above so many times the mean load compute their experts in float8 while responses are generated, those of
    evaluations too; exact when not given. Ranks of fewer than 2,048 rows stay exact."""
    float8_recompute: bool = False
    """Whether ranks above ``float8_above`` compute in float8 when old log-probabilities are recomputed, too."""
    learning_rate: float = 3e-4
    """The learning rate of updates from responses."""
    warmup_learning_rate: float = 3e-3
    """The learning rate of supervised updates."""
    evaluation_batches: int = 4
    """The batches of prompts, the same for all seeds, that are scored after the warm-up and at the end."""
    evaluate_every: int | None = None
    """The learning steps between two further evaluations; none when not given."""
    checkpoint_every: int = 20
    """The steps between two checkpoints, those of the warm-up too."""
    record: int = 0
    """Save the routing of the last so many batches as a trace, ``replay.npz``."""
    writer: str | None = None
    """A further writer of metrics, Weights & Biases for instance: ``my_module:my_writer``, a function that is given the
    folder of a run and its settings and returns an object with ``log(metrics, step=)``."""
    profile: int | None = None
    """The learning step whose profile is written, by `jax.profiler`."""
    out: Path | None = None
    """The folder where everything goes; a new one in ``out`` when not given."""
    resume: Path | None = None
    """A folder that a run has left: go on there, with its settings where the command line gives none."""
    verify: bool = True
    """Whether a resumed run compares its checkpoint with the digests that were saved with it."""

    def __post_init__(self) -> None:
        for name, value, table in (
            ("policy", self.policy, POLICIES),
            ("algorithm", self.algorithm, ALGORITHMS),
            ("planner", self.planner, PLANNERS),
            ("dtype", self.dtype, DTYPES),
            ("routing", self.routing, ROUTINGS),
        ):
            if value not in table:
                raise ValueError(
                    f"{name} {value!r} must be one of {', '.join(table)}{suggest_names(value, table)}"
                )
        if self.model is not None:  # a run may be resumed from another folder
            object.__setattr__(self, "model", self.model.resolve())
        if self.model is not None and self.policy != "tiny":
            raise ValueError(
                f"policy={self.policy!r} starts from nothing, model={self.model} from a checkpoint"
            )
        changed = [part for part in (self.reorder, self.replicate) if part != type(part)()]
        if changed and self.planner not in TUNABLE:
            raise ValueError(f"planner={self.planner}, and {changed[0]} is for {' and '.join(TUNABLE)} alone")
        at_least = {
            **dict.fromkeys(AT_LEAST_ZERO, 0),
            **dict.fromkeys(AT_LEAST_ONE, 1),
            "responses_per_prompt": 2 if self.algorithm_entry.compares else 1,
        }
        for name, least in at_least.items():
            check_integer(name, getattr(self, name), least=least)
        for seed in self.seeds:
            check_seed("seeds", seed)
        for name in NOT_NEGATIVE:
            check_not_negative(name, getattr(self, name))
        check_sampling(self.temperature, self.top_p)
        check_positive("temperature", self.temperature)
        check_positive("plan_ahead", self.plan_ahead)
        if self.planner not in TUNABLE and self.plan_ahead not in (type(self).plan_ahead, 1):
            raise ValueError(
                f"planner={self.planner}, and plan_ahead={self.plan_ahead} is for {' and '.join(TUNABLE)} alone"
            )
        if self.plan_ahead > 1:
            raise ValueError(f"plan_ahead={self.plan_ahead} is a share of the responses, at most 1")
        if self.evaluate_every is not None:
            check_integer("evaluate_every", self.evaluate_every, least=1)
        self._check_division()
        self._check_algorithm()
        if self.routing == "recompute" and not self.replay:
            raise ValueError(
                "routing=recompute records what updates replay, and replay=False replays nothing"
            )
        if self.float8_above is not None:
            check_not_negative("float8_above", self.float8_above)
        elif self.float8_recompute:
            raise ValueError(
                "float8_recompute=True needs float8_above, the load above which ranks compute in float8"
            )
        if self.float8_recompute and self.routing == "recompute":
            raise ValueError(
                "routing=recompute records what updates replay and computes exactly: float8_recompute=True is for"
                " routing=rollout"
            )
        if not self.seeds:
            raise ValueError("seeds: at least one")
        end = self.warmup_steps + self.steps
        if self.profile is not None and not self.warmup_steps <= self.profile < end:
            raise ValueError(
                f"profile={self.profile} must be a learning step: at least warmup_steps={self.warmup_steps} and below"
                f" warmup_steps + steps = {end}"
            )
        if self.resume is not None and self.out is not None:
            raise ValueError(f"resume={self.resume} goes on in that folder, and out={self.out} is another")
        self._check_memory()

    def _check_division(self) -> None:
        """Samples over updates, ranks and micro-batches."""
        ranks = self.topology.num_ranks
        samples = f"prompts={self.prompts} x responses_per_prompt={self.responses_per_prompt} = {self.samples} samples"
        if self.prompts % self.updates:
            raise ValueError(
                f"prompts={self.prompts} must divide evenly over updates={self.updates}: responses to one prompt stay"
                " together"
            )
        own = samples if self.updates == 1 else f"{samples} over updates={self.updates}"
        divisions = [(own, "micro_batches", self.updates * self.micro_batches)]
        if self.recompute_micro_batches is not None:
            check_integer("recompute_micro_batches", self.recompute_micro_batches, least=1)
            divisions.append((samples, "recompute_micro_batches", self.recompute_micro_batches))
        for what, name, number in divisions:
            if self.samples % (ranks * number):
                raise ValueError(
                    f"{what} must divide evenly over {ranks} ranks x {name}={getattr(self, name)}"
                )

    def _check_algorithm(self) -> None:
        """Settings of an algorithm without it, and windows."""
        entry = self.algorithm_entry
        for name, used in (("critic", entry.critic), ("dapo", entry.mixed_groups)):
            part = getattr(self, name)
            if part != type(part)() and not used:
                raise ValueError(f"algorithm={self.algorithm}, which has no use for {part}")
        if entry.mixed_groups and self.plan_ahead not in (type(self).plan_ahead, 1):
            raise ValueError(
                f"algorithm={self.algorithm} replaces prompts once their responses are scored, and plan_ahead="
                f"{self.plan_ahead} would plan for them before"
            )
        if entry.windows != (self.window is not None):
            raise ValueError(
                f"algorithm={self.algorithm}, and window={self.window}: tppo needs a window, and no other has one"
            )
        if self.window is None:
            return
        check_integer("window", self.window, least=1)
        if self.window < self.prompt_tokens:
            raise ValueError(
                f"window={self.window} is smaller than the room for a prompt, prompt_tokens={self.prompt_tokens}: every"
                " rollout runs the prompts again, which must not cost more than what it samples"
            )
        if self.response_tokens % self.window:
            raise ValueError(
                f"response_tokens={self.response_tokens} must be a multiple of window={self.window}"
            )
        if self.routing == "recompute":
            raise ValueError(
                "routing=recompute records the routing of all tokens anew, and tppo replays that of the policies which"
                " sampled them"
            )

    def _check_memory(self) -> None:
        """The largest arrays alone: keys and values of all samples, and what the steps of searches draw."""
        tokens = self.prompt_tokens + self.response_tokens
        generating = f"generating {self.samples} samples of {tokens} tokens"
        check_memory(generating, self.samples * tokens * self.model_config.cache_bytes)
        # A step draws a number for every micro-batch, and one for every expert of a rank, at least.
        for name, steps, draws in (
            ("anneal_steps", self.anneal_steps, self.micro_batches),
            ("reorder.steps", self.reorder.steps, self.topology.home_slots),
        ):
            check_memory(f"{name}={steps}", 4 * steps * draws)

    @property
    def algorithm_entry(self) -> AlgorithmEntry:
        """The algorithm with what happens for it while responses are sampled."""
        return ALGORITHMS[self.algorithm]

    @property
    def samples(self) -> int:
        """B, the samples of a batch."""
        return self.prompts * self.responses_per_prompt

    def evaluates_before(self, step: int) -> bool:
        """Whether an evaluation comes before a step: after the warm-up, and from time to time if it is asked for."""
        learned = step - self.warmup_steps
        due = learned == 0 or (
            self.evaluate_every is not None and learned > 0 and learned % self.evaluate_every == 0
        )
        return due and self.evaluation_batches > 0

    @property
    def mini_batches(self) -> tuple[range, ...]:
        """The samples of each update of a pass over the batch."""
        size = self.samples // self.updates
        return tuple(range(first, first + size) for first in range(0, self.samples, size))

    @property
    def live_micro_batches(self) -> int:
        """The micro-batches in which a whole batch runs live: no larger than the updates', unless told."""
        return self.recompute_micro_batches or self.updates * self.micro_batches

    @property
    def model_config(self) -> ModelConfig:
        """The sizes of the model."""
        if self.model is not None:
            return _pretrained(self.model, self.dtype)
        return dataclasses.replace(POLICIES[self.policy], dtype=self.dtype)

    @property
    def model_name(self) -> str:
        """What the run calls its model."""
        return f"{self.policy} model" if self.model is None else f"model {self.model.name}"

    @property
    def topology(self) -> Topology:
        """The ranks with the model's experts."""
        return self.ranks.topology(self.model_config.num_experts)

    @property
    def planner_entry(self) -> PlannerEntry:
        """The planner with its settings, the same object for equal ones, as jit wants it."""
        if self.planner not in TUNABLE:
            return PLANNERS[self.planner]
        return tuned_planner(self.planner, self.reorder, self.replicate)

    @property
    def float8_rollout(self) -> HotRanks | None:
        """Which ranks compute in float8 while responses are generated; None for none."""
        return None if self.float8_above is None else HotRanks(threshold=self.float8_above)

    @property
    def assign(self) -> Assign | None:
        """How samples are assigned, the same object for equal settings; None for in order."""
        return annealed(self.anneal_steps) if self.anneal_steps else None


@functools.cache
def _pretrained(folder: Path, dtype: str) -> ModelConfig:
    return load_config(folder, dtype=dtype)
