"""Rules as users write them, in Python or YAML, and the choice of the rule that a tensor goes by."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from holdfast.checkpoint.pieces import check_name
from holdfast.checkpoint.rules.patterns import Flat, Partial, Pattern, Replicate, Shard, Step, Unique
from holdfast.checkpoint.trees import some
from holdfast.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule for the tensors whose whole name the regular expression ``match`` matches.

    ``pattern`` says how their fragments make up a tensor. ``copies`` are the axes along which holders have the same.
    ``rename`` is the new name, with ``\\1`` for the first group of ``match``. A rule without a pattern only renames,
    before the others are looked at. Raises ``UsageError`` if it contradicts itself.

    >>> Rule(match=r"old\\.(.*)", rename=r"new.\\1").renamed("old.weight")
    'new.weight'
    """

    match: str
    pattern: Pattern | None = None
    rename: str | None = None
    copies: tuple[str, ...] = ()
    regex: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "regex", re.compile(self.match))
            self.regex.sub(self.rename or "", "")  # refuses a group that is not there
        except (re.error, IndexError) as error:
            raise UsageError(f"{self} is no regular expression, or its rename does not fit it: {error}") from error
        if self.pattern is None and self.rename is None:
            raise UsageError(f"{self} says nothing about the tensors it matches", hint="give it a pattern or a rename")
        axes = [step.axis for step in self.steps] + list(self.copies)
        if len(set(axes)) < len(axes):
            raise UsageError(f"{self} names an axis twice: {', '.join(axes)}")
        if any(isinstance(step, Flat) for step in self.steps[:-1]):
            raise UsageError(f"{self} cuts what is flat already", hint="flat is the innermost step")
        if self.copies and isinstance(self.pattern, Replicate | None):
            raise UsageError(f"{self} needs no copies", hint="replicate is copies along every axis, a rename has none")

    def __str__(self) -> str:
        return f"the rule for {self.match}"

    @property
    def steps(self) -> tuple[Step, ...]:
        """The cuts of the tensor, the outermost first."""
        if isinstance(self.pattern, tuple):
            return self.pattern
        return (self.pattern,) if isinstance(self.pattern, Shard | Flat) else ()

    def renamed(self, name: str) -> str:
        """The new name of a tensor whose name the rule matches."""
        found = self.regex.fullmatch(name)
        assert found is not None
        return name if self.rename is None else found.expand(self.rename)


@dataclass(frozen=True, kw_only=True)
class Target:
    """The rule that a tensor goes by.

    ``seen`` is the name that the rule matched (after rules that only rename), ``name`` the final one. ``follows`` is
    the parameter whose rule it is, for an optimizer's slot without a rule of its own.
    """

    rule: Rule
    seen: str
    name: str
    follows: str | None = None


class Rules:
    """Rules for all tensors of a checkpoint: each tensor matches exactly one, each rule at least one tensor.

    >>> rules = Rules([Rule(match="model/.*weight", pattern=Shard(dim=0)), Rule(match=".*bias", pattern=Replicate())])
    >>> rules.targets(["model/a.weight", "optimizer/state/a.weight/exp_avg", "model/a.bias"])["model/a.bias"].rule.match
    '.*bias'
    """

    def __init__(self, rules: Iterable[Rule], *, base: Rules | None = None) -> None:
        self.rules = tuple(rules)
        self.base = base

    @classmethod
    def from_yaml(cls, source: str | Path) -> Rules:
        """Rules written in YAML: a file if it is a ``Path``, else the text itself.

        >>> Rules.from_yaml("- {match: 'model/embed.*', shard: {dim: 0, size: 50257}}").rules[0].pattern.size
        50257
        """
        where = f"{source}: " if isinstance(source, Path) else ""
        try:
            text = source.read_text() if isinstance(source, Path) else source
            nodes = yaml.load(text, _NoTwins)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UsageError(f"{where}the rules cannot be read: {error}") from error
        if not isinstance(nodes, list) or not nodes:
            raise UsageError(f"{where}rules are a list", hint="begin each with '- match: ...'")
        return cls(_rule(node, f"{where}rule {number}") for number, node in enumerate(nodes, 1))

    def over(self, base: Rules) -> Rules:
        """These rules, and those of ``base`` for tensors that they do not match; the latter may match nothing."""
        return Rules(self.rules, base=base if self.base is None else self.base.over(base))

    def targets(self, names: Iterable[str]) -> dict[str, Target]:
        """The rule of each tensor. ``UsageError`` if a tensor matches none or several, or a rule matches no tensor."""
        names, used = list(dict.fromkeys(names)), set[Rule]()
        for name in names:
            check_name(name)
        targets = {name: self._target(name, used) for name in names}
        self._refuse_idle(used, names)
        return targets

    def renames(self, names: Iterable[str]) -> dict[str, str]:
        """New names for a checkpoint whose layout is known. ``UsageError`` if a rule says more than a rename."""
        for rule in self.rules:
            if rule.pattern is not None:
                raise UsageError(f"{rule} describes a layout that is known without rules", hint="keep the rename alone")
        names, used = list(dict.fromkeys(names)), set[Rule]()
        renamed = {name: self._first(name, used) for name in names}
        self._refuse_idle(used, names)
        owner: dict[str, str] = {}
        for old, new in renamed.items():
            if owner.setdefault(new, old) != old:
                raise UsageError(f"{owner[new]} and {old} would both be called {new}")
        return renamed

    def _target(self, name: str, used: set[Rule]) -> Target:
        seen = self._first(name, used)
        found = self._find(seen, layout=True, used=used)
        if found is None:
            shown = name if seen == name else f"{name}, renamed to {seen}"
            raise UsageError(f"no rule matches {shown}", hint="every tensor needs exactly one; replicate, shard, ...")
        rule, follows = found
        return Target(rule=rule, seen=seen, name=_renamed(rule, seen, follows), follows=follows)

    def _first(self, name: str, used: set[Rule]) -> str:
        found = self._find(name, layout=False, used=used)
        return name if found is None else _renamed(found[0], name, found[1])

    def _find(self, name: str, *, layout: bool, used: set[Rule]) -> tuple[Rule, str | None] | None:
        """The rule for a name, and the parameter whose rule it is if it is not the name's own.

        A slot goes by its own name first, then by its parameter's.
        """
        rules = [rule for rule in self.rules if (rule.pattern is not None) == layout]
        for tried in filter(None, (name, parameter_of(name))):
            hits = [rule for rule in rules if rule.regex.fullmatch(tried)]
            if len(hits) > 1:
                which = " and ".join(rule.match for rule in hits)
                raise UsageError(f"{name} matches {len(hits)} rules: {which}", hint="every tensor needs exactly one")
            if hits:
                used.update(hits)
                return hits[0], None if tried == name else tried
        return None if self.base is None else self.base._find(name, layout=layout, used=used)

    def _refuse_idle(self, used: set[Rule], names: Sequence[str]) -> None:
        for rule in self.rules:
            if rule not in used:
                raise UsageError(f"{rule} matches no tensor", hint=f"the tensors are {some(names, 5) or 'none at all'}")


