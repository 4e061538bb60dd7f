"""Modules that are commands and functions: ``python -m diloco.inspect`` and ``diloco.inspect()``.

``python -m diloco.inspect`` needs a module of that name. As soon as any code imports it, Python
sets the attribute ``inspect`` of the package to the module, so a function of the same name would be
replaced, depending on what was imported before. Therefore the module itself is callable, as
https://docs.python.org/3/reference/datamodel.html#customizing-module-attribute-access allows::

    sys.modules[__name__].__class__ = CallableModule
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any


class CallableModule(ModuleType):
    """A module whose call is the call of its function with the last part of the module's name."""

    @property
    def _function(self) -> Callable[..., Any]:
        function: Callable[..., Any] = self.__dict__[self.__name__.rpartition(".")[2]]
        return function

    @property
    def __signature__(self) -> inspect.Signature:
        """The function's signature, for ``help`` and editors."""
        return inspect.signature(self._function)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._function(*arguments, **keywords)
