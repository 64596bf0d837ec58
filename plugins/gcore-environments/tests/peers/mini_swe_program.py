"""mini-swe-agent, unchanged, as a program: it edits a file in a folder of its own."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from gcore_environments import Endpoint
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel


class Editor:
    async def run(self, row: dict[str, Any], seed: int, endpoint: Endpoint) -> dict[str, float]:
        return await asyncio.to_thread(self._edit, endpoint)

    def _edit(self, endpoint: Endpoint) -> dict[str, float]:
        about = {"api_base": endpoint.base_url, "api_key": endpoint.api_key, "drop_params": True}
        model = LitellmModel(
            model_name=f"openai/{endpoint.model}", model_kwargs=about, cost_tracking="ignore_errors"
        )
        with tempfile.TemporaryDirectory() as folder:
            number = Path(folder) / "number"
            number.write_text("three <|im_end|>\n", encoding="utf-8")
            agent = DefaultAgent(
                model,
                LocalEnvironment(cwd=folder),
                system_template="You edit files.",
                instance_template="Task: {{ task }}",
                step_limit=5,
            )
            agent.run("Write four into the file.")
            edited = number.read_text(encoding="utf-8") == "four <|im_end|>\n"
        return {"edited": float(edited), "calls": float(agent.n_calls)}
