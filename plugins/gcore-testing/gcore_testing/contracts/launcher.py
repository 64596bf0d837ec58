"""The contract of a launcher: its site's agent answers, and closing leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gcore_core.contract import run_files
from gcore_core.contract.launching import ElasticLauncher, Launcher, Site
from gcore_core.contract.site_files import JobFiles
from gcore_core.runtime.messages import METER, USAGE, MeterRequest, Nothing
from gcore_core.wire.service import Service
from gcore_testing.contracts.base import Contract

#: Processes that each test places on a site; none of them is started.
NAMES = ["controller.0", "policy.0", "rollout.0"]
#: What each test asks for; enough for the names.
DEVICES = 2


class LauncherContract(Contract):
    """To test a launcher, override ``provider``, or the fixture ``launcher``.

    Each test opens a site for itself.
    """

    kind: ClassVar[str] = "launcher"

    @pytest.fixture
    def launcher(self) -> Any:
        return self.build()

    @pytest.fixture
    def logs(self, tmp_path: Path) -> Path:
        directory = tmp_path / "logs"
        directory.mkdir()
        return directory

    def test_it_is_a_launcher(self, launcher: Any) -> None:
        assert isinstance(launcher, Launcher)

    def test_it_says_which_nodes_there_are(self, launcher: Any) -> None:
        """Their names differ, and together they have the devices that were asked for."""
        nodes = asyncio.run(launcher.nodes(DEVICES))
        names = [node.name for node in nodes]
        assert nodes and len(set(names)) == len(names)
        assert sum(len(node.devices) for node in nodes) == DEVICES

    def test_it_finds_its_nodes_again(self, launcher: Any, logs: Path) -> None:
        """Only of an ``ElasticLauncher``. While none is missing it finds what ``nodes`` returns."""
        if not isinstance(launcher, ElasticLauncher):
            self.not_claimed("a run that goes on with fewer machines")

        async def go() -> None:
            first = await launcher.find_nodes(DEVICES, again=False)
            found = await launcher.find_nodes(DEVICES, again=True)
            assert first == found
            assert found.nodes == await launcher.nodes(DEVICES)
            assert not found.missing and not found.refusal
            names = [node.name for node in found.nodes]
            async with launcher.site(placed(names), Service("supervisor"), logs) as site:
                assert set(names) <= site.nodes.keys()

        asyncio.run(go())

    def test_the_agents_of_a_site_answer(self, launcher: Any, logs: Path) -> None:
        async def look(site: Site) -> None:
            assert site.home in site.nodes
            for node in site.nodes.values():
                usage = await node.agent.call(USAGE, Nothing(), deadline_s=60)
                assert usage.memory_mib, "the agent knows of no process"
                assert all(mib > 0 for mib in usage.memory_mib.values())

        visit(launcher, logs, look)

    def test_the_agent_of_a_site_reads_a_meter(self, launcher: Any, logs: Path) -> None:
        """Devices of workers that do not live there are left out; the clock goes on."""
        request = MeterRequest("gcore_testing.fake:FakeMeter", {"nobody.0": [0]})

        async def look(site: Site) -> None:
            agent = site.home_node.agent
            before = await agent.call(METER, request, deadline_s=60)
            after = await agent.call(METER, request, deadline_s=60)
            assert before.used_s == after.used_s == {}
            assert before.clock_s <= after.clock_s

        visit(launcher, logs, look)

    def test_files_go_to_every_node_and_come_back(self, launcher: Any, logs: Path) -> None:
        """Those of the job, and parts of checkpoints. On one disk all stay where they are."""
        run = logs.parent
        job = run / "job.yaml"
        job.write_text("run: {name: files}\n")
        part = run / run_files.CHECKPOINTS / "step-000001.partial" / "policy"

        async def look(site: Site) -> None:
            named = dict.fromkeys(site.nodes, frozenset({str(job)}))
            await site.files.provide(JobFiles(paths=named), lambda text, share: None)
            async with site.files.follow(run):
                part.mkdir(parents=True)
                await site.files.make(part)
                (part / "weights").write_bytes(b"trained")
                await site.files.collect(part.parent)
                assert (part / "weights").read_bytes() == b"trained"
                whole = part.parent.rename(part.parent.with_suffix(""))
                await site.files.send({whole / part.name: NAMES})
                await site.files.collect_all()
                assert (whole / part.name / "weights").read_bytes() == b"trained"
            assert job.read_text() == "run: {name: files}\n"

        visit(launcher, logs, look)

    def test_every_process_has_an_address_of_its_own(self, launcher: Any, logs: Path) -> None:
        async def look(site: Site) -> None:
            assert set(NAMES) <= site.where.keys()
            assert set(site.views) == set(site.nodes)
            for view in site.views.values():
                assert set(NAMES) <= view.keys()
                assert len(set(view.values())) == len(view)

        visit(launcher, logs, look)

    def test_every_process_is_where_it_was_to_be(self, launcher: Any, logs: Path) -> None:
        nodes = [node.name for node in asyncio.run(launcher.nodes(DEVICES))]

        async def look(site: Site) -> None:
            # The site has the machines now, so the launcher is not asked for them again.
            assert {name: site.where[name] for name in NAMES} == placed(nodes)

        visit(launcher, logs, look)

    def test_the_secret_is_new_for_each_site(self, launcher: Any, logs: Path) -> None:
        secrets = []

        async def look(site: Site) -> None:
            secrets.append(site.secret)

        visit(launcher, logs, look)
        visit(launcher, logs, look)
        assert all(len(secret) >= 16 for secret in secrets)
        assert secrets[0] != secrets[1]

    def test_where_ranks_meet_is_private(self, launcher: Any, logs: Path) -> None:
        async def look(site: Site) -> None:
            meeting = site.home_node.meeting
            assert meeting.is_dir()
            assert meeting.stat().st_mode & 0o077 == 0, "others may enter it"

        visit(launcher, logs, look)

    @pytest.mark.parametrize("ends", ["well", "with an error"])
    def test_nothing_is_left_behind(self, launcher: Any, logs: Path, ends: str) -> None:
        sites: list[Site] = []

        async def look(site: Site) -> None:
            sites.append(site)
            if ends == "with an error":
                raise KeyError("on purpose")

        if ends == "well":
            visit(launcher, logs, look)
        else:
            with pytest.raises(KeyError, match="on purpose"):
                visit(launcher, logs, look)
        (site,) = sites
        assert not site.home_node.store.exists(), "the store is still there"
        assert not site.home_node.meeting.exists(), "the meeting place is still there"

    def test_a_machine_that_is_let_go_is_not_of_the_next_site(
        self, launcher: Any, logs: Path
    ) -> None:
        """Only of a site whose nodes have ``let_go``. Until it is closed, the machine works on."""

        async def leave(site: Site) -> str:
            leaving = [name for name, node in site.nodes.items() if node.let_go is not None]
            if not leaving:
                self.not_claimed("a way to have a machine leave a run")
            assert site.home not in leaving, "the supervisor is there"
            node = site.nodes[leaving[0]]
            assert node.let_go is not None
            node.let_go()
            await node.agent.call(USAGE, Nothing(), deadline_s=60)
            return leaving[0]

        async def go() -> None:
            nodes = await launcher.nodes(DEVICES)
            names = [node.name for node in nodes]
            async with launcher.site(placed(names), Service("supervisor"), logs) as site:
                left = await leave(site)
            (host,) = [node.host for node in nodes if node.name == left]
            found = await launcher.find_nodes(DEVICES, again=True)
            assert host not in [node.host for node in found.nodes]
            assert host in found.missing

        asyncio.run(go())


def placed(nodes: list[str]) -> dict[str, str]:
    """Deals the processes to the nodes, in turn."""
    return {name: nodes[number % len(nodes)] for number, name in enumerate(NAMES)}


def visit(launcher: Any, logs: Path, look: Callable[[Site], Awaitable[None]]) -> None:
    """Opens a site, looks at it and closes it."""

    async def go() -> None:
        nodes = [node.name for node in await launcher.nodes(DEVICES)]
        async with launcher.site(placed(nodes), Service("supervisor"), logs) as site:
            await look(site)

    asyncio.run(go())
