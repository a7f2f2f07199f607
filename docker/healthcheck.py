"""Asks the daemon in this container for its health, and ends with 0 if it answers and is not on its way out."""

import http.client
import os
import sys

TIMEOUT_S = 5


def main() -> None:
    asked = http.client.HTTPConnection("127.0.0.1", int(os.environ.get("SSMD_PORT") or 7763), timeout=TIMEOUT_S)
    try:
        asked.request("GET", "/health")
        answer = asked.getresponse()
        sys.stdout.write(answer.read().decode() + "\n")
    except OSError as err:
        sys.exit(f"the daemon does not answer: {err}")
    sys.exit(answer.status != http.client.OK)


if __name__ == "__main__":
    main()
