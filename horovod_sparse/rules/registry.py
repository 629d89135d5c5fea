"""Registries of rules by the names that configurations use; users can add rules."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

from horovod_sparse.rules.options import RuleOptions

_Rule = TypeVar("_Rule", bound=type)

# Settings of the configuration itself; an option of a rule must not have these names.
RESERVED = ("density", "sparsifier", "memory", "collective", "schedule", "dense_below", "bucket_bytes")


def lookup(what: str, name: Any, known: Mapping[str, Any], hint: str = "") -> Any:
    """Return the value of a known name; raise ValueError for any other, which ``what`` describes in the message."""
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"unknown {what} {name!r}; known are: {', '.join(known)}{hint}")
    return known[name]


class Registry(Mapping[str, Any]):
    """The rules of one kind, by name.

    Args:
        kind: "sparsifier", "memory", "collective" or "schedule".
        protocol: Methods and attributes that a rule of this kind must have.
        rules: Built-in rules; the name of each is that of its module.
    """

    def __init__(self, kind: str, protocol: type, rules: Iterable[type]) -> None:
        self.kind = kind
        self._protocol = protocol
        self._rules = {rule.__module__.rpartition(".")[2]: rule for rule in rules}

    def __getitem__(self, name: str) -> Any:
        return self._rules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def find(self, name: Any) -> Any:
        """Return the rule with a name; raise ValueError if it is unknown."""
        hint = f"; a custom {self.kind} must be registered first, on every rank (import its module)"
        return lookup(self.kind, name, self._rules, hint)

    def name_of(self, options: Any) -> str:
        """Return the name of the rule that options belong to; raise ValueError if it is none of these."""
        for name, rule in self._rules.items():
            if rule.Options is type(options):  # type: ignore[attr-defined]
                return name
        raise ValueError(
            f"{self.kind} must be the options of one of {', '.join(self)}, such as "
            f"{next(iter(self._rules.values())).__qualname__}.Options(), not {options!r}: Sparse.of() takes names, and "
            "a custom rule must be registered on every rank (import its module)"
        )

    def register(self, name: Any) -> Callable[[_Rule], _Rule]:
        """Return a decorator that registers a class under this name; see ``horovod_sparse.register``."""
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise ValueError(f"the name of a {self.kind} must be an identifier, such as my_{self.kind}, not {name!r}")

        def add(rule: _Rule) -> _Rule:
            known = self._rules.get(name)
            if known is not None and _full_name(known) != _full_name(rule):
                raise ValueError(
                    f"the {self.kind} {name!r} already exists, as {_full_name(known)}: choose another name"
                )
            self.check(rule)
            self._rules[name] = rule
            return rule

        return add

    def check(self, rule: Any) -> None:
        """Raise ValueError, which names a missing or unusable member, unless a class satisfies the protocol."""
        if not isinstance(rule, type):
            raise ValueError(f"a {self.kind} must be a class, not {rule!r}")
        about = f"the {self.kind} {rule.__qualname__}"
        _check_options(about, vars(rule).get("Options"))
        for name in self._protocol.__annotations__:
            if not hasattr(rule, name):
                raise ValueError(f"{about} lacks the attribute {name}: see {self._protocol.__qualname__}")
        for name, expected in inspect.getmembers(self._protocol):
            if isinstance(expected, property) and not hasattr(rule, name):
                raise ValueError(f"{about} lacks the property {name}: see {self._protocol.__qualname__}")
            if inspect.isfunction(expected) and (name == "__init__" or name[0] != "_"):
                _check_method(about, getattr(rule, name, None), name, inspect.signature(expected))


def _full_name(rule: type) -> str:
    return f"{rule.__module__}.{rule.__qualname__}"


def _check_options(about: str, options: Any) -> None:
    if not (isinstance(options, type) and issubclass(options, RuleOptions)):
        raise ValueError(f"{about} must define a nested class Options derived from RuleOptions")
    if "__dataclass_params__" not in vars(options) or not is_dataclass(options):
        raise ValueError(f"Options of {about} must be a dataclass: put @dataclass(frozen=True, kw_only=True) above it")
    for option in fields(options):
        if option.name in RESERVED:
            raise ValueError(f"the option {option.name!r} of {about} is reserved for the configuration: rename it")
        if option.default is MISSING and option.default_factory is MISSING:
            raise ValueError(f"the option {option.name!r} of {about} has no default: declare it with integer or number")


def _check_method(about: str, method: Any, name: str, expected: inspect.Signature) -> None:
    try:
        inspect.signature(method).bind(*expected.parameters)
    except TypeError:
        raise ValueError(f"{about} must have a method {name}({', '.join(expected.parameters)})") from None
