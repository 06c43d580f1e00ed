"""Encoders of given routes in the formats of engines and trainers, and helpers to read them back.

Each encoder follows the description of its format, or byte for byte the engine's own encoder if the docstring names
one. It never follows our decoder.
"""

import base64
import io
import json
from types import SimpleNamespace

import numpy as np

from relibra_jax.contract.replay import check_replay
from relibra_jax.contract.types import EMPTY
from relibra_jax.rollout.ingest import replay_from_rollout

LEFT_PADDED = np.array([[0, 1, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]], bool)


def routes(seed, mask, *, layers, num_experts, top_k):
    """Draw rows ``[B, T, layers, K]`` of different experts in random order; no token has only zeros."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((*mask.shape, layers, num_experts)), axis=-1)[..., :top_k]
    ids[(ids == 0).all(axis=(2, 3))] = num_experts - 1
    return ids


def b64(data):
    return base64.b64encode(data).decode()


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return b64(file.getvalue())


def described(array):
    return {
        "encoding": "base64",
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "data": b64(array.tobytes()),
    }


def sglang(ids, mask, dtype=None, start=None):
    """Return the ``meta_info`` of each sample; the last token has no row."""
    extra = {} if dtype is None else {"routed_experts_dtype": dtype}
    extra |= {} if start is None else {"routed_experts_start_len": start}
    return [
        {"routed_experts": b64(sample[real][start or 0 : -1].astype(dtype or "int32").tobytes()), **extra}
        for sample, real in zip(ids, mask, strict=True)
    ]


def vllm(ids, mask, dtype=np.int32):
    """Return the rows of each sample, without that of its last token."""
    return [sample[real][:-1].astype(dtype) for sample, real in zip(ids, mask, strict=True)]


def vllm_http(ids, mask, encode, prompt=2):
    """Return one response per sample, with the rows of the prompt and those of the generated tokens except the last."""
    return [
        {
            "prompt_routed_experts": encode(rows[:prompt]),
            "choices": [{"routed_experts": encode(rows[prompt:])}],
        }
        for rows in vllm(ids, mask, np.uint8)
    ]


def whole(ids, mask):
    """Return the rows of each sample, with that of its last token."""
    return [sample[real] for sample, real in zip(ids, mask, strict=True)]


def padded(ids, mask, fill):
    """Return an array ``[B, T, layers, K]`` with ``fill`` (an id or ``[K]``) at padding and each last token."""
    grid = np.where(mask[..., None, None], ids, fill).astype(np.int32)
    grid[last_tokens(mask)] = fill
    return grid


def nemo_rl_wire(rows, dtype):
    """Return NeMo-RL's wire string of rows ``[tokens, layers, K]``."""
    shape, little_endian = "x".join(map(str, rows.shape)), np.dtype(dtype).newbyteorder("<")
    return f"nrlre1:{dtype}:{shape}:{b64(rows.astype(little_endian).tobytes())}"


def last_tokens(mask):
    """Mark the last real token of each sample, which engines do not route."""
    last = np.zeros_like(mask)
    for sample, real in enumerate(mask):
        last[sample, np.flatnonzero(real)[-1:]] = True
    return last


def slime_padding(rows, shape, num_experts):
    """Return padding rows of slime, each of ``shape`` ``[layers, K]``."""
    return np.arange(rows * np.prod(shape)).reshape(rows, *shape) % num_experts


def slime(ids, mask, num_experts, extra=1):
    """Return the rows of each sample without that of its last token, followed by ``extra`` padding rows of slime."""
    pads = slime_padding(extra, ids.shape[2:], num_experts)
    return [np.concatenate([rows, pads]).astype(np.int32) for rows in vllm(ids, mask)]


def trace_lines(ids, layers, rank, *, steps=None):
    """Return the trace lines of one rank for tokens ``[n, len(layers), K]``, in ``steps`` passes."""
    return [
        json.dumps(
            {
                "step": step,
                "stage": "pre_dispatch",
                "block": "decoder",
                "layer": layer,
                "rank": rank,
                "num_tokens": len(part),
                "topk": part.shape[2],
                "top_indices": part[:, position].tolist(),
            }
        )
        for step, part in enumerate(np.array_split(ids, steps or 1))
        for position, layer in enumerate(layers)
    ]


def stages(ids, mask):
    """Return the streams of two pipeline stages with two passes each, for one data-parallel rank and four layers."""
    rows = ids[mask]
    return [
        trace_lines(rows[:, :2], (0, 1), 0, steps=2),
        trace_lines(rows[:, 2:], (2, 3), 1, steps=2),
    ]


def skyrl_packed(rows):
    """Encode rows as ``pack_routed_experts`` and ``compact_routed_expert_indices`` of SkyRL do.

    Source: NovaSky-AI/SkyRL a9564572, skyrl/backends/skyrl_train/inference_servers/generate_wire.py and
    skyrl_train/utils/routed_experts.py.
    """
    largest = rows.max(initial=0)
    dtype = np.uint8 if largest < 2**8 else np.int16 if largest < 2**15 else np.int32
    compact = np.ascontiguousarray(rows, dtype)
    return {"data": b64(compact.tobytes()), "shape": list(compact.shape), "dtype": compact.dtype.name}


