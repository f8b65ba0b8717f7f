"""Where chat templates run: jinja2's sandbox as transformers sets it up, in which every operation has its price.

Of the library's filters, functions and methods those are there that chat templates use; each of them is known to do
work in proportion to its values, or is held to that here.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from string import Formatter
from types import GeneratorType
from typing import Any, Final, NoReturn

from jinja2 import nodes, pass_context, pass_eval_context
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent, sync_do_join
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace

from estream_runtime.budget import CHARACTERS, MAX_BITS, Budget
from estream_runtime.metering import COMPARE, SPEND, WEIGH, Metering, below
from estream_spec.errors import LinkError, TrapError


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


GLANCED: Final = _words("count d default first items last length list map reject rejectattr select selectattr")
"""Filters that look at how many items there are, or at one after the other when that is asked for."""
FILTERS: Final = GLANCED | _words(
    "abs capitalize dictsort e escape float format indent int join lower max min replace reverse safe sort"
    " string sum title tojson trim unique upper"
)
ATTRIBUTE_AT: Final = {
    "join": 1,
    "max": 1,
    "min": 1,
    "rejectattr": 0,
    "selectattr": 0,
    "sort": 2,
    "sum": 0,
    "unique": 1,
}
"""Where the name of an attribute stands among the arguments of a filter, if not by its own name."""
ORDERING: Final = _words("dictsort max min sort unique")
"""Filters that compare items with one another."""
COMPARING: Final = _words("!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lt ne")
"""Tests that look at all their values hold."""
TESTS: Final = COMPARING | _words(
    "boolean defined even false float integer iterable mapping none number odd sameas sequence string true undefined"
)
SEARCHING: Final = _words("count find index lstrip partition replace rfind rindex rpartition rsplit rstrip split strip")
"""Methods of texts that may look for all of one text at every place of another."""
METHODS: Final[Mapping[type, frozenset[str]]] = {
    str: _words(
        "capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal isdigit isidentifier"
        " islower isnumeric isprintable isspace istitle isupper join lower lstrip partition removeprefix removesuffix"
        " replace rfind rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper"
    ),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    LoopContext: frozenset({"changed", "cycle"}),
    Cycler: frozenset({"next", "reset"}),
}
"""Methods that may be called, by what they belong to."""
CALL: Final = 10
"""Steps that a call is worth, by the time it takes."""
FILTER: Final = 3
ORDER: Final = 10
"""Steps for each part of what is put in order."""
MAX_WIDTH: Final = 100
"""Columns a filter may indent by or fill up to."""
MAX_PATH: Final = 8
"""Points in the name of an attribute; each leads one value further in."""
MAX_MESSAGE: Final = 1000
"""Characters of what a template says it does not take."""
MAX_NODES: Final = 1 << 13
"""Parts of a template's tree. Published ones have less than half."""
_WIDE: Final = re.compile(r"\d{3,}|\*")
"""In a format: a width of its own, or one that comes with the values."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one chat template. Not for several threads at a time.

    Attributes:
        budget: what is left of the steps of the rendering under way.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[loopcontrols, MarkedBlock])
        self.budget = Budget()
        self.globals = {
            "range": self.globals["range"],
            "dict": dict,
            "namespace": Notes,
            "cycler": Cycler,
            "joiner": Joiner,
            "raise_exception": _refuse,
            "strftime_now": _now,
        }
        own = {
            "indent": self._indent,
            "join": self._join,
            "replace": self._replace,
            "tojson": self._to_json,
            "trim": self._trim,
        }
        library = self.filters | own
        self.filters = {name: self._paid_filter(name, library[name]) for name in FILTERS}
        self.filters |= {SPEND: self._spend, WEIGH: self._weigh, COMPARE: self._compare}
        self.tests = {name: self._paid_test(name, self.tests[name]) for name in TESTS}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The tree of a template, which counts its steps; what is made of it takes time and memory in proportion."""
        tree = super()._parse(source, name, filename)
        if sum(1 for _ in below(tree)) > MAX_NODES:
            raise LinkError(f"the chat template has more than {MAX_NODES} parts")
        Metering().visit(tree)
        tree.set_environment(self)
        return tree

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a filter that the template names by a value, as `map` is given one: never one that keeps the budget."""
        if name not in FILTERS:
            raise TrapError(f"the chat template asks for the filter {str(name)[:80]!r}, which it may not")
        return super().call_filter(name, *args, **kwargs)

    def call(self, context: Context, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, a function, or a method that may be called."""
        budget = self.budget
        budget.spend(CALL)
        if isinstance(callee, (Macro, LoopContext, BlockReference)):
            budget.spend(CALL + len(args) + len(kwargs))
            return super().call(context, callee, *args, **kwargs)
        for each in (*args, *kwargs.values()):
            budget.weigh(each)
        owner = getattr(getattr(callee, "__wrapped__", callee), "__self__", None)
        if owner is not None and not _may_call(owner, callee.__name__):
            raise TrapError(f"the chat template calls {type(owner).__name__}.{callee.__name__}, which it may not")
        if isinstance(owner, str):
            budget.spend_text(len(owner))
            args = self._prepaid(owner, callee.__name__, args, kwargs)
        elif isinstance(owner, (list, tuple)):
            budget.weigh(owner)
        return self._made(super().call(context, callee, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Calculate, where the result may be larger than what it is made of."""
        budget = self.budget
        budget.spend(1)
        if operator == "*":
            for count, value in ((left, right), (right, left)):
                if isinstance(count, int) and isinstance(value, (str, list, tuple)):
                    budget.weigh(value, max(count, 0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > MAX_BITS:
                raise TrapError(f"the chat template raises {left} to the power of {right}")
        elif operator == "%" and isinstance(left, str):
            self._check_format(left, right)
        return self._made(super().call_binop(context, operator, left, right))

    @pass_context  # which keeps the library from working out ahead what it takes for a constant
    def _spend(self, _: Context, steps: int) -> bool:
        self.budget.spend(steps)
        return True

    @pass_context
    def _weigh(self, _: Context, value: Any) -> Any:
        self.budget.weigh(value)
        return value

    @pass_context
    def _compare(self, _: Context, value: Any) -> Any:
        self._look_at(value)
        return value

    def _made(self, value: Any) -> Any:
        """A value that came into being, paid for; what is made item by item is paid so."""
        if isinstance(value, GeneratorType):
            return self.budget.metered(value)
        if isinstance(value, (Namespace, range)):
            self.budget.glance(value)
        else:
            self.budget.weigh(value)
        return value

    def _check_format(self, text: str, values: Any) -> None:
        """Pay for filling values into a text with `%` signs, and refuse wide columns."""
        if _WIDE.search(text):
            raise TrapError(f"the chat template fills up columns by {text[:80]!r}")
        self.budget.weigh(values, text.count("%"))

    def _prepaid(self, owner: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Pay for what methods of texts make whose result may be larger than what it is made of."""
        if name == "join" and len(args) == 1:
            args = (list(args[0]),)
            self.budget.weigh(args[0])
            self.budget.weigh(owner, len(args[0]))
        elif name == "replace" and len(args) > 1:
            self._pay_replace(owner, str(args[0]), str(args[1]))
        elif name in SEARCHING:
            for each in (*args, *kwargs.values()):
                self.budget.search(owner, each)
        elif name == "format":
            fields = [spec for _, field, spec, _ in Formatter().parse(owner) if field is not None]
            if any("{" in (spec or "") or _WIDE.search(spec or "") for spec in fields):
                raise TrapError(f"the chat template fills up columns by {owner[:80]!r}")
            self.budget.weigh((*args, *kwargs.values()), len(fields))
        return args

    def _look_at(self, value: Any) -> None:
        """Pay for comparing a value; a namespace is equal to itself alone."""
        if not isinstance(value, Namespace):
            self.budget.weigh(value)

    def _pay_replace(self, text: str, old: str, new: str) -> None:
        self.budget.search(text, old)
        self.budget.weigh(new, text.count(old))

    def _replace(self, value: Any, old: Any, new: Any, count: int = -1) -> str:
        """As the library's filter of that name; so are those that follow, each paid for before it makes anything."""
        text, old, new = str(value), str(old), str(new)
        self._pay_replace(text, old, new)
        return text.replace(old, new, count)

    def _trim(self, value: Any, chars: str | None = None) -> str:
        text = value if isinstance(value, str) else str(value)
        self.budget.search(text, chars)
        return text.strip(chars)

    @pass_eval_context
    def _join(self, context: EvalContext, value: Any, d: Any = "", attribute: Any = None) -> str:
        items, between = list(value), str(d)
        self.budget.weigh(items)
        self.budget.weigh(between, len(items))
        return sync_do_join(context, items, between, attribute)

    def _indent(self, value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        if not _narrow(width):
            raise TrapError(f"the chat template indents by more than {MAX_WIDTH} columns")
        before = width if isinstance(width, str) else " " * width
        self.budget.weigh(before, 1 + len(value.splitlines()))
        return do_indent(value, before, first, blank)

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """A value as JSON, without the escapes for HTML that the library's own filter makes."""
        if not _narrow(indent):
            raise TrapError(f"the chat template indents by more than {MAX_WIDTH} columns")
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        pieces = list[str]()
        for piece in encoder.iterencode(value):
            self.budget.spend(len(piece) / CHARACTERS)
            pieces.append(piece)
        return "".join(pieces)

    def _paid_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that is paid for."""
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def paid(*args: Any, **kwargs: Any) -> Any:
            self.budget.spend(FILTER)
            before, (value, *rest) = args[:first], args[first:]
            if name in GLANCED:
                self.budget.glance(value)
            else:
                self.budget.weigh(value, ORDER if name in ORDERING else 1)
            for each in (*rest, *kwargs.values()):
                self.budget.weigh(each)
            named = rest[ATTRIBUTE_AT[name] :][:1] if name in ATTRIBUTE_AT else []
            for each in (*named, kwargs.get("attribute")):
                if isinstance(each, tuple) or (isinstance(each, str) and each.count(".") > MAX_PATH):
                    raise TrapError(f"the chat template looks for {str(each)[:80]!r} in values, which it may not")
            if name == "format":
                self._check_format(str(value), [*rest, *kwargs.values()])
            elif name == "sum" and any(isinstance(each, (list, tuple)) for each in (*rest, *kwargs.values())):
                raise TrapError("the chat template sums up lists")
            return self._made(function(*before, value, *rest, **kwargs))

        return paid

    def _paid_test(self, name: str, test: Any) -> Callable[..., bool]:
        """A test that is paid for."""

        @functools.wraps(test)
        def paid(*args: Any, **kwargs: Any) -> bool:
            self.budget.spend(1)
            for each in args if name in COMPARING else ():
                self._look_at(each)
            if name == "in" and len(args) == 2:
                self.budget.search(args[1], args[0])
            elif name in ("even", "odd") and isinstance(args[0], str):
                raise TrapError(f"the chat template asks whether a text is {name}")  # it would be filled in
            return bool(test(*args, **kwargs))

        return paid


class MarkedBlock(Extension):
    """The block `generation`, which marks what a model wrote: it is rendered as if it were not there."""

    tags = {"generation"}  # noqa: RUF012 - as the library declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """What is between the tags, with variables of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class Notes(Namespace):
    """A namespace without names that mean something to Python."""

    def __init__(self, /, *args: Any, **kwargs: Any):
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise TrapError(f"the chat template sets {name!r} in a namespace, a name that begins with an underscore")
        super().__setitem__(name, value)


def _may_call(owner: object, name: str) -> bool:
    return any(isinstance(owner, kind) and name in names for kind, names in METHODS.items())


def _narrow(value: object) -> bool:
    """Whether what to indent by, columns or a text, is no more than may be."""
    return len(value) <= MAX_WIDTH if isinstance(value, str) else not isinstance(value, int) or value <= MAX_WIDTH


def _refuse(message: object) -> NoReturn:
    """What a template calls on a conversation it does not take."""
    raise TrapError(f"the chat template does not take the conversation: {str(message)[:MAX_MESSAGE]}")


def _now(form: str) -> str:
    """The time here, as a format of `strftime` says."""
    if len(form) > MAX_WIDTH or _WIDE.search(form):
        raise TrapError(f"the chat template fills up columns by {form[:80]!r}")
    return datetime.now().strftime(form)
