"""The programs of generation for whole models: the prompt pass and the decoding steps of a wave, from their shapes.

Both are those of `experiments.rl.generation`, as a run compiles them for every wave of `experiments.rl.waves`. Routing
is live, so buffers have the sizes of the worst case.
"""

from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from experiments.rl.generation import DecodingState, PaddedPrompts, decode, prefill
from relibra_jax.execution import ExpertParallel
from relibra_jax.models import LanguageModel

ENDS: Final = 2
"""The number of tokens that end a response."""


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