def prime_rl_answer(rows, start=0):
    """Encode rows as ``serialize_routed_experts`` of prime-rl does.

    Source: PrimeIntellect-ai/prime-rl 559b4477, inference/vllm/routed_experts.py.
    """
    dtype = np.uint16 if rows.max(initial=0) > 255 else np.uint8
    data = b64(np.ascontiguousarray(rows, dtype).tobytes())
    return {"data": data, "shape": list(rows.shape), "start": start, "dtype": np.dtype(dtype).name}


def prime_rl_transport(rows, tokens):
    """Encode rows as a ``RoutedExperts``, as ``_encode_routed_experts`` of prime-rl does.

    Source: PrimeIntellect-ai/prime-rl 559b4477, src/prime_rl/orchestrator/trajectories.py. The placeholder of the last
    token comes from ``_attribute_routed_experts`` of PrimeIntellect-ai/verifiers a60a606e, verifiers/v1/graph.py.
    """
    array = np.concatenate([rows, rows[-1:]]).astype(np.uint16 if rows.max(initial=0) > 255 else np.uint8)
    array = np.concatenate([array, np.zeros((tokens - len(array), *array.shape[1:]), array.dtype)])
    return SimpleNamespace(data=array.tobytes(), shape=list(array.shape), dtype=str(array.dtype))


def areal_response(rows):
    """Encode rows as ``parse_generation_response`` of AReaL does.

    Source: areal-project/AReaL cbff54d6, areal/engine/sglang_remote.py.
    """
    return np.frombuffer(rows.astype(np.int32).tobytes(), np.int32).reshape(len(rows), -1)


def areal_trajectories(ids, mask):
    """Encode each sample as ``_preprocess_one`` of AReaL does.

    Source: AReaL's pull request 1496 at ff703e2e, areal/engine/r3/preprocess.py. AReaL pads on the right; here tokens
    are at the positions of the mask.
    """
    batch = np.zeros(ids.shape, np.int32)
    for sample, real in enumerate(mask):
        rows = ids[sample, real][:-1]
        batch[sample, real] = np.concatenate([rows, rows[-1:]])
    return {"routed_experts": batch, "r3_routing_valid": np.ones(len(mask), bool)}


def selected_experts(ids):
    """Encode rows as the ``MoERouting`` of transformers: one int64 array ``[B * T, K]`` per layer.

    Source: huggingface/transformers 49ba6f63, src/transformers/integrations/moe_routing.py, of pull request 44925.
    """
    flat = ids.reshape(-1, *ids.shape[2:]).astype(np.int64)
    return tuple(flat[:, layer] for layer in range(ids.shape[2]))


# name -> (layout, encoder(ids, mask, num_experts), whether the last token of each sample has no route)
ENCODINGS = {
    "sglang": ("sglang", lambda ids, mask, e: sglang(ids, mask), True),
    "sglang uint8": ("sglang", lambda ids, mask, e: sglang(ids, mask, "uint8", 0), True),
    "sglang uint16": ("sglang", lambda ids, mask, e: sglang(ids, mask, "uint16"), True),
    "vllm": ("vllm", lambda ids, mask, e: vllm(ids, mask), True),
    "vllm uint8": ("vllm", lambda ids, mask, e: vllm(ids, mask, np.uint8), True),
    "vllm_http npy": ("vllm_http", lambda ids, mask, e: vllm_http(ids, mask, npy), True),
    "vllm_http described": ("vllm_http", lambda ids, mask, e: vllm_http(ids, mask, described), True),
    "vllm_http lists": ("vllm_http", lambda ids, mask, e: vllm_http(ids, mask, np.ndarray.tolist), True),
    "verl": ("verl", lambda ids, mask, e: padded(ids, mask, 0), True),
    "slime": ("slime", lambda ids, mask, e: slime(ids, mask, e), True),
    "slime unpadded": ("slime", lambda ids, mask, e: vllm(ids, mask), True),
    "nemo_rl": ("nemo_rl", lambda ids, mask, e: padded(ids, mask, EMPTY), True),
    "nemo_rl ragged": ("nemo_rl", lambda ids, mask, e: whole(padded(ids, mask, EMPTY), mask), True),
    "nemo_rl wire": (
        "nemo_rl",
        lambda ids, mask, e: [
            nemo_rl_wire(rows, "int16") for rows in whole(padded(ids, mask, np.arange(ids.shape[3])), mask)
        ],
        True,
    ),
    "maxtext": ("maxtext", lambda ids, mask, e: padded(ids, mask, EMPTY), True),
    "tunix": ("tunix", lambda ids, mask, e: padded(ids, mask, EMPTY), True),
    "tunix_layers_first": (
        "tunix_layers_first",
        lambda ids, mask, e: padded(ids, mask, EMPTY).swapaxes(1, 2),
        True,
    ),
    "megatron_inference": ("megatron_inference", lambda ids, mask, e: vllm(ids, mask), True),
    # Written from the description of NVIDIA/TensorRT-LLM's pull request 18397, whose code could not be read.
    "tensorrt_llm": ("tensorrt_llm", lambda ids, mask, e: vllm(ids, mask), True),
    "skyrl": ("skyrl", lambda ids, mask, e: vllm(ids, mask, np.int16), True),
    "skyrl packed": ("skyrl", lambda ids, mask, e: list(map(skyrl_packed, vllm(ids, mask))), True),
    # Like convert_prompts_responses_to_batch_tensors, skyrl/train/dataset/preprocess.py.
    "skyrl batch": ("skyrl", lambda ids, mask, e: padded(ids, mask, np.arange(ids.shape[3])), True),
    "prime_rl answer": ("prime_rl", lambda ids, mask, e: list(map(prime_rl_answer, vllm(ids, mask))), True),
    "prime_rl transport": (
        "prime_rl",
        lambda ids, mask, e: [prime_rl_transport(rows, len(rows) + 1) for rows in vllm(ids, mask)],
        True,
    ),
    "prime_rl zero tail": (
        "prime_rl",
        lambda ids, mask, e: whole(padded(ids, mask, 0), mask),
        True,
    ),
    # Like get_routed_experts_from_response of radixark/miles 31f1ca96,
    # rollout/generate_utils/generate_endpoint_utils.py; "padded" has the row of -1 that fill_replay_data
    # (backends/training_utils/replay_data.py) adds.
    "miles": (
        "miles",
        lambda ids, mask, e: [{"rollout_routed_experts": rows} for rows in vllm(ids, mask)],
        True,
    ),
    "miles padded": ("miles", lambda ids, mask, e: whole(padded(ids, mask, EMPTY), mask), True),
    "areal": ("areal", lambda ids, mask, e: list(map(areal_response, vllm(ids, mask))), True),
    "areal trajectories": ("areal", lambda ids, mask, e: areal_trajectories(ids, mask), True),
    "transformers": (
        "transformers",
        lambda ids, mask, e: SimpleNamespace(selected_experts=selected_experts(ids)),
        False,
    ),
    "transformers layers": (
        "transformers",
        lambda ids, mask, e: dict(enumerate(selected_experts(ids))),
        False,
    ),
    "megatron_router_tracer": ("megatron_router_tracer", lambda ids, mask, e: stages(ids, mask), False),
}


