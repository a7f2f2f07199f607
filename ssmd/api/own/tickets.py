"""/ssmd/v1/tickets: rights without the key. A caller makes a ticket; another client redeems it once."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse

from ssmd.api.http.access import TICKET_S, caller_of
from ssmd.api.http.body import StrictModel
from ssmd.api.operation import Endpoint, Service
from ssmd.engine.terms import Rejection

_SECRET = {"cache-control": "no-store"}


class RedeemBody(StrictModel):
    ticket: Annotated[str, Field(min_length=1, max_length=200)]


def make(on: Service) -> Endpoint:
    """Build the endpoint that makes a ticket."""

    async def answer(request: Request) -> JSONResponse:
        ticket = on.keys.ticket(caller_of(request.scope))
        return JSONResponse({"ticket": ticket, "expires_in": int(TICKET_S)}, headers=_SECRET)

    return answer


def redeem(on: Service) -> Endpoint:
    """Build the endpoint that redeems a ticket, which adds a key to those in force."""
    pool = on.pool

    async def answer(request: Request) -> JSONResponse:
        asked = await pool.body(request, RedeemBody)
        made = on.keys.redeem(asked.ticket)
        if made is None:
            raise Rejection(
                f"unknown, used or expired ticket; tickets last {TICKET_S:.0f} s; make another",
                status=403,
                code="invalid_ticket",
                param="ticket",
            )
        key, lasts_s = made
        return JSONResponse({"key": key, "expires_in": int(lasts_s)}, headers=_SECRET)

    return answer
