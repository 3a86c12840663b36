"""Text that every Python installation has: the standard library's sources, docstrings and language reference.

They are read when a pattern is generated, from the running interpreter's own library (PSF licence), and nothing of
them is shipped. So the text depends on the version of Python, and ``LIBRARY_VERSION`` names it.
"""

import ast
import importlib
import inspect
import platform
import random
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from irminsul.errors import InputError
from irminsul.trace.records import Tool

LIBRARY_VERSION = f"Python {platform.python_version()}"

# Modules that 3.11 and its successors have, with sources worth asking about.
_MODULES = """
_pydecimal argparse ast asyncio/base_events asyncio/streams asyncio/tasks bdb calendar cmd codecs collections/__init__
compileall configparser contextlib copy csv dataclasses difflib dis doctest email/message enum fileinput fractions
ftplib functools gettext glob gzip heapq html/parser http/client http/cookiejar http/server imaplib inspect ipaddress
json/encoder locale logging/__init__ logging/handlers mailbox mimetypes modulefinder multiprocessing/pool optparse os
pdb pickle pickletools pkgutil platform plistlib poplib pprint profile pstats pydoc queue random reprlib sched
selectors shelve shlex shutil smtplib socket socketserver ssl statistics string subprocess symtable tarfile tempfile
textwrap threading timeit tokenize trace traceback tracemalloc types typing unittest/case unittest/mock urllib/parse
urllib/request uuid warnings wave weakref webbrowser xml/dom/minidom xml/etree/ElementTree zipfile
"""
# Chapters of the reference none of which contains another one.
_CHAPTERS = (
    *("specialnames", "compound", "types", "string-methods", "formatstrings", "typesseq", "debugger", "typesmapping"),
    *("comparisons", "assignment", "strings", "import", "calls", "execmodel"),
)


@dataclass(frozen=True)
class Function:
    """A function or method with a docstring, as its source defines it."""

    name: str
    """A method is ``Class.method``."""
    arguments: tuple[str, ...]
    doc: str
    first_line: int
    """From 1."""
    last_line: int


@dataclass(frozen=True)
class Module:
    """One source file."""

    path: str
    """As the agent sees it."""
    text: str

    @cached_property
    def lines(self) -> list[str]:
        """The lines, without their ends."""
        return self.text.splitlines()

    @cached_property
    def functions(self) -> tuple[Function, ...]:
        """The functions worth asking about, in the order of the file."""
        tree = ast.parse(self.text)
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        owners = [("", tree.body), *((f"{node.name}.", node.body) for node in classes)]
        return tuple(
            _function(owner, node)
            for owner, body in owners
            for node in body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node)
        )

    def raised_by(self, function: Function) -> list[str]:
        """Return the names of the exceptions that a function raises by itself."""
        body = "\n".join(self.lines[function.first_line - 1 : function.last_line])
        return sorted(set(re.findall(r"^\s+raise (\w+)", body, re.MULTILINE)))


class Library:
    """The sources of the running interpreter's standard library; read when they are needed.

    Raises:
        InputError: there are no sources (an embedded or zipped library).
    """

    def __init__(self) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        self._files = {f"lib/{name}.py": root / f"{name}.py" for name in _MODULES.split()}
        self._files = {path: file for path, file in self._files.items() if file.is_file()}
        if len(self._files) < len(_MODULES.split()) / 2:
            raise InputError(f"the patterns are made of the standard library's sources, and {root} does not hold them")
        self._modules: dict[str, Module] = {}

    @property
    def paths(self) -> list[str]:
        """All paths, ascending."""
        return sorted(self._files)

    def module(self, path: str) -> Module:
        """Return the module at a path of ``paths``."""
        if path not in self._modules:
            self._modules[path] = Module(path, self._files[path].read_text(encoding="utf-8"))
        return self._modules[path]

    def random_function(self, rng: random.Random) -> tuple[Module, Function]:
        """Draw a module, then one of its functions."""
        while True:
            module = self.module(rng.choice(self.paths))
            if module.functions:
                return module, rng.choice(module.functions)


@cache
def standard_library() -> Library:
    """Return the library, read once in a process."""
    return Library()


def reference(*topics: str) -> str:
    """Return passages of the language reference, one behind the other.

    Raises:
        InputError: the interpreter came without them.
    """
    try:
        known: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        return "\n\n".join(known[topic].strip() for topic in topics)
    except (ImportError, KeyError) as error:
        raise InputError(f"the patterns quote the language reference of pydoc, which lacks {error}") from None


@dataclass(frozen=True)
class Document:
    """A stretch of the reference."""

    title: str
    text: str


def reference_documents(rng: random.Random, shortest: int, longest: int) -> list[Document]:
    """Cut chapters of the language reference between paragraphs.

    Args:
        rng: draws the lengths.
        shortest: fewest characters of a document.
        longest: most characters of one, but for a paragraph that is longer.

    Returns:
        The documents in the order of the chapters. No two of them overlap.
    """
    return [
        Document(f"{chapter}, part {number}", text)
        for chapter in _CHAPTERS
        for number, text in enumerate(_cut(reference(chapter), rng, shortest, longest), start=1)
    ]


def library_tool(name: str) -> Tool:
    """Describe a function of the library as a tool: its docstring, and its parameters as the signature has them.

    Raises:
        InputError: Python runs without docstrings (-OO).
    """
    module, _, attribute = name.rpartition(".")
    function = getattr(importlib.import_module(module), attribute)
    doc = inspect.getdoc(function)
    if not doc:
        raise InputError("the patterns are made of docstrings, and this Python runs without them (-OO)")
    parameters = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.POSITIONAL_ONLY, parameter.KEYWORD_ONLY)
    ]
    schema = {
        "type": "object",
        "properties": {parameter.name: _property(parameter) for parameter in parameters},
        "required": [parameter.name for parameter in parameters if parameter.default is parameter.empty],
    }
    return {
        "type": "function",
        "function": {"name": f"python_{name.replace('.', '_')}", "description": doc, "parameters": schema},
    }


def _property(parameter: inspect.Parameter) -> dict[str, str]:
    default = parameter.default
    if default is parameter.empty:
        return {"description": f"The {parameter.name.strip('_')} argument."}
    # The text of another default may hold an address, which would differ from run to run.
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string"}
    if default is not None and type(default) not in kinds:
        return {"description": "Optional."}
    kind = {} if default is None else {"type": kinds[type(default)]}
    return kind | {"description": f"Optional; {default!r} if not given."}


def _function(owner: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function:
    arguments = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    doc = ast.get_docstring(node)
    assert doc, node.name
    return Function(
        name=f"{owner}{node.name}",
        arguments=tuple(argument for argument in arguments if argument not in ("self", "cls")),
        doc=doc,
        first_line=node.lineno,
        last_line=node.end_lineno or node.lineno,
    )


def _cut(text: str, rng: random.Random, shortest: int, longest: int) -> list[str]:
    """Join paragraphs to stretches of drawn lengths; a rest that is too short is left out."""
    stretches: list[str] = []
    stretch: list[str] = []
    room = rng.randint(shortest, longest)
    for paragraph in re.split(r"\n{2,}", text):
        if stretch and _length(stretch) + len(paragraph) > room and _length(stretch) >= shortest:
            stretches.append("\n\n".join(stretch))
            stretch, room = [], rng.randint(shortest, longest)
        stretch.append(paragraph)
    return [*stretches, "\n\n".join(stretch)] if _length(stretch) >= shortest else stretches


def _length(paragraphs: Sequence[str]) -> int:
    return sum(len(paragraph) + 2 for paragraph in paragraphs)
