"""SGLang's request log, in JSON: ``--log-requests --log-requests-level 3 --log-requests-format json``.

What is read is what SGLang 0.5.23 writes (``sglang/srt/utils/request_logger.py`` and ``log_utils.py``): lines of the
form ``[2026-01-31 12:00:00] {"timestamp": ISO, "event": ..., "rid": ..., "obj": {...}}``, on the console between other
lines or in the files of ``--log-requests-target``. Console lines that are no request are passed over.

* ``request.received`` is a call: the prompt is ``obj.input_ids`` if it is there, else ``obj.text``; a batch is several.
* ``request.finished`` gives the reply to the call of its ``rid``; if its ``received`` is not in the log (it had rotated
  away), the event is the call.
* ``request.received.openai`` repeats a call before the template was applied, without its ``rid``. It is passed over.

At levels 0 and 1 the log holds no prompt, at level 2 it is cut to 2,048 characters or ids; such a line is bad, and says
so. The namespace is ``obj.cache_salt``, ``extra_key`` and ``lora_path``; the session is ``obj.session_id`` or
``conversation_id``. The times have no zone and are taken as UTC.
"""

import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from irminsul.trace.fields import call_info
from irminsul.trace.formats.log_file import LogFile
from irminsul.trace.formats.plain import prompts_of, token_ids
from irminsul.trace.lines import LineError, parse_object
from irminsul.trace.messages import as_object
from irminsul.trace.records import CallInfo, LoggedCall, Prompt, Tokens

_RECEIVED, _FINISHED = "request.received", "request.finished"
_EVENT = re.compile(r'"event": ?"request\.')
# Calls whose end has not been seen: more than any server runs at once. A log of received requests only passes through.
_MAX_OPEN = 4096
_CUT, _CUT_LENGTH = "...", 2048
_LEVEL = "run SGLang with --log-requests-level 3"


class SGLangFormat:
    """Reads SGLang's JSON request log."""

    name = "sglang"

    def recognises(self, text: str, record: dict[str, Any] | None) -> bool:
        """See Format."""
        del record
        return _EVENT.search(text) is not None and '"timestamp"' in text

    def read(self, file: LogFile) -> Iterator[LoggedCall]:
        """See Format. A call is yielded when its end is seen, so not in the order of arrival; its time says that."""
        running: OrderedDict[str, LoggedCall] = OrderedDict()
        for line in file.lines:
            if _EVENT.search(line.text) is None:
                continue
            try:
                event = parse_object("{" + line.text.partition("{")[2])
                kind = event.get("event")
                if kind in (_RECEIVED, _FINISHED):
                    yield from _follow(event, running, file.name, line.number)
            except LineError as reason:
                file.bad(line.number, str(reason))
        yield from running.values()


def _follow(event: dict[str, Any], running: OrderedDict[str, LoggedCall], file: str, line: int) -> Iterator[LoggedCall]:
    """Take one event; yield the calls that are complete now."""
    body = as_object(event.get("obj"), "'obj'")
    rid = event.get("rid")
    if event["event"] == _FINISHED:
        # A batch ends one by one, each under an id of its own.
        begun = running.pop(str(rid), None)
        calls = [begun] if begun is not None else _calls(event, body, file, line)
        yield from (replace(call, reply=_reply(event.get("out"), call.prompt)) for call in calls)
        return
    calls = _calls(event, body, file, line)
    rids = rid if isinstance(rid, list) else [rid]
    if len(rids) != len(calls):
        yield from calls
        return
    for own, call in zip(rids, calls, strict=True):
        if str(own) in running:
            # The server was started again and counts anew, or has no ids: the earlier call has no end.
            yield running.pop(str(own))
        running[str(own)] = call
    while len(running) > _MAX_OPEN:
        yield running.popitem(last=False)[1]


def _calls(event: dict[str, Any], body: dict[str, Any], file: str, line: int) -> list[LoggedCall]:
    ids, text = body.get("input_ids"), body.get("text")
    if ids is None and text is None:
        raise LineError(f"the log holds no prompts; {_LEVEL}")
    prompts = [_whole(prompt) for prompt in _uncut_prompts(ids, text)]
    infos = [_info(event, body, file, line, index, len(prompts)) for index in range(len(prompts))]
    return [LoggedCall(info, prompt) for info, prompt in zip(infos, prompts, strict=True)]


def _uncut_prompts(ids: object, text: object) -> list[str | Tokens]:
    if ids is None:
        return prompts_of(text, "text")
    if isinstance(ids, list) and (_CUT in ids or any(isinstance(row, list) and _CUT in row for row in ids)):
        raise LineError(f"the prompt was cut when it was logged; {_LEVEL}")
    return prompts_of(ids, "input_ids")


def _whole(prompt: str | Tokens) -> str | Tokens:
    half = _CUT_LENGTH // 2
    cut = _CUT_LENGTH + len(_CUT)
    if isinstance(prompt, str) and len(prompt) == cut and prompt[half : half + len(_CUT)] == _CUT:
        raise LineError(f"the prompt was cut when it was logged; {_LEVEL}")
    return prompt


def _info(event: dict[str, Any], body: dict[str, Any], file: str, line: int, index: int, count: int) -> CallInfo:
    """Collect the fields; those that a batch gives as a list are a prompt's own."""
    fields = {
        name: value[index] if isinstance(value, list) and len(value) == count else value
        for name in ("session_id", "conversation_id", "cache_salt", "extra_key", "lora_path", "model")
        if (value := body.get(name)) is not None
    }
    return call_info(file, line, [{"timestamp": event.get("timestamp")}, fields])


def _reply(out: object, prompt: Prompt) -> str | Tokens | None:
    """Return what was generated in the form of the prompt; None if the log has it not, or not whole."""
    if not isinstance(out, dict):
        return None
    text, ids = out.get("text"), out.get("output_ids")
    if isinstance(prompt, str):
        return text if isinstance(text, str) else None
    try:
        return token_ids(ids, "output_ids")
    except LineError:
        return None
