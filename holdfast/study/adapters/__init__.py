"""Adapters, one per framework. Each runs in its framework's own interpreter, which has nothing else installed."""

from __future__ import annotations

import importlib

from holdfast.study.adapters.base import Adapter

NAMES = ("pytorch", "tensorflow", "jax", "chainer", "holdfast")


def find(name: str) -> Adapter:
    """Import a framework and return its adapter; raises ``ImportError`` where it is not installed."""
    adapter: Adapter = importlib.import_module(f"holdfast.study.adapters.{name}").ADAPTER
    return adapter
