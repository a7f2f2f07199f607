"""An order of operators that writes a state after its last reader, so that old and new state can share memory.

XNNPACK computes one operator after another, in the file's order. A step with states in place needs half the memory, and
does not fetch memory that it is about to overwrite (docs/notes/log.md has the gain).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from ssmd_litert.library import IN_PLACE, METADATA
from ssmd_litert.modelfile import Edited

_VIEW = schema.BuiltinOperator.RESHAPE  # XNNPACK may make no copy of it


def write_states_last(edited: Edited, states: Collection[str]) -> None:
    """Bring all signatures into that order and mark the model so, if it is possible for all of these states.

    If not, nothing is changed. states: names of inputs that are outputs too.
    """
    orders = []
    for signature in edited.model.signatureDefs:
        outputs = {_text(t.name): int(t.tensorIndex) for t in signature.outputs}
        pairs = [(int(t.tensorIndex), outputs[_text(t.name)]) for t in signature.inputs if _text(t.name) in states]
        order = _Order(edited, edited.model.subgraphs[signature.subgraphIndex])
        orders.append(order)
        for source, target in pairs:
            order.write_last(source, target)
        if not all(order.is_written_last(source, target) for source, target in pairs):
            return
    for order in orders:
        order.graph.operators = order.operators
    _say(edited.model)


class _Order:
    """The order of a graph's operators, which the graph itself has when all is well."""

    def __init__(self, edited: Edited, graph: Any) -> None:
        self.graph = graph
        self.operators = list(graph.operators)
        self._views = {id(o) for o in self.operators if edited.code(o) == _VIEW}
        self._maker = {int(i): o for o in self.operators for i in o.outputs}
        self._users: dict[int, list[Any]] = {}
        for operator in self.operators:
            for i in {int(i) for i in operator.inputs}:
                self._users.setdefault(i, []).append(operator)
        self._count()

    def write_last(self, source: int, target: int) -> None:
        """Move the operators that make `target` after the last reader of `source`, unless a reader needs them."""
        makers, last = self._makers(target), self._last_reader(source)
        if not makers or self._place[id(makers[0])] > last:
            return
        first, moved = self._place[id(makers[0])], {id(o) for o in makers}
        made = {int(i) for o in makers for i in o.outputs}
        between = [o for o in self.operators[first : last + 1] if id(o) not in moved]
        if not any(int(i) in made for o in between for i in o.inputs):
            self.operators[first : last + 1] = [*between, *makers]
            self._count()

    def is_written_last(self, source: int, target: int) -> bool:
        makers = self._makers(target)
        return bool(makers) and self._place[id(makers[0])] > self._last_reader(source)

    def _count(self) -> None:
        self._place = {id(o): place for place, o in enumerate(self.operators)}

    def _last_reader(self, source: int) -> int:
        """Return the place of the last operator that reads a tensor or a view of it; -1 if none does."""
        users = self._users.get(source, ())
        through = (self._last_reader(int(i)) for o in users if id(o) in self._views for i in o.outputs)
        return max([-1, *(self._place[id(o)] for o in users), *through])

    def _makers(self, target: int) -> list[Any]:
        """Return the operators that write a tensor's memory, in order: its maker and, for a view, the makers before."""
        operator = self._maker.get(target)
        if operator is None:
            return []
        return [*(self._makers(int(operator.inputs[0])) if id(operator) in self._views else ()), operator]


def _say(model: Any) -> None:
    buffer = schema.BufferT()
    buffer.data = np.frombuffer(IN_PLACE, np.uint8)
    told = schema.MetadataT()
    told.name, told.buffer = METADATA, len(model.buffers)
    model.buffers.append(buffer)
    model.metadata = [*(model.metadata or ()), told]


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
