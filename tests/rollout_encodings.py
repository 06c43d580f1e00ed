"""What engines and trainers hand over, encoded from known routes, and how a test reads it back.

Each layout's encoder is written here from the description of the format, not from the decoder.
"""

import base64
import io
import json

import numpy as np

from relibra_jax.replay import check_replay
from relibra_jax.rollout import replay_from_rollout
from relibra_jax.types import EMPTY

LEFT_PADDED = np.array([[0, 1, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]], bool)


def routes(seed, mask, *, layers, num_experts, top_k):
    """Random rows ``[B, T, layers, K]`` of different experts, in no order; no token has only zeros."""
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
    """``meta_info`` of each sample; the last token has no row."""
    extra = {} if dtype is None else {"routed_experts_dtype": dtype}
    extra |= {} if start is None else {"routed_experts_start_len": start}
    return [
        {"routed_experts": b64(sample[real][start or 0 : -1].astype(dtype or "int32").tobytes()), **extra}
        for sample, real in zip(ids, mask, strict=True)
    ]


def vllm(ids, mask, dtype=np.int32):
    """Rows of each sample but its last token's."""
    return [sample[real][:-1].astype(dtype) for sample, real in zip(ids, mask, strict=True)]


def vllm_http(ids, mask, encode, prompt=2):
    """One response a sample: the prompt's rows, then those of generated tokens but the last."""
    return [
        {
            "prompt_routed_experts": encode(rows[:prompt]),
            "choices": [{"routed_experts": encode(rows[prompt:])}],
        }
        for rows in vllm(ids, mask, np.uint8)
    ]


def whole(ids, mask):
    """Rows of each sample, the last token's too."""
    return [sample[real] for sample, real in zip(ids, mask, strict=True)]


def padded(ids, mask, fill):
    """A grid whose padding, and the last token of each sample, hold ``fill``, an id or ``[K]`` of them."""
    grid = np.where(mask[..., None, None], ids, fill).astype(np.int32)
    grid[lacking_last(mask)] = fill
    return grid


def nemo_rl_wire(rows, dtype):
    """NeMo-RL's wire string of rows ``[tokens, layers, K]``."""
    shape, little_endian = "x".join(map(str, rows.shape)), np.dtype(dtype).newbyteorder("<")
    return f"nrlre1:{dtype}:{shape}:{b64(rows.astype(little_endian).tobytes())}"


def lacking_last(mask):
    """True at the last real token of each sample, which engines do not route."""
    last = np.zeros_like(mask)
    for sample, real in enumerate(mask):
        last[sample, np.flatnonzero(real)[-1:]] = True
    return last


def slime_padding(rows, shape, num_experts):
    """Rows of ``shape`` ``[layers, K]`` that slime makes up."""
    return np.arange(rows * np.prod(shape)).reshape(rows, *shape) % num_experts


def slime(ids, mask, num_experts, extra=1):
    """Rows but the last token's, then ``extra`` rows of slime's padding."""
    pads = slime_padding(extra, ids.shape[2:], num_experts)
    return [np.concatenate([rows, pads]).astype(np.int32) for rows in vllm(ids, mask)]


def trace_lines(ids, layers, rank, *, steps=None):
    """One rank's lines for tokens ``[n, len(layers), K]``, in ``steps`` passes."""
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
    """Two pipeline stages of one data-parallel rank, two passes each, of a model of four layers."""
    rows = ids[mask]
    return [
        trace_lines(rows[:, :2], (0, 1), 0, steps=2),
        trace_lines(rows[:, 2:], (2, 3), 1, steps=2),
    ]


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
    "megatron_router_tracer": ("megatron_router_tracer", lambda ids, mask, e: stages(ids, mask), False),
}


def live(ids):
    """A live forward pass that routes as ``ids`` where a route is missing and must not be read elsewhere."""
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
    """Read rows of every token as vLLM's; a plain carrier for what is true of all layouts."""
    arguments = {"layout": "vllm", "mask": LEFT_PADDED} | MODEL | changes
    return replay_from_rollout(whole(ids, arguments["mask"]), **arguments)
