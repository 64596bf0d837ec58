"""What all contracts share: which provider is tested, what it claims, how outcomes are told.

    class TestMine(BalancerContract):
        provider = "mine"

Outcomes are pass, fail and not claimed. A test that ``claims`` a capability which the provider's
description does not
have ends as not claimed: it is counted and listed. ``known_gaps`` holds failures that the author
knows of; a gap that has closed fails until it is taken out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import msgspec
import pytest

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import ContractError, did_you_mean
from gcore_core.contract.factories import import_attribute
from gcore_core.contract.providers import Provider

T = TypeVar("T", bound=Callable[..., Any])


class NotClaimed(pytest.skip.Exception):  # type: ignore[name-defined, misc]
    """Ends a test as not claimed; the message says what is not."""


def claims(capability: str) -> Callable[[T], T]:
    """Marks a test that holds a provider to a claim; where nobody claims it, the outcome is not
    claimed.
    """

    def mark(test: T) -> T:
        test.capability = capability  # type: ignore[attr-defined]
        return test

    return mark


class Contract:
    """Base of every contract; a plugin may derive contracts for kinds of its own.

    provider: what ``use:`` says ("torch", "core/varied"), or a description. It may stay None when
        the fixture that gives the tested object is overridden; ``capabilities`` then says what that
        object claims.
    config: settings under which the provider is made. tolerance: what the contract's comparisons of
        numbers allow.
    known_gaps: name of a test, or of one of its cases ("test_x[case]") -> why it fails, with a link
        where there is one.
    """

    kind: ClassVar[str] = ""
    provider: ClassVar[str | Provider | None] = None
    config: ClassVar[Mapping[str, Any]] = {}
    capabilities: ClassVar[frozenset[str] | None] = None
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
        from gcore_core.testing.pytest_plugin import show_outcomes

        show_outcomes(request.config)
        for name in (request.node.name, request.function.__name__):
            if name in self.known_gaps:
                request.node.add_marker(
                    pytest.mark.xfail(reason=self.known_gaps[name], strict=True)
                )
        capability = getattr(request.function, "capability", "")
        if capability and capability not in self.claimed():
            self.not_claimed(capability)

    @classmethod
    def not_claimed(cls, what: str) -> NoReturn:
        raise NotClaimed(f"not claimed: {what}")

    @classmethod
    def claimed(cls) -> frozenset[str]:
        """The capabilities in the provider's description, or those that the class names."""
        if cls.capabilities is not None:
            return cls.capabilities
        return frozenset() if cls.provider is None else cls.description().capabilities

    @classmethod
    def description(cls, kind: str = "") -> Provider:
        """What the provider says of itself; an installed plugin is loaded as a run would load
        it.
        """
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
        """Makes the tested object as a worker would; ``changes`` are further settings."""
        return make(self.description(), {**self.config, **changes}, *args)

    @pytest.fixture
    def model(self) -> Mapping[str, Any]:
        """The ``model:`` mapping of the role, for backends that need one."""
        return {}

    @pytest.fixture
    def context(self, model: Mapping[str, Any], tmp_path: Path) -> WorkerContext:
        return WorkerContext(
            role="contract", deterministic=True, steps=100, model=model, directory=str(tmp_path)
        )


def described(provider: str | Provider, kind: str) -> Provider:
    """The description that ``use: provider`` names for a kind."""
    if isinstance(provider, Provider):
        return provider
    from gcore_core.config import catalog
    from gcore_core.config.plugins import Plugins

    plugin = provider.partition("/")[0]
    plugins = Plugins()
    plugins.load(catalog.scan().get(plugin, where=provider))
    return plugins.resolve(kind, provider, where=provider).spec


def make(spec: Provider, settings: Mapping[str, Any], *args: Any) -> Any:
    """Calls the factory with its own config object."""
    config = None if spec.config is None else msgspec.convert(dict(settings), spec.config)
    return import_attribute(spec.factory)(config, *args)


def closing(backend: Any) -> Iterator[Any]:
    """Gives a fixture's backend and closes it, if it can be closed."""
    yield backend
    close = getattr(backend, "close", None)
    if close is not None:
        close()
