"""Chat templates of a hostile checkpoint: they run in jinja2's sandbox, in the analyser and in the server."""

import json
import shutil

import pytest
from fuzzing import in_time, irminsul, write
from server_fakes import byte_level_tokenizer

from irminsul.errors import InputError
from irminsul.server.chat import PromptEncoder
from irminsul.server.protocol import ChatMessage

HOSTILE = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "code": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "format": "{{ '{0.__class__}'.format(messages) }}",
    "changed": "{{ messages.append(1) }}",
    "file": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "range": "{% for number in range(10 ** 9) %}{% endfor %}",
    "recursion": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "memory": "{{ messages[0].content * 10 ** 13 }}",
    "blocks": "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "indents": "{% if true %}" * 200 + "{% endif %}" * 200,
    "brackets": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "syntax": "{% for %}",
}


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE)
def test_the_analyser_gives_nothing_away(tmp_path, compiled, template):
    directory = tmp_path / "tokenizer"
    shutil.copytree(compiled, directory)
    write(directory / "chat_template.jinja", template.encode())
    log = write(tmp_path / "log", json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode())
    out = irminsul("analyze", log, "--tokenizer", directory)
    reasons = ("the chat template cannot be read: ", "the chat template cannot render this ", "the prompt has no token")
    assert any(reason in out.sentence for reason in reasons), out


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE)
def test_the_server_gives_nothing_away(template):
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = template
    sentence, tokens = "the chat template ", ()
    with in_time():
        try:
            tokens = PromptEncoder(tokenizer).chat([ChatMessage(role="user", content="hi")], None, None)
        except InputError as error:
            sentence = str(error)
    assert tokens == ()
    assert "the chat template " in sentence