def split_response(rows, start):
    """Return a response with separate rows for the prompt, which here ends one token after ``start``."""
    prompt = min(1, len(rows))
    return {"prompt_routed_experts": npy(rows[:prompt]), "choices": [{"routed_experts": npy(rows[prompt:])}]}


def flat_from(rows, start):
    return {"routed_experts": b64(rows.astype(np.int32).tobytes())}


# The engines that can skip tokens: name -> (layout, encoder of a sample's rows from token ``start`` on, whether the
# recording says start)
STARTS = {
    "sglang": ("sglang", flat_from, False),
    "sglang with start": (
        "sglang",
        lambda rows, start: flat_from(rows, start) | {"routed_experts_start_len": start},
        True,
    ),
    "vllm": ("vllm", lambda rows, start: rows, False),
    "vllm_http": ("vllm_http", lambda rows, start: {"choices": [{"routed_experts": npy(rows)}]}, False),
    "vllm_http split": ("vllm_http", split_response, False),
    "slime": (
        "slime",
        lambda rows, start: np.concatenate([rows, slime_padding(1, rows.shape[1:], 16)]),
        False,
    ),
    "slime with start": (
        "slime",
        lambda rows, start: {"rollout_routed_experts": rows, "routed_experts_start_len": start},
        True,
    ),
    "nemo_rl": ("nemo_rl", lambda rows, start: rows, False),
    "nemo_rl wire": ("nemo_rl", lambda rows, start: nemo_rl_wire(rows, "int16"), False),
    "megatron_inference": ("megatron_inference", lambda rows, start: rows, False),
    "tensorrt_llm": ("tensorrt_llm", lambda rows, start: rows, False),
    "prime_rl answer": ("prime_rl", prime_rl_answer, True),
}


def live(ids):
    """Return a ``live_routing``: ``ids`` for missing routes, and invalid ids elsewhere, which must not be read."""
    return lambda missing: np.where(missing[..., None, None], ids, 10_000)


MODEL = {"num_experts": 16, "top_k": 3, "num_layers": 4}


def example(seed=0, mask=LEFT_PADDED, **changes):
    return routes(
        seed, mask, layers=4, num_experts=changes.get("num_experts", 16), top_k=changes.get("top_k", 3)
    )


def assert_holds(replay, ids, mask):
    check_replay(replay, num_experts=MODEL["num_experts"])
    assert replay.expert_ids.dtype == np.uint8
    np.testing.assert_array_equal(replay.mask, mask)
    np.testing.assert_array_equal(replay.expert_ids[mask], ids[mask])
    assert not replay.expert_ids[~mask].any()


def full(ids, **changes):
    """Read rows of every token in vLLM's layout, for tests of what all layouts have in common."""
    arguments = {"layout": "vllm", "mask": LEFT_PADDED} | MODEL | changes
    return replay_from_rollout(whole(ids, arguments["mask"]), **arguments)
