"""What the demo sends: the token ids of its own conversations or of real logs, as the server would encode them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pydantic import ValidationError

from irminsul.demo.scenarios import DemoRequest, demo_requests
from irminsul.errors import InputError
from irminsul.server.chat import PromptEncoder
from irminsul.server.detokenize import Tokenizer
from irminsul.server.protocol import ChatBody
from irminsul.trace.delta import read_trace


@dataclass(frozen=True)
class Prompt:
    """One request as token ids; requests of one scenario share a namespace."""

    scenario: str
    token_ids: tuple[int, ...]


def scenario_prompts(tokenizer: Tokenizer) -> Iterator[Prompt]:
    """Encode the demo's own conversations.

    Raises:
        InputError: the tokenizer has no chat template, or it cannot render tools.
    """
    return encode(demo_requests(), tokenizer)


def trace_prompts(paths: Sequence[Path], limit: int, tokenizer: Tokenizer) -> Iterator[Prompt]:
    """Encode the first ``limit`` calls of each log; each file is a scenario.

    Raises:
        InputError: two files have one name, a log cannot be read (see read_trace), or a call cannot be rendered.
    """
    names = [path.name.partition(".jsonl")[0] for path in paths]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two traces are named {name!r}; rename one, because each file is a row of the table")
    for name, path in zip(names, paths, strict=True):
        calls = (DemoRequest(name, call.messages, call.tools) for call in islice(read_trace(path), limit))
        yield from encode(calls, tokenizer)


def encode(requests: Iterator[DemoRequest] | Sequence[DemoRequest], tokenizer: Tokenizer) -> Iterator[Prompt]:
    """Render each request through the tokenizer's chat template, up to where the assistant's answer begins.

    Raises:
        InputError: says which request cannot be rendered, and why.
    """
    encoder = PromptEncoder(tokenizer)
    for number, request in enumerate(requests, start=1):
        try:
            body = ChatBody.model_validate({"model": "", "messages": [*request.messages], "tools": _list(request)})
            token_ids = encoder.chat(body.messages, body.tools, None)
        except ValidationError as error:
            fault = error.errors()[0]
            where = ".".join(str(part) for part in fault["loc"])
            raise InputError(f"request {number} of {request.scenario}: {where}: {fault['msg']}") from None
        except InputError as error:
            raise InputError(f"request {number} of {request.scenario}: {error}") from error
        yield Prompt(request.scenario, token_ids)


def _list(request: DemoRequest) -> list[dict[str, object]] | None:
    return None if request.tools is None else [*request.tools]
