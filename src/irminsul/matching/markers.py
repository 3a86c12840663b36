"""Markers: a delimiter of 64 tokens that an agent framework puts around text which prompts share (the paper's S2).

The paper's chunker cuts where its rolling hash says so. If a shared region begins with a cut that always falls on the
same token, its chunks are the same in every prompt and are found; if not, they are found from wherever the cuts
happen to agree. A marker is to make that cut. What decides is not that it is there, but whether it *contains a cut
candidate*: seven consecutive tokens whose gear hash ends in seven zero bits. About 63 % of all 64-token texts have
none, and push the region's chunks about like any other text.

What can be guaranteed (m is the number of marker tokens in front of a cut):

* The hash hears 7 tokens, so where m < 7 the text before the marker has a say: a cut may or may not fall there. From
  m = 7 on the marker alone says where candidates are.
* A candidate is refused if the chunk would be shorter than 32 tokens. A chunk can begin in front of the marker or, by
  the rule above, up to 6 tokens inside it: a lone candidate at m >= 38 is accepted in all these cases.
* One case is left: a chunk that meets no candidate is ended by force at 512 tokens, which can happen anywhere in the
  marker and makes the next 31 positions unusable. With two candidates, at a >= 7 and b >= a + 32, and none between
  them after b - 32, the cut at b **always** happens: either the chunk that reaches a is cut there, or a cut before a
  is at least 32 tokens away from b; and behind a cut at a no limit is near.
* Nothing can be said if the tail begins inside the marker (a prefix match ended there), since the plain chunker then
  starts there; the matchers *anchored* and *winnow* do not depend on it.

A marker costs the model 64 tokens of context a region. The winnowing matcher needs none.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from irminsul.errors import InputError
from irminsul.matching.cdc import MASK, MAX_CHUNK, MEMORY, MIN_CHUNK, gear_step

MARKER_TOKENS = 64
TRIES = 20_000

_LEAD = "boundary"
_WORDS = """
amber anchor apple arrow autumn basin beacon birch border branch bridge bronze canal candle canyon carbon cedar circle
cliff clover coast copper coral corner cotton crystal delta desert dome dune eagle echo ember engine fabric falcon field
forest garden gate glass gold grain granite grove harbor hazel hill hollow horizon island ivory jacket jungle lake
lantern leaf lemon lily linen maple marble meadow metal mirror moon mountain needle north ocean olive orange orchard
paper pebble pepper pine planet plaza pond quartz rain raven reef ribbon ridge river rocket root saddle sail salt sand
shadow silver sky slate snow south spring star stone stream summer sun table thunder timber tower trail tree tunnel
valley velvet village violet water wave west whale wheel willow window winter wolf
"""
# What may stand around a marker that has a line to itself.
_BEFORE = ("\n", "\n\n", "text\n", "text.\n", "}\n", " \n")
_AFTER = ("\n", "\n\n", "\ntext", "\n{", "\n  text", "\n- ")


@dataclass(frozen=True)
class MarkerReport:
    """What a text does as a marker; places are numbers of its tokens in front of a cut."""

    n_tokens: int
    candidates: tuple[int, ...]
    """Where the gear hash permits a cut, whatever precedes the text."""
    cut: int | None
    """The last cut in the text, if it is the same one wherever the chunk before it began; None: it is not."""
    always: bool
    """Whether ``cut`` happens even when a chunk reaches its limit of 512 tokens inside the text."""
    reason: str
    """One sentence."""

    @property
    def helps(self) -> bool:
        """Whether text behind it is cut alike, whatever precedes it (but for the limit, see ``always``)."""
        return self.cut is not None

    def __str__(self) -> str:
        return f"{self.n_tokens} tokens: {self.reason}"


def check_marker(tokens: Sequence[int]) -> MarkerReport:
    """Say whether and where a text cuts as a marker, and why it would not help."""
    n = len(tokens)
    candidates = _candidates(tokens)
    # A chunk begins up to 511 tokens before the text, or inside it where the text before it has a say.
    outcomes = [_last_cut(start, candidates, n) for start in range(1 - MAX_CHUNK, min(MEMORY, n + 1))]
    usual = {cut for cut, limited in outcomes if not limited}
    cut = usual.pop() if len(usual) == 1 else None
    always = cut is not None and all(other == cut for other, _ in outcomes)
    return MarkerReport(n, candidates, cut, always, _reason(candidates, cut, always=always))


def generate_marker(encode: Callable[[str], list[int]], decode: Callable[[list[int]], str], seed: int = 0) -> str:
    """Return a line of words that the tokenizer turns into 64 tokens with a cut that always happens.

    Args:
        encode: turns plain text into token ids, without adding special tokens.
        decode: turns them back into exactly that text.
        seed: another seed, another marker.

    Returns:
        The text, to be put on a line of its own: its tokens are the same whatever stands on the lines around it.

    Raises:
        InputError: the tokenizer gives no such text within 20,000 tries.
    """
    for text in _lines_of_words(encode, random.Random(seed)):  # noqa: S311  # nothing secret about it
        tokens = encode(text)
        candidates = _candidates(tokens)
        # Cheap test first: two candidates far enough apart.
        if len(tokens) != MARKER_TOKENS or not candidates or candidates[-1] - candidates[0] < MIN_CHUNK:
            continue
        if check_marker(tokens).always and decode(tokens) == text and _is_stable(encode, text, tokens):
            return text
    raise InputError(
        f"no marker found for this tokenizer in {TRIES} tries; encode must add no special tokens, decode must undo it, "
        "and a line of words must have the same tokens whatever stands on the lines around it"
    )


def _candidates(tokens: Sequence[int]) -> tuple[int, ...]:
    places = []
    for m in range(MEMORY, len(tokens) + 1):
        h = 0
        for token in tokens[m - MEMORY : m]:
            h = gear_step(h, token)
        if h & MASK == 0:
            places.append(m)
    return tuple(places)


def _last_cut(start: int, candidates: tuple[int, ...], n: int) -> tuple[int | None, bool]:
    """Return the last cut in a text of ``n`` tokens if a chunk begins at ``start``, and whether the limit made any."""
    last = None
    limited = False
    while True:
        natural = next((place for place in candidates if place - start >= MIN_CHUNK), math.inf)
        end = int(min(natural, start + MAX_CHUNK))
        if end > n:
            return last, limited
        limited = limited or natural > end
        last = start = end


def _reason(candidates: tuple[int, ...], cut: int | None, *, always: bool) -> str:
    if not candidates:
        return "it contains no cut candidate, so it moves cuts about like any other text"
    places = ", ".join(map(str, candidates))
    if cut is None:
        return (
            f"whether it cuts at its candidates ({places}) depends on where the chunk before it began; a lone one is "
            f"accepted in any case from {MIN_CHUNK + MEMORY - 1} on, and a later one only {MIN_CHUNK} tokens behind it"
        )
    if always:
        return f"it always cuts behind its token {cut}, whatever precedes it"
    return f"it cuts behind its token {cut}, unless a chunk reaches {MAX_CHUNK} tokens inside it"


def _lines_of_words(encode: Callable[[str], list[int]], rng: random.Random) -> Iterator[str]:
    """Yield lines that begin alike and have about the right number of tokens."""
    vocabulary = _WORDS.split()
    for _ in range(TRIES):
        words = [_LEAD, *rng.choices(vocabulary, k=MARKER_TOKENS)]
        fewest, most = 1, len(words)
        while fewest < most:
            middle = (fewest + most) // 2
            if len(encode(" ".join(words[:middle]))) < MARKER_TOKENS:
                fewest = middle + 1
            else:
                most = middle
        yield " ".join(words[:fewest])


def _is_stable(encode: Callable[[str], list[int]], text: str, tokens: list[int]) -> bool:
    around = [(before, after) for before in _BEFORE for after in _AFTER]
    return all(_contains(encode(before + text + after), tokens) for before, after in around)


def _contains(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[i : i + len(part)] == part for i in range(len(tokens) - len(part) + 1))
