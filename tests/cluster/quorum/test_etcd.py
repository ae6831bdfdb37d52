"""The client of etcd, against a real one: keys, leases, watches, lost members, TLS, passwords, and what it says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.events import Events
from holdfast.cluster.membership import Generation, Member
from holdfast.cluster.quorum.etcd import (
    Entry,
    Etcd,
    EtcdRefused,
    EtcdSettings,
    EtcdUnreachable,
    created_at,
    delete,
    put,
)
from holdfast.cluster.quorum.fence import Deposed, Fence, FencedOutbox, Resigned
from holdfast.cluster.quorum.keeper import ElectedKeeper
from holdfast.cluster.quorum.records import Decided, Holder, Keys
from holdfast.errors import UsageError
from tests.certificates import Certificates
from tests.etcd_cluster import EtcdCluster, needs_etcd
from tests.harness import TRAIN, until
from tests.warm import Command

pytestmark = needs_etcd

NEVER = 60.0  # seconds after which a test is broken, not slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    made = EtcdCluster(tmp_path_factory.mktemp("etcd"))
    made.wait()
    yield made
    made.end()


def ask(endpoints: str, dialogue: Callable[[Etcd], Awaitable[Any]], **environment: str) -> Any:
    """Run a dialogue with etcd. ``environment``: variables of etcdctl."""

    async def scene() -> Any:
        async with Etcd(EtcdSettings.given(endpoints, environment)) as etcd:
            return await dialogue(etcd)

    return asyncio.run(asyncio.wait_for(scene(), NEVER))


def test_a_key_is_created_once_and_goes_with_its_lease(cluster: EtcdCluster) -> None:
    async def dialogue(etcd: Etcd) -> None:
        leases = [await etcd.grant(2), await etcd.grant(2)]
        create = [[created_at("/role", 0)], [put("/role", f"of {leases[0]}", lease=leases[0])]]
        assert [await etcd.transact(*create), await etcd.transact(*create)] == [True, False]
        entry = await etcd.get("/role")
        assert entry is not None
        assert entry.value == f"of {leases[0]}"
        assert await etcd.transact([created_at("/role", entry.created)], [put("/other", "ö")])
        assert {key: each.value for key, each in (await etcd.get_all("/o")).items()} == {"/other": "ö"}
        await etcd.revoke(leases[0])
        await etcd.revoke(leases[0])  # once more does no harm
        assert await etcd.get("/role") is None
        assert not await etcd.transact([created_at("/role", entry.created)], [put("/other", "late")])
        assert [await etcd.keep_alive(lease) for lease in leases] == [False, True]
        await etcd.transact([], [delete("/other")])
        assert await etcd.get_all("/o") == {}

    ask(cluster.endpoints, dialogue)


def test_a_watch_tells_every_change_also_one_before_it_began(cluster: EtcdCluster) -> None:
    async def dialogue(etcd: Etcd) -> list[str | None]:
        await etcd.transact([], [put("/watched", "before")])
        seen: list[str | None] = []
        async for entry in etcd.watch("/watched"):
            seen.append(None if entry is None else entry.value)
            if len(seen) == 1:
                await etcd.transact([], [put("/watched", "after")])
            elif len(seen) == 2:
                await etcd.transact([], [delete("/watched")])
            else:
                return seen
        return seen

    assert ask(cluster.endpoints, dialogue) == ["before", "after", None]


def test_members_that_are_killed_or_do_not_answer_are_passed_over(tmp_path: Path) -> None:
    cluster = EtcdCluster(tmp_path)
    try:
        cluster.wait()

        async def change(etcd: Etcd) -> int:
            while True:  # without its leader it needs a moment
                try:
                    await etcd.transact([], [put("/key", "value")])
                    return etcd.member
                except EtcdUnreachable:
                    await asyncio.sleep(0.1)

        assert ask(cluster.endpoints, change) == 0
        cluster.kill(0)
        assert ask(cluster.endpoints, change) > 0
        cluster.start(0)
        cluster.wait()
        cluster.pause(0)
        assert ask(cluster.endpoints, change) > 0
        cluster.pause(1)
        with pytest.raises(EtcdUnreachable, match="quorum"):
            ask(cluster.endpoints, lambda etcd: etcd.grant(2))
    finally:
        cluster.end()


async def ask_for_passwords(etcd: Etcd) -> None:
    for path, body in [
        ("auth/user/add", {"name": "root", "password": "right"}),
        ("auth/role/add", {"name": "root"}),
        ("auth/user/grant", {"user": "root", "role": "root"}),
        ("auth/enable", {}),
    ]:
        await etcd._call(path, body)


def test_a_password(tmp_path: Path) -> None:
    cluster = EtcdCluster(tmp_path, size=1)
    try:
        cluster.wait()

        async def use(etcd: Etcd) -> Any:
            lease = await etcd.grant(2)
            await etcd.transact([], [put("/key", "secret", lease=lease)])
            etcd._token = "an old one"  # as after a restart of etcd
            assert await etcd.keep_alive(lease)
            watch = etcd.watch("/key")
            found = await anext(watch)
            etcd._token = "an old one"
            with pytest.raises(EtcdUnreachable, match="has ended the watch"):  # not silence for ever
                await anext(watch)
            return found

        ask(cluster.endpoints, ask_for_passwords)
        for settings in ({"ETCDCTL_USER": "root:right"}, {"ETCDCTL_USER": "root", "ETCDCTL_PASSWORD": "right"}):
            assert ask(cluster.endpoints, use, **settings).value == "secret"
        for settings in ({}, {"ETCDCTL_USER": "root:wrong"}, {"ETCDCTL_USER": "nobody:right"}):
            with pytest.raises(EtcdRefused, match="ETCDCTL_USER") as refused:
                ask(cluster.endpoints, use, **settings)
            assert "\n" not in str(refused.value)
            assert "right" not in str(refused.value), "no password is shown"
        agent = start(tmp_path, cluster.endpoints, ETCDCTL_USER="root:wrong")
        assert agent.wait(NEVER) == 2
        assert agent.stderr.count("\n") == 1
        assert "ETCDCTL_USER" in agent.stderr
    finally:
        cluster.end()


def test_tls_on_both_sides(tmp_path: Path) -> None:
    made = Certificates(tmp_path / "certificates")
    for authority in ("ca", "their-ca"):
        made.authority(authority)
    made.issue("etcd", "ca")
    made.issue("client", "ca")
    made.issue("nameless", "ca", subject="/O=holdfast")
    made.issue("stranger", "their-ca")
    name = f"{made.folder}/"
    options = ("--cert-file", f"{name}etcd.pem", "--key-file", f"{name}etcd.key")
    options += ("--client-cert-auth", "--trusted-ca-file", f"{name}ca.pem")
    cluster = EtcdCluster(tmp_path, size=1, scheme="https", options=options)

    def settings(who: str, ca: str = "ca") -> dict[str, str]:
        files = {"ETCDCTL_CACERT": f"{name}{ca}.pem"}
        return files | {"ETCDCTL_CERT": f"{name}{who}.pem", "ETCDCTL_KEY": f"{name}{who}.key"} if who else files

    async def use(etcd: Etcd) -> int:
        began = time.monotonic()
        while True:
            try:
                return await etcd.grant(2)
            except EtcdUnreachable:
                if time.monotonic() > began + NEVER / 2:
                    raise
                await asyncio.sleep(0.05)

    try:
        assert ask(cluster.endpoints, use, **settings("client"))
        assert ask(cluster.endpoints.removeprefix("https://"), use, **settings("client")), "files mean https"
        for bad in (settings("stranger"), settings(""), settings("client", ca="their-ca")):
            with pytest.raises(EtcdUnreachable):
                ask(cluster.endpoints, lambda etcd: etcd.grant(2), **bad)
        with pytest.raises(UsageError, match="ETCDCTL_CERT"):
            ask(cluster.endpoints, use, **settings("missing"))
        with pytest.raises(UsageError, match="certificates"):
            ask(cluster.endpoints, use, ETCDCTL_CACERT=f"{name}etcd.key")
        ask(cluster.endpoints, ask_for_passwords, **settings("client"))
        assert ask(cluster.endpoints, use, ETCDCTL_USER="root:right", **settings("nameless"))
        with pytest.raises(EtcdRefused, match="CommonName"):
            ask(cluster.endpoints, use, ETCDCTL_USER="root:right", **settings("client"))
    finally:
        cluster.end()


# --- what a user is told -----------------------------------------------------------------------------------


def start(folder: Path, endpoints: str, *options: str, **environment: str) -> Command:
    words = ("run", "--rdzv-backend", "etcd", "--rdzv-endpoint", endpoints, "--patience", "1", *options, str(TRAIN))
    return Command(*words, folder=folder, HOLDFAST_TOKEN="a secret of the test", **environment)


@pytest.mark.parametrize(
    ("endpoints", "options", "said"),
    [
        ("", [], "--rdzv-endpoint"),
        ("a:b:c", [], "a:b:c"),
        ("127.0.0.1:99999", [], "127.0.0.1:99999"),
        ("127.0.0.1:1", [], "quorum"),
        ("no.such.host.invalid:2379", [], "no.such.host.invalid"),
        ("127.0.0.1:1", ["--rdzv-backend", "zookeeper"], "zookeeper"),
    ],
)
def test_bad_endpoints_get_one_sentence(tmp_path: Path, endpoints: str, options: list[str], said: str) -> None:
    agent = start(tmp_path, endpoints, *options)
    assert agent.wait(NEVER) == 2
    assert said in agent.stderr
    assert len(agent.stderr.splitlines()) == 1, agent.stderr


def test_a_member_whose_name_is_gone_is_passed_over(cluster: EtcdCluster, tmp_path: Path) -> None:
    results = {"RESULTS": str(tmp_path / "results.jsonl"), "STEPS": "2"}
    agent = start(tmp_path, f"no.such.host.invalid:2379,{cluster.endpoints}", "--rdzv-id", "gone", **results)
    assert agent.wait(NEVER) == 0, agent.stderr


def test_an_agent_that_cannot_reach_the_coordinator_looks_anew_where_it_is(
    cluster: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its watch may hang on a connection that has died in silence."""
    watch, deaf = Etcd.watch, [True]

    async def deaf_at_first(etcd: Etcd, key: str) -> AsyncIterator[Entry | None]:
        async for entry in watch(etcd, key):
            yield entry
            if deaf:
                deaf.pop()
                await asyncio.Event().wait()

    async def dialogue(etcd: Etcd) -> None:
        keys, lease = Keys(run="deaf"), await etcd.grant(60)
        settings = EtcdSettings.given(cluster.endpoints, {})
        about: dict[str, Any] = {"events": Events(None), "say": print, "moved": lambda: None}
        keeper = ElectedKeeper(settings, run="deaf", agent="a", address="127.0.0.1", patience=NEVER, **about)
        keeping = asyncio.create_task(keeper.keep([], "a token", lambda: None))
        for port in (1, 2):
            holder = Holder(agent=f"at {port}", lease=lease, address=("127.0.0.1", port))
            await etcd.transact([], [put(keys.coordinator, holder.to_text(), lease=lease)])
            if keeper.address is not None:
                keeper.unreached(keeper.address, TimeoutError())
            await until(lambda at=holder.address: keeper.address == at)
        keeping.cancel()

    monkeypatch.setattr(Etcd, "watch", deaf_at_first)
    ask(cluster.endpoints, dialogue)


