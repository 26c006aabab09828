"""Chat templates: Jinja programs that come with a checkpoint, run in a sandbox with limits.

The environment is that of Transformers' ``apply_chat_template`` (trim_blocks, lstrip_blocks, loop controls,
``raise_exception``, ``strftime_now``, a ``tojson`` that does not escape HTML, ``generation`` blocks), inside Jinja's
immutable sandbox. The sandbox alone bounds neither time nor memory, so the syntax tree is rewritten before it is
compiled: every loop iteration, call, written piece and newly built value is charged to a :class:`Limits` budget.
The invariant is that no value a template can hold is larger than ``max_chars``, checked where values are built.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from specexport.runtime.errors import BundleError, SpecExportError, UsageError

MAX_SOURCE_CHARS = 1 << 18
_MAX_INTEGER_BITS = 4096
#: Methods of str that build text from a width or a pattern; no published template needs them.
_REFUSED_METHODS = frozenset(
    {"ljust", "rjust", "center", "zfill", "expandtabs", "format", "format_map", "translate", "encode"}
)
_REFUSED_FILTERS = (
    "center",
    "format",
    "wordwrap",
    "urlize",
    "xmlattr",
    "pprint",
    "filesizeformat",
    "batch",
    "slice",
    "striptags",
)
_EMIT, _BUILT, _ITERATION, _CONCAT = "budget emit", "budget built", "budget iteration", "budget concat"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rendering may use: characters of any value and of the output, characters built in all, steps (loop
    iterations, calls, elements of new containers), and seconds as a last resort."""

    max_chars: int = 4_000_000
    max_total_chars: int = 256_000_000
    max_steps: int = 5_000_000
    max_seconds: float = 20.0


class LimitError(SecurityError):
    """A template used more than its :class:`Limits`."""


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the Jinja text. special_tokens: variables such as ``bos_token``; they may be overridden by a call.
        clock: what ``strftime_now`` reads. limits: what a rendering may use.

    Raises:
        BundleError: the template is too long or not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        clock: Callable[[], datetime] = datetime.now,
        limits: Limits | None = None,
    ) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise BundleError(f"chat template has {len(source)} characters, expected at most {MAX_SOURCE_CHARS}")
        self._special_tokens = dict(special_tokens or {})
        self._limits = limits or Limits()
        environment = _Environment(clock)
        try:
            tree = _Metering(environment).visit(environment.parse(source))
            self._template = environment.from_string(tree)
        except TemplateSyntaxError as error:
            raise BundleError(f"chat template, line {error.lineno}: {_one_line(error)}") from error
        except (TemplateError, RecursionError, SyntaxError, ValueError, MemoryError) as error:
            raise BundleError(f"chat template does not compile: {_one_line(error)}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation. Further ``variables`` (``enable_thinking`` and the like) go to the template.

        Raises:
            UsageError: the template refuses the messages (``raise_exception``).
            BundleError: it attempts something that is not allowed, or exceeds its limits.
            SpecExportError: it fails in another way.
        """
        budget = _Budget(self._limits)
        token = _BUDGET.set(budget)
        try:
            given = {
                **self._special_tokens,
                "messages": list(messages),
                "tools": tools,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
                **variables,
            }
            budget.check(list(given.values()))
            pieces: list[str] = []
            size = 0
            for piece in self._template.generate(given):
                size += len(piece)
                if size > self._limits.max_chars:
                    raise LimitError(f"its output exceeds {self._limits.max_chars} characters")
                pieces.append(piece)
            return "".join(pieces)
        except _Refusal as error:
            raise UsageError(f"the chat template refuses the messages: {_one_line(error)}") from error
        except (SecurityError, OverflowError, RecursionError, MemoryError) as error:
            raise BundleError(f"the chat template was stopped: {_one_line(error)}") from error
        except SpecExportError:
            raise
        except Exception as error:  # a template can raise anything that Python operators raise
            raise SpecExportError(
                f"the chat template failed: {type(error).__name__}: {_one_line(error)}; check the keys of the messages"
            ) from error
        finally:
            _BUDGET.reset(token)


class _Refusal(TemplateError):
    """``raise_exception`` of a template."""


class _Budget:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._steps = 0
        self._chars = 0
        self._deadline = time.monotonic() + limits.max_seconds

    def step(self) -> None:
        self._steps += 1
        if self._steps > self._limits.max_steps:
            raise LimitError(f"it takes more than {self._limits.max_steps} steps (an endless loop?)")
        if self._steps % 64 == 0 and time.monotonic() > self._deadline:
            raise LimitError(f"it runs for more than {self._limits.max_seconds} seconds")

    def expect(self, size: int) -> None:
        """A value of ``size`` characters or elements is about to be built."""
        if size > self._limits.max_chars:
            raise LimitError(f"it builds a value of {size} characters, more than {self._limits.max_chars}")
        self._chars += size
        if self._chars > self._limits.max_total_chars:
            raise LimitError(f"it builds more than {self._limits.max_total_chars} characters in all")

    def check(self, value: Any) -> Any:
        """``value`` if its size, counted through all its elements, is allowed."""
        if isinstance(value, str):
            self.expect(len(value))
        elif isinstance(value, list | tuple | dict | set | frozenset):
            size, pending = 0, [value]
            while pending:
                for item in _elements(pending.pop()):
                    self.step()
                    size += 8 + (len(item) if isinstance(item, str) else 0)
                    if isinstance(item, list | tuple | dict | set | frozenset):
                        pending.append(item)
                if size > self._limits.max_chars:
                    break
            self.expect(size)
        return value


_BUDGET: ContextVar[_Budget] = ContextVar("chat template budget")


def _elements(container: Any) -> Iterable[Any]:
    return [*container.keys(), *container.values()] if isinstance(container, dict) else container


class _Plain(Namespace):
    """Jinja's ``namespace``, with a text that does not unfold its contents."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, clock: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        for name in _REFUSED_FILTERS:
            del self.filters[name]
        self.globals |= {
            "namespace": _Plain,
            "raise_exception": _raise_exception,
            "strftime_now": lambda pattern: clock().strftime(pattern),
        }
        self.filters = {name: _metered(name, function) for name, function in self.filters.items()}
        self.filters |= {
            "tojson": _tojson,
            _EMIT: pass_context(_emit),
            _BUILT: pass_context(lambda _, value: _BUDGET.get().check(value)),
            _ITERATION: pass_context(_iteration),
            _CONCAT: pass_context(_concat),
        }

    def wrap_str_format(self, value: Any) -> None:
        return None

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _REFUSED_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = _BUDGET.get()
        budget.step()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str):
            _expect_text(budget, name, owner, args)
        return budget.check(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _BUDGET.get()
        budget.step()
        sized = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
        if operator == "%" and isinstance(left, str):
            raise SecurityError("% formatting of text is not allowed; use ~")
        if operator == "+" and len(sized) == 2:
            budget.expect(sum(sized))
        elif operator == "*" and sized:
            times = right if isinstance(right, int) else left
            budget.expect(sized[0] * max(0, times) if isinstance(times, int) else 0)
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            factor = right if operator == "**" else 1
            bits = left.bit_length() * max(1, factor) + (right.bit_length() if operator == "*" else 0)
            if bits > _MAX_INTEGER_BITS:
                raise LimitError(f"it computes an integer of {bits} bits, more than {_MAX_INTEGER_BITS}")
        return budget.check(super().call_binop(context, operator, left, right))


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the class attribute Jinja reads

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Macro) -> Any:
        return caller()


