"""Text form of a configuration, for command lines and batch scripts."""

from __future__ import annotations

import ast
import inspect
import re
import threading
from collections.abc import Mapping
from typing import Any

from horovod_sparse.config.presets import Compression
from horovod_sparse.rules.registry import lookup

# Python 3.11's parser is not thread-safe (python/cpython#106905).
_PARSER = threading.Lock()
# Commas outside brackets: warmup_densities=(0.3,0.1) is one setting.
_COMMA = re.compile(r",(?![^(\[]*[)\]])")


def parse(spec: str) -> Any:
    """Parse a configuration from text, such as an argument on the command line.

    Args:
        spec: ``preset`` or ``preset:key=value,key=value``, for example ``topka:density=0.01,memory=none``. Presets are
            the names in ``Compression``.

    Returns:
        A ``Sparse``, or Horovod's own compressor for ``none`` and ``fp16``.

    Raises:
        ValueError: A name is unknown (the message lists the known ones), or a value is out of range.
    """
    name, _, rest = spec.partition(":")
    presets = {key: value for key, value in vars(Compression).items() if not key.startswith("_")}
    lookup("compression", name, presets)
    pairs = [_setting(item, spec) for item in _COMMA.split(rest) if item]
    settings = dict(pairs)
    if len(settings) < len(pairs):
        raise ValueError(f"{spec!r} gives a setting twice: write each of {', '.join(settings)} once")
    preset = getattr(Compression, name)
    if isinstance(presets[name], staticmethod):
        missing = [key for key, item in inspect.signature(preset).parameters.items() if _required(item, settings)]
        if missing:
            raise ValueError(f"compression {name!r} needs {missing[0]}, as in {name}:{missing[0]}=0.1")
        return preset(**settings)
    if settings:
        raise ValueError(f"compression {name!r} is Horovod's own and takes no settings, but {spec!r} has {rest!r}")
    return preset


def _required(parameter: inspect.Parameter, settings: Mapping[str, Any]) -> bool:
    named = parameter.kind is not inspect.Parameter.VAR_KEYWORD
    return named and parameter.default is inspect.Parameter.empty and parameter.name not in settings


def _setting(item: str, spec: str) -> tuple[str, Any]:
    key, equals, value = item.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"{item!r} in {spec!r} is not of the form key=value")
    try:
        with _PARSER:
            return key.strip(), ast.literal_eval(value.strip())
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last two: deeply nested brackets
        return key.strip(), value.strip()