# --- the fence ---------------------------------------------------------------------------------------------


KEYS = Keys(run="fenced")
MEMBERS = (Member(worker="0.0", address="::1", host="0"),)
DECIDED = Decided(generation=Generation(number=4, members=MEMBERS, run="a", life="b"), resumable=True)


def beat(number: int) -> tuple[int, dict[str, Any]]:
    return (number, {"type": "beat"})


async def elect(etcd: Etcd, agent: str, keys: Keys = KEYS) -> tuple[Fence, int]:
    lease = await etcd.grant(60)
    holder = Holder(agent=agent, lease=lease, address=("::1", 1))
    assert await etcd.transact(
        [created_at(keys.coordinator, 0)], [put(keys.coordinator, holder.to_text(), lease=lease)]
    )
    entry = await etcd.get(keys.coordinator)
    assert entry is not None
    return Fence(etcd, keys, epoch=entry.created), lease


def test_an_old_coordinator_can_decide_nothing(cluster: EtcdCluster) -> None:
    async def dialogue(etcd: Etcd) -> None:
        first, lease = await elect(etcd, "first")
        assert (await first.open()).decided is None
        assert (await first.open()).first_host == 1000, "started again: numbers are never given twice"
        await first.confirm(DECIDED)
        await etcd.transact([], [put(KEYS.host("somebody"), "0")])
        await etcd.revoke(lease)
        second, _ = await elect(etcd, "second")
        for old in (first.confirm(), first.confirm(DECIDED), first.open(), first.end()):
            with pytest.raises(Deposed):
                await old
        recalled = await second.open()
        assert recalled.decided == DECIDED, "the first has not removed it"
        assert recalled.alive == {0}
        await etcd.transact([], [delete(KEYS.host("somebody"))])
        recalled = await second.open()
        assert recalled.decided is None, "nobody is left of it: the run begins again"
        assert recalled.newest == DECIDED.generation.number, "with higher numbers"
        await second.end()
        assert await etcd.get(KEYS.generation) is None

    ask(cluster.endpoints, dialogue)


