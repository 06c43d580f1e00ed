"""The programs of generation for whole models: the prompt pass and the decoding steps of a wave, from their shapes.

Both are those of `experiments.rl.generation`, as a run compiles them for every wave of `experiments.rl.waves`. Routing
is live, so buffers have the sizes of the worst case.
"""

from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from experiments.aot.stack import with_shardings
from experiments.aot.whole_settings import COMPILER_OPTIONS, Cluster, Lowered, Whole
from experiments.rl.generation import DecodingState, PaddedPrompts, decode, prefill
from relibra_jax.execution import ExpertParallel
from relibra_jax.models import LanguageModel

ENDS: Final = 2
"""The number of tokens that end a response."""


def generation_program(setting: Whole, cluster: Cluster) -> Lowered:
    """Return the prompt pass of a wave, or its decoding steps."""
    parallel = cluster.parallel.live
    graph, shapes = nnx.split(nnx.eval_shape(lambda: cluster.make(nnx.Rngs(0))))
    weights = with_shardings(shapes, parallel.mesh)
    prompts = prompt_shapes(parallel, samples=setting.samples, prompt_tokens=setting.prompt_tokens)

    def prefill_of(weights: Any, prompts: PaddedPrompts) -> Any:
        return run_prompts(
            *(nnx.merge(graph, weights), prompts, parallel),
            responses=setting.responses,
            new_tokens=setting.response_tokens,
        )

    def decode_of(weights: Any, state: DecodingState, lengths: jax.Array, until: jax.Array) -> Any:
        return decode_wave(nnx.merge(graph, weights), state, lengths, until, parallel)

    if setting.program == "prefill":
        return Lowered(jax.jit(prefill_of, compiler_options=COMPILER_OPTIONS), (weights, prompts))
    state = state_shapes(jax.eval_shape(prefill_of, weights, prompts)[1], parallel)
    until = jax.ShapeDtypeStruct((), jnp.int32, sharding=prompts.lengths.sharding)
    program = jax.jit(decode_of, donate_argnums=1, compiler_options=COMPILER_OPTIONS)
    return Lowered(program, (weights, state, prompts.lengths, until))


def prompt_shapes(parallel: ExpertParallel, *, samples: int, prompt_tokens: int) -> PaddedPrompts:
    """Return the shapes of the prompts of a wave, which every device holds.

    Args:
        parallel: the mesh.
        samples: the number of samples of a rank.
        prompt_tokens: the width of the prompts.
    """
    everywhere = NamedSharding(parallel.mesh, PartitionSpec())
    wave = samples * parallel.num_ranks

    def shape(*size: int) -> Any:
        return jax.ShapeDtypeStruct(size, jnp.int32, sharding=everywhere)

    return PaddedPrompts(shape(wave, prompt_tokens), shape(wave))


def run_prompts(
    policy: LanguageModel,
    prompts: PaddedPrompts,
    parallel: ExpertParallel,
    *,
    responses: int,
    new_tokens: int,
) -> tuple[Any, DecodingState]:
    """Run the prompts of a wave, each once for its responses.

    Args:
        policy: the policy.
        prompts: the prompts.
        parallel: the settings of live routing.
        responses: the number of responses of a prompt, all on one rank.
        new_tokens: the largest number of tokens of a response.
    """
    return prefill(
        policy, prompts, jnp.int32(0), parallel=parallel, max_new_tokens=new_tokens, copies=responses
    )


def decode_wave(
    policy: LanguageModel,
    state: DecodingState,
    lengths: jax.Array,
    until: jax.Array,
    parallel: ExpertParallel,
) -> DecodingState:
    """Decode a wave up to a column, with temperature and top-p.

    Args:
        policy: the policy.
        state: the state from the prompts or from earlier steps.
        lengths: the lengths of the prompts.
        until: the column.
        parallel: the settings of live routing.
    """
    vocabulary = policy.config.vocabulary
    return decode(
        policy,
        state,
        keys=jax.random.split(jax.random.key(0), len(lengths)),
        lengths=lengths,
        ends=jnp.arange(ENDS, dtype=jnp.int32),
        sampling=(jnp.float32(1), jnp.float32(0.9), jnp.ones(vocabulary, bool)),
        until=until,
        parallel=parallel,
    )


def state_shapes(state: DecodingState, parallel: ExpertParallel) -> DecodingState:
    """Add the shardings to the shapes of a state: samples over the ranks.

    Args:
        state: the shapes that `run_prompts` returns.
        parallel: the mesh.
    """

    def place(leaf: Any, *spec: Any) -> Any:
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(parallel.mesh, PartitionSpec(*spec))
        )

    by_sample = parallel.token_spec
    cache = state.cache._replace(
        keys=place(state.cache.keys, None, *by_sample),
        values=place(state.cache.values, None, *by_sample),
        positions=place(state.cache.positions, *by_sample),
        filled=place(state.cache.filled),
    )
    others = {
        name: place(leaf, *by_sample)
        for name, leaf in state._asdict().items()
        if name not in ("cache", "step")
    }
    return DecodingState(**others, cache=cache, step=place(state.step))
