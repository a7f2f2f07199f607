"""Requests that keep a daemon's lanes busy while a test looks at the queue."""

from __future__ import annotations

import contextlib
import http.client
import json
from typing import Any

from daemon_process import DaemonProcess

ENDLESS: dict[str, Any] = {"temperature": 0, "max_tokens": 1_000_000}


def occupy(one: DaemonProcess) -> None:
    """Begin an answer that goes on without a reader, and does not end."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", one.port, timeout=30)) as connection:
        messages = [{"role": "user", "content": "Takes a lane"}]
        body = {"model": "mamba", "messages": messages, "stream": True, "background": True, **ENDLESS}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        assert connection.getresponse().status == 200