def test_a_coordinator_that_most_members_do_not_reach_decides_nothing_while_they_live(cluster: EtcdCluster) -> None:
    keys = Keys(run="few are heard")
    members = tuple(Member(worker=f"{n}.0", address="::1", host=str(n)) for n in range(3))
    three = Decided(generation=Generation(number=4, members=members, run="r", life="l"), resumable=False)

    async def dialogue(etcd: Etcd) -> None:
        fence, own = await elect(etcd, "first", keys)
        await fence.hear(set, 0.0)  # the run has not begun
        await fence.confirm(three)
        leases = [await etcd.grant(60) for _ in range(3)]
        for number, lease in enumerate(leases):
            await etcd.transact([], [put(keys.host(f"agent{number}"), str(number), lease=lease)])
        await fence.hear(lambda: {0, 1}, NEVER)
        with pytest.raises(Resigned, match="reaches 1 of 3"):
            await fence.hear(lambda: {0}, 0.0)
        heard = {0}
        coming = asyncio.create_task(fence.hear(lambda: heard, NEVER))
        assert not (await asyncio.wait([coming], timeout=0.3))[0]
        heard.add(1)
        await asyncio.wait_for(coming, NEVER)
        dying = asyncio.create_task(fence.hear(lambda: {0}, NEVER))
        await etcd.revoke(leases[2])
        await asyncio.wait_for(dying, NEVER)
        await etcd.revoke(own)
        await etcd.revoke(leases[0])
        again, _ = await elect(etcd, "second", keys)
        await again.open()
        with pytest.raises(Resigned, match="reaches 0 of 3"):
            await again.hear(set, 0.0)
        await again.end()

    ask(cluster.endpoints, dialogue)


