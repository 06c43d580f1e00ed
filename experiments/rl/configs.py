"""The settings of a reinforcement-learning run, and the checks that they fit together.

The docstrings of fields are the command line's help texts. Help keeps their line breaks, so break them after sentences.
"""

import dataclasses
import functools
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final

import tyro

from experiments.engines.settings import EngineRequests
from experiments.float8.hot_ranks import HotRanks
from experiments.published import PUBLISHED
from experiments.rl.advantages import Group
from experiments.rl.algorithms import ALGORITHMS, AlgorithmEntry, Critic
from experiments.rl.correction import Correction
from experiments.rl.dapo import Dapo
from experiments.rl.devices import FSDP
from experiments.rl.evaluation import Evaluation
from experiments.rl.generation import check_sampling
from experiments.rl.groups import copies_of_machine
from experiments.rl.losses import LOSSES, WEIGHTS, Clip
from experiments.rl.objective import Losses
from experiments.rl.optimizer import AdamW
from experiments.rl.planner_settings import TUNABLE, Reorder, Replicate, annealed, tuned_planner
from experiments.rl.policy import POLICIES
from experiments.rl.process_group import HUNG_SECONDS, PATIENCE_SECONDS
from experiments.rl.reference import Reference
from experiments.rl.reward_pool import PoolSettings
from experiments.rl.waves import check_wave
from relibra_jax.contract.types import Topology
from relibra_jax.evaluation import Ranks
from relibra_jax.execution.memory import MEMORY_KINDS
from relibra_jax.models import ModelConfig
from relibra_jax.models.hf_config import load_config, model_config
from relibra_jax.planning.assignment import Assign
from relibra_jax.planning.planners import PLANNERS, PlannerEntry
from relibra_jax.support.limits import (
    check_integer,
    check_memory,
    check_not_negative,
    check_positive,
    check_seed,
)
from relibra_jax.support.suggestions import suggest_names

DTYPES: Final = ("float32", "bfloat16")
ROUTINGS: Final = ("rollout", "recompute")
PRICES: Final = ("time", "balance")

