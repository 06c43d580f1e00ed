"""A small training run whose expert state tests attack: weights, moments, homes, residents and prepared tables."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from test_residents_training import LAYERS, SAMPLES, SIZES, TOKENS, TOPOLOGY, WIDTH, Model

from relibra_jax.execution import expert_mesh
from relibra_jax.nnx import (
    Balancer,
    ExpertParallel,
    accumulate_gradients,
    logical_optimizer_state,
    logical_params,
    prepare_residents,
)
from support.plans import random_planner, random_routing

EXPERTS = TOPOLOGY.num_experts
TX = optax.adamw(1e-3, eps=1e-5)


@functools.cache
def data():
    rng = np.random.default_rng(0)
    sizes = {"samples": SAMPLES, "tokens": TOKENS, "layers": LAYERS, "experts": EXPERTS, "top_k": 2}
    return [
        (rng.normal(size=(SAMPLES, TOKENS, WIDTH)).astype(np.float32), random_routing(rng, **sizes))
        for _ in range(4)
    ]


@nnx.jit
def train_step(model, optimizer, batch, sequences, residents):
    gradients = gradients_of(model, batch, sequences, residents, optimizer.step[...])
    optimizer.update(model, gradients)


def gradients_of(model, batch, sequences, residents, step):
    def objective(model, sequences, layers):
        x, replay = sequences
        out, *_ = model(x, replay, layers, batch.parallel)
        loss = (jnp.square(out - 1).sum(-1) * replay.mask).sum() / (SAMPLES * TOKENS)
        return loss, loss

    return accumulate_gradients(model, objective, batch, sequences, residents=residents, step=step)[0]


PLANNER = random_planner()


class Run:
    """A model, its optimizer and its balancer, on 2 x 2 ranks with residents and replicas, and on other axes."""

    def __init__(self, planner=PLANNER, axes=None, cost=None):
        axes = axes or {}
        devices = TOPOLOGY.num_ranks * math.prod(axes.values())
        self.mesh = expert_mesh(TOPOLOGY, devices=jax.devices()[:devices], **axes)
        self.model = Model(TOPOLOGY, self.mesh, fsdp_axis="fsdp" if "fsdp" in axes else None)
        self.optimizer = nnx.Optimizer(self.model, TX, wrt=nnx.Param)
        self.balancer = Balancer(
            planner,
            ExpertParallel(mesh=self.mesh, topology=TOPOLOGY, capacities=SIZES),
            num_layers=LAYERS,
            num_micro_batches=2,
            key=jax.random.key(0),
            assign=None,
            cost=cost,
        )

    def prepare(self, number, optimizer=True, **options):
        optimizer = self.optimizer if optimizer else None
        return self.balancer.prepare(self.model, optimizer, data()[number][1], **options)

    def step(self, batch, number):
        residents = PUSH(self.model, self.optimizer, batch)
        train_step(self.model, self.optimizer, batch, batch.to_ranks(data()[number]), residents)

    def train(self, first, last, **options):
        for number in range(first, last):
            self.step(self.prepare(number, **options), number)

    def logical(self):
        """Return all parameters and the optimizer's state on the host, with experts in the order of their ids."""
        both = logical_params(self.model), logical_optimizer_state(self.model, self.optimizer)
        return jax.tree.map(on_host, both)


def on_host(array):
    """Return an array as a NumPy array, whole on every process."""
    if array.is_fully_addressable:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)


PUSH = nnx.jit(prepare_residents)
