"""A pool whose rows say what they are, and a stand-in for the model that writes them.

*scope*: what a request must share to share rows (tenant, salt, adapter), as a small number. *context*: a digest of
every row that stood before a row when it was computed, as the pool held them then; so the context of a row in exact
text is a pure function of scope and tokens, and any wrong row before it shows. *generation*: how many rows were written
before this one; a copy keeps its donor's. The position is what the rotary part is turned to, by the code that turns
real rows.

Whatever is published is copied to a *shadow*. From then on pool and shadow must be equal bit by bit until the slot is
evicted, and whoever reads a row must read the token, position and scope that it expects.
"""

import math
import zlib
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch

from irminsul.layout import RowLayout
from irminsul.rope import Pairing, RopeSpec

VOCABULARY = 12
END = 0
"""The end-of-text token."""
POSITIONS = 4096
ROPE = RopeSpec((2 * math.pi / POSITIONS,), Pairing.INTERLEAVED)
LAYOUT = RowLayout(6, 2, "float32")
HALF = 16
"""float32 holds integers below 2**24, so that wider ones take two values: the low 16 bits and the rest."""


class Kind(IntEnum):
    """What a slot holds."""

    UNCACHED = 0
    EXACT = 1
    DERIVED = 2


class Rows(NamedTuple):
    """What some rows say, in columns of shape [rows], int64."""

    token: np.ndarray
    scope: np.ndarray
    context: np.ndarray
    generation: np.ndarray
    position: np.ndarray


def read(rows_NW):
    """Decode rows."""
    latent = rows_NW[:, : LAYOUT.latent_dim].astype(np.int64)
    angle = np.arctan2(rows_NW[:, -1], rows_NW[:, -2])
    position = np.rint(angle * (POSITIONS / (2 * math.pi))).astype(np.int64) % POSITIONS
    context, generation = (latent[:, low] | latent[:, low + 1] << HALF for low in (2, 4))
    return Rows(latent[:, 0], latent[:, 1], context, generation, position)


def put(rows_SW, slots, rows):
    """Encode rows, into these slots."""
    mask = (1 << HALF) - 1
    angle = rows.position * (2 * math.pi / POSITIONS)
    wide = (part for value in (rows.context, rows.generation) for part in (value & mask, value >> HALF))
    rows_SW[slots] = np.stack([rows.token, rows.scope, *wide, np.cos(angle), np.sin(angle)], axis=1)


def digest(rows_N3, start):
    """Continue a digest by rows of (token, position, context)."""
    return zlib.crc32(rows_N3, start)


def fill_contexts(rows_N3, positions, scope):
    """Give the rows at these ascending positions their contexts: digests of all rows before them."""
    before, cursor = scope + 1, 0
    for position in positions.tolist():
        before = digest(rows_N3[cursor:position], before)
        rows_N3[position, 2] = before
        cursor = position


def exact_contexts(tokens, scope):
    """Return the context of each token of a text of which every row was computed behind exactly this text."""
    everywhere = np.arange(len(tokens))
    rows_N3 = np.stack([tokens, everywhere, everywhere], axis=1).astype(np.int64)
    fill_contexts(rows_N3, everywhere, scope)
    return rows_N3[:, 2]


