"""``irminsul bench``: measure, and show what was measured."""

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from irminsul.api_key import check_api_key
from irminsul.bench.load import LoadOptions, read_load
from irminsul.bench.report import markdown, write_html
from irminsul.bench.results import BLOCKS, REQUESTS, ResultFiles, only_writer, read_blocks
from irminsul.bench.run import BenchConfig, check_servers, run
from irminsul.bench.server import BenchError, parse_targets
from irminsul.errors import InputError
from irminsul.output_files import require_writable

_INTERRUPTED = 130


def serve_command(
    servers: Sequence[str], loads: Sequence[str], options: LoadOptions, config: BenchConfig, out: Path
) -> None:
    """Measure servers under loads and keep the results in a folder; a second run measures what is missing.

    Raises:
        InputError: anything given that cannot be used, or a server that does not answer.
        BenchError: a server failed, or some requests did.
    """
    console = Console(stderr=True)
    targets = parse_targets(servers)
    if config.api_key is not None:
        check_api_key(config.api_key)
    with only_writer(out):
        files = ResultFiles(out)
        check_servers(targets, config)
        made = [read_load(text, options) for text in loads]
        if len({load.fingerprint for load in made}) < len(made):
            raise InputError(f"loads must be different, got the same calls twice in {', '.join(loads)}")
        try:
            blocks = run(targets, made, config, files, console)
        except KeyboardInterrupt:
            typer.echo(
                f"interrupted; {out} has {len(files.blocks)} blocks, and the same command measures the rest", err=True
            )
            raise typer.Exit(_INTERRUPTED) from None
    typer.echo(markdown(files.blocks), nl=False)
    failed = sum(block["requests"] - block["succeeded"] for block in blocks)
    if failed:
        first = next(block for block in blocks if block["errors"])
        raise BenchError(
            f"{failed} of {sum(block['requests'] for block in blocks)} requests failed and are counted in {out}; the "
            f"first, on server {first['server']['name']}: {first['first_error']}"
        )


def report_command(folder: Path, html: Path | None) -> None:
    """Print the tables of a folder's results, and write the page if it is asked for; InputError as ``read_blocks``."""
    blocks = read_blocks(folder)
    if html is not None:
        require_writable(html, inputs=[folder / BLOCKS, folder / REQUESTS])
        write_html(html, blocks)
    typer.echo(markdown(blocks), nl=False)
