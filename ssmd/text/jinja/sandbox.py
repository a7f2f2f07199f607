"""The Jinja environment of chat templates: sandboxed, deterministic, and metered at every step.

Only the functions and methods listed here can be called. The size of a possibly large result is checked before it is
made.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter, safe_range
from jinja2.utils import Cycler, Joiner, Namespace

from ssmd.text.jinja.amplifiers import MAX_COUNT, MAX_WIDTH, Amplifiers
from ssmd.text.jinja.compiling import GenerationTag, MeteredCode, Ticks
from ssmd.text.jinja.meter import MAX_BITS, LimitError, Meter

# fmt: off
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
_DICT_ATTRIBUTES = frozenset(dir(dict))
_JINJAS = ("_loop_vars", "_block_vars")  # arguments that compiled templates add to each call
_CALLABLE_OBJECTS = (Macro, LoopContext, Joiner, BlockReference, Undefined)


class TemplateFunction:
    """A function that templates may call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


class TemplateDict(TemplateFunction):
    """The type `dict` of templates: it can be called and has `fromkeys`, but no other member of the type.

    Each key counts as a step on the meter, as a key is compared with all others of the same hash.
    """

    def __init__(self, meter: Callable[[], Meter]) -> None:
        super().__init__(self._of)
        self._meter = meter

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return self._of((key, value) for key in keys)

    def _of(self, given: Any = (), /, **more: Any) -> dict[Any, Any]:
        if isinstance(given, dict):
            return dict(given, **more)
        made: dict[Any, Any] = {}
        meter = self._meter()
        for pair in given:
            meter.tick()
            made.update((pair,))
        return made | more


_METHOD_OWNERS = (LoopContext, Cycler, Joiner, TemplateDict)


class TemplateNamespace(Namespace):
    """Jinja's `namespace`, opaque when printed (it can refer to itself), without underscored names."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:  # `self` may be the name of an attribute
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


class _Local(threading.local):
    meter: Meter | None = None


_OPEN = (LoopContext, TemplateNamespace)  # all attributes but underscored ones can be read


class Sandbox(ImmutableSandboxedEnvironment):
    """Chat templates' dialect of Jinja (as transformers has it), metered by `meter` of the rendering thread."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
            optimized=False,
        )
        self.code_generator_class = MeteredCode
        self._local = _Local()
        self._amplifiers = Amplifiers(lambda: self.meter)
        self.filters = {name: self._metered(filter) for name, filter in self._amplifiers.filters().items()}
        self.globals = {
            "range": TemplateFunction(safe_range),
            "dict": TemplateDict(lambda: self.meter),
            "namespace": TemplateFunction(TemplateNamespace),
            "cycler": TemplateFunction(Cycler),
            "joiner": TemplateFunction(Joiner),
            "raise_exception": TemplateFunction(_raise),
        }

    @property
    def meter(self) -> Meter:
        return self._local.meter or Meter(0)

    @meter.setter
    def meter(self, meter: Meter | None) -> None:
        self._local.meter = meter

    # Called by compiled templates.

    def made(self, value: Any) -> Any:
        """Count the result of a filter, an operator or a call, and return it."""
        if type(value) is not str and isinstance(value, Iterator):
            return self._paced(value)
        return self.meter.made(value)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute as Jinja's `getattr` does, with a shortcut for common types that are known to be safe."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind in METHODS:
            if attribute in METHODS[kind]:
                return getattr(obj, attribute)
        elif issubclass(kind, _OPEN) and not attribute.startswith("_"):
            with contextlib.suppress(AttributeError):
                return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def joined(self, *parts: Any) -> str:
        """Join texts as the operator ~ does."""
        meter = self.meter
        for part in parts:
            meter.fits(meter.size(part))
        return self.concat([str(part) for part in parts])

    def concat(self, parts: Iterable[str]) -> str:
        """Join the text that a macro or a {% set %} block printed."""
        texts: list[str] = list(parts)
        meter = self.meter
        meter.fits(sum(map(len, texts)))
        text = "".join(texts)
        meter.made(text)
        return text

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = self.meter
        if operator == "+" and type(left) is str and type(right) is str:
            meter.fits(len(left) + len(right))
            return meter.made(left + right)
        meter.tick()
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and numbers and left.bit_length() * abs(right) > MAX_BITS:
            raise LimitError(f"the chat template computes a number of more than {MAX_BITS} bits")
        if operator == "*" and not numbers:
            times, what = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int):
                meter.fits(max(1, meter.size(what)) * times)
        elif operator == "+" and not numbers:
            meter.fits(meter.size(left) + meter.size(right))
        elif operator == "%" and isinstance(left, str):
            self._amplifiers.check_percent(left, right)
        return self.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = __self.meter
        if len(args) + len(kwargs) > MAX_COUNT:
            raise LimitError(f"the chat template calls with more than {MAX_COUNT} arguments")
        meter.fits(sum(map(meter.size, args)) + sum(map(meter.size, kwargs.values())))
        if isinstance(__obj, types.BuiltinMethodType):
            owner, name = __obj.__self__, __obj.__name__
            if name not in METHODS.get(type(owner), ()):
                raise SecurityError(f"chat templates cannot call {type(owner).__name__}.{name}")
            for own in _JINJAS:
                kwargs.pop(own, None)
            if isinstance(owner, str):
                args = __self._amplifiers.check_method(owner, name, args, kwargs)
            return __self.made(__obj(*args, **kwargs))
        if isinstance(__obj, types.MethodType):
            if not isinstance(__obj.__self__, _METHOD_OWNERS):
                raise SecurityError(f"chat templates cannot call {__obj.__name__}")
        elif not isinstance(__obj, (TemplateFunction, *_CALLABLE_OBJECTS)):
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

        return TemplateFunction(format_text)

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


def _raise(message: Any = "") -> None:
    raise jinja2.TemplateError(str(message))


class _MeteredFormatter(SandboxedFormatter):
    """A str.format with limits on the width of fields and the size of the result."""

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__(sandbox)
        self._meter = sandbox.meter
        self._total = 0

    def format_field(self, value: Any, format_spec: str) -> str:
        if re.search(r"\d{4,}", format_spec):
            raise LimitError(f"the chat template formats with a width of more than {MAX_WIDTH}")
        text: str = super().format_field(value, format_spec)
        self._total += len(text)
        self._meter.fits(self._total)
        self._meter.tick()
        return text
