"""The plugin in a real SGLang server over HTTP, on a CPU, with the real small checkpoint."""

import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from irminsul.checkpoints.smollm2 import BuiltIn, build, find_gguf
from irminsul.errors import InputError

pytestmark = [pytest.mark.sglang, pytest.mark.checkpoint, pytest.mark.slow]

HOST = Path(__file__).parent / "host"
SOURCE = Path(__file__).parents[2] / "src"
START_LIMIT_S = 240
NEW_TOKENS = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """smollm2-mla, with frequencies scaled by 1: SGLang has no plain rotary module for MLA on a CPU."""
    try:
        built = build(BuiltIn.MLA, gguf=find_gguf())
    except InputError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("checkpoint")
    for file in built.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((built / "config.json").read_text())
    config["rope_scaling"] = {
        "type": "yarn",
        "factor": 1.0,
        "original_max_position_embeddings": config["max_position_embeddings"],
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return built, folder


def start(checkpoint, log, *flags, **environment):
    """Start a server; return the process and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint), "--port", str(port)]
    command += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    command += ["--grammar-backend", "none", "--disable-cuda-graph", "--dtype", "float32", "--context-length", "4096"]
    # An idle scheduler would take a core from the other tests.
    command += ["--max-total-tokens", "4000", "--radix-cache-backend", "irminsul", "--sleep-on-idle", *flags]
    path = os.pathsep.join([str(HOST), *sys.path, str(SOURCE)])
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "IRMINSUL_SGLANG_ROW_KERNEL": "reference"}
    process = subprocess.Popen(
        command, stdout=log.open("w"), stderr=subprocess.STDOUT, env=os.environ | own | environment
    )
    return process, f"http://127.0.0.1:{port}"


@contextmanager
def serving(checkpoint, log, *flags, **environment):
    """A server that answers; yields a client."""
    process, address = start(checkpoint, log, *flags, **environment)
    try:
        with httpx.Client(base_url=address, timeout=120) as client:
            deadline = time.monotonic() + START_LIMIT_S
            while not answers(client):
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(0.5)
            yield client
    finally:
        process.terminate()
        process.wait(60)


def answers(client):
    """Say whether a server is up."""
    try:
        return client.get("/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    """A running server."""
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(checkpoint[1], log, "--enable-metrics", "--enable-cache-report") as client:
        yield client


@pytest.fixture(scope="module")
def prompts(checkpoint):
    """A donor, its passage behind another head, the next turn, and two passages in another order."""
    from irminsul.engine.loading import load_tokenizer

    tokenizer = load_tokenizer(checkpoint[0])
    lines = json.__doc__ + re.__doc__
    passage, other = (tokenizer(part * 2, add_special_tokens=False).input_ids[:150] for part in (lines, lines[900:]))
    head, longer = (
        tokenizer(text, add_special_tokens=False).input_ids
        for text in (
            "You are a helpful assistant. Today is Monday.\n" * 7,
            "You help readers of manuals. It is Tuesday, the 3rd of May.\n" * 6,
        )
    )
    question = tokenizer("\n\nQuestion: what is this about?\nAnswer:", add_special_tokens=False).input_ids
    turn = tokenizer(" Something. And what else does it say?", add_special_tokens=False).input_ids
    return [
        head + passage + other + question,
        longer + passage + other + question,
        longer + passage + other + question + turn,
        longer + other + question + passage + turn,
    ]


def test_agrees_with_the_embedded_engine_on_plans_and_tokens(server, checkpoint, prompts):
    from irminsul.engine.engine import EngineConfig
    from irminsul.engine.loading import load_engine
    from irminsul.engine.types import Request, SamplingParams

    engine = load_engine(checkpoint[0], EngineConfig(pool_slots=4000, prefill_chunk=4096))
    shifted = 0
    for at, prompt in enumerate(prompts):
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        answer = server.post("/generate", json={"input_ids": prompt, "sampling_params": sampling}).json()
        (found,) = answer["meta_info"]["irminsul"]
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        engine.submit(Request(str(at), tuple(prompt), params))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        usage = outputs[0].usage
        assert found["prefix_tokens"] == usage.prefix, at
        assert found["approximate_prefix_tokens"] == usage.approximate_prefix, at
        assert found["shifted_tokens"] == usage.shifted, at
        assert found["computed_tokens"] == usage.computed, at
        assert found["gaps"] == usage.gaps, at
        assert answer["output_ids"] == [output.token_id for output in outputs], at
        shifted += usage.shifted
    assert shifted > 400, "the prompts reuse nothing"


def test_a_wrong_option_of_a_request_is_a_400_and_nothing_else(server, prompts):
    asked = {"max_new_tokens": 1, "custom_params": {"irminsul": {"mode": "fast"}}}
    answer = server.post("/generate", json={"input_ids": prompts[0][:20], "sampling_params": asked})
    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert "unknown mode 'fast'; valid modes: off, observe, live" in answer.text


def test_a_chat_can_opt_out(server):
    body = {"model": "any", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    answer = server.post("/v1/chat/completions", json=body | {"custom_params": {"irminsul": {"mode": "off"}}})
    assert answer.status_code == httpx.codes.OK
    assert answer.json()["usage"]["completion_tokens"] == 1
    assert "irminsul" not in answer.json()["usage"]


def usage_of(server, path, *, stream, **body):
    """Ask over OpenAI's protocol; return the usage block."""
    body = {"model": "any", "max_tokens": 3, "temperature": 0} | body
    if not stream:
        return server.post(path, json=body).json()["usage"]
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    lines = server.post(path, json=body).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    (usage,) = (chunk["usage"] for chunk in chunks if chunk.get("usage"))
    return usage


def check_sums(usage):
    """The block's classes add up to the prompt, and agree with SGLang's own count."""
    block = usage["irminsul"]
    cached = block["prefix"] + block["approximate_prefix"]
    assert cached == usage["prompt_tokens_details"]["cached_tokens"]
    assert cached + block["shifted"] + block["computed"] == usage["prompt_tokens"]
    assert block["planned_shifted"] == block["shifted"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_usage_of_a_completion_has_the_counters(server, prompts, stream):
    for prompt in prompts[:2]:
        usage_of(server, "/v1/completions", stream=stream, prompt=prompt)
    # Known until the cut, and moved by it from there on.
    cut = 50 if stream else 40
    usage = usage_of(server, "/v1/completions", stream=stream, prompt=prompts[1][:cut] + prompts[1][60:])
    check_sums(usage)
    assert usage["irminsul"]["prefix"] == cut
    assert usage["irminsul"]["shifted"] > 200
    assert usage["irminsul"]["gaps"] >= 1


@pytest.mark.parametrize("stream", [False, True])
def test_the_usage_of_a_chat_has_the_counters(server, stream):
    for head in ("Good morning.", "How do you do? I have a question for you."):
        content = f"{head} It is about {'streams' if stream else 'texts'}.\n\n{json.__doc__[:1500]}"
        messages = [{"role": "user", "content": content}]
        usage = usage_of(server, "/v1/chat/completions", stream=stream, messages=messages)
        check_sums(usage)
    assert usage["irminsul"]["shifted"] > 200


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_a_prompt_once_for_all_its_choices(server, prompts, stream):
    several = [prompts[0][:90], prompts[1][:70]]
    usage = usage_of(server, "/v1/completions", stream=stream, prompt=several, n=2)
    check_sums(usage)
    assert usage["prompt_tokens"] == 160
    assert usage["completion_tokens"] == 12


def test_metrics_stand_beside_sglangs(server):
    text = server.get("/metrics").text
    for name in ("prefix", "history", "shifted", "computed"):
        assert f'token_class="{name}"' in text
    assert "sglang:" in text


def test_two_ranks_take_the_same_plans(tiny_checkpoint, tmp_path):
    rng = random.Random(0)
    passage = [rng.randrange(3, 997) for _ in range(300)]
    flags = ("--tp-size", "2", "--load-format", "dummy", "--skip-tokenizer-init", "--context-length", "4096")
    # SGLang itself ends the server if its ranks disagree on a plan.
    checked = {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    log = tmp_path / "log"
    with serving(tiny_checkpoint, log, *flags, **checked) as client:
        for head in (100, 130, 70):
            prompt = [rng.randrange(3, 997) for _ in range(head)] + passage
            asked = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 2}}
            (found,) = client.post("/generate", json=asked).json()["meta_info"]["irminsul"]
        assert found["shifted_tokens"] == len(passage) - 1
    assert log.read_text().count("Rank consensus checker is enabled") == 2


def test_a_refused_flag_ends_the_server_with_a_sentence(checkpoint, tmp_path):
    log = tmp_path / "log"
    process, _ = start(checkpoint[1], log, "--enable-streaming-session")
    assert process.wait(START_LIMIT_S) != 0
    assert (
        "irminsul: --enable-streaming-session True is not supported: a session's rows are not in the" in log.read_text()
    )


BROKEN = {
    "its module cannot be imported": ("", "raise ImportError('broken')", "Registered backends: []"),
    "activate() raises behind the backend, before the hooks": (
        "    register_radix_cache_backend(BACKEND, build_cache)",
        "    raise RuntimeError('broken')",
        "PrefillAdder.add_one_req was not hooked; SGLang's log says why",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_plugin_that_cannot_be_loaded_ends_the_server(tiny_checkpoint, tmp_path, record_property, what):
    after, statement, sentence = BROKEN[what]
    shutil.copytree(SOURCE / "irminsul", tmp_path / "irminsul")
    plugin = tmp_path / "irminsul" / "sglang" / "plugin.py"
    head, found, rest = plugin.read_text().partition(after) if after else ("", "", plugin.read_text())
    assert found == after
    plugin.write_text(f"{head}{found}\n{statement}\n{rest}")
    flags = ("--load-format", "dummy", "--skip-tokenizer-init", "--context-length", "4096")
    log = tmp_path / "log"
    path = os.pathsep.join([str(HOST), str(tmp_path), *sys.path])
    process, address = start(tiny_checkpoint, log, *flags, PYTHONPATH=path)
    try:
        assert process.wait(START_LIMIT_S) != 0
    finally:
        process.kill()
    assert sentence in log.read_text()
    with httpx.Client(base_url=address) as client:
        assert not answers(client)
    done = f"SGLang with --radix-cache-backend irminsul, where the plugin is broken: {what}"
    record_property("fault", (done, f"SGLang logs the plugin's error; then the server ends: {sentence}", "nothing"))
