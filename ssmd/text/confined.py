"""The program of the child process for untrusted templates and tokenizers (apart.py). Arguments: PARENT MEMORY.

It answers jobs from its standard input until that ends. A limit may end it in the middle of a job.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from ssmd.machine.child import MAX_HEAD, Packet, answer_jobs
from ssmd.model.artifact import SpecialTokens
from ssmd.text.apart import ERRORS, decoded, encoded, json_of
from ssmd.text.messages import Message
from ssmd.text.template import ChatTemplate, RenderedText, TemplateInput
from ssmd.text.tokenizer import Tokenizer

_SHOWN = 2000  # characters of an error that are returned
Fields = Mapping[str, Any]


class Work:
    """A template and a tokenizer, and the jobs done with them. The job `open` comes first."""

    def __init__(self) -> None:
        self.template: ChatTemplate | None = None
        self.tokenizer: Tokenizer | None = None
        self._jobs: dict[str, Callable[[Fields, bytes], Packet]] = {
            "open": self._open,
            "render": self._render,
            "settled": self._settled,
            "after": self._after,
            "read": self._read,
            "variables": self._variables,
        }

    def do(self, job: Packet) -> Packet:
        """Do a job and return its answer. An error of the template or the tokenizer is returned as an answer too."""
        try:
            return self._jobs[job.head["do"]](job.head, job.body)
        except Exception as err:
            name = next((n for n, kind in ERRORS.items() if isinstance(err, kind)), "")
            said = str(err) if name else f"{type(err).__name__}: {err}"
            return Packet({"error": name, "said": said[:_SHOWN]})

    def _open(self, fields: Fields, body: bytes) -> Packet:
        self.template = ChatTemplate(decoded(body), SpecialTokens(**fields["special"]))
        path, told = Path(fields["tokenizer"]), {name: fields[name] for name in ("stop_tokens", "nonce", "sha256")}
        self.tokenizer = Tokenizer.open(path, **told)
        return Packet({"start_matters": self.tokenizer.start_matters})

    def _render(self, fields: Fields, body: bytes) -> Packet:
        assert self.template is not None
        said, given = _asked(body)
        text = self.template.render(said, now=_now(fields), generate=fields["generate"], given=given)
        return Packet({}, encoded(text))

    def _settled(self, fields: Fields, body: bytes) -> Packet:
        assert self.template is not None
        said, given = _asked(body)
        return _told(self.template.render_settled(said, now=_now(fields), given=given))

    def _after(self, fields: Fields, body: bytes) -> Packet:
        assert self.template is not None
        (first, *tail), given = _asked(body)
        return _told(self.template.render_after(first, fields["skipped"], tail, now=_now(fields), given=given))

    def _variables(self, fields: Fields, body: bytes) -> Packet:
        assert self.template is not None
        return Packet({}, encoded(json.dumps(sorted(self.template.variables))))

    def _read(self, fields: Fields, body: bytes) -> Packet:
        assert self.tokenizer is not None
        return Packet({}, self.tokenizer.read(decoded(body)).astype("<i4").tobytes())


def _asked(body: bytes) -> tuple[list[Message], TemplateInput]:
    asked = json_of(body)
    said = [Message.from_json(m) for m in asked["messages"]]
    return said, TemplateInput(tuple(asked["tools"]), asked["variables"])


def _now(fields: Fields) -> datetime:
    return datetime.fromisoformat(fields["now"])


def _told(rendered: RenderedText | None) -> Packet:
    if rendered is None:
        return Packet({"none": True})
    settled = rendered.settled and [rendered.settled.messages, rendered.settled.characters]
    return Packet({"settled": settled}, encoded(rendered.text))


def main() -> None:
    """Answer jobs until the standard input ends."""
    answer_jobs(Work().do, most_head=MAX_HEAD + (1 << 20))


if __name__ == "__main__":
    main()