def test_decisions_wait_for_the_fence_and_heartbeats_do_not() -> None:
    class Slow:
        """A fence that opens when it is told to."""

        def __init__(self) -> None:
            self.opened, self.committed = asyncio.Event(), []

        async def hear(self, heard: Any, seconds: float) -> None:
            await self.opened.wait()

        async def confirm(self, generation: Any) -> None:
            await self.opened.wait()
            self.committed.append(generation)

    async def scene() -> None:
        sent: list[Any] = []
        fence, outbox = Slow(), FencedOutbox(sent.extend, set)
        sending = asyncio.create_task(outbox.send_all(fence))
        outbox.put([(1, {"type": "welcome"}), beat(1)], None)
        assert sent == [(1, {"type": "welcome"}), beat(1)], "nothing is decided yet"
        outbox.put([(1, {"type": "generation"}), beat(2)], DECIDED)
        outbox.put([(1, {"type": "store"}), (-1, {"event": "x"}), beat(3)], None)
        await asyncio.sleep(0.01)
        assert sent[2:] == [beat(2), beat(3)]
        fence.opened.set()
        await outbox.emptied()
        assert sent[4:] == [(1, {"type": "generation"}), (1, {"type": "store"}), (-1, {"event": "x"})]
        assert fence.committed == [DECIDED, None]
        sending.cancel()

    asyncio.run(scene())
