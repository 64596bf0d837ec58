import numpy as np
import pytest
from gcore_testing import GeneratorContract

from gcore_example.letters import TENSORS


class TestLetters(GeneratorContract):
    provider = "example"

    @pytest.fixture
    def weights(self):
        return [(spec, np.zeros(spec.nbytes, np.uint8)) for spec in TENSORS]
