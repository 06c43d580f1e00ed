"""A process that generates with Hugging Face's `transformers`, for `experiments.bench_transformers`.

The benchmark starts this file with another Python, which has torch and transformers, but not this project. A request is
one line of JSON on standard input: ``call``, a method of `Worker`, and its arguments. The reply is one line of JSON on
standard output: ``result``, or ``error`` with its reason.
"""

import json
import os
import sys
import time
from typing import Any


class Worker:
    """A model that is run with `transformers`."""

    model: Any

    def versions(self) -> dict[str, str]:
        """Return the versions of the packages that run the model."""
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        return {"torch": torch.__version__, "transformers": transformers.__version__}

    def load(self, folder: str) -> None:
        """Load a checkpoint, in float32."""
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self.model = model.eval()

    def log_probs(self, tokens: list[list[int]]) -> list[list[float]]:
        """Return the log-probability of every token of a batch but the first ones, in one pass without a cache."""
        import torch

        def of_rows(rows):
            logits = self.model(rows, use_cache=False).logits[:, :-1]
            return logits.log_softmax(-1).gather(-1, rows[:, 1:, None])[..., 0].tolist()

        with torch.inference_mode():  # logits of all rows at once may be large
            return [row for rows in torch.tensor(tokens).split(32) for row in of_rows(rows)]

    def generate(
        self,
        prompts: list[list[int]],
        *,
        new_tokens: int,
        end: int,
        experts: str,
        cache: str,
        threads: int,
        seed: int | None,
    ) -> dict[str, Any]:
        """Respond to prompts of one length.

        Args:
            prompts: the tokens of the prompts.
            new_tokens: the largest number of tokens of a response.
            end: the token that ends a response.
            experts: the implementation of the experts, as transformers names it.
            cache: ``dynamic``, ``static``, or ``compiled`` for a static cache and a decoding step by `torch.compile`.
            threads: the number of threads.
            seed: the seed of sampling at temperature 1. None takes the most likely tokens.

        Returns:
            The seconds that generation took, those of all cores together, and the tokens of the responses.
        """
        import torch
        from transformers import CompileConfig, GenerationConfig

        torch.set_num_threads(threads)
        self.model.set_experts_implementation(experts)
        options: dict[str, Any] = {"do_sample": False}
        if seed is not None:
            torch.manual_seed(seed)
            options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        if cache != "dynamic":
            options["cache_implementation"] = "static"
        if cache == "compiled":
            options["compile_config"] = CompileConfig(fullgraph=False, dynamic=False, mode="default")
            options["compile_config"]._compile_all_devices = True  # otherwise not on CPUs
        settings = GenerationConfig(
            max_new_tokens=new_tokens, use_cache=True, eos_token_id=end, pad_token_id=0, **options
        )
        tokens = torch.tensor(prompts)
        with torch.inference_mode():
            start, cpu_start = time.perf_counter(), time.process_time()
            output = self.model.generate(
                tokens, attention_mask=torch.ones_like(tokens), generation_config=settings
            )
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        return {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "tokens": output[:, tokens.shape[1] :].tolist(),
        }


def reply(worker: Any, line: str) -> str:
    """Carry out the request of one line, and return the line of the reply.

    >>> reply("word", '{"call": "upper"}')
    '{"result": "WORD"}'
    """
    request = json.loads(line)
    try:
        return json.dumps({"result": getattr(worker, request.pop("call"))(**request)})
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return json.dumps({"error": text[:300]})


def main() -> None:
    """Answer requests until standard input ends."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    replies, sys.stdout = sys.stdout, sys.stderr  # what libraries print is not a reply
    worker = Worker()
    for line in sys.stdin:
        print(reply(worker, line), file=replies, flush=True)


if __name__ == "__main__":
    main()
