"""The language of rules: how the fragments that several holders have make up a tensor.

Most checkpoints say themselves how their tensors are cut. Where one does not, a user's rules say it;
``docs/checkpoint-rules.md`` teaches them.

- :mod:`.language`: ``Rule`` and ``Rules``, in Python and YAML, and which rule a tensor goes by
- :mod:`.patterns`: ``Shard``, ``Flat`` … and the geometry of what they mean
- :mod:`.assembly`: logical tensors out of fragments
- :mod:`.hand_cut`: rules in a script whose ranks hold plain tensors that it has cut itself
- :mod:`.renaming`: new names throughout a checkpoint whose layout is known
"""

from holdfast.checkpoint.rules.assembly import Fragment, Laid, copies, lay_out, merge
from holdfast.checkpoint.rules.language import Rule, Rules, parameter_of
from holdfast.checkpoint.rules.patterns import Flat, FragmentPart, Partial, Pattern, Replicate, Shard, Unique

__all__ = [
    "Flat",
    "Fragment",
    "FragmentPart",
    "Laid",
    "Partial",
    "Pattern",
    "Replicate",
    "Rule",
    "Rules",
    "Shard",
    "Unique",
    "copies",
    "lay_out",
    "merge",
    "parameter_of",
]
