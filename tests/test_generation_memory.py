"""The counted memory of generation, held against XLA's for the programs of a wave on CPUs and on described H100s."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from experiments.aot.whole_generation import prompt_shapes, run_prompts, state_shapes
from experiments.aot.whole_settings import GENERATION_PROGRAMS, Whole, sizes_of
from experiments.rl.generation import decode, prefill
from experiments.rl.policy import TINY
from experiments.step_memory import RunSizes, memory_by_stage
from relibra_jax import Topology
from relibra_jax.models import make_model
from relibra_jax.nnx import ExpertParallel, expert_mesh

TOPOLOGY = Topology(num_nodes=1, ranks_per_node=4, num_experts=16, replica_slots=0)
WITHIN = 0.1
"""The relative error that is allowed for the memory of a program."""
STAGES = {"prefill": "prompts", "decode": "decoding"}
RECORD = Path(__file__).parents[1] / "experiments" / "results" / "whole_models.jsonl"
LINES = [line for line in map(json.loads, RECORD.read_text().splitlines()) if line["program"] in STAGES]


def compile_generation(sizes):
    """Compile the programs of a wave, whose parameters, besides the experts, are sharded over the ranks."""
    config, new_tokens = sizes.config, sizes.columns - sizes.prompt_tokens
    mesh = expert_mesh(TOPOLOGY, devices=jax.devices()[: TOPOLOGY.num_ranks])
    policy = make_model(config, TOPOLOGY, mesh=mesh, key=jax.random.key(0), shard_dense=True)
    parallel = ExpertParallel(mesh=mesh, topology=TOPOLOGY).live
    prompts = prompt_shapes(parallel, samples=sizes.samples, prompt_tokens=sizes.prompt_tokens)
    options = {"responses": sizes.responses, "new_tokens": new_tokens}
    graph, state = nnx.split(policy)
    begun = jax.eval_shape(
        lambda state, prompts: run_prompts(nnx.merge(graph, state), prompts, parallel, **options),
        *(state, prompts),
    )[1]
    lowered = {
        "prefill": prefill.lower(
            *(policy, prompts, jnp.int32(0)),
            parallel=parallel,
            max_new_tokens=new_tokens,
            copies=sizes.responses,
        ),
        "decode": decode.lower(
            *(policy, state_shapes(begun, parallel)),
            keys=jax.random.split(jax.random.key(0), len(prompts.lengths)),
            lengths=prompts.lengths,
            ends=jnp.arange(2),
            sampling=(jnp.float32(1), jnp.float32(0.9), jnp.ones(config.vocabulary, bool)),
            until=jnp.int32(5),
            parallel=parallel,
        ),
    }
    return {name: program.compile().compiled.memory_analysis() for name, program in lowered.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("item", "model", "wave"),
    [
        ("cache", {"layers": 4}, {"samples": 8, "prompt_tokens": 384, "columns": 4096}),
        pytest.param(
            "logits of the last tokens",
            {"vocabulary": 16384},
            {"samples": 16, "prompt_tokens": 32, "columns": 128},
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("weights of a layer", {"expert_width": 2048}),
            {"samples": 8, "prompt_tokens": 32, "columns": 96},
            marks=pytest.mark.long,
        ),
    ],
    ids=["long responses", "wide vocabulary", "wide experts"],
)
def test_memory_of_generation_is_what_xla_allocates(item, model, wave):
    sizes = RunSizes(
        config=dataclasses.replace(TINY, **{"layers": 2, **model}),
        topology=TOPOLOGY,
        shard_dense=True,
        responses=4,
        **wave,
    )
    stages = memory_by_stage(sizes)
    assert item in sorted(stages["decoding"], key=stages["decoding"].get)[-3:]
    for name, memory in compile_generation(sizes).items():
        counted = sum(stages[STAGES[name]].values()) - stages[STAGES[name]]["moments"]
        # The program returns no weights: they would lie beside those that it got.
        kept = memory.output_size_in_bytes - memory.alias_size_in_bytes
        allocated = memory.argument_size_in_bytes + memory.temp_size_in_bytes + kept
        if name == "prefill":  # It does not get the output head, which is there all the same.
            allocated += 4 * sizes.config.width * sizes.config.vocabulary // TOPOLOGY.num_ranks

        assert counted == pytest.approx(allocated, rel=WITHIN), name
        assert kept < (1.1 * stages["prompts"]["cache"] + 1e6 if name == "prefill" else 1e3)


@pytest.mark.parametrize(
    "line", LINES, ids=lambda line: f"{line['program']} {line['model']} {line['samples']}"
)
def test_count_is_near_the_memory_of_published_models_compiled_for_h100(line):
    fields = {field.name for field in dataclasses.fields(Whole)}
    setting = Whole(**{name: value for name, value in line.items() if name in fields})
    assert setting.program in GENERATION_PROGRAMS
    counted = sum(memory_by_stage(sizes_of(setting))[STAGES[setting.program]].values()) / 1e9
    assert counted == pytest.approx(line["run_gb"], rel=0.12)
