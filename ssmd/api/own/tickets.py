"""/ssmd/v1/tickets: rights without the key. A caller makes a ticket; another client redeems it once."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ssmd.api.generate.fair_reading import FairPool
from ssmd.api.http.body import StrictModel
from ssmd.api.http.keys import REDEEM, TICKET_S, TICKETS, Keys, caller_of
from ssmd.engine.terms import Rejection

_SECRET = {"cache-control": "no-store"}


class RedeemBody(StrictModel):
    ticket: Annotated[str, Field(min_length=1, max_length=200)]


def routes(keys: Keys, pool: FairPool) -> list[Route]:
    """Return the two endpoints. keys: the keys in force, to which a redeemed ticket adds one. pool: of looks."""

    async def make(request: Request) -> JSONResponse:
        ticket = keys.ticket(caller_of(request.scope))
        return JSONResponse({"ticket": ticket, "expires_in": int(TICKET_S)}, headers=_SECRET)

    async def redeem(request: Request) -> JSONResponse:
        asked = await pool.body(request, RedeemBody)
        made = keys.redeem(asked.ticket)
        if made is None:
            raise Rejection(
                f"unknown, used or expired ticket; tickets last {TICKET_S:.0f} s; make another",
                status=403,
                code="invalid_ticket",
                param="ticket",
            )
        key, lasts_s = made
        return JSONResponse({"key": key, "expires_in": int(lasts_s)}, headers=_SECRET)

    return [Route(TICKETS, make, methods=["POST"]), Route(REDEEM, redeem, methods=["POST"])]
