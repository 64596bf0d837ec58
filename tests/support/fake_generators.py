"""What contracts of generators share when they are held against generators with a fault."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from gcore_testing import fake
from gcore_testing.fake import FakeGenerator

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.records import TensorSpec
from gcore_core.contract.traits import Traits


class OfBackend:
    """Tests the class ``Backend``.

    caught_by: tests that it must fail, and no others.
    """

    traits: ClassVar[Traits] = fake.AbleGeneratorConfig().traits()
    caught_by: ClassVar[tuple[str, ...]] = ()
    Backend: ClassVar[type[FakeGenerator]] = FakeGenerator

    @pytest.fixture
    def generator(self, context: WorkerContext) -> FakeGenerator:
        return self.Backend(fake.FakeGeneratorConfig(), context)

    @pytest.fixture
    def weights(self) -> list[tuple[TensorSpec, np.ndarray]]:
        return list(fake.tensors_of(fake.initial_logits(0)))
