"""Check that `transformers` loads the checkpoints that relibra_jax saves, in two steps and two environments.

python tests/check_hf_checkpoints.py save OUT     # with relibra_jax: load every fixture, move experts, save
python tests/check_hf_checkpoints.py check OUT    # with torch and transformers: compare bits and logits
"""

import os
import sys
from pathlib import Path

import numpy as np

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
FOLDER = Path(__file__).parent / "golden" / "hf"


def save(out: Path) -> None:
    """Load every fixture, move its experts to random homes, and save it with a generated config.json."""
    import test_pretrained as fixtures

    from relibra_jax.models import load_pretrained, save_pretrained
    from relibra_jax.nnx import reorder_experts

    for name in fixtures.CHECKPOINTS:
        dtype = "bfloat16" if name.endswith("bfloat16") else "float32"
        model = load_pretrained(FOLDER / name, fixtures.mesh(), fixtures.TOPOLOGY, param_dtype=dtype)
        homes = fixtures.some_homes(name)
        reorder_experts(model, None, homes, mesh=fixtures.mesh(), topology=fixtures.TOPOLOGY)
        save_pretrained(model, out / name, shard_bytes=50_000)


def check(out: Path) -> None:
    """Load both checkpoints with transformers, and compare all tensors bit by bit and the logits with the fixture's."""
    import torch
    import transformers

    for path in sorted(FOLDER.iterdir()):
        load = transformers.AutoModelForCausalLM.from_pretrained
        saved_model, source_model = (load(folder, dtype="auto") for folder in (out / path.name, path))
        states = saved_model.state_dict(), source_model.state_dict()
        assert states[0].keys() == states[1].keys()
        for name, value in states[1].items():
            assert states[0][name].dtype == value.dtype, name
            assert torch.equal(states[0][name].view(torch.uint8), value.view(torch.uint8)), name
        reference = np.load(path / "logits.npz")
        tokens = torch.from_numpy(reference["tokens"]).long()
        logits = load(out / path.name, dtype=torch.float32)(tokens, use_cache=False).logits
        difference = np.abs(logits.detach().numpy() - reference["logits"]).max()
        print(f"{path.name}: {len(states[0])} tensors equal bit for bit, logits differ by {difference}")


if __name__ == "__main__":
    {"save": save, "check": check}[sys.argv[1]](Path(sys.argv[2]))
