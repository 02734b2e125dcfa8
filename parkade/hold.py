"""`parkade park` and `parkade resume`: set the request in a slot aside, and bring it back."""

from typing import Any

import click

from parkade.api import Api


def park(url: str, api_key: str, slot: int, deadline_s: float) -> None:
    """Returns when the request has left the batch. ApiError where that cannot be."""
    _tell(Api(url, api_key).post(f"/slots/{slot}/park", {"deadline_s": deadline_s}), f"set aside for {deadline_s:g} s at most")


def resume(url: str, api_key: str, slot: int) -> None:
    """The request comes back as soon as it fits. ApiError where there is none set aside."""
    _tell(Api(url, api_key).post(f"/slots/{slot}/resume", {}), "may come back")


def _tell(slot: dict[str, Any], what: str) -> None:
    click.echo(f"slot {slot['id']}: request {slot['request_id']}, {slot['n_tokens']} tokens, {what}")
