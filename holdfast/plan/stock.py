"""Templates in stock: made once for a profile, kept while the process lives. After a loss there is no time for it."""

from __future__ import annotations

from functools import lru_cache

from holdfast.plan.profile import LayerCost, Link, Profile
from holdfast.plan.sizes import chains, fewest_nodes
from holdfast.plan.stage_costs import StageCosts
from holdfast.plan.template import Template, Templates, make_templates
from holdfast.words import count

PROFILES = 8  # a process has one, or a few in tests


class Stock:
    """The templates of one profile, for workers that are one device each.

    A template does not depend on how many workers there are besides, so whoever made it for more of them has
    the same as somebody who joined later.

    >>> from holdfast.plan.profile import uniform
    >>> stock_of(uniform(4)).templates(3, tolerate=1).by_nodes[2].roles
    (range(0, 2), range(2, 4))
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.costs = StageCosts(profile)
        self.minimum = fewest_nodes(self.costs, 1, None)
        self._made: dict[int, Template | None] = {}

    def template(self, workers: int) -> Template | None:
        """The fastest pipeline of so many workers; None if none fits: too few layers, or too little memory."""
        if workers not in self._made:
            fits = bool(chains(self.costs, workers, 1))
            made = make_templates(self.profile, nodes=workers, tolerate=0, minimum=workers) if fits else None
            self._made[workers] = made.by_nodes[workers] if made else None
        return self._made[workers]

    def templates(self, workers: int, *, tolerate: int) -> Templates:
        """All that so many workers can use, and no others: what else is in stock must not change a plan."""
        made = {size: self.template(size) for size in range(self.minimum, min(workers, self.costs.count) + 1)}
        missing = next((size for size, template in made.items() if template is None), None)
        short = f"the model has only {count(self.costs.count, 'layer')}"
        return Templates(
            profile=self.profile,
            devices=1,
            tolerate=tolerate,
            minimum=self.minimum,
            by_nodes={size: template for size, template in made.items() if template is not None},
            reason=f"a pipeline of {missing} would not fit into the memory" if missing else short,
        )


def stock_of(profile: Profile) -> Stock:
    """The stock of a profile: that of any other with the same numbers."""
    return _stock(profile.layers, profile.between, profile.memory)


@lru_cache(maxsize=PROFILES)
def _stock(layers: tuple[LayerCost, ...], between: Link, memory: int | None) -> Stock:
    return Stock(
        Profile(model="", device="", micro_batch=1, layers=layers, inside=between, between=between, memory=memory)
    )
