"""``HoldfastStrategy``: Lightning's ``Trainer`` on ``holdfast.Loop``."""

from holdfast.integrations.lightning.journal import JournalLogger as JournalLogger
from holdfast.integrations.lightning.strategy import HoldfastStrategy as HoldfastStrategy

__all__ = ["HoldfastStrategy", "JournalLogger"]
