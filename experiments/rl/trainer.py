"""One run: a policy that is warmed up, rolls out, and learns in balanced steps.

What is drawn follows from the seed and the number of the step, so a run that goes on from a checkpoint draws what it
would have drawn, and on the same mesh computes the same bits.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import jax
import numpy as np
from flax import nnx

from experiments.rl.balance import Foresight, measure_balance, plan_rollout, to_ranks, with_room
from experiments.rl.configs import Train
from experiments.rl.losses import group_advantages, token_weights
from experiments.rl.policy import live_parallel
from experiments.rl.rewards import Rewards, score_rollout
from experiments.rl.running import Phases, host_devices
from experiments.rl.sampler import Rollout, rollout
from experiments.rl.state import State
from experiments.rl.step import Goal, Ran, Rows, check_executed, recompute, update
from experiments.rl.tasks import Example, Task, find_task
from experiments.rl.tokens import pad
from relibra_jax.capacity import count_capacities, grow_capacities
from relibra_jax.execution.mesh import expert_mesh
from relibra_jax.execution.moe import ExpertParallel
from relibra_jax.nnx.layer import reorder_experts
from relibra_jax.planning.assignment import assign_in_order
from relibra_jax.types import Array, Assignment, RoutingReplay

SHOWN_FAILURES: Final = 3
MORE_EXAMPLES: Final = 8
"""So many times the examples that are needed are drawn where some have no room."""
SUPERVISED, PROMPTS, EVALUATION, PLANNING = range(4)
"""What is drawn: part of the seed of examples, and of the keys."""


class Trainer:
    """The state of a run and the steps that change it.

    Args:
        config: of the run.
        seed: one of its seeds.
        task: in place of the one that ``config`` names.

    Raises:
        ValueError: a task that there is not, or fewer devices than ranks.
    """

    def __init__(self, config: Train, seed: int, *, task: Task | None = None):
        self.config, self.seed = config, seed
        self.task = find_task(config.task) if task is None else task
        self.topology = config.topology
        self.mesh = expert_mesh(self.topology, devices=host_devices(self.topology.num_ranks))
        self.state = State(config, seed, self.mesh)
        self.replay: RoutingReplay | None = None
        """Of the last rollout."""
        samples = config.samples // config.micro_batches // self.topology.num_ranks
        tokens = samples * (config.prompt_tokens + config.response_tokens)
        self.live = live_parallel(self._parallel(), tokens, config.model.top_k)

    @property
    def total_steps(self) -> int:
        """Of warm-up and rollouts together."""
        return self.config.warmup_steps + self.config.steps

    def warm_up(self) -> dict[str, Any]:
        """One supervised update on prompts with right answers; its metrics."""
        config, phases = self.config, Phases()
        examples = self._draw((self.seed, SUPERVISED, self.state.step), config.samples)
        prompts = [example.prompt_tokens for example in examples]
        rows = [prompt + example.answer_tokens for prompt, example in zip(prompts, examples, strict=True)]
        tokens = pad(rows, config.prompt_tokens + config.response_tokens)
        position = np.arange(tokens.shape[1])[None]
        mask = position < np.array([len(row) for row in rows])[:, None]
        answer = mask & (position >= np.array([len(prompt) for prompt in prompts])[:, None])
        weight = token_weights(answer, np.ones(len(rows), bool), token_level=True)
        with phases("update"):
            in_order = assign_in_order(len(rows), self.topology, num_micro_batches=config.micro_batches)
            batch = Rows(tokens, mask, None), Goal(weight, None, None)
            samples, goal = to_ranks(batch, in_order, self.mesh)
            # Live routing is known once it has run.
            _, ran = recompute(self.state.model, samples, None, parallel=self.live, temperature=1.0)
            learned = update(
                *(self.state.model, self.state.optimizer, samples, goal, None, ran.load.sum((0, 2, 3))),
                parallel=self.live,
                balance=config.balance,
            )
            loss = self._finite(learned.loss.loss, "loss")
            self._finite(learned.gradient_norm, "gradient norm")
        self.state.step += 1
        return {"kind": "warm-up", "loss": loss, "tokens": int(mask.sum()), **phases.report()}

    def learn(self) -> dict[str, Any]:
        """One rollout and what is learned from it; its metrics."""
        config, phases = self.config, Phases()
        examples = self.examples(PROMPTS, self.state.step)
        with phases("rollout"):
            made = self.sample(examples, self._key(PROMPTS, self.state.step))
        with ThreadPoolExecutor(1) as scorer:
            # Rewards are Python, planning is compiled: they run side by side.
            scoring = scorer.submit(score_rollout, self.task, examples, made.tokens, made.response)
            assignment, rows, known, parallel = self.balance(made, phases)
            with phases("recompute"):
                old_log_prob, ran = jax.block_until_ready(
                    recompute(
                        self.state.model, rows, known, parallel=parallel, temperature=config.temperature
                    )
                )
            check_executed(ran, known, self.topology, intra_node=config.row.intra_node)
            with phases("score"):
                rewards = scoring.result()
        with phases("update"):
            advantage = group_advantages(rewards.reward, rewards.scored, group_size=config.group)
            weight = token_weights(made.response, rewards.scored, token_level=config.token_level)
            goal = to_ranks(Goal(weight, advantage, None), assignment, self.mesh)
            goal = goal._replace(old_log_prob=old_log_prob)
            followed, by = (known, parallel) if config.replay else (None, self.live)
            batch_load = known.load.sum((0, 2, 3))
            for _ in range(config.epochs):
                learned = update(
                    *(self.state.model, self.state.optimizer, rows, goal, followed, batch_load),
                    parallel=by,
                    balance=config.balance,
                    temperature=config.temperature,
                    clip=config.clip,
                )
                loss = self._finite(learned.loss.loss, "loss")
                self._finite(learned.gradient_norm, "gradient norm")
                if config.replay:
                    check_executed(learned.ran, known, self.topology, intra_node=config.row.intra_node)
        times = phases.report()
        self.state.step += 1
        return {
            "kind": "learn",
            "reward": _mean(rewards.reward[rewards.scored]),
            "failed": len(rewards.failures),
            "failures": rewards.failures[:SHOWN_FAILURES],
            "response_tokens": float(made.response.sum() / len(made.response)),
            "loss": loss,
            "clipped": float(learned.loss.clipped),
            "kl": float(learned.loss.kl),
            "gradient_norm": float(learned.gradient_norm),
            "tokens": int(made.mask.sum()),
            **self._routing_metrics(known, learned.ran),
            **times,
        }

    def evaluate(self) -> dict[str, Any]:
        """Score prompts that are the same at every call and for every seed; nothing is learned."""
        rewards: list[Rewards] = []
        for batch in range(self.config.evaluation_batches):
            examples = self.examples(EVALUATION, batch)
            made = self.sample(examples, self._key(EVALUATION, batch))
            rewards.append(score_rollout(self.task, examples, made.tokens, made.response))
        scored = np.concatenate([each.reward[each.scored] for each in rewards])
        return {
            "kind": "evaluation",
            "reward": _mean(scored),
            "samples": len(scored),
            "failed": sum(len(each.failures) for each in rewards),
            "failures": [failure for each in rewards for failure in each.failures][:SHOWN_FAILURES],
        }

    def sample(self, examples: list[Example], key: jax.Array) -> Rollout:
        """Answers to the prompts of ``examples``, each by a key of its own: ``[B, ...]``, on the host."""
        config, ranks = self.config, (self.topology.num_nodes, self.topology.ranks_per_node)
        rows = [example.prompt_tokens for example in examples]
        prompts = pad(rows, config.prompt_tokens).reshape(*ranks, -1, config.prompt_tokens)
        lengths = np.array([len(row) for row in rows], np.int32).reshape(prompts.shape[:-1])
        keys = jax.random.split(key, lengths.shape)
        made = rollout(
            *(self.state.model, prompts, lengths, keys),
            parallel=self.live,
            max_new_tokens=config.response_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
        )
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:]), jax.device_get(made))

    def balance(self, made: Rollout, phases: Phases) -> tuple[Assignment, Rows, Foresight, ExpertParallel]:
        """Plan a rollout, move its rows to their ranks and experts to their homes, and choose buffers."""
        config, replay = self.config, RoutingReplay(made.expert_ids, made.mask)
        with phases("plan"):
            assignment, known, self.state.planner_state = jax.block_until_ready(
                plan_rollout(
                    *(replay, self.state.planner_state, self._key(PLANNING, self.state.step)),
                    planner=config.row.planner,
                    topology=self.topology,
                    num_micro_batches=config.micro_batches,
                    anneal_steps=config.anneal_steps,
                )
            )
            known = jax.device_get(known)
            need = count_capacities(known.plan, known.load, self.topology)
            self.state.sizes = grow_capacities(self.state.sizes, need, round_up=with_room)
        with phases("migrate"):
            reorder_experts(
                self.state.model,
                self.state.optimizer,
                known.plan.home,
                mesh=self.mesh,
                topology=self.topology,
            )
            rows = to_ranks(Rows(made.tokens, made.mask, made.expert_ids), assignment, self.mesh)
            jax.block_until_ready(nnx.state(self.state.model))
        self.replay = replay
        return assignment, rows, known, self._parallel()

    def examples(self, what: int, number: int) -> list[Example]:
        """Prompts of one batch, each as often as it is answered."""
        seed = (what, number) if what == EVALUATION else (self.seed, what, number)
        drawn = self._draw(seed, self.config.prompts)
        return [example for example in drawn for _ in range(self.config.group)]

    def _parallel(self) -> ExpertParallel:
        """With the buffers of the batches so far."""
        return ExpertParallel(
            mesh=self.mesh,
            topology=self.topology,
            capacities=self.state.sizes,
            across_nodes=not self.config.row.intra_node,
        )

    def _draw(self, seed: tuple[int, ...], count: int) -> list[Example]:
        """The first examples that there is room for."""
        config = self.config
        for times in (1, MORE_EXAMPLES):
            drawn = self.task.sample(seed, times * count)
            fitting = [
                example
                for example in drawn
                if len(example.prompt_tokens) <= config.prompt_tokens
                and len(example.answer_tokens) <= config.response_tokens
            ]
            if len(fitting) >= count:
                return fitting[:count]
        longest = [max(len(getattr(one, f"{part}_tokens")) for one in drawn) for part in ("prompt", "answer")]
        raise ValueError(
            f"task {self.task.name!r}: of {len(drawn)} examples {len(fitting)} fit prompt_tokens="
            f"{config.prompt_tokens} and response_tokens={config.response_tokens}, {count} are needed; the longest"
            f" have {longest[0]} and {longest[1]}"
        )

    def _key(self, what: int, number: int) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(self.state.key, what), number)

    def _finite(self, value: Array, name: str) -> float:
        number = float(value)
        if not np.isfinite(number):
            raise FloatingPointError(f"step {self.state.step}: {name} is {number}")
        return number

    def _routing_metrics(self, known: Foresight, ran: Ran) -> dict[str, Any]:
        across = not self.config.row.intra_node
        balance = measure_balance(known, ran.load, topology=self.topology, across_nodes=across)
        if self.config.replay:
            del balance["imbalance_live"]
        changed, choices = np.asarray(ran.changed).sum(0), known.load.sum((0, 2, 3, 4))
        return {
            **{name: np.asarray(value).tolist() for name, value in balance.items()},
            "routing_changed": changed.tolist(),
            "routing_changed_share": (changed / choices).tolist(),
        }


def _mean(rewards: np.ndarray) -> float | None:
    return float(rewards.mean()) if rewards.size else None
