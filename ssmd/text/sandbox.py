"""The Jinja environment that chat templates run in: nothing escapes, nothing random, every step on the meter.

Only what is listed here can be called, and whatever could turn little into much says first how much it will be.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jinja2
import markupsafe
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter, safe_range
from jinja2.utils import Cycler, Joiner, Namespace, pass_context, pass_environment

from ssmd.text.compiling import Generation, MeteredCode, Ticks
from ssmd.text.meter import MAX_BITS, Meter, TooMuch

MAX_COUNT = 10_000  # of batches, arguments and the like
MAX_WIDTH = 999

# As Jinja has them. Left out: random and lipsum (a prompt must come out the same each time), HTML's.
# fmt: off
FILTER_NAMES = (
    "abs", "attr", "batch", "capitalize", "center", "count", "d", "default", "dictsort", "filesizeformat",
    "first", "float", "format", "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower",
    "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round", "select", "selectattr", "slice",
    "sort", "string", "sum", "title", "trim", "truncate", "unique", "upper", "urlencode", "wordcount",
)
STR_METHODS = frozenset((
    "capitalize", "casefold", "center", "count", "endswith", "expandtabs", "find", "index", "isalnum",
    "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable",
    "isspace", "istitle", "isupper", "join", "ljust", "lower", "lstrip", "partition", "removeprefix",
    "removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split",
    "splitlines", "startswith", "strip", "swapcase", "title", "upper", "zfill",
))
# fmt: on
METHODS: dict[type, frozenset[str]] = {
    str: STR_METHODS,
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    float: frozenset({"is_integer"}),
}
_CALLABLE_OBJECTS = (Macro, LoopContext, Joiner, BlockReference, Undefined)
_METHOD_OWNERS = (LoopContext, Cycler, Joiner)
_PARENTHESES = re.compile(r"[()]")
_PERCENT_WIDTHS = re.compile(r"[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?")


class Offered:
    """A function that templates may call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


