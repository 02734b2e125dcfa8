"""The seats: who has them, and setting a request aside and bringing it back by the number of its seat."""

import asyncio
from collections.abc import Awaitable
from typing import Any

from msgspec.structs import asdict, replace
from starlette.requests import Request
from starlette.responses import Response

from router.openai.errors import ApiError, router_lost
from router.openai.limits import read_body
from router.openai.params import park_deadline_s
from router.openai.replies import json_response
from router.openai.schema import ParkRequest, ResumeRequest, decode
from router.openai.serving import Serving
from wire.messages import HoldAnswer, Slot

LISTED_S = 0.3  # after so long a seat's new owner is listed


async def slots(request: Request) -> Response:
    """GET /slots: a JSON array with every key in every entry. `acceptance` is null before anything was drafted."""
    status = await request.app.state.serving.status()
    return json_response([_entry(slot) for slot in status.slots])


async def park(request: Request) -> Response:
    """POST /slots/{id}/park: the request in this seat is set aside until its resume, or for `deadline_s`; answered when it has
    left the batch, with its entry. 404 for an unknown seat, 409 where there is nobody to park."""
    serving: Serving = request.app.state.serving
    deadline_s = park_deadline_s(decode(await read_body(request) or b"{}", ParkRequest))
    slot = await _owned(serving, request.path_params["id"])
    return await _answered(serving.client.park(slot.request_id, deadline_s), slot, held=True)


async def resume(request: Request) -> Response:
    """POST /slots/{id}/resume: the request in this seat comes back as soon as it fits; answered at once, errors as of `park`."""
    serving: Serving = request.app.state.serving
    decode(await read_body(request) or b"{}", ResumeRequest)
    slot = await _owned(serving, request.path_params["id"])
    return await _answered(serving.client.resume(slot.request_id), slot, held=False)


async def _owned(serving: Serving, number: str) -> Slot:
    """The seat's line, with a request in it. One that looks idle is looked at twice: its owner may be too new to be listed."""
    for is_last in (False, True):
        status = await serving.status()
        slot = next((slot for slot in status.slots if str(slot.id) == number), None)
        if slot is None:
            raise ApiError(404, f"There is no slot {number[:40]!r}; GET /slots lists them.", code="slot_not_found")
        if slot.request_id:
            return slot
        if not is_last:
            await asyncio.sleep(LISTED_S)
    raise ApiError(409, f"Slot {number} is idle.", code="conflict")


async def _answered(asked: Awaitable[HoldAnswer], slot: Slot, held: bool) -> Response:
    """The router's answer as an HTTP one. Without a line in it, because the worker is away, the one known before is shown."""
    try:
        answer = await asked
    except TimeoutError:
        raise ApiError(503, f"The request in slot {slot.id} has not left the batch yet; it will.", code="timeout") from None
    except ConnectionError:
        raise router_lost() from None
    match answer.code:
        case "unknown_request":
            raise ApiError(409, f"The request in slot {slot.id} has just ended.", code="conflict")
        case "conflict":
            raise ApiError(409, f"Slot {slot.id}: {answer.message}.", code="conflict")
        case _:
            return json_response(_entry(answer.slot or replace(slot, held=held)))


def _entry(slot: Slot) -> dict[str, Any]:
    return asdict(slot) | {"acceptance": round(slot.accepted / slot.drafted, 4) if slot.drafted else None}