class _Metering(NodeTransformer):
    """Charges loops, written pieces and new containers to the budget."""

    def __init__(self, environment: _Environment) -> None:
        self._environment = environment

    def _wrapped(self, node: nodes.Node, name: str) -> nodes.Filter:
        wrapped = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
        wrapped.set_environment(self._environment)
        return wrapped

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [
            self._wrapped(nodes.Const(n.data, lineno=n.lineno) if isinstance(n, nodes.TemplateData) else n, _EMIT)
            for n in node.nodes
        ]
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.test is not None:
            node.test = self._wrapped(node.test, _ITERATION)
        tick = self._wrapped(nodes.Const(None, lineno=node.lineno), _ITERATION)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._wrapped(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)

    def _visit_container(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":
            return node  # type: ignore[no-any-return]
        return self._wrapped(node, _BUILT)

    visit_List = visit_Tuple = visit_Dict = _visit_container


def _emit(_: Context, value: Any) -> str:
    text = str(value)
    budget = _BUDGET.get()
    budget.step()
    budget.expect(len(text))
    return text


def _iteration(_: Context, value: Any) -> Any:
    _BUDGET.get().step()
    return value


def _concat(_: Context, values: list[Any]) -> str:
    texts = [str(value) for value in values]
    _BUDGET.get().expect(sum(map(len, texts)))
    return "".join(texts)


def _expect_text(budget: _Budget, name: str, text: str, args: Sequence[Any]) -> None:
    """Charge what ``replace`` and ``join`` of ``text`` will build, before they do."""
    if name == "replace" and len(args) >= 2:
        budget.expect(len(text) + text.count(str(args[0])) * len(str(args[1])))
    elif name == "join" and args and isinstance(args[0], list | tuple):
        budget.expect(sum(len(str(item)) + len(text) for item in args[0]))


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose result is checked, and whose numbers and text cannot blow it up before."""

    def run(*args: Any, **kwargs: Any) -> Any:
        budget = _BUDGET.get()
        budget.step()
        at = 1 if hasattr(function, "jinja_pass_arg") else 0
        value, options = args[at], [*args[at + 1 :], *kwargs.values()]
        if name == "replace" and len(options) >= 2:
            _expect_text(budget, name, str(value), options)
        elif name == "join":
            args = (*args[:at], value := list(value), *args[at + 1 :])
            budget.expect(len(value) * len(str(options[0])) if options else 0)
        elif name == "indent":
            widths = [len(o) if isinstance(o, str) else int(o) for o in options]
            budget.expect((str(value).count("\n") + 1) * max(widths, default=4))
        return budget.check(function(*args, **kwargs))

    if hasattr(function, "jinja_pass_arg"):
        run.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return run


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    width = len(indent) if isinstance(indent, str) else indent or 0
    if width > 64:
        raise LimitError(f"tojson(indent={width}) is more than 64")
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    _BUDGET.get().expect(len(text))
    return text


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
