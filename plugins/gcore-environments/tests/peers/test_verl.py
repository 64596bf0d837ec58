"""verl's own cases of continuous tokens, unchanged, on our renderer and book.

``$G_CORE_PEERS/verl`` has the file, of verl at 036a1675; nothing of verl is imported:

    git -C CLONE show 036a1675:tests/utils/test_continuous_token_on_cpu.py > \
        $G_CORE_PEERS/verl/test_continuous_token_on_cpu.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support import peers

HERE = Path(__file__).parent
FILE = "test_continuous_token_on_cpu.py"

_NAMES = "a chat template says where turns end; no model is known by its name"
_TOOLS = "the chat template writes a tool's answer; verl writes that of these families by hand"
_FORK = "a history that changes is another sequence, not an error"
_SHAPE = "the ids of tokens are those of the tokenizer, one each"
_ERRORS = "it is an error of the contract, in other words"
#: Case -> why it is other by design. All cases that are not named here are equal.
OTHER = {
    "builtin_family_surface": _NAMES,
    "builtin_family_class_mapping": _NAMES,
    "auto_family_inference": _NAMES,
    "auto_family_inference_uses_tokenizer_name": _NAMES,
    "auto_family_inference_uses_tokenizer_init_kwargs_name": _NAMES,
    "explicit_family_is_not_rewritten": _NAMES,
    "auto_family_resolution_uses_tokenizer_name_or_path": _NAMES,
    "auto_family_is_resolved_at_factory_time": _NAMES,
    "unknown_family_fails_during_resolution": _NAMES,
    "empty_family_fails_during_resolution": _NAMES,
    "continuous_token_rollout_config_validates_model_family": _NAMES,
    "default_builder_creation_forwards_kwargs": "any role may be appended",
    "builder_rejects_unsupported_append_roles": "any role may be appended; it is given, mask 0",
    "builder_forwards_template_kwargs_and_tools_when_rendering_initial_prompt": (
        "the template gets a copy of the tools"
    ),
    "gemma4_builder_formats_tool_response_by_position_with_warning": _TOOLS,
    "gpt_oss_builder_formats_tool_responses_with_resolved_tool_name": _TOOLS,
    "gpt_oss_builder_prefers_tool_message_name_over_context_id": _TOOLS,
    "gpt_oss_builder_formats_multiple_tool_responses_by_position_with_warning": _TOOLS,
    "gpt_oss_builder_rejects_ambiguous_positional_tool_name_resolution": _TOOLS,
    "gpt_oss_builder_does_not_use_older_assistant_tool_calls_for_position": _TOOLS,
    "strict_tool_name_builders_reject_split_positional_tool_groups": _TOOLS,
    "default_builder_builds_dummy_assistant_from_tool_messages_only": (
        "the stand-in's calls have other names"
    ),
    "default_builder_tokenizes_system_and_user_appends_with_generation_prompt": (
        "the line break that the template writes behind the policy's turn is given; verl, whose "
        "class of the family does not know it, leaves it out"
    ),
    "default_builder_rejects_multi_message_user_or_system_groups": "verl's own grouping",
    "subclass_only_overrides_token_level_merge_hook": "verl's own hook",
    "assistant_alignment_validates_logprobs": _ERRORS,
    "alignment_rejects_unknown_merge_kind": _ERRORS,
    "default_builder_rejects_mutated_message_prefix": _FORK,
    "default_builder_returns_empty_delta_when_no_message_is_appended": (
        "who asks again without a message begins another turn"
    ),
    "model_specific_builders_validate_required_special_tokens": _SHAPE,
    "model_specific_builders_validate_special_token_id_shape": _SHAPE,
}
EQUAL = {
    "builder_align_response_metadata_handles_inserted_boundary_tokens",
    "default_builder_appends_assistant_tokens_to_runtime_stream",
    "default_builder_is_available_from_builtin_registry",
    "default_builder_merges_append_only_non_assistant_messages",
    "default_builder_rejects_non_prefix_stable_template_deltas",
    "gemma4_builder_does_not_duplicate_existing_tool_response_boundary",
    "gemma4_builder_inserts_tool_response_boundary_for_appended_messages",
    "glm47_builder_removes_ambiguous_boundary_token",
    "minimax_builder_inserts_missing_newline_after_eos",
    "non_assistant_alignment_handles_boundary_inserts_and_trims",
    "qwen35_builder_uses_qwen3_newline_boundary_logic",
    "qwen3_builder_inserts_missing_newline_after_im_end",
}


def test_verls_cases_are_equal_or_other_by_design(tmp_path: Path) -> None:
    file = Path(os.environ.get(peers.FOLDER, "")) / "verl" / FILE
    if peers.FOLDER not in os.environ or not file.is_file():
        pytest.skip(f"needs {FILE} of verl in a folder verl below ${peers.FOLDER}")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    options = ["-q", "-rA", "--tb=no", "-p", "no:cacheprovider", "-p", "verl_adapter"]
    options += ["-c", str(tmp_path / "pytest.ini"), "--rootdir", str(file.parent)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(file)],
        env={**os.environ, "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    found = re.findall(r"^(PASSED|FAILED|ERROR) \S*::test_([a-z0-9_]+)", done.stdout, re.MULTILINE)
    assert len(found) == 86, done.stdout[-2000:] + done.stderr[-2000:]
    passed = Counter(name for outcome, name in found if outcome == "PASSED")
    other = Counter(name for outcome, name in found if outcome != "PASSED")
    assert set(other) == set(OTHER)
    assert set(passed) == EQUAL
