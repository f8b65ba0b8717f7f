"""Makes a chat template count its own steps: puts calls into its syntax tree where it works or makes values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

from jinja2 import TemplateSyntaxError, nodes
from jinja2.visitor import NodeTransformer

from estream_runtime.budget import CHARACTERS

T = TypeVar("T", nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)
SPEND: Final = "-spend"
"""The filter that takes steps away and gives true. No template can name it, nor those below."""
WEIGH: Final = "-weigh"
"""The filter that gives the value it got, paid for with all it holds."""
COMPARE: Final = "-compare"
"""The same for what is compared, which may be anything."""
PARTS: Final = 16
"""Parts of a tree that are run in one step, where they cost nothing of their own."""


class Metering(NodeTransformer):
    """Changes a tree in place; what it renders stays the same."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - the library calls it by the node's name
        """Each round costs what its parts may do, and so does each item that the loop's condition looks at."""
        if node.test is not None:
            node.test = nodes.And(_spend(_steps([node.test])), self.visit(node.test))
        return self.visit_Macro(node)

    def visit_Macro(self, node: T) -> T:  # noqa: N802
        """What may be run often is paid for each time."""
        steps = _steps(node.body)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_spend(steps)))
        return node

    visit_CallBlock = visit_Block = visit_Macro  # noqa: N815

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:  # noqa: N802
        """What is written is paid for."""
        self.generic_visit(node)
        fixed = sum(len(each.data) for each in node.nodes if isinstance(each, nodes.TemplateData))
        node.nodes = [each if isinstance(each, nodes.TemplateData) else _filtered(each, WEIGH) for each in node.nodes]
        return [nodes.ExprStmt(_spend(1 + fixed // CHARACTERS)), node]

    def visit_Assign(self, node: nodes.Assign) -> nodes.Assign:  # noqa: N802
        """A namespace must not come to hold itself."""
        self.generic_visit(node)
        if isinstance(node.target, nodes.NSRef) or node.target.find(nodes.NSRef) is not None:
            node.node = _filtered(node.node, WEIGH)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:  # noqa: N802
        """Comparing looks at all that both sides hold; to look for one in the other is what the test `in` does."""
        self.generic_visit(node)
        if any(each.op in ("in", "notin") for each in node.ops):
            if len(node.ops) > 1:
                raise TemplateSyntaxError("'in' stands in a chain of comparisons", node.lineno)
            found = nodes.Test(node.expr, "in", [node.ops[0].expr], [], None, None)
            return found if node.ops[0].op == "in" else nodes.Not(found)
        node.expr = _filtered(node.expr, COMPARE)
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, COMPARE)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        """A part that is cut out is a value of its own; what is looked up is read whole."""
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _filtered(node, WEIGH)
        if not isinstance(node.arg, nodes.Const):
            node.arg = _filtered(node.arg, WEIGH)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Concat:  # noqa: N802
        """What is put together is paid for before; it may be the same text very often."""
        self.generic_visit(node)
        node.nodes = [_filtered(each, WEIGH) for each in node.nodes]
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802
        """One that is made, not one that values are assigned to."""
        self.generic_visit(node)
        return _filtered(node, WEIGH) if node.ctx == "load" else node

    def visit_List(self, node: nodes.Expr) -> nodes.Expr:  # noqa: N802
        """Values that are made of others."""
        self.generic_visit(node)
        return _filtered(node, WEIGH)

    visit_Dict = visit_List  # noqa: N815


def below(node: nodes.Node) -> Iterator[nodes.Node]:
    """The node and all that is in it."""
    pending = [node]
    while pending:
        yield (each := pending.pop())
        pending.extend(each.iter_child_nodes())


def _steps(parts: Iterable[nodes.Node]) -> int:
    """Steps of running parts of a tree once. Looking for what is not there takes about half a one."""
    found = [each for part in parts for each in below(part)]
    lookups = sum(isinstance(each, (nodes.Getattr, nodes.Getitem)) for each in found)
    return 1 + len(found) // PARTS + lookups // 2


def _spend(steps: int) -> nodes.Expr:
    return _filtered(nodes.Const(steps), SPEND)


def _filtered(node: nodes.Node, name: str) -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None)
