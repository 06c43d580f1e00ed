"""The state of a run and its checkpoints, in logical expert order, so that a run can resume on any mesh."""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

import jax
import orbax.checkpoint as ocp  # type: ignore[import-untyped]
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray

from experiments.model_memory import check_training_memory
from experiments.rl.configs import Train
from experiments.rl.critic import ValueNetwork, make_critic
from experiments.rl.optimizer import make_optimizer
from experiments.rl.planner_settings import price_of
from experiments.rl.policy import Agent
from experiments.rl.reference import copy_weights
from experiments.rl.windows import Carried, carry_nothing
from experiments.step_memory import RunSizes
from relibra_jax.contract.replay import id_dtype
from relibra_jax.cost.cost_model import CostModel
from relibra_jax.cost.hardware import Cluster
from relibra_jax.execution.checkpoint_steps import find_step, read_layout
from relibra_jax.execution.memory import HOST
from relibra_jax.models import load_pretrained, make_model
from relibra_jax.nnx import Balancer, ExpertParallel, restore_training, save_training
from relibra_jax.nnx.derived_cost import cluster_of
from relibra_jax.nnx.host_state import on_device, put_on_host
from relibra_jax.nnx.put_on_mesh import replicate
from relibra_jax.nnx.training_checkpoint import COPIES
from relibra_jax.routing.sizes import Capacities

FIRST_CAPACITIES: Final[Capacities | None] = None
"""The buffer sizes at the start of a run. None counts those of the first batch."""
SETTINGS: Final = "extra.settings."
"""The prefix of settings among the names of a checkpoint's arrays."""
SKIPPED: Final = "extra.skipped"
"""The name of the number of skipped steps in a row. Checkpoints without it have 0."""
CARRIED_SETTINGS: Final = ("response_tokens", "prompt_tokens", "samples")
"""The settings, besides algorithm and window, that must not change while responses are carried from step to step."""
CRITIC: Final = 1
"""The part of the random key of the weights for the critic."""
DEFAULTS: Final[Mapping[str, str]] = MappingProxyType(
    {"moments": "float32", "window": "None", "reference": "none"}
)
"""The values of settings that a checkpoint does not name."""


