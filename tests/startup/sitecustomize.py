"""Halves the time that a program of the tests needs to start: Python imports this by itself from its path.

Torch's optimizers import torch's compiler, which takes seconds, only to be left out of it. Here they get a module that
leaves every function as it is. Whatever else is asked of it comes from the compiler itself, imported then.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"


class _StandIn:
    """Finds and makes the module."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == _COMPILER else None

    def create_module(self, _: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.disable = lambda function, *_, **__: function
        module.graph_break = lambda: None
        module.__getattr__ = self._ask_the_compiler

    def _ask_the_compiler(self, attribute: str) -> Any:
        if attribute.startswith("__") and attribute != "__path__":
            raise AttributeError(attribute)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            del sys.modules[_COMPILER]
        return getattr(import_module(_COMPILER), attribute)


sys.meta_path.insert(0, _StandIn())
