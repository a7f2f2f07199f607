"""Unsupported fields: those that would change the answer are refused later; all others are ignored and listed."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from ssmd.api.http.body import StrictModel
from ssmd.engine.terms import Rejection

log = logging.getLogger(__name__)
Neutral = Mapping[str, tuple[Any, ...]]  # by field, the values that ask for nothing
MOST_NAMED = 32
MAX_NAME_CHARS = 64
MAX_PATH_CHARS = 256  # of a keyword in a schema
MAX_PATHS_CHARS = 2048  # of all these paths together: some proxies take 4 KiB of headers
_MOST_LOGGED = 256  # most names that are logged, of all clients together
# Objects whose inner fields are sorted too. The other objects constrain the answer, so an unknown field is refused.
_OPTIONS = frozenset({"stream_options"})
_ODD = re.compile(r"[^A-Za-z0-9_.:/@$+\[\]-]")

# Other servers' fields that ssmd does not support and that change the answer's shape or meaning. llama.cpp's server:
LLAMA_CPP: Neutral = {
    "adaptive_target": (None, -1),
    "dynatemp_range": (None, 0),
    "grammar_lazy": (None, False),
    "lora": (None, []),
    "mirostat": (None, 0),
    "n_cmpl": (None, 1),
    "n_indent": (None, 0),
    "n_probs": (None, 0),
    "parse_tool_calls": (None, True),
    "post_sampling_probs": (None, False),
    "reasoning_format": (None, "auto", "deepseek"),
    "response_fields": (None, []),
    "return_tokens": (None, False),
    "samplers": (None, []),
    "t_max_predict_ms": (None, -1, 0),
    "top_n_sigma": (None, -1, 0),
}
# vLLM's:
VLLM: Neutral = {
    "add_generation_prompt": (None, True),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "chat_template": (None,),
    "documents": (None, []),
    "echo": (None, False),
    "ignore_eos": (None, False),
    "include_reasoning": (None, True),
    "include_stop_str_in_output": (None, False),
    "logits_processors": (None, []),
    "logprob_token_ids": (None, []),
    "min_tokens": (None, 0),
    "prompt_logprobs": (None,),
    "repetition_detection": (None,),
    "return_prompt_text": (None, False),
    "return_token_ids": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "skip_special_tokens": (None, True),
    "stop_token_ids": (None, []),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "watermarking": (None, False),
}
# Ollama's:
OLLAMA: Neutral = {
    "format": (None, ""),
}
OTHERS: Neutral = {**LLAMA_CPP, **VLLM, **OLLAMA}


class Fields:
    """Sorts the fields of an endpoint's bodies. strict: refuse unknown fields unless their value asks for nothing."""

    def __init__(self, read: Mapping[str, FieldInfo], refused: Neutral, *, strict: bool = False) -> None:
        """read: the fields of the endpoint's model. refused: unsupported fields that the endpoint refuses by name."""
        self._nested = {name: nested for name in _OPTIONS & read.keys() if (nested := _nested(read[name].annotation))}
        self._known, self._refused, self._strict = read.keys() | refused.keys(), refused, strict
        self._logged: set[str] = set()
        self._lock = threading.Lock()

    def sort(self, fields: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the fields of a body to read, and the names of its ignored fields. Raises Rejection."""
        kept: dict[str, Any] = {}
        ignored: list[str] = []
        for name, value in fields.items():
            if name in self._nested and isinstance(value, dict):
                kept[name] = self._within(name, value, ignored)
            elif name in self._known:
                if name not in self._refused or value not in self._refused[name]:
                    kept[name] = value
            elif value is not None:
                if self._strict:
                    kept[name] = value
                else:
                    ignored.append(name)
        return kept, self.named(ignored)

    def _within(self, name: str, value: dict[str, Any], ignored: list[str]) -> dict[str, Any]:
        kept = {}
        for inner, given in value.items():
            if inner in self._nested[name].model_fields or (self._strict and given is not None):
                kept[inner] = given
            elif given is not None:
                ignored.append(f"{name}.{inner}")
        return kept

    def named(self, ignored: Collection[str]) -> tuple[str, ...]:
        """Return ignored fields' names as an answer lists them, and log new ones. Raises Rejection if strict."""
        if not ignored:
            return ()
        if self._strict:
            name = printable(min(ignored))
            raise Rejection(f"there is no parameter {name!r} here", code="unknown_parameter", param=name)
        names = sorted({printable(name) for name in ignored})
        for name in self._unlogged(names):
            log.info("a client sends the field %s, which is ignored (SSMD_STRICT=1 refuses it)", name)
        more = len(names) - MOST_NAMED
        return tuple(names) if more <= 0 else (*names[:MOST_NAMED], f"({more} more)")

    def not_enforced(self, keywords: Collection[str]) -> tuple[str, ...]:
        """Return keywords of a request's schema, as paths, as an answer lists them, and log new ones by their name.

        A path has names of the client's own, so it is not logged. Raises Rejection if strict.
        """
        if not keywords:
            return ()
        if self._strict:
            first = min(keywords)
            said = f"{first} is not enforced here, and SSMD_STRICT=1 refuses what is not; leave it out"
            raise Rejection(said, code="unsupported_schema", param=first)
        for name in self._unlogged({keyword.rpartition(".")[2] for keyword in keywords}):
            log.info("a client sends a schema with %s, which is not enforced (SSMD_STRICT=1 refuses it)", name)
        paths, chars = sorted({printable(keyword, MAX_PATH_CHARS) for keyword in keywords}), 0
        for i, path in enumerate(paths):
            chars += len(path)
            if i == MOST_NAMED or chars > MAX_PATHS_CHARS:
                return (*paths[:i], f"({len(paths) - i} more)")
        return tuple(paths)

    def _unlogged(self, names: Collection[str]) -> Iterator[str]:
        for name in names:
            with self._lock:
                new = name not in self._logged and len(self._logged) < _MOST_LOGGED
                if new:
                    self._logged.add(name)
            if new:
                yield name


def printable(name: str, most: int = MAX_NAME_CHARS) -> str:
    """Return a client's field name made safe for a header, a log and a list: printable ASCII, no comma, cut."""
    safe = _ODD.sub(lambda odd: f"\\x{ord(odd[0]):x}", name[:most])
    return safe if safe == name else f"{safe[:most]}..."


def _nested(annotation: Any) -> type[StrictModel] | None:
    """Return the pydantic model of a field that is an object; None for any other field."""
    options = getattr(annotation, "__args__", (annotation,))
    return next((one for one in options if isinstance(one, type) and issubclass(one, StrictModel)), None)
