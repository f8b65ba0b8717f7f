"""Makes a chat template count its own steps: puts calls into its syntax tree where it works or makes values."""

from __future__ import annotations

from typing import Final

from jinja2 import TemplateSyntaxError, nodes
from jinja2.visitor import NodeTransformer

from estream_runtime.budget import CHARACTERS

SPEND: Final = "-spend"
"""The filter that takes steps away and gives true. No template can name it, nor those below."""
WEIGH: Final = "-weigh"
"""The filter that gives the value it got, paid for with all it holds."""
COMPARE: Final = "-compare"
"""The same for what is compared, which may be anything."""


class Metering(NodeTransformer):
    """Changes a tree in place; what it renders stays the same."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - the library calls it by the node's name
        """Each round is a step, and each item that the loop's condition looks at."""
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_spend(1)))
        if node.test is not None:
            node.test = nodes.And(_spend(1), node.test)
        return node

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
        """A part that is cut out is a value of its own."""
        self.generic_visit(node)
        return _filtered(node, WEIGH) if isinstance(node.arg, nodes.Slice) else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802
        """One that is made, not one that values are assigned to."""
        self.generic_visit(node)
        return _filtered(node, WEIGH) if node.ctx == "load" else node

    def visit_List(self, node: nodes.Expr) -> nodes.Expr:  # noqa: N802
        """Values that are made of others."""
        self.generic_visit(node)
        return _filtered(node, WEIGH)

    visit_Dict = visit_Concat = visit_List  # noqa: N815


def _spend(steps: int) -> nodes.Expr:
    return _filtered(nodes.Const(steps), SPEND)


def _filtered(node: nodes.Node, name: str) -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None)
