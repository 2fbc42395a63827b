# SPDX-License-Identifier: Apache-2.0
"""Other names in MAX's modules while a model is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def bound(module: ModuleType, **values: object) -> Iterator[None]:
    """Binds names of a module, each of which it has, to other values.

    A model's classes make its layers by such names, and take no factories
    for them. Nothing else may run that reads the names meanwhile; MAX makes a
    process's models one after the other.

    Raises:
        AttributeError: If the module has not one of the names.
    """
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
