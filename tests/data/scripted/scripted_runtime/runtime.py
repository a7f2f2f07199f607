"""The runtime's class, which the entry point names: LiteRT computes every state, and a file has the answers.

The file named by SCRIPTED_ANSWERS is a list of texts in JSON. Each prompt takes the next one, also after a restart: the
taken ones are removed from the file. When none is left, the model goes on as it likes. A load takes SCRIPTED_LOAD_S
seconds more. A prompt of less than SCRIPTED_LEAST tokens takes none, and gets SIDE_ANSWER: agents ask for titles so.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from saying import Saying

from ssmd.runtime import Artifact, Device, Program
from ssmd.runtime.protocol import Handle, Logits, get_runtime
from ssmd.text.tokenizer import Tokenizer

BASE = "litert"
SIDE_ANSWER = "A title"


class ScriptedRuntime:
    name = "scripted"

    def devices(self) -> list[Device]:
        return get_runtime(BASE).devices()

    def load(self, artifact: Artifact, *, device: str | None = None, threads: int | None = None) -> Program:
        """Load an artifact of LiteRT's whose manifest names this runtime."""
        time.sleep(float(os.environ.get("SCRIPTED_LOAD_S", "0")))
        manifest = artifact.manifest.model_copy(update={"runtime": BASE})
        program = get_runtime(BASE).load(replace(artifact, manifest=manifest), device=device, threads=threads)
        stops = manifest.stop_tokens
        tokenizer = Tokenizer.open(artifact.file("tokenizer.json"), stop_tokens=stops)
        return _FromFile(program, tokenizer, min(stops), Path(os.environ["SCRIPTED_ANSWERS"]))


class _FromFile(Saying):
    def __init__(self, program: Program, tokenizer: Tokenizer, stop: int, file: Path) -> None:
        super().__init__(program)
        self._tokenizer, self._stop, self._file = tokenizer, stop, file
        self._line_end = int(tokenizer.encode("\n")[-1])
        self._least = int(os.environ.get("SCRIPTED_LEAST", "0"))

    def decode(self, handles: Sequence[Handle], tokens: Sequence[int]) -> Logits:
        for handle, token in zip(handles, tokens, strict=True):
            if id(handle) not in self._told:  # a chat's prompt ends with a line, a warm-up's tokens do not
                script: list[int] = []
                if token == self._line_end:
                    long = self._program.position(handle) >= self._least
                    script = self._taken() if long else self._tokens(SIDE_ANSWER)
                self._told[id(handle)] = (handle, script, 0)
        return super().decode(handles, tokens)

    def prefill(self, handle: Handle, tokens: Sequence[int]) -> Logits:
        """Follow the tokens that a grammar forced: the script goes on behind their text."""
        row = self._program.prefill(handle, tokens)
        if id(handle) not in self._told:
            return row
        _, script, at = self._told[id(handle)]
        left, fed = (self._text(ids) for ids in (script[at - 1 :], tokens))
        rest = self._tokens(left.removeprefix(fed))
        self._told[id(handle)] = (handle, rest, 1)
        row = np.array(row)
        row[..., rest[0]] = float(np.max(row)) + 1000
        return row

    def _text(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self._tokenizer.token_bytes, (one for one in tokens if one != self._stop))).decode()

    def _taken(self) -> list[int]:
        first, *rest = json.loads(self._file.read_text("utf-8")) or [None]
        if first is None:
            return []
        self._file.write_text(json.dumps(rest), "utf-8")
        return self._tokens(first)

    def _tokens(self, text: str) -> list[int]:
        return [*self._tokenizer.encode(text), self._stop]
