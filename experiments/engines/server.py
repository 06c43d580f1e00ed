"""The HTTP interface of a worker: the part of SGLang's interface that a run needs.

======================================  ===============================================================================
``POST /generate``                      ``input_ids`` of one prompt or a list of prompts, ``sampling_params``,
                                        ``return_routed_experts``
``POST /update_weights_from_disk``      ``model_path``, ``weight_version``; after the requests before it
``POST /abort_request``                 ``abort_all``; the requests before it are answered soon, with the tokens so far
``GET /get_model_info``                 the folder and version of the weights, sizes of the model, and that a
                                        ``sampling_seed`` is a random key of 64 bits
``GET /health``                         200 while the worker lives
``POST /flush_cache``                   200; no prompt is kept from one request to another
======================================  ===============================================================================

Answers have SGLang's format, with a route for the last token too. A bad request is answered by 400 and one line, and
one that the worker does not finish because it is ending by 503.
"""

import asyncio
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from experiments.engines.requests import read_request
from experiments.engines.worker import Ending, Worker
from relibra_jax.support.json_text import parse_json


def make_app(worker: Worker) -> Starlette:
    """Return the ASGI application that gives requests to a worker."""
    config = worker.config

    async def generate(request: HttpRequest) -> Response:
        body = await _body(request)
        prompts = body.get("input_ids")
        if not isinstance(prompts, list) or not prompts:
            raise ValueError("input_ids: expected the tokens of a prompt, or a list of prompts")
        several = isinstance(prompts[0], list)
        requests = [
            read_request(body, prompt, config.vocabulary) for prompt in (prompts if several else [prompts])
        ]
        futures = [asyncio.wrap_future(worker.generate(each)) for each in requests]
        answers = await asyncio.gather(*futures)
        return JSONResponse(list(answers) if several else answers[0])

    async def update_weights(request: HttpRequest) -> Response:
        body = await _body(request)
        folder, version = body.get("model_path"), body.get("weight_version", "default")
        if not isinstance(folder, str) or not Path(folder).is_dir():
            raise ValueError(f"model_path: no folder {folder}")
        await asyncio.wrap_future(worker.load(Path(folder), str(version)))
        return JSONResponse({"success": True, "message": f"version {version}"})

    async def abort(request: HttpRequest) -> Response:
        if (await _body(request)).get("abort_all") is not True:
            raise ValueError("abort_all: only all requests can be aborted, by true")
        worker.interrupt()
        return PlainTextResponse("")

    async def model_info(_: HttpRequest) -> Response:
        sizes = {
            "takes_keys": True,
            "num_experts": config.num_experts,
            "top_k": config.top_k,
            "moe_layers": config.moe_layers,
            "vocabulary": config.vocabulary,
        }
        return JSONResponse({"model_path": str(worker.model), "weight_version": worker.version, **sizes})

    async def health(_: HttpRequest) -> Response:
        return PlainTextResponse("", status_code=200 if worker.alive else 503)

    async def reject(_: HttpRequest, error: Exception) -> Response:
        message = " ".join(str(error).split())
        return JSONResponse({"success": False, "message": message}, status_code=400)

    async def refuse(_: HttpRequest, error: Exception) -> Response:
        return PlainTextResponse(str(error), status_code=503)

    routes = [
        Route("/generate", generate, methods=["POST"]),
        Route("/update_weights_from_disk", update_weights, methods=["POST"]),
        Route("/abort_request", abort, methods=["POST"]),
        Route("/get_model_info", model_info),
        Route("/health", health),
        Route("/flush_cache", health, methods=["GET", "POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={ValueError: reject, Ending: refuse})


async def _body(request: HttpRequest) -> dict[str, Any]:
    try:
        body = parse_json((await request.body()).decode())
    except ValueError:
        raise ValueError("the request is not JSON") from None
    if not isinstance(body, dict):
        raise ValueError("the request is not a JSON object")
    return body
