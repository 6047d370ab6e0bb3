"""A child for test_children.py."""

from __future__ import annotations

import os

from tests.children import obey


def fail() -> None:
    raise ValueError("not today")


def leave() -> None:
    print("farewell", flush=True)
    os._exit(3)


if __name__ == "__main__":
    obey({"add": lambda a, b: a + b, "fail": fail, "leave": leave})
