"""Reports as one HTML file each: no network, no other files, opens from disk.

A page allows itself its own style sheet and script, by their hashes (Content-Security-Policy), so text from a log could
not run even if it got past the escaping. Needs the ``jinja2`` package: ``pip install 'irminsul-kv[analyze]'``.
"""

import base64
import hashlib
import importlib
from pathlib import Path
from typing import Any

from irminsul.errors import InputError
from irminsul.output_files import replace_files

_HEAD = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{{ title }}</title>
<style>{{ style | safe }}</style>
</head>
"""


def render_page(body: str, *, title: str, style: str, script: str = "", **values: Any) -> str:  # noqa: ANN401
    """Render a page.

    Args:
        body: jinja2, from ``<body>`` to the end; it finds ``script`` and the values, and escapes what it prints.
        title: of the page.
        style: the style sheet.
        script: the script.
        **values: whatever else the body names.

    Raises:
        InputError: jinja2 is missing.
    """
    try:
        jinja2 = importlib.import_module("jinja2")
    except ModuleNotFoundError:
        raise InputError("--html needs the jinja2 package: pip install 'irminsul-kv[analyze]'") from None
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    policy = (
        f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; base-uri 'none'; "
        "form-action 'none'"
    )
    template = environment.from_string(_HEAD + body)
    page: str = template.render(policy=policy, title=title, style=style, script=script, **values)
    return page


def write_page(path: Path, page: str) -> None:
    """Write a page; InputError if the file cannot be written."""
    replace_files({path: page.encode()})


def _source(inline: str) -> str:
    """Return the source expression that allows exactly this inline text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"
