"""Machines divided into expert-parallel groups by ``experts_over``, and what does not divide."""

import pytest
from support.runs import SMALL

from experiments.rl.configs import Train
from relibra_jax.evaluation import Ranks

pytestmark = pytest.mark.usefixtures("smallest_policy")


def test_groups_of_a_machine_are_copies():
    config = Train(**SMALL, ranks=Ranks(nodes=4, ranks_per_node=2), experts_over="2x2", fsdp=2)
    assert (config.topology.num_nodes, config.topology.ranks_per_node) == (2, 2)
    assert (config.data, config.fsdp, config.num_ranks) == (1, 2, 8)
    assert Train(**SMALL, ranks=Ranks(nodes=4, ranks_per_node=2), experts_over="1x2").data == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"experts_over": "3x2"},
            r"experts_over=3x2: .* must divide 4 nodes x 2 ranks .* what fits is 1x2, 2x2, 4x2$",
        ),
        ({"experts_over": "2x1"}, r"what fits is 1x2, 2x2, 4x2$"),
        ({"experts_over": "4x2", "fsdp": 2}, r"into a multiple of fsdp=2 groups, .* what fits is 1x2, 2x2$"),
        ({"experts_over": "2x2", "fsdp": 3}, r"no size fits$"),
        ({"experts_over": "two"}, r"experts_over='two' must be NODESxRANKS, such as 4x8$"),
        ({"experts_over": "2x2", "data": 2}, r"experts_over=2x2 and data=2: give one of them$"),
    ],
)
def test_what_does_not_divide_is_refused_with_what_does(changes, message):
    with pytest.raises(ValueError, match=message):
        Train(**SMALL, ranks=Ranks(nodes=4, ranks_per_node=2), **changes)


def test_a_resumed_run_keeps_its_groups(tmp_path):
    with pytest.raises(
        ValueError, match=r"experts_over=2x2 is for new runs: .* groups of 4x2, data=1 and fsdp=1$"
    ):
        Train(**SMALL, ranks=Ranks(nodes=4, ranks_per_node=2), experts_over="2x2", resume=tmp_path)
