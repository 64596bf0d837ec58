"""Models are opened in two places alone, which know what was not found, not used and not finite.

transformers and diffusers fill in random numbers for what files lack, and say so in a log.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHIPPED = [
    path
    for folder in ("gcore_core", "plugins", "contrib")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not {"tests", "build"} & set(path.relative_to(ROOT).parts)
]
#: What has no weights.
LIGHT = {"AutoConfig", "AutoTokenizer", "AutoImageProcessor", "GenerationConfig"}
#: File -> why it may.
ALLOWED = {
    "plugins/gcore-language/gcore_language/pretrained.py": "models of transformers",
    "plugins/gcore-diffusion/gcore_diffusion/components.py": "models of diffusers",
    "plugins/gcore-diffusion/gcore_diffusion/pipelines.py": "a pipeline, which gets its models",
    "plugins/gcore-language/gcore_language/testing.py": "what an engine is compared with in tests",
}


def openings(tree: ast.Module) -> Iterator[str]:
    """What each ``from_pretrained`` is called on, other than what has no weights."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "from_pretrained":
            owner = ast.unparse(node.value)
            if owner not in LIGHT:
                yield owner


def test_models_are_opened_by_the_functions_that_look_at_their_weights() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in SHIPPED
        if list(openings(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert found == ALLOWED.keys()


def test_an_opening_is_found_whatever_it_is_called_on() -> None:
    tree = ast.parse("kind.from_pretrained(a)\nAutoConfig.from_pretrained(b)\nf().from_pretrained")
    assert sorted(openings(tree)) == ["f()", "kind"]
