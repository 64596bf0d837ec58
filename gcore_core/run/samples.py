"""Makes the rows of samples that show a few evaluated records to a person."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from gcore_core.contract.dataset import Dataset
from gcore_core.contract.records import Header
from gcore_core.runtime.main_thread import in_main_thread
from gcore_core.store.client import StoreReader


async def shown_rows(
    headers: Iterable[Header], reader: StoreReader, dataset: Dataset
) -> list[dict[str, Any]]:
    """Returns the rows of ``samples/step_*.jsonl``.

    A row has prompt, text, rewards, mode ("greedy" or "sampled") and status. A record with pictures
    has ``arrays`` too: name -> each column or medium that is uint8[H, W, C]. Records without
    columns are left out.
    """
    shown = [header for header in headers if header.columns is not None]
    contents = await reader.records(shown)
    prompts = in_main_thread(lambda: [dataset[header.row] for header in shown])
    rows = []
    for header, prompt, (columns, media) in zip(shown, prompts, contents, strict=True):
        pictures = {
            n: a for n, a in {**columns, **media}.items() if a.dtype == np.uint8 and a.ndim == 3
        }
        text = columns["text"].tobytes().decode("utf-8", "replace") if "text" in columns else ""
        row: dict[str, Any] = {
            "prompt": prompt.text if prompt.text is not None else prompt.messages,
            "text": text,
            "rewards": header.rewards,
            # An evaluation draws row r as ordinal -(2r + 1), greedily, and as -(2r + 2), sampled.
            "mode": ("greedy", "sampled")[(-header.ordinal - 1) % 2],
            "status": header.status,
        }
        rows.append(row | ({"arrays": pictures} if pictures else {}))
    return rows
