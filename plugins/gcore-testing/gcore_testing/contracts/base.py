"""The base of all contracts: which provider is tested, what it claims, and how tests end.

    class TestMine(BalancerContract):
        provider = "mine"

A test passes, fails or is not claimed. It ends as not claimed when it ``claims`` a trait that
the provider's description does not have; such tests are counted and listed. ``known_gaps`` names
failures that the author knows of. A gap that has closed fails until it is removed from there.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import msgspec
import pytest

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ContractError, did_you_mean
from gcore_core.contract.factories import import_attribute
from gcore_core.contract.providers import Provider
from gcore_core.contract.traits import Traits, traits_of

T = TypeVar("T", bound=Callable[..., Any])


class NotClaimed(pytest.skip.Exception):  # type: ignore[name-defined, misc]
    """Ends a test as not claimed. The message names what is not claimed."""


def claims(trait: str) -> Callable[[T], T]:
    """Marks a test of a trait; it ends as not claimed when the provider does not claim it."""
    getattr(Traits(), trait)  # so that a misspelt one is no test that never runs

    def mark(test: T) -> T:
        test.trait = trait  # type: ignore[attr-defined]
        return test

    return mark


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Has a test that is a coroutine run in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        async def go() -> None:
            await test(*args, **fixtures)

        asyncio.run(go())

    return run


class Contract:
    """The base of every contract. A plugin may derive contracts for kinds of its own.

    kind: the kind of provider that is tested.
    provider: what ``use:`` says ("torch", "core/varied"), or a description. It may stay None when
        the fixture that gives the tested object is overridden.
    config: settings that the provider is made with.
    traits: what the tested object claims; None to ask the provider's config, with ``config``.
    tolerance: how much numbers may differ; each contract says of which and in what unit.
    known_gaps: name of a test, or of one of its cases ("test_x[case]") -> why it fails, with a link
        where there is one.
    """

    kind: ClassVar[str] = ""
    provider: ClassVar[str | Provider | None] = None
    config: ClassVar[Mapping[str, Any]] = {}
    traits: ClassVar[Traits | None] = None
    tolerance: ClassVar[float] = 0.0
    known_gaps: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        tests = [name for name in dir(cls) if name.startswith("test_")]
        for name in cls.known_gaps:
            if name.partition("[")[0] not in tests:
                raise ContractError(
                    (
                        f"known_gaps names {name!r}, which is no test of this "
                        f"contract{did_you_mean(name, tests)}."
                    ),
                    where=cls.__name__,
                    todo="take it out, or correct its name",
                )

    @pytest.fixture(autouse=True)
    def _outcome(self, request: pytest.FixtureRequest) -> None:
        """Prepares each test: its outcome is shown, a known gap has to fail, and a test of what is
        not claimed ends here.
        """
        from gcore_testing.pytest_plugin import show_outcomes

        show_outcomes(request.config)
        for name in (request.node.name, request.function.__name__):
            if name in self.known_gaps:
                request.node.add_marker(
                    pytest.mark.xfail(reason=self.known_gaps[name], strict=True)
                )
        trait = getattr(request.function, "trait", "")
        if trait and not getattr(self.claimed(), trait):
            self.not_claimed(trait)

    @classmethod
    def not_claimed(cls, what: str) -> NoReturn:
        raise NotClaimed(f"not claimed: {what}")

    @classmethod
    def claimed(cls) -> Traits:
        """Returns the traits that the class names, or those of the provider's config."""
        if cls.traits is not None:
            return cls.traits
        if cls.provider is None:
            return Traits()
        return traits_of(config_of(cls.description(), cls.config))

    @classmethod
    def description(cls, kind: str = "") -> Provider:
        """Returns the provider's description; an installed plugin is loaded as a run loads it."""
        if cls.provider is None:
            raise ContractError(
                f"{cls.__name__} says neither which provider it tests nor how to make it.",
                todo=(
                    'set provider = "<plugin>", or override the fixture that gives the tested '
                    "object"
                ),
            )
        return described(cls.provider, kind or cls.kind)

    def build(self, *args: Any, **changes: Any) -> Any:
        """Makes the tested object as a worker would.

        args: passed to the factory after the config.
        changes: settings that are added to ``config``.
        """
        return make(self.description(), {**self.config, **changes}, *args)

    @pytest.fixture
    def model(self) -> Mapping[str, Any]:
        """Gives the ``model:`` mapping of the role, for backends that need one."""
        return {}

    @pytest.fixture
    def context(self, model: Mapping[str, Any], tmp_path: Path) -> WorkerContext:
        return WorkerContext(
            role="contract", deterministic=True, steps=100, model=model, directory=str(tmp_path)
        )


def described(provider: str | Provider, kind: str) -> Provider:
    """Returns the description that ``use: provider`` names for a kind."""
    if isinstance(provider, Provider):
        return provider
    from gcore_core.config import catalog
    from gcore_core.config.plugins import Plugins

    plugin = provider.partition("/")[0]
    plugins = Plugins()
    plugins.load(catalog.scan().get(plugin, where=provider))
    return plugins.resolve(kind, provider, where=provider).spec


def make(spec: Provider, settings: Mapping[str, Any], *args: Any) -> Any:
    """Calls a provider's factory with its own config object, made of ``settings``."""
    return import_attribute(spec.factory)(config_of(spec, settings), *args)


def config_of(spec: Provider, settings: Mapping[str, Any]) -> Any:
    """Returns a provider's own config object, made of ``settings``; None where it has no class."""
    return None if spec.config is None else msgspec.convert(dict(settings), spec.config)


def closing(backend: Any) -> Iterator[Any]:
    """Yields the backend for a fixture, and closes it afterwards if it can be closed."""
    yield backend
    close = getattr(backend, "close", None)
    if close is not None:
        close()