class State:
    """The state of a run: policy, critic, their optimizers, balancer, unfinished responses, random key and step.

    Args:
        config: the settings of the run.
        seed: the seed of the weights, and of everything drawn later.
        mesh: the device mesh of the model.
    """

    def __init__(self, config: Train, seed: int, mesh: Mesh):
        self.step = 0
        self.key, weights, planning = split_key(seed)
        sharding: dict[str, Any] = {"fsdp_axis": config.fsdp_axis, "shard_dense": config.shard_dense}
        check_training_memory(config.model_name, run_sizes(config), mesh)
        if config.model is None:
            policy = make_model(config.model_config, config.topology, mesh=mesh, key=weights, **sharding)
        else:
            policy = load_pretrained(config.model, mesh, config.topology, dtype=config.dtype, **sharding)
            policy.config = config.model_config
        self.agent = Agent(policy)
        self.critic: ValueNetwork | None = None
        """The critic, on every device. None for algorithms without one."""
        self.critic_optimizer: nnx.Optimizer | None = None
        """The optimizer of the critic."""
        if config.algorithm_entry.critic:
            self.critic, self.critic_optimizer = make_critic(
                *(policy.config.width, config.critic, config.adamw, mesh),
                key=jax.random.fold_in(weights, CRITIC),
            )
        tx = make_optimizer(
            *(config.warmup_learning_rate, config.learning_rate, config.warmup_steps, config.adamw),
            updates=max(config.steps * config.epochs * config.updates, 1),
            moments=config.moments,
        )
        self.reference: Agent | None = None
        """The policy before the first learning step, at the agent's homes. None until then, or if no loss uses it."""
        self.reference_memory = config.reference.memory
        self.on_host = config.state_memory == HOST
        """Whether parameters and optimizer state are in host memory."""
        if self.on_host:
            put_on_host(self.agent)
        self.optimizer = nnx.Optimizer(self.agent, tx, wrt=nnx.Param)
        if self.on_host:
            put_on_host(self.optimizer)
        cost = run_price(config, cluster_of(mesh.devices.flat[0]))
        self.balancer = make_balancer(config, mesh, cost, key=planning)
        carries = CARRIED_SETTINGS if config.window is not None else ()
        named = ("algorithm", "moments", "window", *carries)
        self.settings = {name: str(getattr(config, name)) for name in named}
        self.settings["reference"] = "none" if config.reference.kind == "none" else "kept"
        """The settings that a run must have to resume a checkpoint of this run."""
        if self.critic is not None:
            self.settings["critic.width"] = str(config.critic.width)
        self.carried: Carried | None = None
        """The responses that the last rollout has not learned from. None without windows."""
        self.skipped = 0
        """The number of last learning steps in a row that changed nothing, because they were not finite."""
        if config.window is not None:
            self.carried = carry_nothing(
                config.samples,
                config.prompt_tokens + config.response_tokens,
                layers=config.model_config.moe_layers,
                top_k=config.model_config.top_k,
                dtype=id_dtype(config.model_config.num_experts),
            )

    def on_devices(self) -> Agent:
        """Return the agent for programs that do not train it: a copy in device memory if it is in the host's."""
        return _copy_to_devices(self.agent, self.balancer.parallel.mesh) if self.on_host else self.agent

    @property
    def copies(self) -> tuple[Agent, ...]:
        """The models whose experts move with the agent's."""
        return () if self.reference is None else (self.reference,)

    def keep_reference(self) -> None:
        """Keep the weights of the policy as the reference, unless there is one: learning starts from them."""
        if self.reference is None:
            self.reference = Agent(copy_weights(self.on_devices().policy, self.reference_memory))

    def reference_on_devices(self) -> Agent:
        """Return the reference in device memory: a copy if it is in the host's."""
        assert self.reference is not None, "the first learning step keeps the reference"
        if self.reference_memory != HOST:
            return self.reference
        return _copy_to_devices(self.reference, self.balancer.parallel.mesh)

    def save(self, manager: ocp.CheckpointManager) -> None:
        """Save everything that the next step depends on, except the random key, which follows from the seed."""
        save_training(
            *(manager, self.step, self.agent, self.optimizer, self.balancer),
            copies=self.copies,
            extra=self._extra(skipped=self.skipped > 0),
        )

    def restore(self, manager: ocp.CheckpointManager, *, verify: bool = True) -> None:
        """Restore the latest checkpoint, which may have been saved on another mesh.

        Args:
            manager: the Orbax manager of the checkpoint directory.
            verify: whether to compare every array with the digest that was saved with it.

        Raises:
            ValueError: if there is no checkpoint, it is damaged, it belongs to another model, algorithm or dtype of
                moments, only one of it and this run has a reference, or its unfinished responses were sampled under
                other settings. The message names the difference.
        """
        names = read_layout(manager, find_step(manager, None), verify=verify).arrays
        named = (name.removeprefix(SETTINGS).rsplit(".", 1) for name in names if name.startswith(SETTINGS))
        saved = {**DEFAULTS, **dict(named)}
        for name, value in self.settings.items():
            if saved.get(name) != value:
                raise ValueError(
                    f"{manager.directory}: its checkpoints have {name}={saved.get(name, 'none')}, but this run has"
                    f" {name}={value}"
                )
        if any(name.startswith(COPIES) for name in names):  # those of the warm-up have no reference yet
            self.keep_reference()
        self.step, extra = restore_training(
            *(manager, self.agent, self.optimizer, self.balancer),
            copies=self.copies,
            extra=self._extra(skipped=SKIPPED in names),
            verify=verify,
        )
        self.carried, self.skipped = extra["carried"], int(extra.get("skipped", 0))
        if self.critic is not None:
            modules, mesh = (self.critic, self.critic_optimizer), self.balancer.parallel.mesh
            nnx.update(modules, jax.tree.map(functools.partial(replicate, mesh=mesh), extra["critic"]))

    def _extra(self, *, skipped: bool) -> dict[str, Any]:
        """Return what a checkpoint contains besides the policy, its optimizer and the balancer."""
        settings = {name: {value: 1} for name, value in self.settings.items() if DEFAULTS.get(name) != value}
        critic = None
        if self.critic is not None:
            critic = jax.device_get(nnx.to_pure_dict(nnx.state((self.critic, self.critic_optimizer))))
        counts = {"skipped": self.skipped} if skipped else {}
        return {"settings": settings, "carried": self.carried, "critic": critic, **counts}


