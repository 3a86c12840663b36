"""The public logs, read completely, if IRMINSUL_TRACES names the directory that holds them."""

import os
from pathlib import Path

import pytest

from irminsul.trace.readers import read_calls
from irminsul.trace.token_log_builder import build_token_log

TRACES = os.environ.get("IRMINSUL_TRACES")
pytestmark = pytest.mark.skipif(TRACES is None, reason="IRMINSUL_TRACES does not name a directory with traces")

COUNTS = {
    "mini-swe-agent": (201, 16_211),
    "moatless": (271, 3_381),
    "tau-bench": (315, 4_241),
    "rag-storm": (1, 48),
    "lmcache-miniswe": (20, 402),
}
# Prompt tokens with DeepSeek's tokenizer and the default template; the large logs take a minute and are left out.
TOKENS = {"tau-bench": 24_161_194, "rag-storm": 43_540}


@pytest.mark.parametrize("name", COUNTS)
def test_every_call_is_read(name):
    sessions, calls = set(), 0
    for call in read_calls([Path(TRACES) / f"{name}.jsonl.gz"]):
        sessions.add(call.info.session)
        calls += 1
    assert (len(sessions), calls) == COUNTS[name]


@pytest.mark.parametrize("name", TOKENS)
def test_every_token_is_counted(name, deepseek):
    log = build_token_log(read_calls([Path(TRACES) / f"{name}.jsonl.gz"]), deepseek)
    assert (len(log), log.prompt_tokens()) == (COUNTS[name][1], TOKENS[name])
