"""Reordering the experts of a torch model by a plan: ``python -m experiments.examples.torch_reorder``.

The model has the parameter names of Megatron-Core. One process plays all expert-parallel ranks; each rank has the local
experts that Megatron would give it, and tokens are sent to experts by position. The script moves the experts to the
homes of a plan. Every token then still uses the same experts, on other ranks: the outputs, and all parameters and
moments after a step of Adam, are equal bit for bit.

Only the homes of the plan are used here. A trainer that makes no replicas plans for a topology without replica slots.
"""

import copy
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from experiments.examples import torch_arrays
from relibra_jax.integrations.expert_order import logical_order, map_ids
from relibra_jax.integrations.megatron import expert_moves, reorder_state_dicts

WIDTH, EXPERT_WIDTH = 32, 24


class Expert(torch.nn.Module):
    """One expert: Megatron's MLP with a gated linear unit."""

    def __init__(self):
        super().__init__()
        self.linear_fc1 = torch.nn.Linear(WIDTH, 2 * EXPERT_WIDTH, bias=False)
        self.linear_fc2 = torch.nn.Linear(EXPERT_WIDTH, WIDTH, bias=False)

    def forward(self, x):
        gate, up = self.linear_fc1(x).chunk(2, -1)
        return self.linear_fc2(F.silu(gate) * up)


