"""Files that are cut, emptied or not what they should be: one sentence that names what is wrong, nothing served."""

import gzip
import json
import shutil

import pytest
import torch
from fuzzing import irminsul
from safetensors.torch import load_file, save_file
from sample_logs import CALL, RESULT, SYSTEM, TOOL, USER
from sample_results import block

from irminsul.bench.results import BLOCKS
from irminsul.checkpoints import build_directory, smollm2
from irminsul.errors import InputError
from irminsul.server import app
from irminsul.server.runner import EngineRunner
from irminsul.sglang.settings import read_settings

PLENTY = 100


def refused(*arguments):
    """Run a command that must refuse; return its sentence."""
    told = irminsul(*arguments, seconds=PLENTY)
    assert told.status == 1
    assert told.sentence
    assert "Traceback" not in told.stderr
    return told.sentence


def cut(path):
    """Leave the first half of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tiny, tmp_path):
    """A copy of the tiny checkpoint, to be damaged."""
    return shutil.copytree(tiny, tmp_path / "m")


@pytest.fixture
def serve(checkpoint, monkeypatch):
    """``irminsul serve`` up to where it would listen; gives its outcome."""

    def served(engine, tokenizer, **options):
        app.create_app(EngineRunner(engine), tokenizer, model_name=options["model_name"])

    monkeypatch.setattr(app, "serve", served)
    return lambda *options: irminsul("serve", checkpoint, "--pool-tokens", "256", *options, seconds=PLENTY)


def weights(change):
    """Damage that changes tensors."""

    def damage(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def set_value(tensors, value):
    tensors["model.layers.1.self_attn.kv_b_proj.weight"][3, 5] = value


def text(name, content):
    """Damage that replaces a file."""
    return lambda folder: (folder / name).write_bytes(content)


def foreign_tokenizer(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["elsewhere"] = 100_000
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


NORM = "model.norm.weight"
DAMAGED = {
    "the weights: cut in their header": (
        lambda folder: text("model.safetensors", (folder / "model.safetensors").read_bytes()[:100])(folder),
        "model.safetensors cannot be read: Error while deserializing header: invalid header length",
    ),
    "the weights: their last byte missing": (
        lambda folder: text("model.safetensors", (folder / "model.safetensors").read_bytes()[:-1])(folder),
        "model.safetensors cannot be read: Error while deserializing header: incomplete metadata",
    ),
    "the weights: an empty file": (text("model.safetensors", b""), "model.safetensors cannot be read"),
    "the weights: removed": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "holds neither model.safetensors nor model.safetensors.index.json",
    ),
    "the weights: a tensor missing": (
        weights(lambda tensors: tensors.pop(NORM)),
        "the checkpoint lacks tensor model.norm.weight, of shape (64,)",
    ),
    "the weights: a tensor of another shape": (
        weights(lambda tensors: tensors.update({NORM: torch.ones(65)})),
        "tensor model.norm.weight has shape (65,); config.json asks for (64,)",
    ),
    "the weights: one NaN": (
        weights(lambda tensors: set_value(tensors, torch.nan)),
        "tensor model.layers.1.self_attn.kv_b_proj.weight holds NaN or infinity in float32",
    ),
    "the weights: one infinity": (
        weights(lambda tensors: set_value(tensors, -torch.inf)),
        "tensor model.layers.1.self_attn.kv_b_proj.weight holds NaN or infinity in float32",
    ),
    "config.json: cut": (lambda folder: cut(folder / "config.json"), "config.json cannot be read as JSON"),
    "config.json: an empty object": (text("config.json", b"{}"), "model type None is not supported"),
    "config.json: removed": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "generation_config.json: cut": (
        lambda folder: cut(folder / "generation_config.json"),
        "generation_config.json cannot be read as JSON",
    ),
    "tokenizer.json: cut": (
        lambda folder: cut(folder / "tokenizer.json"),
        "holds no usable tokenizer: JSONDecodeError",
    ),
    "tokenizer.json: NUL bytes": (text("tokenizer.json", bytes(500)), "holds no usable tokenizer: JSONDecodeError"),
    "tokenizer.json: of another model": (
        foreign_tokenizer,
        "holds the tokenizer of another model: it has a token 100000, and the model 512 tokens",
    ),
    "tokenizer_config.json: cut": (lambda folder: cut(folder / "tokenizer_config.json"), "holds no usable tokenizer"),
    "the chat template: cut in a tag": (
        text("chat_template.jinja", b"{% for message in messages %}\n{{ message.conte"),
        "the chat template does not compile: line 2: ",
    ),
    "the chat template: NUL bytes": (
        text("chat_template.jinja", bytes(50)),
        "the chat template shows nothing of a conversation",
    ),
    "the chat template: no UTF-8": (
        text("chat_template.jinja", b"\xff\xfe"),
        "holds no usable tokenizer: UnicodeDecodeError",
    ),
    "an adapter that would not be applied": (
        text("adapter_config.json", b'{"peft_type": "LO'),
        "adapter_config.json asks for an adapter, which is not supported: merge it",
    ),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_checkpoint_is_not_served(fault, serve, checkpoint, what):
    damage, sentence = DAMAGED[what]
    damage(checkpoint)
    told = serve()
    assert told.status == 1
    assert sentence in told.sentence
    fault(f"`irminsul serve` on a damaged checkpoint; {what}", f"exit status 1: {told.sentence[:200]}")


def test_the_whole_checkpoint_would_be_served(serve):
    assert serve().status == 0


def test_weights_that_another_dtype_cannot_hold_are_refused(fault, serve, checkpoint):
    weights(lambda tensors: set_value(tensors, 1e6))(checkpoint)
    assert serve().status == 0
    told = serve("--dtype", "float16")
    assert told.sentence == "tensor model.layers.1.self_attn.kv_b_proj.weight holds NaN or infinity in float16"
    fault("`irminsul serve --dtype float16` on a weight of 10^6", f"exit status 1: {told.sentence}")


# -- built-in models ---------------------------------------------------------------------------------------------------


@pytest.fixture
def built(tiny, tmp_path, monkeypatch):
    """A directory that looks like a build of smollm2-mla, in the place for it."""
    monkeypatch.setenv("IRMINSUL_HOME", str(tmp_path / "home"))
    folder = shutil.copytree(tiny, tmp_path / "home" / "smollm2-mla")
    build_directory.write_manifest(folder, smollm2.asdict(smollm2.Provenance("smollm2-mla")))
    assert smollm2.find_checkpoint("smollm2-mla") == folder
    return folder


def flip_one_bit(path):
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("what", "name", "damage"),
    [
        ("one bit of the weights flipped", "model.safetensors", flip_one_bit),
        ("tokenizer.json cut", "tokenizer.json", cut),
        ("the chat template edited", "chat_template.jinja", lambda path: path.write_text("{{ messages }}")),
        ("config.json removed, as in a folder that is half there", "config.json", lambda path: path.unlink()),
        ("its list of files cut", "irminsul-build.json", cut),
    ],
)
def test_a_damaged_build_is_not_used(fault, built, what, name, damage):
    damage(built / name)
    told = refused("serve", "smollm2-mla")
    assert f"{built} cannot be used, " in told
    assert told.endswith("; run: irminsul model build smollm2-mla")
    fault(f"`irminsul serve smollm2-mla`, {what}", f"exit status 1: {told}")


@pytest.mark.parametrize("content", [b"", b"GGUF" + bytes(500)], ids=["empty", "cut"])
def test_another_source_is_not_built_from(fault, tmp_path, monkeypatch, content):
    monkeypatch.setenv("IRMINSUL_HOME", str(tmp_path / "home"))
    source = tmp_path / "source.gguf"
    source.write_bytes(content)
    told = refused("model", "build", "--gguf", source)
    assert f"{source} has SHA-256 " in told
    assert not (tmp_path / "home").exists()
    fault(f"`irminsul model build` from a damaged GGUF file of {len(content)} bytes", f"exit status 1: {told}")


# -- what other commands read ------------------------------------------------------------------------------------------


LINE = json.dumps({"messages": [SYSTEM, USER, CALL, RESULT], "tools": [TOOL]})


@pytest.mark.parametrize(
    ("what", "content", "sentence"),
    [
        ("its last line cut", f"{LINE}\n{LINE[:100]}".encode(), "line 2"),
        ("no UTF-8 in line 2", f"{LINE}\n".encode() + b"\xff\xfe\n", "line 2"),
        ("gzip, cut", gzip.compress(f"{LINE}\n".encode() * 50)[:-20], ""),
        ("empty", b"", "no calls in"),
    ],
)
def test_a_damaged_log(fault, tiny, tmp_path, what, content, sentence):
    log = tmp_path / "log.jsonl"
    log.write_bytes(content)
    told = refused("analyze", log, "--tokenizer", tiny)
    assert str(log) in told
    assert sentence in told
    fault(f"`irminsul analyze` on a damaged log: {what}", f"exit status 1: {told[:200]}")


def test_damaged_cached_tokens_are_made_again(fault, small_log, tmp_path):
    arguments = ["analyze", *small_log, "--token-cache", tmp_path / "cache", "--json", tmp_path / "out.json"]
    assert irminsul(*arguments, seconds=PLENTY).status == 0
    first = json.loads((tmp_path / "out.json").read_text())
    (entry,) = (tmp_path / "cache").iterdir()
    whole = entry.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole[:-200] + bytes(200)):
        entry.write_bytes(damaged)
        assert irminsul(*arguments, seconds=PLENTY).status == 0
        again = json.loads((tmp_path / "out.json").read_text())
        assert again.pop("notes")[-1] == f"the cached tokens in {entry} were damaged and have been made again"
        assert again == {name: value for name, value in first.items() if name != "notes"}
    fault("`irminsul analyze --token-cache` on damaged entries", "made the tokens again, same results, and noted it")


def test_a_damaged_block_is_named_by_its_line(fault, tmp_path):
    lines = [json.dumps(block(name)) for name in "abc"]
    (tmp_path / BLOCKS).write_text("\n".join([lines[0], lines[1][:80], lines[2], ""]))
    before = (tmp_path / BLOCKS).read_bytes()
    told = refused("bench", "report", tmp_path)
    assert f"{tmp_path / BLOCKS}, line 2: " in told
    assert refused("bench", "serve", "--server", "a=http://127.0.0.1:1", "--load", "rerank", "--out", tmp_path) == told
    assert (tmp_path / BLOCKS).read_bytes() == before
    fault(
        "`irminsul bench report` and `serve` on a blocks.jsonl with half a line in the middle", f"exit status 1: {told}"
    )


@pytest.mark.parametrize("content", [b"", b'{"schema": 2, "cases": [{"ta', b"{}", b"\x80"])
def test_damaged_results_are_not_rendered(fault, tmp_path, content):
    results = tmp_path / "results.json"
    results.write_bytes(content)
    told = refused("fidelity", "--render", results)
    assert str(results) in told
    fault(f"`irminsul fidelity --render` on a file that holds {content!r}", f"exit status 1: {told[:200]}")


@pytest.mark.parametrize("content", [b'mode = "live', b"\xff", b"mode = 5\n", b'mod = "live"\n'])
def test_damaged_settings_of_the_plugin_are_refused(fault, tmp_path, content):
    settings = tmp_path / "irminsul.toml"
    settings.write_bytes(content)
    with pytest.raises(InputError) as told:
        read_settings({"IRMINSUL_SGLANG_CONFIG": str(settings)})
    assert str(settings) in str(told.value)
    fault(f"IRMINSUL_SGLANG_CONFIG names a file that holds {content!r}", f"SGLang ends: irminsul: {told.value}")
