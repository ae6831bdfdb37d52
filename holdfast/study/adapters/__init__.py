"""One small adapter per framework. Each runs in its framework's own interpreter, where nothing else may be."""

from __future__ import annotations

import importlib

from holdfast.study.adapters.base import Adapter

NAMES = ("pytorch", "tensorflow", "jax", "chainer", "holdfast")


def find(name: str) -> Adapter:
    """Imports a framework; only where it is installed."""
    adapter: Adapter = importlib.import_module(f"holdfast.study.adapters.{name}").ADAPTER
    return adapter
