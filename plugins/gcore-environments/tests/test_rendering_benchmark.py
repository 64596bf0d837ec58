"""benchmarks/rendering.py in short: what it counts on templates that are known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from gcore_environments import testing

SCRIPT = Path(__file__).parents[3] / "benchmarks/rendering.py"


def test_the_benchmark_tells_bridges_from_forks_and_forges_nothing(tmp_path: Path) -> None:
    """ChatML has bridges; the one that strips thoughts from old turns has them where kept."""
    for name in ("CHATML", "STRIPPING"):
        (tmp_path / f"{name.lower()}.jinja").write_text(getattr(testing, name))
    words = ["--templates", tmp_path, "--rounds", "2", "--conversations", "3", "--json"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *words], capture_output=True, text=True, check=True
    )
    result = json.loads(done.stdout)
    claims = [*result["claims"], *result["details"]]
    values = {claim["name"]: claim["value"] for claim in claims}
    assert values["templates"] == values["templates_attacked"] == 2
    assert values["strict_differs"] == values["keep_declined_user"] == 0
    assert values["turns_attacked"] >= 6
    assert values["forged_special_ids"] == values["old_ids_changed"] == 0
