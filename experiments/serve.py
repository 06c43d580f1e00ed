"""``python -m experiments.serve --model FOLDER``: sample responses for runs in other processes.

The server has the part of SGLang's interface that runs need (`experiments.engines.server`), in front of the sampler
that runs use themselves. A run with ``--engine http://HOST:PORT`` gets its responses there. Ctrl-C or SIGTERM ends the
server: it does not finish its requests, which the run then gives to other servers.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from rich.console import Console

from experiments.engines.server import make_app
from experiments.engines.worker import Worker
from experiments.program import run_program
from experiments.rl.devices import compile_quickly, host_devices
from experiments.rl.waves import check_wave
from relibra_jax.support.limits import check_integer, check_positive


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a checkpoint."""

    model: Path
    """The folder of a Hugging Face checkpoint."""
    nodes: int = 1
    """The number of nodes over which experts are distributed."""
    ranks_per_node: int = 1
    """The number of ranks of a node."""
    dtype: str = "float32"
    """The dtype of the computation: float32 or bfloat16."""
    samples: int = 64
    """The number of samples of a batch, a multiple of the number of ranks. Batches are filled up to it."""
    wait_seconds: float = 0.05
    """The seconds without another request after which a batch starts that is not full."""
    chunk_tokens: int = 1024
    """The largest number of tokens of a rank that run at once through experts, and in a prompt."""
    host: str = "127.0.0.1"
    """The address to listen at. The server has no passwords: let only trusted networks reach it."""
    port: int = 30000
    """The port to listen at."""

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node", "samples", "chunk_tokens", "port"):
            check_integer(name, getattr(self, name), least=1)
        check_positive("wait_seconds", self.wait_seconds)
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype {self.dtype!r} must be one of float32, bfloat16")
        check_wave(self.samples, self.nodes * self.ranks_per_node)


class _HttpServer(uvicorn.Server):
    """A server that lets a worker end its requests when a signal ends it."""

    def __init__(self, config: uvicorn.Config, worker: Worker):
        super().__init__(config)
        self._worker = worker

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._worker.end()
        super().handle_exit(sig, frame)


def main(config: Serve) -> None:
    """Load the model, and serve until the process is ended.

    Args:
        config: the settings.
    """
    compile_quickly()
    host_devices(config.nodes * config.ranks_per_node)
    worker = Worker(
        config.model,
        nodes=config.nodes,
        ranks_per_node=config.ranks_per_node,
        dtype=config.dtype,
        samples=config.samples,
        wait_seconds=config.wait_seconds,
        chunk_tokens=config.chunk_tokens,
    )
    address = f"http://{config.host}:{config.port}"
    Console().print(f"{config.model.name}: {address}", highlight=False, soft_wrap=True)
    settings = uvicorn.Config(make_app(worker), host=config.host, port=config.port, log_level="warning")
    _HttpServer(settings, worker).run()
    worker.close()


if __name__ == "__main__":
    sys.exit(run_program(main, Serve, description=__doc__))
