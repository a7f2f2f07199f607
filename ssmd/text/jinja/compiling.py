"""How chat templates are compiled: like any Jinja template, with a call of the sandbox at every step that counts."""

from __future__ import annotations

from collections.abc import Callable

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer


class Ticks(NodeTransformer):
    """Puts a tick where every repetition passes: loop bodies and their conditions, macros, blocks."""

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


def _tick(node: nodes.Node) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None, lineno=node.lineno)


def _tick_statement(node: nodes.Node) -> nodes.ExprStmt:
    return nodes.ExprStmt(_tick(node), lineno=node.lineno)


class MeteredCode(CodeGenerator):
    """Compiles what makes or compares values so that the sandbox sees the result."""

    def _hooked(self, hook: str, visit: Callable[..., None], node: nodes.Node, frame: Frame) -> None:
        self.write(f"environment.{hook}(")
        visit(node, frame)
        self.write(")")

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        if isinstance(node.node, nodes.EnvironmentAttribute):
            self.write(f"environment.{node.node.name}()")
        else:
            super().visit_Call(node, frame, forward_caller=forward_caller)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined(")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self._hooked("made", super().visit_Compare, node, frame)

    def visit_Test(self, node: nodes.Test, frame: Frame) -> None:
        self._hooked("made", super().visit_Test, node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._hooked("made", super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._hooked("made", super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._hooked("made", super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._hooked("made", super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)


class Generation(Extension):
    """transformers' {% generation %} … {% endgeneration %}, which marks the answer for training: just its contents."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's way

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)
