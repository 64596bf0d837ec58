"""Answers what Inspect asks by the generator of the plugin torch.

Inspect asks many samples at once, each in a coroutine that waits for its answer. Here each of these
that is awake advances all answers by a token, and then lets the others go on. So all answers are
sampled together, without a thread.
"""

from __future__ import annotations

import os
from itertools import count
from typing import Any

import anyio
from gcore_language.prompts import decode, load_tokenizer
from inspect_ai.model import (
    ChatMessage,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    modelapi,
)
from inspect_ai.tool import ToolChoice, ToolInfo

from gcore_core.contract.context import WorkerContext
from gcore_core.contract.errors import DataError
from gcore_core.contract.factories import import_attribute
from gcore_core.contract.generator import Finished, SampleRequest
from gcore_core.contract.records import FAILED, FINISHED, Prompt
from gcore_core.kits.commands import Plugins, catalog

#: Its name in Inspect, in front of a model's.
PROVIDER = "gcore"
_NO_CONFIG = GenerateConfig()
#: The plugin whose generator answers.
_PLUGIN = "torch"
#: Settings that the generator does not take for one question.
_UNHEARD = ("best_of", "frequency_penalty", "logit_bias", "presence_penalty", "top_k", "top_p")
#: A question waits so long for others, whose prompts are read together with its own.
_GATHER_S = 0.05


@modelapi(name=PROVIDER)
class Answers(ModelAPI):  # type: ignore[misc]
    """A model in Hugging Face layout that answers texts and chats; Inspect's provider "gcore".

    model_name: what Inspect calls it.
    path: its directory, or its name on the hub.
    chats: whether questions go through the chat template; else the text of all messages is shown.
    device: as torch names it; "": the first GPU, or the CPU.
    config: of all questions: max_tokens, temperature (None: 0) and seed.
    batch: answers at a time.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = _NO_CONFIG,
        *,
        path: str,
        chats: bool,
        device: str,
        batch: int,
    ) -> None:
        super().__init__(model_name, base_url, api_key, config=config)
        kind, _, number = device.partition(":")
        plugins = Plugins()
        plugins.load(catalog.scan().get(_PLUGIN, where=""))
        spec = plugins.resolve("generator", _PLUGIN, where="").spec
        assert spec.config is not None  # torch has settings
        settings = spec.config(
            max_new_tokens=config.max_tokens or 1,
            temperature=config.temperature or 1.0,
            max_batch=batch,
            device=kind or "auto",
        )
        context = WorkerContext(
            role="eval",
            model={"path": path},
            devices=(int(number or 0),),
            threads=len(os.sched_getaffinity(0)),
        )
        self._generator: Any = import_attribute(spec.factory)(settings, context)
        self._tokenizer = load_tokenizer(path, None)
        self._chats = chats
        self._temperature = config.temperature or 0
        self._max_tokens = config.max_tokens or 1
        self._numbers = count()
        self._ended: dict[int, Finished] = {}

    async def generate(
        self,
        input: list[ChatMessage],  # noqa: A002 - Inspect's name
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        """Returns one answer. Raises DataError for a question that the model cannot be asked."""
        if tools:
            raise DataError(
                "this model calls no tools.", where="g-core eval", todo="take tasks without tools"
            )
        self._refuse_settings(config)
        number = next(self._numbers)
        request = SampleRequest(
            ordinal=number,
            sample=0,
            seed=(config.seed or 0) + number,
            prompt=self._prompt(number, input),
            greedy=not config.temperature,
        )
        self._generator.submit([request])
        try:
            await anyio.sleep(_GATHER_S)
            while number not in self._ended:
                self._ended |= {one.request.ordinal: one for one in self._generator.step()}
                await anyio.sleep(0)
        except BaseException:
            self._generator.abort([(number, 0)])
            raise
        return self._output(self._ended.pop(number), config)

    async def aclose(self) -> None:
        """Ends what is being answered."""
        self._generator.close()

    def _refuse_settings(self, config: GenerateConfig) -> None:
        """Raises DataError for settings of a task that would be ignored."""
        asked = {name: getattr(config, name) for name in _UNHEARD}
        asked["num_choices"] = None if config.num_choices == 1 else config.num_choices
        unheard = sorted(name for name, value in asked.items() if value is not None)
        if config.temperature not in (None, 0, self._temperature):
            unheard.append(f"temperature={config.temperature}")
        if (config.max_tokens or 0) > self._max_tokens:
            unheard.append(f"max_tokens={config.max_tokens}")
        if unheard:
            raise DataError(
                f"the task sets {', '.join(unheard)}, which this model does not follow.",
                where="g-core eval",
                todo="leave them out; --temperature and --max-tokens set these of all tasks",
            )

    def _prompt(self, number: int, messages: list[ChatMessage]) -> Prompt:
        for message in messages:
            if not isinstance(message.content, str) and any(
                part.type not in ("text", "reasoning") for part in message.content
            ):
                raise DataError(
                    "this model reads texts alone.",
                    where="g-core eval",
                    why=f"a message has a part that is none: {message.content!r:.200}",
                )
        if not self._chats:
            return Prompt(row=number, text="".join(message.text for message in messages))
        turns = [{"role": message.role, "content": message.text} for message in messages]
        return Prompt(row=number, messages=turns)

    def _output(self, ended: Finished, config: GenerateConfig) -> ModelOutput:
        if ended.status == FAILED:
            if ended.reason.startswith("prompt_too_long"):
                return ModelOutput.from_content(self.model_name, "", stop_reason="model_length")
            raise DataError(
                f"a question cannot be asked: {ended.reason}.",
                where=f"g-core eval of {self.model_name}",
            )
        drawn = ended.columns["action_ids"]
        actions = drawn[: config.max_tokens]  # a task may ask for less than the generator draws
        (text,) = decode(self._tokenizer, [actions.tolist()])
        is_whole = ended.status == FINISHED and len(actions) == len(drawn)
        stop = "stop" if is_whole else "max_tokens"
        for word in config.stop_seqs or ():
            before, found, _ = text.partition(word)
            text, stop = before, "stop" if found else stop
        output = ModelOutput.from_content(self.model_name, text, stop_reason=stop)
        asked, answered = len(ended.columns["prompt_ids"]), len(actions)
        output.usage = ModelUsage(
            input_tokens=asked, output_tokens=answered, total_tokens=asked + answered
        )
        return output
