"""Jinja's filters, and string methods with large results: each result's size is checked before it is made."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import markupsafe
from jinja2 import Environment
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.utils import pass_environment

from ssmd.text.jinja.meter import LimitError, Meter

MAX_COUNT = 10_000  # items of a batch or slice, and arguments of a call
MAX_WIDTH = 999  # characters of a formatted field
MAX_INDENT = 16  # characters of JSON's indentation

# Jinja's own filters. Left out: random and lipsum, as a prompt must come out the same each time, and those for HTML.
# fmt: off
FILTER_NAMES = (
    "abs", "attr", "batch", "capitalize", "center", "count", "d", "default", "dictsort", "filesizeformat",
    "first", "float", "format", "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower",
    "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round", "select", "selectattr", "slice",
    "sort", "string", "sum", "title", "trim", "truncate", "unique", "upper", "urlencode", "wordcount",
)
# fmt: on
# A private-use character that stands for a control token's text (text/vocabulary.py), escaped as JSON. It is unescaped
# so that it can become that text again. After an escaped backslash it is plain text.
_PRIVATE = re.compile(r"\\\\|\\u(db[c-f][0-9a-f])\\u(d[c-f][0-9a-f]{2})")
_PARENTHESES = re.compile(r"[()]")
_PERCENT_WIDTHS = re.compile(r"[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?")


class Amplifiers:
    """The checks. meter: returns the meter of the rendering in this thread."""

    def __init__(self, meter: Callable[[], Meter]) -> None:
        self._meter = meter

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return all filters that a chat template can use."""
        plain: dict[str, Callable[..., Any]] = {name: FILTERS[name] for name in FILTER_NAMES}
        return plain | {
            "batch": _counted(FILTERS["batch"]),
            "slice": _counted(FILTERS["slice"]),
            "center": self._center,
            "e": _escape,
            "escape": _escape,
            "format": self._percent,
            "indent": self._indent,
            "join": self._join,
            "replace": self._replace,
            "round": _round,
            "safe": str,
            "sum": self._sum,
            "tojson": self._tojson,
            "trim": self._trim,
        }

    def check_method(self, owner: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Check a call of a string's method before it is made. Returns its arguments. Raises LimitError."""
        meter = self._meter()
        given = args
        args = args or tuple(kwargs[key] for key in ("tabsize", "sep") if key in kwargs)
        if name in ("center", "ljust", "rjust", "zfill") and args and isinstance(args[0], int):
            meter.fits(args[0])
        elif name == "expandtabs" and args and isinstance(args[0], int):
            meter.fits(len(owner) + owner.count("\t") * args[0])
        elif name == "join" and args:
            args = (list(args[0]),)  # a generator would be used up
            meter.fits(sum(map(meter.size, args[0])) + len(owner) * len(args[0]))
        elif name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
            meter.fits(len(owner) + owner.count(args[0]) * max(0, len(args[1]) - len(args[0])))
        elif name in ("rfind", "rindex", "rsplit", "rpartition") and args and isinstance(args[0], str):
            # Searching from the right takes time in proportion to the product.
            meter.fits(len(owner) * len(args[0]) // 64)
        elif name in ("strip", "lstrip", "rstrip") and args and isinstance(args[0], str):
            meter.fits(len(owner) * len(args[0]) // 64)  # each character is looked for among those to strip
        return args if not kwargs else given

    def check_percent(self, text: str, values: Any) -> None:
        """Check text % values before it is computed. Raises LimitError."""
        at = text.find("%") + 1
        while at:
            if text.startswith("(", at):
                at = _closing(text, at)
            widths = _PERCENT_WIDTHS.match(text, at)
            if widths and any(w and (w == "*" or len(w) > 3) for w in widths.groups()):
                raise LimitError(f"the chat template formats with a width of more than {MAX_WIDTH}")
            at = text.find("%", at) + 1
        meter = self._meter()
        count = text.count("%")
        meter.fits(len(text) + (count * (2 * MAX_WIDTH + meter.size(values)) if count > 1 else 0))

    def _percent(self, value: Any, *args: Any, **kwargs: Any) -> str:
        if args and kwargs:
            raise TypeError("format takes positional or keyword arguments, not both")
        self.check_percent(str(value), kwargs or args)
        return str(value) % (kwargs or args)

    def _center(self, value: Any, width: int = 80) -> str:
        self._meter().fits(int(width))
        return str(value).center(width)

    def _indent(self, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        text = str(s)
        step = len(width) if isinstance(width, str) else int(width)
        self._meter().fits(len(text) + (len(text.splitlines()) + 1) * step)
        return str(FILTERS["indent"](text, width, first, blank))

    def _replace(self, s: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = str(s), str(old), str(new)
        self.check_method(text, "replace", (old, new), {})
        return text.replace(old, new, -1 if count is None else count)

    def _trim(self, value: Any, chars: str | None = None) -> str:
        text = str(value)
        if chars is not None:
            self.check_method(text, "strip", (chars,), {})
        return text.strip(chars)

    @pass_environment
    def _join(self, environment: Environment, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
        pick = None if attribute is None else make_attrgetter(environment, attribute)
        items = [item if pick is None else pick(item) for item in value]
        meter = self._meter()
        meter.fits(sum(map(meter.size, items)) + len(str(d)) * len(items))
        return str(d).join(map(str, items))

    @pass_environment
    def _sum(self, environment: Environment, value: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
        pick = None if attribute is None else make_attrgetter(environment, attribute)
        meter = self._meter()
        total, size = start, meter.size(start)
        for item in value:
            part = item if pick is None else pick(item)
            size += meter.size(part)
            meter.fits(size)
            meter.tick()
            total = total + part
        return total

    def _tojson(
        self,
        x: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: Sequence[str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Write JSON as transformers' tojson does: without HTML escapes, with json's own options."""
        if (len(indent) if isinstance(indent, str) else indent or 0) > MAX_INDENT:
            raise LimitError(f"tojson: indent is more than {MAX_INDENT}")
        pair = None if separators is None else (str(separators[0])[:16], str(separators[1])[:16])
        self._meter().fits(self._meter().size(x))
        text = json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)
        return _PRIVATE.sub(_unescaped, text) if ensure_ascii else text


def _unescaped(found: re.Match[str]) -> str:
    if found[1] is None:
        return found[0]
    return (int(found[1], 16).to_bytes(2, "big") + int(found[2], 16).to_bytes(2, "big")).decode("utf-16-be")


def _closing(text: str, at: int) -> int:
    """Return the position after the parenthesis that closes the one at `at`; the end if there is none."""
    depth = 0
    for found in _PARENTHESES.finditer(text, at):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    return len(text)


def _counted(filter: Callable[..., Any]) -> Callable[..., Any]:
    def counted(value: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(n, int) and n > MAX_COUNT for n in (*args, *kwargs.values())):
            raise LimitError(f"the chat template asks for more than {MAX_COUNT} items at once")
        return filter(value, *args, **kwargs)

    return counted


def _escape(value: Any) -> str:
    return str(markupsafe.escape(value))


def _round(value: float, precision: int = 0, method: str = "common") -> float:
    if abs(int(precision)) > 300:
        raise LimitError("round: precision is more than 300")
    result: float = FILTERS["round"](value, precision, method)
    return result