SLOTS = "optimizer/state/"  # begins the names of slots: optimizer/state/<parameter>/<slot>


def parameter_of(name: str) -> str | None:
    """The name of the parameter that an optimizer's slot belongs to.

    >>> parameter_of("optimizer/state/layers.0.weight/exp_avg")
    'model/layers.0.weight'
    """
    key, slash, _ = name.removeprefix(SLOTS).partition("/")
    return f"model/{key}" if name.startswith(SLOTS) and slash else None


def _renamed(rule: Rule, name: str, follows: str | None) -> str:
    if follows is None:
        return rule.renamed(name)
    section, slash, key = rule.renamed(follows).partition("/")
    if section != "model" or not slash or "/" in key:
        raise UsageError(
            f"{rule} takes {follows} out of model/, so {name} cannot follow it", hint="give it its own rule"
        )
    return f"{SLOTS}{key}/{name.removeprefix(SLOTS).partition('/')[2]}"


# --- YAML -----------------------------------------------------------------------------------------


class _NoTwins(yaml.SafeLoader):
    """A YAML loader that refuses a key that stands twice; YAML itself takes the last one in silence."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise UsageError(f"{key} stands twice in one mapping{node.start_mark}")
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_count, value))


_FIELDS: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
    "unique": {},
    "replicate": {},
    "partial": {},
    "shard": {
        "dim": _count,
        "axis": lambda v: isinstance(v, str),
        "size": _count,
        "parts": lambda v: _count(v) or _counts(v),
        "groups": _count,
    },
    "flat": {"axis": lambda v: isinstance(v, str), "shape": _counts},
}
_MAKE: Mapping[str, Callable[..., Any]] = {
    "unique": Unique,
    "replicate": Replicate,
    "partial": Partial,
    "shard": Shard,
    "flat": Flat,
}


def _rule(node: Any, where: str) -> Rule:
    if not isinstance(node, dict) or not isinstance(node.get("match"), str):
        raise UsageError(f"{where} has no match", hint="it is a mapping with the key match, a regular expression")
    where = f"{where}, for {node['match']},"
    _refuse_unknown(node, {"match", "rename", "copies", *_FIELDS}, where)
    rename, axes = node.get("rename"), node.get("copies", [])
    if not isinstance(rename, str | None):
        raise UsageError(f"{where} has the rename {rename!r}, which is not a name")
    if not isinstance(axes, list) or not all(isinstance(axis, str) for axis in axes):
        raise UsageError(f"{where} has the copies {axes!r}", hint="a list of axes, such as [dp]")
    kinds = [kind for kind in _FIELDS if kind in node]
    if len(kinds) > 1 and kinds != ["shard", "flat"]:
        raise UsageError(f"{where} is {' and '.join(kinds)} at once", hint="only shard and flat go together")
    patterns = [_pattern(kind, one, where) for kind in kinds for one in _listed(kind, node[kind])]
    pattern = tuple(patterns) if len(patterns) > 1 else patterns[0] if patterns else None
    return Rule(match=node["match"], pattern=pattern, rename=rename, copies=tuple(axes))


def _listed(kind: str, node: Any) -> list[Any]:
    return node if kind == "shard" and isinstance(node, list) else [node]


def _pattern(kind: str, node: Any, where: str) -> Any:
    if not isinstance(node, dict):
        raise UsageError(f"{where} has the {kind} {node!r}", hint=f"a mapping, such as {kind}: {{}}")
    _refuse_unknown(node, _FIELDS[kind], f"{where} in {kind}")
    for key, value in node.items():
        if not _FIELDS[kind][key](value):
            raise UsageError(f"{where} has the {key} {value!r} in {kind}, which cannot be")
    if kind == "shard" and "dim" not in node:
        raise UsageError(f"{where} has a shard without a dim", hint="shard: {dim: 0}")
    try:
        return _MAKE[kind](**{key: tuple(value) if isinstance(value, list) else value for key, value in node.items()})
    except UsageError as error:
        raise UsageError(f"{where} cannot be: {error}") from error


def _refuse_unknown(node: Mapping[Any, Any], known: Iterable[str], where: str) -> None:
    unknown = [str(key) for key in node if key not in set(known)]
    if unknown:
        raise UsageError(f"{where} has the unknown key {', '.join(unknown)}", hint=f"known: {', '.join(sorted(known))}")
