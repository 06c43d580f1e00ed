"""All that a run's next step depends on, and its checkpoints: in logical expert order, so that any mesh goes on."""

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
import orbax.checkpoint as ocp  # type: ignore[import-untyped]
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.rl.configs import Train
from experiments.rl.policy import make_policy
from relibra_jax.capacity import Capacities, ExchangeSizes
from relibra_jax.execution.checkpoint import restore_checkpoint, save_checkpoint
from relibra_jax.execution.expert_labels import optimizer_layers
from relibra_jax.nnx.layer import expert_labels, get_homes, set_homes

LARGEST_GRADIENT: Final = 1.0
"""Norm to which gradients are cut."""
SECOND_MOMENT: Final = 0.95
"""Decay of AdamW's second moment: it has to forget the warm-up, whose gradients are larger, within a few updates."""

_EMPTY_EXCHANGE: Final = ExchangeSizes(pair=0, send=0, receive=0)
NO_BUFFERS: Final = Capacities(rows=0, flat=_EMPTY_EXCHANGE, node=None, local=_EMPTY_EXCHANGE, exports=0)
"""Before the first batch is counted."""


class State:
    """Model, optimizer, planner state, random state, buffer sizes and the number of the step.

    Args:
        config: of the run.
        seed: of the weights, and of all that is drawn later.
        mesh: that the model lies on.
    """

    def __init__(self, config: Train, seed: int, mesh: Mesh):
        self.mesh, self.topology, self.step = mesh, config.topology, 0
        self.key, weights, planning = jax.random.split(jax.random.key(seed), 3)
        self.model = make_policy(config.model, self.topology, mesh=mesh, key=weights)
        tx = _adamw(config.warmup_learning_rate, config.learning_rate, config.warmup_steps)
        self.optimizer = nnx.Optimizer(self.model, tx, wrt=nnx.Param)
        # Counters are born on one device, which would cost a second compilation.
        everywhere = NamedSharding(mesh, PartitionSpec())
        counters = nnx.state(self.optimizer)
        nnx.update(
            self.optimizer,
            jax.tree.map(lambda leaf: leaf if leaf.ndim else jax.device_put(leaf, everywhere), counters),
        )
        self.planner_state = config.row.planner.init(self.topology, config.model.layers, key=planning)
        self.sizes = NO_BUFFERS
        """Of the buffers so far, from which they only grow."""

    def save(self, manager: ocp.CheckpointManager) -> None:
        """Save everything that the next step depends on."""
        save_checkpoint(
            *(manager, self.step, self._tree(), get_homes(self.model)),
            layers=self._layers(),
            mesh=self.mesh,
            topology=self.topology,
        )

    def restore(self, manager: ocp.CheckpointManager) -> None:
        """Go on from the latest checkpoint, which another mesh may have saved.

        Raises:
            ValueError: there is none, or it is of another model; says what differs.
        """
        found = restore_checkpoint(
            manager, self._tree(), layers=self._layers(), mesh=self.mesh, topology=self.topology
        )
        tree = found.tree
        nnx.update(self.model, tree["params"])
        nnx.update(self.optimizer.opt_state, nnx.state(tree["optimizer"]))
        set_homes(self.model, found.home)
        self.key, self.planner_state = _from_host(tree["drawing"], (self.key, self.planner_state))
        self.sizes = tree["sizes"]
        self.step = found.step

    def _tree(self) -> dict[str, Any]:
        return {
            "params": nnx.state(self.model, nnx.Param),
            "optimizer": self.optimizer.opt_state,
            "drawing": _to_host((self.key, self.planner_state)),
            "sizes": self.sizes,
        }

    def _layers(self) -> dict[str, Any]:
        labels = expert_labels(nnx.state(self.model, nnx.Param))
        state = optimizer_layers(self.optimizer.tx, self.optimizer.opt_state, labels)
        return {"params": labels, "optimizer": state, "drawing": None, "sizes": None}


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _to_host(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf), tree)


def _from_host(tree: Any, like: Any) -> Any:
    """Bound to no device, as they were before: planning runs on one, rollouts on all."""

    def back(value, like):
        value = jnp.asarray(value)
        return jax.random.wrap_key_data(value) if _is_key(like) else value

    return jax.tree.map(back, tree, like)


@functools.cache
def _adamw(supervised: float, reinforced: float, warmup_steps: int) -> optax.GradientTransformation:
    """One object for all runs of equal rates, so that they share compiled programs."""
    rates = [optax.constant_schedule(supervised), optax.constant_schedule(reinforced)]
    schedule = optax.join_schedules(rates, [warmup_steps])
    return optax.chain(optax.clip_by_global_norm(LARGEST_GRADIENT), optax.adamw(schedule, b2=SECOND_MOMENT))
