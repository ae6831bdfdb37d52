"""Templates in stock: made once for a profile and kept, so that none has to be made after a loss."""

from __future__ import annotations

from functools import lru_cache

from holdfast.plan.pipeline_sizes import chains, fewest_nodes
from holdfast.plan.profile import LayerCost, Link, Profile
from holdfast.plan.stage_costs import StageCosts
from holdfast.plan.template import Template, Templates, make_templates
from holdfast.words import count

PROFILES = 8  # profiles whose templates are kept; a process has one, tests have a few


class Stock:
    """Templates of one profile, for workers of one device each.

    A template does not depend on how many workers there are in all. So a worker that joined later makes the same
    template as one that was there from the start.

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
        """Return the fastest pipeline of so many workers; None if there are too few layers or too little memory."""
        if workers not in self._made:
            fits = bool(chains(self.costs, workers, 1))
            made = make_templates(self.profile, nodes=workers, tolerate=0, minimum=workers) if fits else None
            self._made[workers] = made.by_nodes[workers] if made else None
        return self._made[workers]

    def templates(self, workers: int, *, tolerate: int) -> Templates:
        """Return the templates that so many workers can use. Others in stock are left out: they must not matter."""
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
    """Return the stock of a profile. Profiles with equal numbers share one."""
    return _stock(profile.layers, profile.between, profile.memory)


@lru_cache(maxsize=PROFILES)
def _stock(layers: tuple[LayerCost, ...], between: Link, memory: int | None) -> Stock:
    return Stock(
        Profile(model="", device="", micro_batch=1, layers=layers, inside=between, between=between, memory=memory)
    )