_copy_to_devices = nnx.jit(on_device, static_argnames="mesh")


def run_price(config: Train, cluster: Cluster) -> CostModel | Literal["balance"]:
    """Return the price for which a run on some hardware plans its batches."""
    return price_of(config.price, config.model_config, cluster, recompute=not config.recomputes_live)


def make_balancer(
    config: Train,
    mesh: Mesh,
    cost: CostModel | Literal["balance"],
    *,
    key: PRNGKeyArray,
    layers: int | None = None,
) -> Balancer:
    """Make the balancer of a run.

    Args:
        config: the settings of the run.
        mesh: the device mesh of the model.
        cost: the price, from `run_price`.
        key: random key for planning.
        layers: the number of MoE layers for which it plans. None for those of the model.
    """
    parallel = ExpertParallel(
        mesh=mesh,
        topology=config.topology,
        capacities=FIRST_CAPACITIES,
        chunk_tokens=config.chunk_tokens,
        across_nodes=config.planner_entry.across_nodes or None,
        late_replicas=config.planner_entry.late_replicas,
        gather_once=config.gather_once,
        check_rows=True,
    )
    return Balancer(
        config.planner_entry.planner,
        parallel,
        num_layers=config.model_config.moe_layers if layers is None else layers,
        num_micro_batches=config.micro_batches,
        key=key,
        cost=cost,
        assign=config.assign,
        sequences="split" if config.split_samples else "packed" if config.pack_sequences else "padded",
        memory_kind=config.batch_memory,
    )


def split_key(seed: int) -> tuple[PRNGKeyArray, PRNGKeyArray, PRNGKeyArray]:
    """Return the random keys of a seed: of the run's draws, of its weights, and of planning."""
    key, weights, planning = jax.random.split(jax.random.key(seed), 3)
    return key, weights, planning


def run_sizes(config: Train) -> RunSizes:
    """Return the sizes of a run that determine the memory of a rank."""
    samples = config.samples // config.num_ranks
    tokens = config.prompt_tokens + config.response_tokens
    # A window or a turn has all tokens before it as its prompt.
    context = tokens - (config.window or config.turn_tokens or config.response_tokens)
    # Windows continue different responses, so every row runs as a prompt.
    windows = config.window is not None
    return RunSizes(
        config=config.model_config,
        topology=config.topology,
        fsdp=config.fsdp,
        gather_once=config.gather_once,
        shard_dense=config.shard_dense,
        moments=config.moments,
        updates=config.updates,
        micro_batches=config.micro_batches,
        split=config.split_samples,
        sequences=samples // (config.updates * config.micro_batches),
        length=tokens,
        recompute_sequences=samples // config.live_micro_batches,
        live=config.updates_live,
        chunk_tokens=config.chunk_tokens,
        state_memory=config.state_memory,
        critic=config.algorithm_entry.critic,
        reference_memory=None if config.reference.kind == "none" else config.reference.memory,
        batch_memory=config.batch_memory,
        samples=0 if config.engine else config.samples_at_once // config.num_ranks,
        columns=tokens,
        prompt_tokens=context,
        responses=1 if windows else config.responses_per_prompt,
    )