LEAST: Final[Mapping[str, int]] = MappingProxyType(
    {
        **dict.fromkeys(("warmup_steps", "steps", "evaluation_batches", "record", "anneal_steps"), 0),
        **dict.fromkeys(("prompts", "prompt_tokens", "response_tokens", "window", "watch_every"), 1),
        **dict.fromkeys(("turns", "turn_tokens"), 1),
        **dict.fromkeys(("updates", "epochs", "micro_batches", "recompute_micro_batches"), 1),
        **dict.fromkeys(("checkpoint_every", "evaluate_every", "data", "fsdp"), 1),
        **dict.fromkeys(("wave_samples", "chunk_tokens"), 1),
        "patience": 6,
        "hung_after": 10,
    }
)
"""The smallest value of integer settings. Some of them may also be None."""
NOT_NEGATIVE: Final = ("learning_rate", "warmup_learning_rate", "balance", "entropy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """The settings of a run: a supervised warm-up, then balanced updates from sampled responses with routing replay.

    Raises:
        ValueError: if a name is unknown, a number is out of its range, settings contradict each other, or the samples
            do not fit in this machine's memory.
    """

    task: str = "count"
    """The task: copy, reverse, add, count, numbers or calculator (built in), the name of a task of reasoning-gym, or
    a function that returns a task, as ``my_module:my_task``.
    Several tasks with weights, such as numbers=2,copy=1, share every batch."""
    prompts_file: Path | None = None
    """A file with prompts of your own, which takes the place of ``task``.
    It has a JSON object in every line, with a ``prompt`` (a text, or a list of messages), possibly an ``answer``, and
    any further keys."""
    reward: str | None = None
    """The reward function for ``prompts_file``, as ``my_module:my_reward``.
    It gets a completion and the line's object, and returns a number. None compares with the ``answer``."""
    reward_pool: PoolSettings = dataclasses.field(default_factory=PoolSettings)
    policy: str = "tiny"
    """The model to train from random weights: tiny or small."""
    model: Path | None = None
    """The folder of a Hugging Face checkpoint with its tokenizer, to start from in place of random weights.
    If there is no such folder, and its name is that of a published model such as Qwen3-30B-A3B, sizes are those of the
    model, for ``--dry``."""
    dtype: str = "float32"
    """The dtype of the computation: float32 or bfloat16. Parameters are always float32."""
    rollout_dtype: str | None = None
    """The dtype in which the run's own devices generate, evaluations included: float32 or bfloat16.
    It must not be wider than ``dtype``, which None takes."""
    moments: str = "float32"
    """The dtype in which AdamW's two moments are stored: float32 or bfloat16. It computes with them in float32."""
    state_memory: str = "device"
    """The memory of parameters and moments between programs: device or pinned_host.
    From the host's, updates take them layer by layer, and devices hold parameters in ``dtype`` and gradients."""
    activation_memory: str = "device"
    """The memory in which the inputs of layers wait for the backward pass: device or pinned_host."""
    batch_memory: str = "pinned_host"
    """The memory of a batch's samples, routes and tables: device or pinned_host.
    From the host's, devices take one micro-batch at a time."""
    algorithm: str = "grpo"
    """The reinforcement-learning algorithm: grpo, dapo, ppo or tppo."""
    critic: Critic = dataclasses.field(default_factory=Critic)
    dapo: Dapo = dataclasses.field(default_factory=Dapo)
    planner: str = "relibra"
    """The planner that places and replicates experts. ``relibra compare`` lists the names."""
    price: str = "time"
    """The price of plans: time, which is modelled time at the model's sizes on the run's devices, or balance."""
    reorder: Reorder = dataclasses.field(default_factory=Reorder)
    replicate: Replicate = dataclasses.field(default_factory=Replicate)
    anneal_steps: int = 50
    """The annealing steps in each round of assigning samples to micro-batches and ranks. 0 keeps samples in order."""
    ranks: Annotated[Ranks, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Ranks)
    experts_over: str | None = None
    """The nodes and ranks of an expert-parallel group, such as 4x8, if ``nodes`` are those of the whole machine.
    The other ranks are copies of the group: ``fsdp`` as given, and data-parallel ones, whose number follows.
    None distributes experts over all nodes of each copy."""
    data: int = 1
    """The number of data-parallel copies of the expert-parallel group, which hold the same experts."""
    fsdp: int = 1
    """The number of further copies of the group, over which every expert is sharded along the model width.
    A run has data x fsdp x nodes x ranks_per_node devices."""
    gather_once: bool = False
    """Whether the experts of a group are gathered over ``fsdp`` once an update, and not in every micro-batch.
    A rank then holds them whole, with their gradients: 6 bytes for each of their parameters in bfloat16."""
    shard_dense: bool = False
    """Whether everything but experts is sharded too, over the ranks of a group and ``fsdp``, and not on every rank.
    Layers then gather it before they use it."""
    seeds: tuple[int, ...] = (0,)
    """The seeds of weights, prompts and sampling. Each seed is a run of its own."""
    warmup_steps: int = 100
    """The number of supervised updates before the first responses are sampled."""
    steps: int = 40
    """The number of learning steps. Each learns from one batch of responses."""
    prompts: int = 32
    """The number of prompts in a batch."""
    responses_per_prompt: int = 8
    """The number of responses to each prompt. GRPO and DAPO compare their rewards."""
    updates: int = 1
    """The number of optimizer updates that share the samples of a batch. Responses to one prompt stay together."""
    micro_batches: int = 4
    """The number of micro-batches M of each update."""
    recompute_micro_batches: int | None = None
    """The number of micro-batches for recomputing old log-probabilities, which have a plan of their own.
    None recomputes in the micro-batches of the updates, under their plans."""
    prompt_tokens: int = 24
    """The maximum number of tokens in a prompt. Examples with longer prompts are skipped."""
    response_tokens: int = 4
    """The maximum number of tokens in a response, its end included. Examples with longer answers are skipped."""
    turns: int = 1
    """The largest number of turns of a response, for tasks that reply to turns, such as calculator.
    A response of several turns has at most ``response_tokens`` tokens with all replies."""
    turn_tokens: int | None = None
    """The largest number of tokens that the policy writes in one of several turns, its end included.
    A turn starts only if the response has room for so many. None for responses of one turn."""
    window: int | None = None
    """The largest number of tokens that a rollout adds to a response. ``response_tokens`` must be a multiple of it.
    The next rollout continues the responses that have not ended.
    With T-PPO, which needs a window, the policy learns from the new tokens of every batch; with GRPO and PPO from all
    tokens of a response in the batch in which it ends, with all responses that it is compared with.
    None samples whole responses."""
    temperature: float = 1.0
    """The sampling temperature, which divides the logits."""
    top_p: float = 1.0
    """Sample only from the fewest most likely tokens whose probabilities reach this sum."""
    wave_samples: int | None = None
    """The largest number of samples that are generated at the same time, a multiple of the number of ranks.
    It bounds the cache of keys and values: the batch is generated in waves, one after the other.
    None generates all samples at the same time."""
    chunk_tokens: int = 1024
    """The largest number of tokens of a rank that run at once through experts with live routing, and in a prompt.
    It bounds buffers, which must have room for all of these tokens of all ranks on each rank."""
    pack_sequences: bool = True
    """Whether updates and recomputes put several samples into one sequence, one after the other."""
    split_samples: bool = False
    """Whether the ranks of a node share its packed samples evenly, so that no rank waits for a long sample.
    Attention then gathers keys and values inside the node. Needs ``pack_sequences``."""
    engine: tuple[str, ...] = ()
    """The addresses of servers that sample the responses, such as http://host:30000, with SGLang's or vLLM's
    interface. They get the weights of every update, and need a ``model``. With none, the run samples on its own
    devices."""
    staleness: int = 0
    """The largest number of updates between the weights that sample a token and those that learn from it.
    Servers sample as many later batches while the run learns from one. New weights interrupt their responses, which
    carry on under them. Above 0, planning ahead has nothing to watch."""
    requests: EngineRequests = dataclasses.field(default_factory=EngineRequests)
    plan_ahead: float = 0.75
    """The share of ended responses at which ReLibra's planners start, during generation. With 1 they start after it."""
    watch_every: int = 16
    """The number of decoded tokens between two checks of how many responses have ended.
    The run also checks between two waves of ``wave_samples``.
    With one wave, and if no response can be longer than this, the planners start after generation."""
    epochs: int = 4
    """The number of passes over a batch. Each pass makes ``updates`` optimizer updates."""
    clip: Clip = dataclasses.field(default_factory=Clip)
    correction: Correction = dataclasses.field(default_factory=Correction)
    mask_truncated: bool = False
    """Whether the policy learns nothing from responses that reached their largest length."""
    loss: str = "clip"
    """The policy loss: clip (PPO, GRPO, DAPO), gspo or cispo."""
    token_weights: str = "tokens"
    """What has the same weight in the loss: tokens (DAPO) or responses (GRPO).
    With length, tokens have one that depends on neither, ``response_tokens`` to a response (Dr. GRPO)."""
    entropy: float = 0.0
    """The factor of the entropy bonus, which the loss subtracts for every token that is learned from."""
    reference: Reference = dataclasses.field(default_factory=Reference)
    group: Group = dataclasses.field(default_factory=Group)
    balance: float = 0.02
    """The factor of the batch's load-balancing loss. Without it, tiny routers send all tokens to a few experts."""
    replay: bool = True
    """Whether updates replay the recorded routing. Otherwise they and the recompute route live, without replicas."""
    routing: str = "rollout"
    """Where the routing that updates replay is recorded: rollout (R3) or recompute (R2).
    With rollout the recompute replays it, too. With recompute the recompute routes live, without a plan."""
    float8_above: float | None = None
    """Ranks with more than this many times the mean load compute their experts in float8 during generation.
    Evaluations are included. Ranks with fewer than 2,048 rows stay exact, and with None all ranks do."""
    float8_recompute: bool = False
    """Whether ranks above ``float8_above`` also use float8 when old log-probabilities are recomputed."""
    learning_rate: float = 3e-4
    """The learning rate of updates from responses, the largest if it changes."""
    adamw: AdamW = dataclasses.field(default_factory=AdamW)
    warmup_learning_rate: float = 3e-3
    """The learning rate of supervised updates."""
    evaluation_batches: int = 4
    """The number of evaluation batches, the same for all seeds, scored after the warm-up and at the end."""
    evaluate_every: int | None = None
    """The number of learning steps between additional evaluations. None makes no additional evaluations."""
    evaluation: Evaluation = dataclasses.field(default_factory=Evaluation)
    checkpoint_every: int = 20
    """The number of steps between two checkpoints, in the warm-up too."""
    record: int = 0
    """The number of last steps that are saved as a trace in ``replay.npz``, with rewards, versions and provenance."""
    writer: str | None = None
    """A writer of metrics beside ``metrics.jsonl``: ``tensorboard``, ``wandb`` or ``mlflow``, where it is installed, or
    ``my_module:my_writer``, a function of a run's folder and settings that returns an object with
    ``log(metrics, step=)``."""
    profile: int | None = None
    """The learning step to profile with `jax.profiler`."""
    out: Path | None = None
    """The folder for all results. None makes a new folder in ``out``."""
    resume: Path | None = None
    """The folder of an earlier run to continue. Its settings are the defaults of all other options."""
    patience: int = PATIENCE_SECONDS
    """The seconds without an answer from the host of a process after which all others end."""
    hung_after: int = HUNG_SECONDS
    """The seconds without a heartbeat after which a process on a host that answers counts as hung, and all others end.
    Threads of JAX send heartbeats, also during long computations. A host without a free core may delay them."""
    verify: bool = True
    """Whether a resumed run compares its checkpoint with the digests that were saved with it."""

    def __post_init__(self) -> None:
        self._check_names()
        self._divide_machine()
        self._check_numbers()
        self._check_division()
        self._check_planner()
        self._check_algorithm()
        self._check_window()
        self._check_turns()
        self._check_routing()
        self._check_data()
        self._check_engine()
        self._check_memory()

    def _check_names(self) -> None:
        """Check names and folders, and make the folder of the model absolute."""
        for name, table in (
            ("policy", POLICIES),
            ("algorithm", ALGORITHMS),
            ("loss", LOSSES),
            ("token_weights", WEIGHTS),
            ("planner", PLANNERS),
            ("dtype", DTYPES),
            ("rollout_dtype", DTYPES),
            ("moments", DTYPES),
            ("state_memory", MEMORY_KINDS),
            ("activation_memory", MEMORY_KINDS),
            ("batch_memory", MEMORY_KINDS),
            ("routing", ROUTINGS),
            ("price", PRICES),
        ):
            value = getattr(self, name)
            if value not in table and (name, value) != ("rollout_dtype", None):
                hint = suggest_names(value, table)
                raise ValueError(f"{name} {value!r} must be one of {', '.join(table)}{hint}")
        if self.model is not None:  # the run may be resumed from another folder
            object.__setattr__(self, "model", self.model.resolve())
        if self.model is not None and self.policy != "tiny":
            raise ValueError(
                f"policy={self.policy!r} and model={self.model} exclude each other: policy starts from random"
                " weights, model from a checkpoint"
            )
        if self.prompts_file is not None:
            object.__setattr__(self, "prompts_file", self.prompts_file.resolve())
        if self.resume is not None and self.out is not None:
            raise ValueError(f"resume={self.resume} and out={self.out}: give one of them")

    def _divide_machine(self) -> None:
        """Replace the machine and ``experts_over`` by the group and its number of data-parallel copies."""
        if self.experts_over is None:
            return
        if self.resume is not None:
            raise ValueError(
                f"experts_over={self.experts_over} is for new runs: {self.resume} goes on with groups of"
                f" {self.ranks.nodes}x{self.ranks.ranks_per_node}, data={self.data} and fsdp={self.fsdp}"
            )
        if self.data != 1:
            raise ValueError(f"experts_over={self.experts_over} and data={self.data}: give one of them")
        ranks = self.ranks
        nodes, data = copies_of_machine(
            *(self.experts_over, ranks.nodes, ranks.ranks_per_node),
            fsdp=self.fsdp,
            num_experts=self.model_config.num_experts,
        )
        object.__setattr__(self, "ranks", dataclasses.replace(ranks, nodes=nodes))
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "experts_over", None)

    def _check_numbers(self) -> None:
        """Check the range of every number."""
        least = {**LEAST, "responses_per_prompt": 2 if self.algorithm_entry.group_relative else 1}
        for name, minimum in least.items():
            if (value := getattr(self, name)) is not None:
                check_integer(name, value, least=minimum)
        if not self.seeds:
            raise ValueError("seeds is empty: give at least one seed")
        for seed in self.seeds:
            check_seed("seeds", seed)
        for name in NOT_NEGATIVE:
            check_not_negative(name, getattr(self, name))
        check_sampling(self.temperature, self.top_p)
        check_positive("temperature", self.temperature)
        check_positive("plan_ahead", self.plan_ahead)
        if self.plan_ahead > 1:
            raise ValueError(
                f"plan_ahead={self.plan_ahead} must be at most 1: it is a share of the responses"
            )
        if self.float8_above is not None:
            check_not_negative("float8_above", self.float8_above)
        end = self.warmup_steps + self.steps
        if self.profile is not None and not self.warmup_steps <= self.profile < end:
            raise ValueError(
                f"profile={self.profile} must be a learning step: at least warmup_steps={self.warmup_steps} and below"
                f" warmup_steps + steps = {end}"
            )

    def _check_division(self) -> None:
        """Check that samples divide evenly over updates, ranks and micro-batches."""
        ranks = self.num_ranks
        samples = f"prompts={self.prompts} x responses_per_prompt={self.responses_per_prompt} = {self.samples} samples"
        if self.prompts % self.updates:
            raise ValueError(
                f"prompts={self.prompts} must divide evenly over updates={self.updates}: responses to one prompt stay"
                " together"
            )
        of_updates = samples if self.updates == 1 else f"{samples} over updates={self.updates}"
        divisions = [(of_updates, "micro_batches", self.updates * self.micro_batches)]
        if self.recompute_micro_batches is not None:
            divisions.append((samples, "recompute_micro_batches", self.recompute_micro_batches))
        for dividend, name, number in divisions:
            if self.samples % (ranks * number):
                raise ValueError(
                    f"{dividend} must divide evenly over {ranks} ranks x {name}={getattr(self, name)}"
                )
        if self.model_config.width % self.fsdp:
            raise ValueError(f"fsdp={self.fsdp} must divide the model's width {self.model_config.width}")
        if self.gather_once and self.fsdp == 1:
            raise ValueError("gather_once=True needs fsdp of at least 2: experts are whole with fsdp=1")
        if self.wave_samples is not None:
            check_wave(self.wave_samples, ranks)
        if self.split_samples and not self.pack_sequences:
            raise ValueError("split_samples=True needs pack_sequences=True: ranks share packed samples")

    def _check_planner(self) -> None:
        """Check that settings of ReLibra's planners are for one of them."""
        if self.planner in TUNABLE:
            return
        unused = [str(part) for part in (self.reorder, self.replicate) if part != type(part)()]
        if self._plans_ahead:
            unused.append(f"plan_ahead={self.plan_ahead}")
        if unused:
            raise ValueError(
                f"planner={self.planner} does not use {unused[0]}, which is only for {' and '.join(TUNABLE)}"
            )

    def _check_algorithm(self) -> None:
        """Check that the settings of a critic or of DAPO belong to the algorithm."""
        entry = self.algorithm_entry
        parts = (
            ("critic", entry.critic),
            ("dapo", entry.dynamic_sampling),
            ("group", entry.group_relative),
        )
        for name, used in parts:
            part = getattr(self, name)
            if part != type(part)() and not used:
                raise ValueError(f"algorithm={self.algorithm} does not use {part}")
        if self.loss == "cispo" and self.clip.dual is not None:
            raise ValueError(
                f"clip.dual={self.clip.dual} is not for loss=cispo, whose ratios have no gradient"
            )
        if self.loss == "gspo" and self.clip == Clip():
            raise ValueError(
                "loss=gspo needs bounds for the ratio of a response, such as clip.low=3e-4 and clip.high=4e-4:"
                f" {self.clip} is for ratios of tokens"
            )
        if self.loss == "gspo" and not entry.group_relative:
            raise ValueError(
                f"loss=gspo has one ratio for a response, but algorithm={self.algorithm} has an advantage for each of"
                " its tokens"
            )
        if self.correction.kind != "none" and self.top_p < 1:
            raise ValueError(
                f"correction.kind={self.correction.kind} needs top_p=1, not {self.top_p}: log-probabilities are"
                " recorded over the whole vocabulary, and not over the tokens that top_p leaves"
            )
        apart = {"cut_decay": self.critic.cut_decay is not None, "whiten": self.critic.whiten == "apart"}
        for name, given in apart.items():
            if given and not entry.learns_unfinished:
                raise ValueError(
                    f"critic.{name}={getattr(self.critic, name)} is not for algorithm={self.algorithm}, which learns"
                    " from no unfinished response"
                )
        updates = self.steps * self.epochs * self.updates
        if self.steps and self.adamw.rising_updates > updates:
            raise ValueError(
                f"adamw.rising_updates={self.adamw.rising_updates} must be at most {updates}, the updates of the run"
            )
        if self.loss == "gspo" and self.correction.kind != "none":
            raise ValueError(
                f"correction.kind={self.correction.kind} bounds the ratio of every token, but loss=gspo has one ratio"
                " for a response"
            )
        if self.reference.kind != "none" and not self.steps:
            raise ValueError(
                f"reference.kind={self.reference.kind} needs learning steps, and steps={self.steps}: no update would"
                " compare the policy with its reference"
            )
        if entry.dynamic_sampling and self._plans_ahead:
            raise ValueError(
                f"algorithm={self.algorithm} replaces prompts after their responses are scored, so plan_ahead="
                f"{self.plan_ahead} cannot plan for them during generation"
            )

    @property
    def _plans_ahead(self) -> bool:
        """Whether the settings ask for planning ahead. The default only allows it."""
        return self.plan_ahead not in (type(self).plan_ahead, 1)

    def _check_window(self) -> None:
        """Check the window of responses."""
        entry = self.algorithm_entry
        if self.window is None:
            if entry.learns_unfinished:
                raise ValueError(
                    f"algorithm={self.algorithm} needs a window, the tokens that it learns from at once"
                )
            return
        if entry.dynamic_sampling:
            raise ValueError(
                f"window={self.window} is not for algorithm={self.algorithm}, which replaces prompts by their rewards"
            )
        if self.response_tokens % self.window:
            raise ValueError(
                f"response_tokens={self.response_tokens} must be a multiple of window={self.window}"
            )
        if self.routing == "recompute" and entry.learns_unfinished:
            raise ValueError(
                "algorithm=tppo needs routing=rollout: it replays the routing of the policies that sampled the tokens,"
                " and routing=recompute records the routing of all tokens again"
            )

    def _check_turns(self) -> None:
        """Check the settings of responses with several turns."""
        if (self.turns > 1) != (self.turn_tokens is not None):
            raise ValueError(
                f"turns={self.turns} with turn_tokens={self.turn_tokens}: several turns need turn_tokens, and one turn"
                " has none"
            )
        if self.turn_tokens is None:
            return
        if self.turn_tokens >= self.response_tokens:
            raise ValueError(
                f"turn_tokens={self.turn_tokens} must be below response_tokens={self.response_tokens}: a second turn"
                " needs room for so many tokens after the first"
            )
        if self.window is not None:
            raise ValueError(f"turns={self.turns} is not for window={self.window}, which cuts turns off")
        if self._plans_ahead:
            raise ValueError(
                f"turns={self.turns}: responses whose turn has ended may go on, so plan_ahead={self.plan_ahead} cannot"
                " plan for them during generation"
            )

    def _check_routing(self) -> None:
        """Check where routing is recorded and replayed, and the precision of rollout and recompute."""
        if self.routing == "recompute" and not self.replay:
            raise ValueError(
                "routing=recompute needs replay=True: it records the routing that updates replay"
            )
        if self.rollout_dtype == "float32" and self.dtype != "float32":
            raise ValueError(f"rollout_dtype=float32 must not be wider than dtype={self.dtype}")
        if self.float8_recompute and self.float8_above is None:
            raise ValueError(
                "float8_recompute=True needs float8_above, the load above which ranks compute in float8"
            )
        if self.float8_recompute and self.routing == "recompute":
            raise ValueError(
                "float8_recompute=True needs routing=rollout: with routing=recompute the recompute is exact, because"
                " it records the routing that updates replay"
            )
        if self.float8_recompute and not self.replay:
            raise ValueError(
                "float8_recompute=True needs replay=True: otherwise the recompute routes live, as the updates"
            )

    def _check_data(self) -> None:
        """Check the settings of own prompts and rewards, and of evaluations."""
        evaluation = self.evaluation
        if self.prompts_file is None:
            for name in ("prompts_file", "share"):
                if getattr(evaluation, name) != getattr(Evaluation, name):
                    raise ValueError(
                        f"evaluation.{name}={getattr(evaluation, name)} is for runs with a prompts_file"
                    )
            if self.reward is not None:
                raise ValueError(f"reward={self.reward} needs a prompts_file: tasks have their own")
        if self.reward_pool != PoolSettings() and self.reward is None and ":" not in self.task:
            raise ValueError(
                f"no reward function is given as module:function, so nothing uses {self.reward_pool}"
            )
        if self.samples % self.evaluation_samples:
            raise ValueError(
                f"evaluation.samples={self.evaluation_samples} must divide the {self.samples} samples of a batch"
            )
        if evaluation.pass_at > self.evaluation_samples:
            raise ValueError(
                f"evaluation.pass_at={evaluation.pass_at} must be at most {self.evaluation_samples}, the number of"
                " responses to an evaluation prompt (evaluation.samples)"
            )

    def _check_engine(self) -> None:
        """Check that the servers have addresses, and that no setting of the own sampler is for them."""
        check_integer("staleness", self.staleness, least=0)
        if not self.engine:
            if self.requests != EngineRequests():
                raise ValueError(f"engine is empty, so nothing uses {self.requests}")
            if self.staleness:
                raise ValueError(
                    f"staleness={self.staleness} needs an engine: the run's own devices train meanwhile"
                )
            return
        entry = self.algorithm_entry
        if self.staleness and (self.window is not None or entry.dynamic_sampling):
            raise ValueError(
                f"staleness={self.staleness} is not for algorithm={self.algorithm} with window={self.window}: which"
                " prompts are sampled next follows from this batch"
            )
        for address in self.engine:
            _check_address(address)
            if self.engine.count(address) > 1:
                raise ValueError(f"engine {address!r} is given {self.engine.count(address)} times")
        if self.model is None:
            raise ValueError(
                f"engine={' '.join(self.engine)} needs a model: servers load checkpoints, and policy={self.policy} has"
                " none; `python -m experiments.examples.tiny_checkpoint` makes one"
            )
        for name in ("wave_samples", "float8_above", "rollout_dtype"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}={getattr(self, name)} is for sampling without an engine")
        if self.requests.bad_answers == "drop" and self.window is not None:
            raise ValueError(
                f"requests.bad_answers=drop is not for window={self.window}: the next rollout continues the responses"
            )

    def _check_memory(self) -> None:
        """Check the largest arrays: the keys and values of a wave on a rank, and the random numbers of the searches."""
        tokens, samples = self.prompt_tokens + self.response_tokens, self.samples_at_once // self.num_ranks
        # Where there is no checkpoint, the run is for other machines: `experiments.rl.dry_run` counts its memory.
        if not self.engine and not self.lacks_checkpoint:
            purpose = f"generating {samples} samples of {tokens} tokens at a time on each rank (wave_samples)"
            check_memory(purpose, samples * tokens * self.model_config.cache_bytes)
        # A search step draws at least one number for every micro-batch, or for every expert of a rank.
        for name, steps, draws in (
            ("anneal_steps", self.anneal_steps, self.micro_batches),
            ("reorder.steps", self.reorder.steps, self.topology.home_slots),
        ):
            check_memory(f"{name}={steps}", 4 * steps * draws)

    @property
    def algorithm_entry(self) -> AlgorithmEntry:
        """The table entry of the algorithm."""
        return ALGORITHMS[self.algorithm]

    @property
    def losses(self) -> Losses:
        """The losses of learning from responses. Equal settings are equal, so that jit does not compile again."""
        return Losses(
            kind=self.loss,
            clip=self.clip,
            entropy=self.entropy,
            reference=self.reference,
            temperature=self.temperature,
            num_samples=self.samples,
        )

    @property
    def recomputes(self) -> int:
        """The number of passes before the updates that compute log-probabilities: of the policy, and the reference."""
        return 1 if self.reference.kind == "none" else 2

    @property
    def samples(self) -> int:
        """B, the number of samples in a batch."""
        return self.prompts * self.responses_per_prompt

    @property
    def evaluation_temperature(self) -> float:
        """The sampling temperature of evaluations."""
        return self.temperature if self.evaluation.temperature is None else self.evaluation.temperature

    @property
    def evaluation_samples(self) -> int:
        """The number of responses to each prompt in evaluations."""
        default = 1 if self.evaluation_temperature == 0 else self.responses_per_prompt
        return default if self.evaluation.samples is None else self.evaluation.samples

    @property
    def compared(self) -> int:
        """The number of successive samples whose rewards the algorithm compares."""
        return self.responses_per_prompt if self.algorithm_entry.group_relative else 1

    @property
    def samples_at_once(self) -> int:
        """The number of samples that are generated at the same time."""
        return min(self.wave_samples or self.samples, self.samples)

    def evaluates_before(self, step: int) -> bool:
        """Return whether the run evaluates before this step: after the warm-up, and every ``evaluate_every`` steps."""
        number = step - self.warmup_steps
        due = number == 0 or (
            self.evaluate_every is not None and number > 0 and number % self.evaluate_every == 0
        )
        return due and self.evaluation_batches > 0

    @property
    def mini_batches(self) -> tuple[range, ...]:
        """The samples of each update in a pass over the batch."""
        size = self.samples // self.updates
        return tuple(range(first, first + size) for first in range(0, self.samples, size))

    @property
    def updates_live(self) -> bool:
        """Whether some updates route live: those of the warm-up, or all of them."""
        return self.warmup_steps > 0 or not self.replay

    @property
    def recomputes_live(self) -> bool:
        """Whether the recompute routes live: it records the routing of the updates, or these route live, too."""
        return self.routing == "recompute" or not self.replay

    @property
    def live_micro_batches(self) -> int:
        """The number of micro-batches in which a whole batch runs live.

        Unless ``recompute_micro_batches`` sets it, these micro-batches are as large as those of the updates.
        """
        return self.recompute_micro_batches or self.updates * self.micro_batches

    @property
    def model_config(self) -> ModelConfig:
        """The architecture and sizes of the model."""
        model = POLICIES[self.policy] if self.model is None else _pretrained(self.model)
        return dataclasses.replace(model, dtype=self.dtype, activation_memory=self.activation_memory)

    @property
    def lacks_checkpoint(self) -> bool:
        """Whether the folder of the model does not exist. Its sizes are then those of a published model."""
        return self.model is not None and not self.model.exists()

    @property
    def task_name(self) -> str:
        """The name of the task in reports."""
        return self.task if self.prompts_file is None else "own prompts"

    @property
    def model_name(self) -> str:
        """The name of the model in reports."""
        return f"{self.policy} model" if self.model is None else f"model {self.model.name}"

    @property
    def topology(self) -> Topology:
        """The expert-parallel group: the ranks with the model's experts."""
        return self.ranks.topology(self.model_config.num_experts)

    @property
    def num_ranks(self) -> int:
        """The number of ranks of all copies of the group together."""
        return self.data * self.fsdp * self.topology.num_ranks

    @property
    def fsdp_axis(self) -> str | None:
        """The name of the mesh axis over which experts are sharded. None if there is one copy."""
        return FSDP if self.fsdp > 1 else None

    @property
    def planner_entry(self) -> PlannerEntry:
        """The planner with its settings. Equal settings give the same object, so that jit does not compile again."""
        if self.planner not in TUNABLE:
            return PLANNERS[self.planner]
        return tuned_planner(self.planner, self.reorder, self.replicate)

    @property
    def float8_rollout(self) -> HotRanks | None:
        """The rule for which ranks compute in float8 during generation. None if no rank does."""
        return None if self.float8_above is None else HotRanks(threshold=self.float8_above)

    @property
    def assign(self) -> Assign | None:
        """The function that assigns samples. None keeps them in order. Equal settings give the same object."""
        return annealed(self.anneal_steps) if self.anneal_steps else None


def _check_address(address: str) -> None:
    """Raise ValueError unless an address has a scheme, a host and a possible port."""
    try:
        parts = urllib.parse.urlsplit(address)
        good = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"engine {address!r} must be an address such as http://host:30000")


@functools.cache
def _pretrained(folder: Path) -> ModelConfig:
    if folder.exists():
        return load_config(folder)
    if folder.name not in PUBLISHED:
        raise ValueError(
            f"model={folder}: there is no such folder, and the published models whose sizes are known are"
            f" {', '.join(PUBLISHED)}{suggest_names(folder.name, PUBLISHED)}"
        )
    return model_config(PUBLISHED[folder.name])
