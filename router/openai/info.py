"""What can be asked about the server: models, health, metrics, properties."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from router.openai.errors import ApiError, shutting_down
from router.openai.limits import MAX_BODY_BYTES
from router.openai.params import MAX_N, MAX_STOP_STRINGS, MAX_STREAMS
from router.openai.replies import json_response
from router.openai.serving import Serving
from wire.messages import MAX_LOGPROBS


async def models(request: Request) -> Response:
    """GET /v1/models: the one model."""
    return json_response({"object": "list", "data": [_model(request.app.state.serving)]})


async def model(request: Request) -> Response:
    """GET /v1/models/{id}; 404 for any other."""
    serving: Serving = request.app.state.serving
    serving.check_model(request.path_params["model"])
    return json_response(_model(serving))


async def health(request: Request) -> Response:
    """GET /health: 200 only if a request would be decoded now, else 503 with the reason."""
    serving: Serving = request.app.state.serving
    status = await serving.status()
    if serving.draining or status.draining:
        raise shutting_down()
    if not status.ready:
        raise ApiError(503, status.reason or "The server is not ready.", code="not_ready", retry_after_s=2)
    return json_response({"status": "ok"})


async def metrics(request: Request) -> Response:
    """GET /metrics: the router's counters and gauges as Prometheus text."""
    status = await request.app.state.serving.status()
    return Response(status.metrics.encode(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def props(request: Request) -> Response:
    """GET /props: the model, what one sequence may use, what all of them share, and the limits of this adapter."""
    serving: Serving = request.app.state.serving
    status = await serving.status()
    alive = [worker for worker in status.workers if worker.alive]
    return json_response(
        {
            "model": serving.name,
            "max_context": min((worker.max_context for worker in alive), default=serving.max_context),
            "pool_cells": sum(worker.pool_cells for worker in alive),
            "slots": sum(worker.slots for worker in alive),
            "exact": bool(alive) and all(worker.exact for worker in alive),
            "exact_note": "; ".join(dict.fromkeys(worker.exact_note for worker in alive if worker.exact_note)),
            "draft": max((worker.draft for worker in alive), default=0),
            "draft_note": "; ".join(dict.fromkeys(worker.draft_note for worker in alive if worker.draft_note)),
            "reuse": bool(alive) and all(worker.reuse for worker in alive),
            "weight_bytes": sum(worker.weight_bytes for worker in alive),
            "pool_bytes": sum(worker.pool_bytes for worker in alive),
            "state_bytes": sum(worker.state_bytes * worker.state_slots for worker in alive),
            "ready": status.ready,
            "draining": serving.draining or status.draining,
            "has_chat_template": serving.text.has_chat_template,
            "vocab_size": serving.vocab_size,
            "hostcache": {
                "budget_bytes": status.budget_bytes,
                "used_bytes": status.used_bytes,
                "held_bytes": status.held_bytes,
            },
            "limits": {
                "max_body_bytes": MAX_BODY_BYTES,
                "max_n": MAX_N,
                "max_streams": MAX_STREAMS,
                "max_stop_strings": MAX_STOP_STRINGS,
                "max_logprobs": MAX_LOGPROBS,
            },
            "workers": [_worker(worker) for worker in status.workers],
        }
    )


def _worker(worker: msgspec.Struct) -> dict[str, Any]:
    return {
        name: msgspec.structs.asdict(value) if isinstance(value, msgspec.Struct) else value
        for name, value in msgspec.structs.asdict(worker).items()
    }


def _model(serving: Serving) -> dict[str, Any]:
    return {
        "id": serving.name,
        "object": "model",
        "created": serving.created_s,
        "owned_by": "parkade",
        "max_model_len": serving.max_context,
    }
