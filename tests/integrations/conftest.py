"""What the tests of trainers share."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations.judge import reported


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one worker of the module's ``PROGRAM`` reports, undisturbed."""
    return reported(request.module.PROGRAM.train(tmp_path_factory.mktemp("alone"), workers=1))