class Ledger:
    """The pool, what was published in it, and who reads what."""

    def __init__(self, n_slots):
        self.pool_LSW = torch.zeros(1, n_slots, LAYOUT.width)
        self.rows_SW = self.pool_LSW[0].numpy()  # the same memory
        self.kind = np.full(n_slots, Kind.UNCACHED)
        self.shadow_SW = self.rows_SW.copy()
        self.shadow = read(self.shadow_SW)
        self.generation = 0
        self._scopes = {}
        self._read = {}

    def scope(self, *fields):
        """Return the number of a scope, by the fields that make it."""
        return self._scopes.setdefault(fields, len(self._scopes))

    def scope_of(self, namespace):
        """Return the number of a namespace's scope; the other fields are the engine's own and the same for all."""
        return self.scope(namespace.tenant, namespace.cache_salt, namespace.extra_key, namespace.lora)

    def rows(self, slots):
        """Decode the rows of some slots, as a reader would see them now."""
        return read(self.rows_SW[slots])

    # -- writing ---------------------------------------------------------------------------------------------------

    def compute(self, slots, tokens, positions, scope):
        """Write the rows of some positions of a text as a model would: each behind all rows before it."""
        end = int(positions[-1]) + 1
        seen = self.rows(slots[:end])
        others = np.ones(end, dtype=np.bool_)
        others[positions] = False
        self.expect(seen, tokens[:end], scope, others, "a model reads")
        written = slots[positions]
        assert (self.kind[written] == Kind.UNCACHED).all(), "a cached row is overwritten"
        rows_N3 = np.stack([tokens[:end], np.arange(end), seen.context], axis=1).astype(np.int64)
        fill_contexts(rows_N3, positions, scope)
        generations = self.generation + np.arange(len(positions))
        self.generation += len(positions)
        scopes = np.full(len(positions), scope)
        put(self.rows_SW, written, Rows(tokens[positions], scopes, rows_N3[positions, 2], generations, positions))

    def next_token(self, slot):
        """Draw the token that follows a row: the same behind the same rows."""
        row = self.rows(np.array([slot]))
        return digest(np.stack([row.token, row.position, row.context], axis=1), 0) % VOCABULARY

    # -- what is published -----------------------------------------------------------------------------------------

    def publish(self, slots, tokens, scope, exact_end):
        """Note that the tree holds a text in these slots, rows from ``exact_end`` on as derived ones."""
        rows = self.rows(slots)
        self.expect(rows, tokens, scope, slice(None), "the tree takes")
        exact = min(exact_end, len(slots))
        pure = exact_contexts(tokens[:exact], scope) == rows.context[:exact]
        assert pure.all(), f"published as exact, but computed behind other rows: {np.flatnonzero(~pure)}"
        kinds = np.where(np.arange(len(slots)) < exact, Kind.EXACT, Kind.DERIVED)
        new = self.kind[slots] == Kind.UNCACHED
        assert (self.kind[slots] == kinds)[~new].all(), "the tree holds rows of another kind"
        self.kind[slots] = kinds
        self.shadow_SW[slots[new]] = self.rows_SW[slots[new]]
        for column, value in zip(self.shadow, rows, strict=True):
            column[slots[new]] = value[new]

    def forget(self, slots):
        """Note that slots were evicted."""
        assert (self.kind[slots] != Kind.UNCACHED).all(), "a slot is evicted that the tree did not hold"
        self.kind[slots] = Kind.UNCACHED

    # -- what must hold --------------------------------------------------------------------------------------------

    @staticmethod
    def expect(rows, tokens, scope, where, who):
        """Check that rows are those of a text, from position 0, at the positions ``where``."""
        assert (rows.token == tokens)[where].all(), f"{who} a row of another token"
        assert (rows.position == np.arange(len(tokens)))[where].all(), f"{who} a row of another position"
        assert (rows.scope == scope)[where].all(), f"{who} a row of another namespace"

    def check_cached(self, slots, tokens, positions, scopes, kinds):
        """Check the tree's slots (all of them) against the shadow, and the shadow against the pool."""
        assert int((self.kind != Kind.UNCACHED).sum()) == len(slots), "published slots are not in the tree"
        assert (self.kind[slots] == kinds).all(), "a derived row stands among exact ones, or the other way round"
        assert (self.shadow.token[slots] == tokens).all(), "the tree has a row under another token"
        assert (self.shadow.position[slots] == positions).all(), "the tree has a row at another position"
        assert (self.shadow.scope[slots] == scopes).all(), "the tree has a row in another namespace"
        assert np.array_equal(self.rows_SW[slots], self.shadow_SW[slots]), "a published row has changed"

    def check_run(self, run, tokens, scope):
        """Check what a search found: live, exact rows of one text of the namespace, equal token by token."""
        assert (self.kind[run.slots] == Kind.EXACT).all(), "a donor row is dead or derived"
        rows = self.rows(run.slots)
        assert (rows.token == tokens[run.start : run.end]).all(), "a donor row has another token"
        assert (rows.scope == scope).all(), "a donor row is in another namespace"
        assert (rows.position == run.source_start + np.arange(run.length)).all(), "a donor row has another position"
        rows_N3 = np.stack([rows.token, rows.position, rows.context], axis=1)
        following = [digest(rows_N3[i : i + 1], int(rows.context[i])) for i in range(run.length - 1)]
        assert rows.context[1:].tolist() == following, "a donor run is not a stretch of one text"

    def check_copy(self, slots, run):
        """Check rows that were just copied: each has its donor's latent, and stands at its new position."""
        copies, at = self.rows(slots[run.start : run.end]), np.arange(run.start, run.end)
        assert (copies.generation == self.shadow.generation[run.slots]).all(), "another row was copied"
        assert (copies.position == at).all(), "a copied row is turned to another position"

    def check_reader(self, name, slots, tokens, valid, scope):
        """Check what a request would read now at its ``valid`` positions; a slot it keeps must keep its row."""
        rows = self.rows(slots)
        self.expect(rows, tokens, scope, valid, f"request {name} reads")
        generations = np.where(valid, rows.generation, -1)
        before_slots, before = self._read.get(name, (slots[:0], generations[:0]))
        n = min(len(before), len(slots))
        kept = (before_slots[:n] == slots[:n]) & (before[:n] >= 0)
        assert (generations[:n] == before[:n])[kept].all(), f"a row of request {name} was replaced"
        self._read[name] = (slots.copy(), generations)

    def keep_readers(self, names):
        """Forget readers that are gone."""
        self._read = {name: self._read[name] for name in names if name in self._read}
