"""Prompts: a conversation through the model's chat template, or text, to token ids."""

import json
import reprlib
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateSyntaxError

from irminsul.errors import CheckpointError
from irminsul.server.detokenize import Tokenizer
from irminsul.server.protocol import ChatMessage, RequestError
from irminsul.template_errors import COMPILING_ERRORS

_PROBE_KEY, _PROBE_VALUE = "irminsul_probe", "7"


class PromptEncoder:
    """Makes token ids of prompts. Encoding a long prompt takes a while; one call at a time.

    A chat template that does not compile, or shows nothing of a conversation, is a CheckpointError.

    Args:
        tokenizer: with a chat template, unless only /v1/completions is to work.
        max_tokens: prompts that cannot fit into so many are refused before they are encoded; None: all are encoded.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        # No token covers more characters than its spelling has, byte-level spellings included.
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        _refuse_broken_template(tokenizer)
        self._arguments_as_objects = _wants_argument_objects(tokenizer)

    def text(self, text: str) -> tuple[int, ...]:
        """Encode plain text, with the special tokens that the tokenizer puts around it."""
        return self._encode(text, param="prompt", add_special_tokens=True)

    def chat(
        self, messages: Sequence[ChatMessage], tools: list[dict[str, Any]] | None, tool_choice: str | None
    ) -> tuple[int, ...]:
        """Render a conversation and encode it, up to where the assistant's answer begins.

        Args:
            messages: the turns.
            tools: shown to the model as they are; None shows none.
            tool_choice: a variable of the template.

        Returns:
            Token ids.

        Raises:
            RequestError: there is no chat template, or it cannot render this conversation.
        """
        if not self._tokenizer.chat_template:
            raise RequestError("this model has no chat template; use /v1/completions")
        conversation = [self._template_message(message, at) for at, message in enumerate(messages)]
        try:
            text = self._tokenizer.apply_chat_template(
                conversation, tools=tools, add_generation_prompt=True, tokenize=False, tool_choice=tool_choice
            )
        except COMPILING_ERRORS as error:
            reason = str(error) or "not enough memory"
            raise RequestError(f"the chat template cannot render this: {reason}", param="messages") from error
        # The template has written the special tokens itself.
        return self._encode(text, param="messages", add_special_tokens=False)

    def _encode(self, text: str, *, param: str, add_special_tokens: bool) -> tuple[int, ...]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError(f"{param} holds half of a surrogate pair, which is not text", param=param) from None
        if self._max_tokens is not None and len(text) > self._max_tokens * self._longest_token:
            raise RequestError(
                f"{param} has {len(text)} characters, more than {self._max_tokens} tokens of this server can hold",
                param=param,
                code="context_length_exceeded",
            )
        return tuple(self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    def _template_message(self, message: ChatMessage, at: int) -> dict[str, Any]:
        fields = message.model_dump(exclude_none=True)
        if self._arguments_as_objects:
            for index, call in enumerate(fields.get("tool_calls", ())):
                where = f"messages[{at}].tool_calls[{index}].function.arguments"
                call["function"]["arguments"] = _parsed_object(call["function"]["arguments"], where)
        return fields


def _parsed_object(arguments: str, where: str) -> dict[str, Any]:
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} is not JSON: {error}", param=where) from error
    if not isinstance(parsed, dict):
        raise RequestError(f"{where} must be a JSON object", param=where)
    return parsed


def _refuse_broken_template(tokenizer: Tokenizer) -> None:
    if tokenizer.chat_template:
        rendered = _rendered_probe(tokenizer, [{"role": "user", "content": _PROBE_KEY}])
        if rendered and _PROBE_KEY not in rendered:
            raise CheckpointError(f"the chat template shows nothing of a conversation: {reprlib.repr(rendered)}")


def _wants_argument_objects(tokenizer: Tokenizer) -> bool:
    """Whether the template wants a tool call's arguments as an object, rather than as JSON text as OpenAI sends them.

    Templates differ, and do not say: DeepSeek's concatenate text, Qwen's apply ``tojson``. So both forms are rendered
    once; the right one shows the arguments as JSON, neither quoted twice nor as Python writes a dictionary.
    """
    if not tokenizer.chat_template:
        return False
    arguments = {_PROBE_KEY: _PROBE_VALUE}
    as_object, as_text = (_rendered_probe(tokenizer, _calling(form)) for form in (arguments, json.dumps(arguments)))
    wanted = f'"{_PROBE_KEY}"'
    return wanted in as_object and wanted not in as_text


def _calling(arguments: object) -> list[dict[str, Any]]:
    function = {"name": "probe", "arguments": arguments}
    return [
        {"role": "user", "content": "-"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "-"},
    ]


def _rendered_probe(tokenizer: Tokenizer, conversation: list[dict[str, Any]]) -> str:
    """Render a conversation that the template may refuse; nothing if it does."""
    try:
        rendered = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    except TemplateSyntaxError as error:
        raise CheckpointError(f"the chat template does not compile: line {error.lineno}: {error.message}") from error
    except COMPILING_ERRORS:
        return ""
    assert isinstance(rendered, str), type(rendered)
    return rendered
