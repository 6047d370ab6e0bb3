"""Libraries that take seconds to import, imported when a test first needs them, not when it is collected."""

from __future__ import annotations

import importlib
from typing import Any


class Late:
    """Stands for a module; the first of its public names that is asked for imports it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if not attribute[:1].isalpha():
            raise AttributeError(attribute)  # asked by pytest of all that a test module holds
        return getattr(importlib.import_module(self._name), attribute)


peft = Late("peft")