class TemplateNamespace(Namespace):
    """Jinja's `namespace`, opaque when printed (it can refer to itself), without underscored names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r}")


class Sandbox(ImmutableSandboxedEnvironment):
    """Chat templates' dialect of Jinja (as transformers has it), metered by `meter` of the rendering thread."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", Generation],
            finalize=self.shown,
            optimized=False,
        )
        self.code_generator_class = MeteredCode
        self._local = threading.local()
        own = {
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
        }
        plain = {name: FILTERS[name] for name in FILTER_NAMES}
        self.filters = {name: self._metered(filter) for name, filter in (plain | own).items()}
        self.globals = {
            "range": Offered(safe_range),
            "dict": Offered(dict),
            "namespace": Offered(TemplateNamespace),
            "cycler": Offered(Cycler),
            "joiner": Offered(Joiner),
            "raise_exception": Offered(_raise),
        }

    @property
    def meter(self) -> Meter:
        found: Meter | None = getattr(self._local, "meter", None)
        return found or Meter(0)

    @meter.setter
    def meter(self, meter: Meter | None) -> None:
        self._local.meter = meter

    # Called by compiled templates.

    @pass_context
    def shown(self, context: Context, value: Any) -> Any:
        """Every value that is printed."""
        self.meter.made(value)
        return value

    def tick(self) -> bool:
        """At each turn of a loop, each call of a macro."""
        self.meter.tick()
        return True

    def made(self, value: Any) -> Any:
        """Every literal container, slice, comparison, and whatever a filter or a call returns."""
        if isinstance(value, Iterator):
            return self._paced(value)
        self.meter.made(value)
        return value

    def joined(self, *parts: Any) -> str:
        """The operator ~."""
        meter = self.meter
        for part in parts:
            meter.fits(meter.size(part))
        return self.concat([str(part) for part in parts])

    def concat(self, parts: Iterable[str]) -> str:
        """What a macro or a {% set %} block printed."""
        texts: list[str] = list(parts)
        meter = self.meter
        meter.fits(sum(map(len, texts)))
        text = "".join(texts)
        meter.made(text)
        return text

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = self.meter
        meter.tick()
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and numbers and left.bit_length() * abs(right) > MAX_BITS:
            raise TooMuch(f"the chat template computes a number of more than {MAX_BITS} bits")
        if operator == "*" and not numbers:
            times, what = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int):
                meter.fits((meter.size(what) + 1) * times)
        elif operator == "+" and not numbers:
            meter.fits(meter.size(left) + meter.size(right))
        elif operator == "%" and isinstance(left, str):
            self._check_percent(left, right)
        return self.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = __self.meter
        if len(args) + len(kwargs) > MAX_COUNT:
            raise TooMuch(f"the chat template calls with more than {MAX_COUNT} arguments")
        meter.fits(sum(map(meter.size, args)) + sum(map(meter.size, kwargs.values())))
        if isinstance(__obj, types.BuiltinMethodType):
            owner, name = __obj.__self__, __obj.__name__
            if name not in METHODS.get(type(owner), ()):
                raise SecurityError(f"chat templates cannot call {type(owner).__name__}.{name}")
            if isinstance(owner, str):
                args = __self._check_method(owner, name, args)
        elif isinstance(__obj, types.MethodType):
            if not isinstance(__obj.__self__, _METHOD_OWNERS):
                raise SecurityError(f"chat templates cannot call {__obj.__name__}")
        elif not isinstance(__obj, (Offered, *_CALLABLE_OBJECTS)):
            raise SecurityError(f"chat templates cannot call a {type(__obj).__name__}")
        return __self.made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if not isinstance(value, types.BuiltinMethodType) or value.__name__ not in ("format", "format_map"):
            return None
        text = value.__self__
        if not isinstance(text, str):
            return None
        mapped = value.__name__ == "format_map"

        def format_text(*args: Any, **kwargs: Any) -> str:
            formatter = _MeteredFormatter(self)
            return formatter.vformat(text, () if mapped else args, args[0] if mapped and args else kwargs)

        return Offered(format_text)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = Ticks().visit(super()._parse(source, name, filename))
        return template

    def _paced(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            meter = self.meter
            meter.tick()
            meter.fits(meter.size(item))
            yield item

    def _metered(self, filter: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(filter)  # keeps the mark that asks for the context
        def metered(*args: Any, **kwargs: Any) -> Any:
            self.meter.tick()
            return self.made(filter(*args, **kwargs))

        return metered

    # Filters and methods that make much of little.

    def _check_method(self, owner: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        meter = self.meter
        if name in ("center", "ljust", "rjust", "zfill") and args and isinstance(args[0], int):
            meter.fits(args[0])
        elif name == "expandtabs" and args and isinstance(args[0], int):
            meter.fits(len(owner) + owner.count("\t") * args[0])
        elif name == "join" and args:
            items = list(args[0])
            meter.fits(sum(map(meter.size, items)) + len(owner) * len(items))
            return (items,)
        elif name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
            meter.fits(len(owner) + owner.count(args[0]) * max(0, len(args[1]) - len(args[0])))
        elif name in ("rfind", "rindex", "rsplit", "rpartition") and args and isinstance(args[0], str):
            # Searching from the right takes time in proportion to the product.
            meter.fits(len(owner) * len(args[0]) // 64)
        return args

    def _check_percent(self, text: str, values: Any) -> None:
        at = text.find("%") + 1
        while at:
            if text.startswith("(", at):
                at = _closing(text, at)
            widths = _PERCENT_WIDTHS.match(text, at)
            if widths and any(w and (w == "*" or len(w) > 3) for w in widths.groups()):
                raise TooMuch(f"the chat template formats with a width of more than {MAX_WIDTH}")
            at = text.find("%", at) + 1
        meter = self.meter
        count = text.count("%")
        meter.fits(len(text) + (count * (2 * MAX_WIDTH + meter.size(values)) if count > 1 else 0))

    def _percent(self, value: Any, *args: Any, **kwargs: Any) -> str:
        if args and kwargs:
            raise TypeError("format takes positional or keyword arguments, not both")
        self._check_percent(str(value), kwargs or args)
        return str(value) % (kwargs or args)

    def _center(self, value: Any, width: int = 80) -> str:
        self.meter.fits(int(width))
        return str(value).center(width)

    def _indent(self, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        text = str(s)
        step = len(width) if isinstance(width, str) else int(width)
        self.meter.fits(len(text) + (len(text.splitlines()) + 1) * step)
        return str(FILTERS["indent"](text, width, first, blank))

    def _replace(self, s: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = str(s), str(old), str(new)
        self._check_method(text, "replace", (old, new))
        return text.replace(old, new, -1 if count is None else count)

    @pass_environment
    def _join(self, environment: Sandbox, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
        pick = None if attribute is None else make_attrgetter(environment, attribute)
        items = [item if pick is None else pick(item) for item in value]
        meter = self.meter
        meter.fits(sum(map(meter.size, items)) + len(str(d)) * len(items))
        return str(d).join(map(str, items))

    @pass_environment
    def _sum(self, environment: Sandbox, value: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
        pick = None if attribute is None else make_attrgetter(environment, attribute)
        total = start
        for item in value:
            part = item if pick is None else pick(item)
            self.meter.fits(self.meter.size(total) + self.meter.size(part))
            total = self.made(total + part)
        return total

    def _tojson(
        self,
        x: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Sequence[str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As transformers': without HTML escapes, with json's own options."""
        if not (indent is None or (isinstance(indent, int) and 0 <= indent <= 16)):
            raise TooMuch("tojson: indent is more than 16")
        pair = None if separators is None else (str(separators[0])[:16], str(separators[1])[:16])
        self.meter.fits(self.meter.size(x))
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)


def _closing(text: str, at: int) -> int:
    """After the parenthesis that closes the one at `at`, or the end."""
    depth = 0
    for found in _PARENTHESES.finditer(text, at):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    return len(text)


def _counted(filter: Callable[..., Any]) -> Callable[..., Any]:
    def counted(value: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(n, int) and n > MAX_COUNT for n in (*args, *kwargs.values())):
            raise TooMuch(f"the chat template asks for more than {MAX_COUNT} items at once")
        return filter(value, *args, **kwargs)

    return counted


def _escape(value: Any) -> str:
    return str(markupsafe.escape(value))


def _round(value: float, precision: int = 0, method: str = "common") -> float:
    if abs(int(precision)) > 300:
        raise TooMuch("round: precision is more than 300")
    result: float = FILTERS["round"](value, precision, method)
    return result


def _raise(message: Any = "") -> None:
    raise jinja2.TemplateError(str(message))


class _MeteredFormatter(SandboxedFormatter):
    """str.format, whose fields may not be wide and whose result must fit."""

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__(sandbox)
        self._meter = sandbox.meter
        self._total = 0

    def format_field(self, value: Any, format_spec: str) -> str:
        if re.search(r"\d{4,}", format_spec):
            raise TooMuch(f"the chat template formats with a width of more than {MAX_WIDTH}")
        text: str = super().format_field(value, format_spec)
        self._total += len(text)
        self._meter.fits(self._total)
        self._meter.tick()
        return text
