"""The compiler of chat templates: Jinja's own, with calls of the sandbox at every step that is metered or checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer


class Ticks(NodeTransformer):
    """A visitor that puts a tick into everything that can repeat: loop bodies and their conditions, macros, blocks."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body = [_tick_statement(node), *node.body]
        if node.test is not None:
            node.test = nodes.And(_tick(node), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body = [_tick_statement(node), *node.body]
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body = [_tick_statement(node), *node.body]
        return node

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        self.generic_visit(node)
        node.body = [_tick_statement(node), *node.body]
        return node


class AppendError(SecurityError):
    """A template's use of a value that later messages could change, or of a message that was skipped."""


# fmt: off
_CARRY_NOTHING = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Continue, nodes.Break, nodes.With,
    nodes.Scope, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.Assign, nodes.AssignBlock, nodes.ExprStmt,
    nodes.Name, nodes.NSRef, nodes.Const, nodes.Tuple, nodes.List, nodes.Dict, nodes.Pair, nodes.Keyword,
    nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call, nodes.Getitem, nodes.Getattr, nodes.Slice, nodes.Concat,
    nodes.Compare, nodes.Operand, nodes.BinExpr, nodes.UnaryExpr, nodes.EnvironmentAttribute,
)
# fmt: on


class AppendTransformer(NodeTransformer):
    """A visitor that routes a loop's iterable and `loop` through the sandbox. Raises AppendError if it cannot.

    A loop is in the flow if it writes straight to the template's output, and no other loop is around it.
    """

    def __init__(self) -> None:
        self._flows = True

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(node, _CARRY_NOTHING):  # blocks, imports, autoescape
            raise AppendError(f"the chat template has a {type(node).__name__}")
        return super().visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        # `else` depends on whether any turn was completed, and a condition can read later messages unnoticed.
        flows = self._flows and not (node.test or node.else_ or node.recursive)
        self._apart(node)
        if flows:
            node.iter = _call("each", node.iter)
            node.body = [nodes.ExprStmt(_call("mark", at=node), lineno=node.lineno), *node.body]
        return node

    def _apart(self, node: nodes.Node) -> nodes.Node:
        flows, self._flows = self._flows, False
        self.generic_visit(node)
        self._flows = flows
        return node

    visit_Macro = visit_CallBlock = visit_FilterBlock = visit_AssignBlock = _apart

    def visit_Name(self, node: nodes.Name) -> nodes.Node:
        if node.ctx != "load":
            return node
        if node.name == "loop":
            raise AppendError("the chat template passes a loop on")
        return _call("asked", node) if node.name == "add_generation_prompt" else node

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:
        if isinstance(node.node, nodes.Name) and node.node.name == "loop":
            return _call("of_loop", node.node, nodes.Const(node.attr, lineno=node.lineno))
        return self.generic_visit(node)

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        if node.name in ("defined", "undefined") and isinstance(node.node, nodes.Name):
            return node
        return self.generic_visit(node)


def _call(hook: str, *args: Any, at: nodes.Node | None = None) -> nodes.Call:
    """Return a node that calls one of the sandbox's methods."""
    lineno: int = (at or args[0]).lineno
    return nodes.Call(nodes.EnvironmentAttribute(hook, lineno=lineno), [*args], [], None, None, lineno=lineno)


def _tick(node: nodes.Node) -> nodes.Call:
    return _call("tick", at=node)


def _tick_statement(node: nodes.Node) -> nodes.ExprStmt:
    return nodes.ExprStmt(_tick(node), lineno=node.lineno)


class MeteredCode(CodeGenerator):
    """A code generator that passes every value that is made, compared or printed to the meter."""

    def write_commons(self) -> None:
        super().write_commons()
        self.writeline("meter_tick, meter_made = environment.meter.tick, environment.meter.made")

    def _make_finalize(self) -> CodeGenerator._FinalizeInfo:
        return self._FinalizeInfo(None, "meter_made(")

    def _hooked(self, visit: Callable[..., None], node: nodes.Node, frame: Frame) -> None:
        self.write("meter_made(")
        visit(node, frame)
        self.write(")")

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        if isinstance(node.node, nodes.EnvironmentAttribute):
            self.write("meter_tick(" if node.node.name == "tick" else f"environment.{node.node.name}(")
            for arg in node.args:
                self.visit(arg, frame)
                self.write(", ")
            self.write(")")
        else:
            super().visit_Call(node, frame, forward_caller=forward_caller)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined(")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self._hooked(super().visit_Compare, node, frame)

    def visit_Test(self, node: nodes.Test, frame: Frame) -> None:
        self._hooked(super().visit_Test, node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._hooked(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._hooked(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._hooked(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._hooked(super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)


class GenerationTag(Extension):
    """transformers' tag {% generation %} … {% endgeneration %}, a mark for training. It renders just its contents."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's way

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)
