"""The contract of a launcher: its site's agent answers, and closing leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gcore_core.contract.launching import Launcher, Site
from gcore_core.runtime.messages import METER, USAGE, MeterRequest, Nothing
from gcore_core.runtime.rpc.service import Service
from gcore_core.testing.contracts.base import Contract

NAMES = ["controller.0", "policy.0", "rollout.0"]


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

    def test_the_agent_of_a_site_answers(self, launcher: Any, logs: Path) -> None:
        async def look(site: Site) -> None:
            usage = await site.agent.call(USAGE, Nothing(), deadline_s=60)
            assert usage.memory_mib, "the agent knows of no process"
            assert all(mib > 0 for mib in usage.memory_mib.values())

        visit(launcher, logs, look)

    def test_the_agent_of_a_site_reads_a_meter(self, launcher: Any, logs: Path) -> None:
        """Devices of workers that do not live there are left out; the clock goes on."""
        request = MeterRequest("gcore_core.testing.fake:FakeMeter", {"nobody.0": [0]})

        async def look(site: Site) -> None:
            before = await site.agent.call(METER, request, deadline_s=60)
            after = await site.agent.call(METER, request, deadline_s=60)
            assert before.used_s == after.used_s == {}
            assert before.clock_s <= after.clock_s

        visit(launcher, logs, look)

    def test_every_process_has_an_address_of_its_own(self, launcher: Any, logs: Path) -> None:
        async def look(site: Site) -> None:
            assert set(NAMES) <= site.addresses.keys()
            assert len(set(site.addresses.values())) == len(site.addresses)

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
            assert site.meeting.is_dir()
            assert site.meeting.stat().st_mode & 0o077 == 0, "others may enter it"

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
        assert not site.store.exists(), "the store is still there"
        assert not site.meeting.exists(), "the meeting place is still there"


def visit(launcher: Any, logs: Path, look: Callable[[Site], Awaitable[None]]) -> None:
    """Opens a site, looks at it and closes it."""

    async def go() -> None:
        async with launcher.site(NAMES, Service("supervisor"), logs) as site:
            await look(site)

    asyncio.run(go())
