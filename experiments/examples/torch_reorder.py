"""A torch model with Megatron-Core's names follows a plan: ``python -m experiments.examples.torch_reorder``.

The expert-parallel ranks live in one process here; each has the local experts that Megatron would give it, and tokens
go to them by position. After the experts moved to the homes of the plan, the same tokens take the same experts, on
other ranks: outputs and what a step of Adam leaves are the same bit for bit. Only the homes of the plan are used here;
a trainer that makes no replicas plans for a topology without replica slots.
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
    """Megatron's MLP with a gated linear unit."""

    def __init__(self):
        super().__init__()
        self.linear_fc1 = torch.nn.Linear(WIDTH, 2 * EXPERT_WIDTH, bias=False)
        self.linear_fc2 = torch.nn.Linear(EXPERT_WIDTH, WIDTH, bias=False)

    def forward(self, x):
        gate, up = self.linear_fc1(x).chunk(2, -1)
        return self.linear_fc2(F.silu(gate) * up)


def rank_modules(num_layers: int, num_experts: int, num_ranks: int) -> list[torch.nn.Module]:
    """One module a rank, with the names of its state dict in Megatron; all share the routers, which Megatron copies."""

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
    """A residual stack of mixtures of experts, ``[tokens, width]``; ``ids[tokens, L, K]`` are positions of experts."""
    for number, layer in enumerate(ranks[0].decoder.layers):
        experts = [
            expert for rank in ranks for expert in rank.decoder.layers[number].mlp.experts.local_experts
        ]
        rows = x[:, None].expand(-1, ids.shape[-1], -1).reshape(-1, WIDTH)
        position = ids[:, number].reshape(-1)
        order = torch.argsort(position, stable=True)
        back = torch.argsort(order)
        parts = rows[order].split(torch.bincount(position, minlength=len(experts)).tolist())
        # Router rows only for the tokens that chose them: no sum, forward or backward, runs in the order of experts.
        router = zip(layer.mlp.router.weight, layer.mlp.router.expert_bias, parts, strict=True)
        logits = torch.cat([part @ weight + bias for weight, bias, part in router])[back].reshape(len(x), -1)
        y = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])[back]
        x = x + (logits.softmax(-1)[..., None] * y.reshape(*logits.shape, WIDTH)).sum(1)
    return x


def adam(ranks: list[torch.nn.Module]) -> torch.optim.Optimizer:
    """One optimizer of all ranks."""
    return torch.optim.Adam({id(p): p for rank in ranks for p in rank.parameters()}.values(), lr=1e-2)


def step(
    ranks: list[torch.nn.Module], optimizer: torch.optim.Optimizer, x: torch.Tensor, ids: np.ndarray
) -> Any:
    """Outputs of a training step."""
    optimizer.zero_grad()
    y = forward(ranks, x, torch.from_numpy(ids))
    y.square().mean().backward()
    optimizer.step()
    return y.detach()


def everything(
    ranks: list[torch.nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, list[dict[str, Any]]]:
    """State dicts of all ranks: parameters and buffers, and each moment by the names of the parameters."""

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
    """Move the experts of all ranks, in place, with their moments."""
    layers = range(len(after))
    states = {
        name: reorder_state_dicts(parts, before, after, layers=layers)
        for name, parts in everything(ranks, optimizer).items()
    }
    for number, rank in enumerate(ranks):
        rank.load_state_dict(states["model"][number])
        for name, p in rank.named_parameters():
            for moment in ("exp_avg", "exp_avg_sq"):
                optimizer.state[p][moment].copy_(states[moment][number][name])


def differences(one: dict[str, list[dict[str, Any]]], other: dict[str, list[dict[str, Any]]]) -> int:
    """How many values of two results of `everything` are not the same bit for bit."""
    return sum(
        not torch.equal(a[name], b[name])
        for part in one
        for a, b in zip(one[part], other[part], strict=True)
        for name in a
    )


def main() -> dict[str, int]:
    """Plan, reorder, train; print what was the same and what changed."""
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

    moved, moved_optimizer = copy.deepcopy((ranks, optimizer))
    reorder(moved, moved_optimizer, before, home)
    moves = expert_moves(before, home, num_ranks=topology.num_ranks)
    outputs = step(ranks, optimizer, x, ids)
    outputs_moved = step(moved, moved_optimizer, x, map_ids(ids, before, home))
    unmapped = step(*copy.deepcopy((moved, moved_optimizer)), x, ids)
    reorder(moved, moved_optimizer, home, before)
    counts = {
        "outputs": int((outputs != outputs_moved).sum()),
        "state": differences(everything(ranks, optimizer), everything(moved, moved_optimizer)),
        "unmapped": int((outputs != unmapped).sum()),
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