def rank_modules(num_layers: int, num_experts: int, num_ranks: int) -> list[torch.nn.Module]:
    """Make one module for each rank, with the state-dict names of Megatron.

    All modules share the same routers, of which Megatron keeps a copy on every rank.
    """

    def router():
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(torch.randn(num_experts, WIDTH))
        module.register_buffer("expert_bias", torch.randn(num_experts))
        return module

    routers = [router() for _ in range(num_layers)]
    layers = [
        [
            {"router": shared, "experts": [Expert() for _ in range(num_experts // num_ranks)]}
            for shared in routers
        ]
        for _ in range(num_ranks)
    ]

    def named(parts):
        module = torch.nn.Module()
        for name, part in parts.items():
            module.add_module(name, part)
        return module

    def layer(parts):
        experts = named({"local_experts": torch.nn.ModuleList(parts["experts"])})
        return named({"mlp": named({"router": parts["router"], "experts": experts})})

    return [named({"decoder": named({"layers": torch.nn.ModuleList(map(layer, rank))})}) for rank in layers]


def forward(ranks: list[torch.nn.Module], x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Run a residual stack of mixture-of-experts layers, with the routing that the caller gives.

    Args:
        ranks: the modules of all ranks.
        x: the tokens, ``[tokens, width]``.
        ids: the positions of each token's experts, ``[tokens, L, K]``.

    Returns:
        The outputs, ``[tokens, width]``.
    """
    for number, layer in enumerate(ranks[0].decoder.layers):
        experts = [
            expert for rank in ranks for expert in rank.decoder.layers[number].mlp.experts.local_experts
        ]
        rows = x[:, None].expand(-1, ids.shape[-1], -1).reshape(-1, WIDTH)
        position = ids[:, number].reshape(-1)
        order = torch.argsort(position, stable=True)
        back = torch.argsort(order)
        parts = rows[order].split(torch.bincount(position, minlength=len(experts)).tolist())
        # Each router row meets only the tokens that chose its expert. So no sum, forward or backward, depends on the
        # order of the experts.
        router = zip(layer.mlp.router.weight, layer.mlp.router.expert_bias, parts, strict=True)
        logits = torch.cat([part @ weight + bias for weight, bias, part in router])[back].reshape(len(x), -1)
        y = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])[back]
        x = x + (logits.softmax(-1)[..., None] * y.reshape(*logits.shape, WIDTH)).sum(1)
    return x


def adam(ranks: list[torch.nn.Module]) -> torch.optim.Optimizer:
    """Make one Adam optimizer for the parameters of all ranks; shared routers count once."""
    return torch.optim.Adam({id(p): p for rank in ranks for p in rank.parameters()}.values(), lr=1e-2)


def step(
    ranks: list[torch.nn.Module], optimizer: torch.optim.Optimizer, x: torch.Tensor, ids: np.ndarray
) -> Any:
    """Run one training step on the mean square of the outputs, and return the outputs."""
    optimizer.zero_grad()
    y = forward(ranks, x, torch.from_numpy(ids))
    y.square().mean().backward()
    optimizer.step()
    return y.detach()


def training_state(
    ranks: list[torch.nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, list[dict[str, Any]]]:
    """Return the full training state of all ranks: their state dicts, and both moments of Adam by parameter name."""

    def moment(name):
        return [{key: optimizer.state[p][name] for key, p in rank.named_parameters()} for rank in ranks]

    return {
        "model": [rank.state_dict() for rank in ranks],
        "exp_avg": moment("exp_avg"),
        "exp_avg_sq": moment("exp_avg_sq"),
    }


def reorder(
    ranks: list[torch.nn.Module], optimizer: torch.optim.Optimizer, before: np.ndarray, after: np.ndarray
) -> None:
    """Move the experts of all ranks and their moments of Adam, in place.

    Args:
        ranks: the modules of all ranks.
        optimizer: the optimizer that `adam` made.
        before: the position of each expert now, ``[L, E]``.
        after: the position of each expert afterwards, ``[L, E]``.
    """
    layers = range(len(after))
    states = {
        name: reorder_state_dicts(parts, before, after, layers=layers)
        for name, parts in training_state(ranks, optimizer).items()
    }
    for number, rank in enumerate(ranks):
        rank.load_state_dict(states["model"][number])
        for name, p in rank.named_parameters():
            for moment in ("exp_avg", "exp_avg_sq"):
                optimizer.state[p][moment].copy_(states[moment][number][name])


def differences(one: dict[str, list[dict[str, Any]]], other: dict[str, list[dict[str, Any]]]) -> int:
    """Count the tensors that differ between two training states, as `training_state` returns them, bit for bit."""
    return sum(
        not torch.equal(a[name], b[name])
        for part in one
        for a, b in zip(one[part], other[part], strict=True)
        for name in a
    )


def main() -> dict[str, int]:
    """Train one step with and without reordered experts, and compare outputs and training states.

    Returns:
        The numbers of differences: of ``outputs``, of training ``state``, and of outputs with ``unmapped`` expert ids.
    """
    batch_plan = torch_arrays.main()
    topology, home = torch_arrays.TOPOLOGY, np.asarray(batch_plan.plan.home)
    num_layers, num_experts = home.shape
    before = logical_order(num_layers, num_experts)
    torch.manual_seed(0)
    ranks = rank_modules(num_layers, num_experts, topology.num_ranks)
    optimizer = adam(ranks)
    rng = np.random.default_rng(1)
    ids = np.argsort(rng.normal(size=(4096, *home.shape)) + np.linspace(0, 2, num_experts), -1)
    ids = ids[..., : torch_arrays.TOP_K]
    x = torch.from_numpy(rng.normal(size=(len(ids), WIDTH)).astype(np.float32))
    step(ranks, optimizer, x, ids)

    reordered_ranks, reordered_optimizer = copy.deepcopy((ranks, optimizer))
    reorder(reordered_ranks, reordered_optimizer, before, home)
    moves = expert_moves(before, home, num_ranks=topology.num_ranks)
    outputs = step(ranks, optimizer, x, ids)
    reordered_outputs = step(reordered_ranks, reordered_optimizer, x, map_ids(ids, before, home))
    # Without mapped ids, tokens must go to other experts.
    unmapped_outputs = step(*copy.deepcopy((reordered_ranks, reordered_optimizer)), x, ids)
    reorder(reordered_ranks, reordered_optimizer, home, before)
    counts = {
        "outputs": int((outputs != reordered_outputs).sum()),
        "state": differences(
            training_state(ranks, optimizer), training_state(reordered_ranks, reordered_optimizer)
        ),
        "unmapped": int((outputs != unmapped_outputs).sum()),
    }
    across = int((moves.source_rank != moves.target_rank).sum())
    print(
        f"torch {torch.__version__}: {len(moves.layer)} of {home.size} experts moved, {across} of them to another rank"
    )
    print(
        f"outputs that differ: {counts['outputs']} of {outputs.numel()};"
        f" parameters and moments that differ after a step of Adam: {counts['state']};"
        f" outputs that differ where ids were not mapped: {counts['unmapped']}"
    )
    return counts


if __name__ == "__main__":
    main()
