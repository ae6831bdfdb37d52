"""The feed: what nobody looks at costs nothing, and slow viewers miss pictures instead of keeping them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from holdfast.watch.feed import Feed
from holdfast.watch.reader import Reader
from tests.watch.test_fold import events_of
from tests.watch.test_top import folder_with


def test_a_picture_is_drawn_once_for_all_and_only_if_somebody_looks(tmp_path: Path) -> None:
    logs = folder_with(events_of("stage_lost"), tmp_path / "logs")

    async def watch() -> None:
        feed = Feed({"logs": Reader(logs)})
        await feed.look("logs")
        await feed.look("logs")  # nothing new
        assert not feed._pictures
        one, other = await asyncio.gather(*[feed.next("logs", 0, seconds=60) for _ in range(2)])
        assert one is other
        assert one is not None
        assert json.loads(one.view)["phase"] == "finished"
        for _ in range(3):
            with (logs / "events.jsonl").open("a") as file:
                file.write('{"t": 1.0, "event": "coordinator-restart"}\n')
            await feed.look("logs")
        assert feed._pictures["logs"] is one
        late = await feed.next("logs", one.number, seconds=60)
        assert late is not None
        assert late.number == one.number + 3
        assert await feed.next("logs", late.number, seconds=0.01) is None
        feed.close()

    asyncio.run(watch())
