"""Runs a parsed chat template over messages; the output is a Text, which knows where each character comes from."""

import operator
from collections.abc import Callable
from typing import Any

from align.tokenizer import _filters as F
from align.tokenizer import _values as V
from align.tokenizer._errors import ChatError

_MAX_STEPS = 1_000_000  # a thousand messages take some ten thousand
_COMPARE = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_ARITHMETIC = {"-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv, "%": operator.mod, "**": operator.pow}
_DICT_METHODS: dict[str, Callable[..., Any]] = {
    "items": lambda d: list(d.items()),
    "keys": lambda d: list(d.keys()),
    "values": lambda d: list(d.values()),
    "get": dict.get,
    "copy": dict.copy,
}


class _Stop(Exception):
    """break or continue on its way to its loop."""


class _Break(_Stop):
    pass


class _Continue(_Stop):
    pass


class Method:
    """A bound method of a str, list or dict that templates may call."""

    def __init__(self, call: Any) -> None:
        self.call = call


class Renderer:
    """One run of a template. `render` gives the text; `generation` holds the (start, end) of {% generation %} blocks."""

    def __init__(self, tree: list[Any], variables: dict[str, Any]) -> None:
        self._tree = tree
        self._scopes: list[dict[str, Any]] = [F.globals_(), dict(variables)]
        self._out: list[str] = []
        self._length = 0
        self._steps = 0
        self.generation: list[tuple[int, int]] = []

    def render(self) -> str:
        line = 1
        try:
            self._run(self._tree)
        except ChatError:
            raise
        except _Stop:
            raise ChatError(f"template line {line}: break or continue outside a loop") from None
        except RecursionError:
            raise ChatError(f"template line {self._line}: the template nests too deeply") from None
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, MemoryError) as error:
            raise ChatError(f"template line {self._line}: {type(error).__name__}: {error}") from None
        return V.concat(self._out)

    # --- statements

    def _run(self, body: list[Any]) -> None:
        for node in body:
            self._step(node[1])
            getattr(self, "_do_" + node[0])(*node[2:])

    def _step(self, line: int) -> None:
        self._line = line
        self._steps += 1
        if self._steps > _MAX_STEPS or self._length > 1 << 28:
            raise ChatError(f"template line {line}: the template runs too long")

    def _emit(self, value: Any) -> None:
        text = value if isinstance(value, str) else V.tagged(F.shown(value), V.origin_of(value))
        self._out.append(text)
        self._length += len(text)

    def _do_data(self, text: str) -> None:
        self._emit(text)

    def _do_print(self, expression: Any) -> None:
        self._emit(self._value(expression))

    def _do_if(self, branches: Any, otherwise: Any) -> Any:
        for condition, body in branches:
            if self._value(condition):
                return self._run(body)
        return self._run(otherwise)

    def _do_for(self, target: Any, iterable: Any, only: Any, body: Any, otherwise: Any) -> None:
        items = F.listed(self._value(iterable))
        if only is not None:
            items = [item for item in items if self._scoped(lambda item=item: self._wanted(target, item, only))]
        for index, item in enumerate(items):
            self._step(self._line)
            self._scopes.append({"loop": F.Loop(items, index)})
            try:
                self._bind(target, item)
                self._run(body)
            except _Break:
                break
            except _Continue:
                continue
            finally:
                self._scopes.pop()
        if not items:
            self._run(otherwise)

    def _wanted(self, target: Any, item: Any, condition: Any) -> Any:
        self._bind(target, item)
        return self._value(condition)

    def _scoped(self, action: Any) -> Any:
        self._scopes.append({})
        try:
            return action()
        finally:
            self._scopes.pop()

    def _bind(self, target: Any, value: Any) -> None:
        kind = target[0]
        if kind == "name":
            self._scopes[-1][target[1]] = value
        elif kind == "names":
            values = F.listed(value)
            if len(values) != len(target[1]):
                raise ChatError(f"template line {self._line}: {len(values)} values for {len(target[1])} names")
            self._scopes[-1].update(zip(target[1], values, strict=False))
        else:
            space = self._lookup(target[1])
            if not isinstance(space, V.Namespace):
                raise ChatError(f"template line {self._line}: {target[1]!r} is no namespace, its attributes cannot be set")
            space[target[2]] = value

    def _do_set(self, target: Any, expression: Any) -> None:
        self._bind(target, self._value(expression))

    def _do_capture(self, target: Any, body: Any, filters: Any) -> None:
        text = self._captured(body)
        self._scopes.append({" captured": text})
        try:
            text = self._value(filters)
        finally:
            self._scopes.pop()
        self._bind(target, text)

    def _captured(self, body: Any) -> str:
        outer, self._out = self._out, []
        try:
            self._run(body)
            return V.concat(self._out)
        finally:
            self._out = outer

    def _do_macro(self, name: str, parameters: Any, body: Any) -> None:
        home = list(self._scopes)

        def macro(*args: Any, **named: Any) -> Any:
            if len(args) > len(parameters) or not set(named) <= {p for p, _ in parameters}:
                raise ChatError(f"template line {self._line}: macro {name!r} takes {len(parameters)} arguments")
            scope: dict[str, Any] = {}
            saved, self._scopes = self._scopes, [*home, scope]
            try:
                for i, (parameter, default) in enumerate(parameters):
                    given = args[i] if i < len(args) else named.get(parameter, V.Undefined(parameter))
                    missing = i >= len(args) and parameter not in named
                    scope[parameter] = self._value(default) if missing and default is not None else given
                return self._captured(body)
            finally:
                self._scopes = saved

        self._scopes[-1][name] = Method(macro)

    def _do_generation(self, body: Any) -> None:
        start = sum(map(len, self._out))
        self._scoped(lambda: self._run(body))
        self.generation.append((start, sum(map(len, self._out))))

    def _do_break(self) -> None:
        raise _Break

    def _do_continue(self) -> None:
        raise _Continue

    # --- expressions

    def _value(self, node: Any) -> Any:
        self._step(node[1])
        return getattr(self, "_on_" + node[0])(*node[2:])

    def _lookup(self, name: str) -> Any:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        return V.Undefined(name)

    def _on_constant(self, value: Any) -> Any:
        return value

    def _on_variable(self, name: str) -> Any:
        return self._lookup(name)

    def _on_captured(self) -> Any:
        return self._lookup(" captured")

    def _on_list(self, items: Any) -> Any:
        return [self._value(item) for item in items]

    def _on_tuple(self, items: Any) -> Any:
        return tuple(self._value(item) for item in items)

    def _on_dict(self, pairs: Any) -> Any:
        return {self._value(k): self._value(v) for k, v in pairs}

    def _on_choice(self, condition: Any, value: Any, otherwise: Any) -> Any:
        if self._value(condition):
            return self._value(value)
        return self._value(otherwise) if otherwise else V.Undefined("the inline if")

    def _on_or(self, left: Any, right: Any) -> Any:
        return self._value(left) or self._value(right)

    def _on_and(self, left: Any, right: Any) -> Any:
        return self._value(left) and self._value(right)

    def _on_not(self, value: Any) -> Any:
        return not self._value(value)

    def _on_compare(self, first: Any, links: Any) -> Any:
        left = self._value(first)
        for op, node in links:
            right = self._value(node)
            if op in ("in", "not in"):
                holds = (left in (list(right) if isinstance(right, V.Undefined) else right)) == (op == "in")
            else:
                if op not in ("==", "!="):
                    self._defined(left), self._defined(right)
                holds = _COMPARE[op](left, right)
            if not holds:
                return False
            left = right
        return True

    def _defined(self, value: Any) -> Any:
        if isinstance(value, V.Undefined):
            raise ChatError(f"template line {self._line}: {value.name!r} is undefined")
        return value

    def _on_binary(self, op: Any, left: Any, right: Any) -> Any:
        a, b = self._value(left), self._value(right)
        if op == "~":
            return V.concat([F.as_text(a), F.as_text(b)])
        self._defined(a), self._defined(b)
        if op == "+":
            if isinstance(a, str) and isinstance(b, str):
                return V.concat([a, b])
            return a + b
        if op == "%" and isinstance(a, str):
            return V.tagged(str(a) % b, V.origin_of([a, b]))
        sizes = [len(x) for x in (a, b) if isinstance(x, (str, list, tuple))]
        numbers = [abs(x) for x in (a, b) if isinstance(x, (int, float))]
        if (op == "*" and sizes and max(numbers, default=0) * max(sizes) > 1 << 20) or (op == "**" and max(numbers, default=0) > 1000):
            raise ChatError(f"template line {self._line}: the result of {op!r} is too large")
        if op == "*" and sizes and isinstance(a, str | list | tuple) != isinstance(b, str | list | tuple):
            text, count = (a, b) if isinstance(a, (str, list, tuple)) else (b, a)
            return V.concat([text] * count) if isinstance(text, str) else text * count
        result = _ARITHMETIC[op](a, b)
        if isinstance(result, int) and abs(result) >> 4096:
            raise ChatError(f"template line {self._line}: the result of {op!r} is too large")
        return result

    def _on_sign(self, sign: Any, value: Any) -> Any:
        number = self._defined(self._value(value))
        return -number if sign == "-" else +number

    def _on_attribute(self, value: Any, name: str) -> Any:
        owner = self._defined(self._value(value))
        if isinstance(owner, V.Namespace):
            return owner[name] if name in owner else V.Undefined(name)
        if isinstance(owner, F.Loop):
            return owner.attribute(name, self._undefined)
        if isinstance(owner, dict):
            if name in _DICT_METHODS:
                return Method(lambda *args: _DICT_METHODS[name](owner, *args))
            return owner.get(name, V.Undefined(name))
        if isinstance(owner, str) and name in V.STRING_METHODS:
            return Method(lambda *args, **named: V.call_method(owner, name, list(args), named))
        if isinstance(owner, list) and name in ("append", "index", "count", "extend", "pop", "insert"):
            return self._list_method(owner, name)
        return V.Undefined(name)

    def _list_method(self, owner: list[Any], name: str) -> Any:
        if name not in ("index", "count"):
            raise ChatError(f"template line {self._line}: the method {name!r} of a list would change it and is not allowed")
        return Method(getattr(owner, name))

    def _undefined(self, name: str) -> Any:
        return V.Undefined(name)

    def _on_item(self, value: Any, index: Any) -> Any:
        owner = self._defined(self._value(value))
        if index[0] == "slice":
            bounds = slice(*(None if part is None else self._value(part) for part in index[2:]))
            return V.sliced(owner, bounds) if isinstance(owner, str) else owner[bounds]
        key = self._value(index)
        if isinstance(owner, str) and isinstance(key, int):
            return V.sliced(owner, slice(key, key + 1 or None)) if -len(owner) <= key < len(owner) else V.Undefined(str(key))
        try:
            return owner[key]
        except (KeyError, IndexError, TypeError):
            if isinstance(key, str):
                return self._on_attribute(("constant", self._line, owner), str(key))
            return V.Undefined(str(key))

    def _arguments(self, positional: Any, named: Any) -> tuple[list[Any], dict[str, Any]]:
        return [self._value(p) for p in positional], {name: self._value(v) for name, v in named}

    def _on_call(self, function: Any, positional: Any, named: Any) -> Any:
        target = self._defined(self._value(function))
        args, keywords = self._arguments(positional, named)
        if not isinstance(target, Method) and target not in F.FUNCTIONS:
            raise ChatError(f"template line {self._line}: this value cannot be called")
        try:
            return target.call(*args, **keywords) if isinstance(target, Method) else target(*args, **keywords)
        except F.Raised as error:
            raise ChatError(str(error)) from None

    def _on_filter(self, name: str, value: Any, positional: Any, named: Any) -> Any:
        if name not in F.FILTERS:
            raise ChatError(f"template line {self._line}: the filter {name!r} is not supported")
        operand = self._value(value)
        args, keywords = self._arguments(positional, named)
        return F.FILTERS[name](operand, *args, **keywords)

    def _on_test(self, name: str, value: Any, positional: Any, named: Any) -> Any:
        if name not in F.TESTS:
            raise ChatError(f"template line {self._line}: the test {name!r} is not supported")
        operand = self._value(value)
        args, keywords = self._arguments(positional, named)
        return bool(F.TESTS[name](operand, *args, **keywords))
