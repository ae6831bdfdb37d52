"""Standings as workers show them: the cluster's fields, and an account of state in the payload."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holdfast.cluster.membership import Standing
from holdfast.commit.settle import Account, settle

NARROW = ("operation", "voted", "boundary", "leaving", "broken", "unreached", "refused")


def standing(**fields: Any) -> Standing:
    """A standing from the fields of ``Standing`` and ``Account`` together."""
    narrow = {name: fields.pop(name) for name in NARROW if name in fields}
    return Standing(**narrow, payload=Account(**fields).to_json())


def lost_units(standings: Iterable[Standing]) -> list[int]:
    """The units of a trained state that none of these workers holds."""
    named = {f"0.{number}": each for number, each in enumerate(standings)}
    return list(settle(named).lost) if named else []
