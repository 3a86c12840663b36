"""Tiny tokenizers, and a server on a real socket."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import openai
import uvicorn
from fake_engine import FakeEngine
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ANSWER = "The answer is 42 ✓ café 🙂."
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'developer' %}{{ raise_exception('developers are not known here') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>"
    "{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "The answer is 42, and the weather is fine.\n",
    "café naïve über ✓ 🙂 日本語 - tools",
    "Stop here. STOP there.",
]


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """All 256 bytes and a few merges, as DeepSeek's and SmolLM2's kind."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|end|>", chat_template=CHAT_TEMPLATE
    )


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Words with a leading marker, and bytes for what is no word, as Llama's kind."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁sun", "s", "h", "ines"]
    tokenizer = Tokenizer(
        models.BPE({piece: at for at, piece in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


@dataclass
class LiveServer:
    """A running server and clients for it."""

    url: str
    engine: FakeEngine
    client: openai.OpenAI
    http: httpx.Client


@contextlib.contextmanager
def running(app: object) -> Iterator[str]:
    """Run ``app`` on a free port in a thread; yield its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Return when ``condition`` holds; AssertionError if it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)
