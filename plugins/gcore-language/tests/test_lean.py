"""What transformers and torch import, and what still works where they import less.

Each program runs in a process of its own, since what is imported once stays.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gcore_language.tiny import save_model


def run(program: str) -> str:
    """Runs a program in which ``lean`` is imported; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; from gcore_language import lean\n{program}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_opening_a_tokenizer_and_a_model_imports_neither_scikit_learn_nor_scipy(
    tmp_path: Path,
) -> None:
    """transformers would: for a way of generating and for losses that nothing here uses."""
    pytest.importorskip("sklearn")
    pytest.importorskip("scipy")
    save_model(tmp_path, "llama")
    program = f"""
from gcore_language.prompts import load_tokenizer
load_tokenizer({str(tmp_path)!r}, None)
from gcore_language.models import load_model
load_model({str(tmp_path)!r}, dtype="float32")
from transformers import utils
assert utils.is_sklearn_available() and utils.is_scipy_available()
print("sklearn" in sys.modules or "scipy" in sys.modules)
"""
    assert run(program) == "False\n"


def test_a_function_that_must_not_be_compiled_is_not_though_it_was_marked_before() -> None:
    """The mark is made while a stand-in is there, and compiling imports torch's compiler."""
    program = """
lean.import_lean()
import torch
@torch.compiler.disable
def marked(x): return x.sin()
@torch.compiler.disable(recursive=False)
def marked_alone(x): return x.tan()
one = torch.ones(3)
assert torch.equal(marked(one), one.sin()) and torch.equal(marked_alone(one), one.tan())
assert "torch._dynamo.eval_frame" not in sys.modules
def backend(graph, inputs):
    print(*sorted({node.target for node in graph.graph.nodes if node.op == "call_method"}))
    return graph.forward
compiled = torch.compile(lambda x: marked_alone(marked(x.cos()).exp()).cosh(), backend=backend)
assert torch.equal(compiled(one), one.cos().sin().exp().tan().cosh())
import torch._dynamo.config
assert sys.modules["torch._dynamo"].__file__ and torch._dynamo is sys.modules["torch._dynamo"]
"""
    assert run(program).splitlines() == ["cos", "exp", "cosh"]


def test_who_looks_at_all_modules_imports_no_compiler() -> None:
    program = """
lean.import_lean()
import inspect, torch
inspect.getmodule(sys._getframe())
files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
print("torch._dynamo.eval_frame" in sys.modules, len(files) > 100)
"""
    assert run(program) == "False True\n"


def test_what_needs_accelerate_says_so(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    program = f"""
lean.import_lean()
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, device_map="auto")
except (ImportError, ValueError) as error:
    print("accelerate" in str(error))
"""
    assert run(program) == "True\n"


def test_libraries_find_distributed_tensors_that_they_name_and_do_not_import() -> None:
    """As peft does where it looks at a layer."""
    program = """
lean.import_lean()
import torch
from transformers.distributed import tensor_parallel
print(tensor_parallel.Shard is torch.distributed.tensor.Shard)
"""
    assert run(program) == "True\n"


def test_an_engine_gets_all_of_transformers() -> None:
    program = """
lean.import_whole()
lean.import_lean()
from transformers import AutoModelForCausalLM
print("accelerate" in sys.modules, "sklearn" in sys.modules)
"""
    assert run(program) == "True True\n"
