"""The exact-prefix cache: a radix tree over token ids whose nodes own slots, and a second kind for derived rows.

Rows computed behind a shifted hit are approximate. They must not be met as if exact, yet a session's next turn has to
find its own history. So the tree has two kinds of nodes. *Exact* nodes form the lossless tree. *Derived* nodes hang
below exact or derived ones and are followed only by a match that asks for them; they are never announced to the
listener, so they never become donors, and nothing derived is ever copied::

    root -- exact -- exact -- exact
                       `-- derived -- derived

Ownership: a slot is in at most one node. Eviction removes leaves, least recently used first, from the end of their
text, and never one that is locked or that stands above a locked one. Lengths are multiples of ``page_size`` tokens.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from irminsul.namespace import Namespace

ChildKey: TypeAlias = tuple[bool, bytes]
"""Whether the child is derived, and the tokens of its first page."""

NO_SLOTS: NDArray[np.int32] = np.empty(0, dtype=np.int32)


class CacheListener(Protocol):
    """Hears of exact rows as they come and go (Registry is one)."""

    def add(self, namespace: Namespace, tokens: NDArray[np.int32], slots: NDArray[np.int32], start: int) -> None:
        """Positions [start, n) of a sequence became exact cached rows."""
        ...

    def drop(self, slots: NDArray[np.int32]) -> None:
        """Rows were freed."""
        ...


@dataclass(eq=False)
class Node:
    """A stretch of tokens and the slots that hold their rows; ``end`` is the position behind it."""

    node_id: int
    namespace: Namespace
    parent: "Node | None"
    derived: bool
    tokens: NDArray[np.int32]
    slots: NDArray[np.int32]
    end: int
    children: dict[ChildKey, "Node"] = field(default_factory=dict)
    locks: int = 0
    """Locks on this node and on all below it."""
    last_used: int = 0


@dataclass(frozen=True, eq=False)
class PrefixMatch:
    """What the tree holds of a prompt's beginning, along one path.

    ``slots`` are lossless. ``derived_slots`` continue them with approximate rows, if the caller asked for those and the
    path through them is longer than the longest exact one.
    """

    slots: NDArray[np.int32]
    derived_slots: NDArray[np.int32]
    node: Node | None
    """The deepest node; locking it keeps every slot of the match, and nothing else. None: nothing matched."""


@dataclass(frozen=True, eq=False)
class Insertion:
    """What the tree holds of a sequence after its insertion."""

    slots: NDArray[np.int32]
    """The tree's slots of the sequence's whole pages, shape [m], m <= n: the caller's where the tree took them, its
    own where it held the tokens already. The caller's other slots are still the caller's."""
    node: Node
    """The deepest node; locking it keeps all of ``slots``."""


class RadixCache:
    """Exact and derived rows by prefix.

    Args:
        capacity: number of slots that exist; slot numbers are below it.
        page_size: matches and insertions are cut down to multiples of this many tokens.
        listener: told of exact rows.
    """

    def __init__(self, capacity: int, *, page_size: int = 1, listener: CacheListener | None = None) -> None:
        self.page_size = page_size
        self._listener = listener
        self._roots: dict[Namespace, Node] = {}
        self._nodes: dict[int, Node] = {}
        self._node_ids = itertools.count()
        self._clock = itertools.count(1)
        self._owner = np.full(capacity, -1, dtype=np.int64)
        self._leaves: list[tuple[int, int]] = []
        self.cached_slots = 0
        self.derived_slots = 0
        self.locked_slots = 0
        self.evicted_slots = 0

    @property
    def capacity(self) -> int:
        """Slot numbers are below this."""
        return len(self._owner)

    def grow(self, capacity: int) -> None:
        """Admit slot numbers up to ``capacity`` (a replay without a bound learns its size as it goes)."""
        more = max(0, capacity - len(self._owner))
        self._owner = np.concatenate([self._owner, np.full(more, -1, dtype=np.int64)])

    def match(self, namespace: Namespace, tokens: NDArray[np.int32], *, derived: bool = False) -> PrefixMatch:
        """Return the longest prefix of ``tokens`` that the tree holds, and mark it as just used.

        Nodes are split where the match ends, so that locking it keeps nothing more than the match.
        """
        root = self._roots.get(namespace)
        if root is None:
            return PrefixMatch(NO_SLOTS, NO_SLOTS, None)
        path = self._descend(root, tokens, derived=False)
        if derived:
            # One path, one lock: rows between the anchor of a derived tail and the end of the exact match are left.
            tails = [self._descend(anchor, tokens, derived=True) for anchor in path]
            i = max(range(len(path)), key=lambda i: tails[i][-1].end)
            if tails[i][-1].end > path[-1].end:
                path = path[: i + 1] + tails[i][1:]
        self._touch(path)
        slots = np.concatenate([node.slots for node in path if not node.derived])
        derived_slots = [node.slots for node in path if node.derived]
        return PrefixMatch(slots, np.concatenate([NO_SLOTS, *derived_slots]), path[-1])

    def insert(
        self, namespace: Namespace, tokens: NDArray[np.int32], slots: NDArray[np.int32], *, exact_end: int
    ) -> Insertion:
        """Hand rows over to the tree.

        Args:
            namespace: scope.
            tokens: token ids from position 0, shape [n].
            slots: the slot of each, shape [n].
            exact_end: rows at and beyond this position are derived.

        Returns:
            The slots the tree holds now. Where it already held a token of the sequence it keeps its own row.
        """
        whole = len(tokens) // self.page_size * self.page_size
        exact = min(exact_end, len(tokens)) // self.page_size * self.page_size
        root = self._roots.get(namespace)
        if root is None:
            root = self._new_node(namespace, None, NO_SLOTS, NO_SLOTS, derived=False)
            self._roots[namespace] = root
        path = self._descend(root, tokens[:exact], derived=False)
        if path[-1].end < exact:
            path.append(self._append(path, tokens[:exact], slots[:exact], derived=False))
        if exact < whole:
            # Derived rows hang where the exact ones end, so that a sequence's rows lie on one path.
            path += self._descend(path[-1], tokens[:whole], derived=True)[1:]
            if path[-1].end < whole:
                path.append(self._append(path, tokens[:whole], slots[:whole], derived=True))
        self._touch(path)
        return Insertion(np.concatenate([node.slots for node in path]), path[-1])

    def lock(self, node: Node | None) -> None:
        """Keep a node and all above it from eviction until ``unlock``; None stands for an empty match."""
        for above in self._upward(node):
            self.locked_slots += len(above.slots) * (above.locks == 0)
            above.locks += 1

    def unlock(self, node: Node | None) -> None:
        """Undo one ``lock`` of the same node."""
        for above in self._upward(node):
            assert above.locks > 0, f"node {above.node_id} is unlocked more often than locked"
            above.locks -= 1
            self.locked_slots -= len(above.slots) * (above.locks == 0)
            self._offer(above)
            self._prune(above)

    @contextmanager
    def lock_rows(self, slots: NDArray[np.int32]) -> Iterator[None]:
        """Keep the rows of these cached slots alive, and mark them as just used (they are somebody's donor)."""
        nodes = [self._nodes[node_id] for node_id in np.unique(self._owner[slots]).tolist()]
        self._touch(nodes)
        lowest = self._lowest(nodes)
        for node in lowest:
            self.lock(node)
        try:
            yield
        finally:
            for node in lowest:
                self.unlock(node)

    def _lowest(self, nodes: Sequence[Node]) -> list[Node]:
        """Leave out nodes above others: a lock holds a whole path, which clients can cut into many nodes."""
        lowest: list[Node] = []
        covered: set[int] = set()
        for node in sorted(nodes, key=lambda node: -node.end):
            if node.node_id not in covered:
                lowest.append(node)
            for above in self._upward(node):
                if above.node_id in covered:
                    break
                covered.add(above.node_id)
        return lowest

    def evict(self, n_slots: int) -> NDArray[np.int32]:
        """Free at least ``n_slots`` slots, if that many are unlocked; return the freed slots in whole pages."""
        freed: list[NDArray[np.int32]] = []
        count = 0
        while count < n_slots and self._leaves:
            last_used, node_id = heapq.heappop(self._leaves)
            node = self._nodes.get(node_id)
            if node is None or node.children or node.locks:
                continue  # offered again when its last child goes or its last lock is released
            if node.last_used != last_used:
                self._offer(node)
                continue
            pages = -(-(n_slots - count) // self.page_size)
            freed.append(self._trim(node, min(len(node.slots), pages * self.page_size)))
            count += len(freed[-1])
        self.evicted_slots += count
        return np.concatenate(freed) if freed else NO_SLOTS

    def flush(self) -> NDArray[np.int32]:
        """Evict everything that is not locked; return the freed slots."""
        return self.evict(self.cached_slots)

    def owned(self) -> NDArray[np.int32]:
        """Return every slot the tree owns, after checking that tree, counters and owner table agree."""
        seen: list[NDArray[np.int32]] = []
        exact = derived = locked = nodes = 0
        for root in self._roots.values():
            assert not root.derived, "a root is exact"
            for node in self._below(root):
                nodes += 1
                assert node.locks >= sum(child.locks for child in node.children.values()), node.node_id
                assert (self._owner[node.slots] == node.node_id).all(), node.node_id
                assert len(node.tokens) == len(node.slots), node.node_id
                for (is_derived, _), child in node.children.items():
                    assert child.parent is node, child.node_id
                    assert child.end == node.end + len(child.slots), child.node_id
                    assert child.derived == is_derived, child.node_id
                    assert is_derived or not node.derived, "an exact node below a derived one"
                seen.append(node.slots)
                locked += len(node.slots) * (node.locks > 0)
                derived += len(node.slots) * node.derived
                exact += len(node.slots) * (not node.derived)
        slots = np.concatenate(seen) if seen else NO_SLOTS
        assert len(np.unique(slots)) == len(slots), "a slot is in two nodes"
        assert exact + derived == self.cached_slots, (exact, derived, self.cached_slots)
        assert derived == self.derived_slots, (derived, self.derived_slots)
        assert locked == self.locked_slots, (locked, self.locked_slots)
        assert int((self._owner >= 0).sum()) == len(slots), "the owner table names a slot that no node holds"
        assert nodes == len(self._nodes), (nodes, len(self._nodes))
        return slots

    def _descend(self, node: Node, tokens: NDArray[np.int32], *, derived: bool) -> list[Node]:
        """Follow one kind of nodes from ``node`` as far as the tokens agree; split the last one where they end."""
        path = [node]
        while len(tokens) - node.end >= self.page_size:
            child = node.children.get(self._key(tokens, node.end, derived=derived))
            if child is None:
                break
            common = self._common(child.tokens, tokens[node.end :])
            if common < len(child.tokens):
                child = self._split(child, common)
            path.append(child)
            node = child
        return path

    def _key(self, tokens: NDArray[np.int32], start: int, *, derived: bool) -> ChildKey:
        return (derived, tokens[start : start + self.page_size].tobytes())

    def _common(self, held: NDArray[np.int32], tokens: NDArray[np.int32]) -> int:
        length = min(len(held), len(tokens))
        differs = held[:length] != tokens[:length]
        common = int(np.argmax(differs)) if differs.any() else length
        return common // self.page_size * self.page_size

    def _new_node(
        self,
        namespace: Namespace,
        parent: Node | None,
        tokens: NDArray[np.int32],
        slots: NDArray[np.int32],
        *,
        derived: bool,
    ) -> Node:
        end = (parent.end if parent else 0) + len(slots)
        node = Node(next(self._node_ids), namespace, parent, derived, tokens, slots, end)
        self._nodes[node.node_id] = node
        self._owner[slots] = node.node_id
        if parent is not None:
            parent.children[self._key(tokens, 0, derived=derived)] = node
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node after ``at`` tokens; return the new upper part (the old object keeps the lower part)."""
        assert 0 < at < len(node.tokens), at
        parent = node.parent
        assert parent is not None, "a root holds no tokens"
        upper = self._new_node(
            node.namespace, parent, node.tokens[:at].copy(), node.slots[:at].copy(), derived=node.derived
        )
        upper.locks = node.locks
        upper.last_used = node.last_used
        node.parent = upper
        node.tokens = node.tokens[at:].copy()
        node.slots = node.slots[at:].copy()
        upper.children[self._key(node.tokens, 0, derived=node.derived)] = node
        return upper

    def _append(
        self, path: Sequence[Node], tokens: NDArray[np.int32], slots: NDArray[np.int32], *, derived: bool
    ) -> Node:
        """Hang the rest of a sequence below the path that holds its beginning."""
        parent = path[-1]
        start = parent.end
        assert (self._owner[slots[start:]] == -1).all(), "a slot that the tree owns is inserted again"
        node = self._new_node(parent.namespace, parent, tokens[start:].copy(), slots[start:].copy(), derived=derived)
        self.cached_slots += len(node.slots)
        self.derived_slots += len(node.slots) * derived
        if self._listener is not None and not derived:
            held = np.concatenate([above.slots for above in (*path, node)])
            self._listener.add(node.namespace, tokens, held, start)
        return node

    def _trim(self, node: Node, count: int) -> NDArray[np.int32]:
        """Free the last ``count`` slots of a leaf, and the leaf itself when nothing is left of it."""
        kept = len(node.slots) - count
        freed = node.slots[kept:]
        key = self._key(node.tokens, 0, derived=node.derived)
        node.tokens, node.slots, node.end = node.tokens[:kept], node.slots[:kept], node.end - count
        self._owner[freed] = -1
        self.cached_slots -= count
        self.derived_slots -= count * node.derived
        if self._listener is not None and not node.derived:
            self._listener.drop(freed)
        if kept:
            self._offer(node)
        else:
            self._remove(node, key)
        return freed

    def _remove(self, node: Node, key: ChildKey) -> None:
        parent = node.parent
        assert parent is not None, "a root holds no tokens"
        del parent.children[key]
        del self._nodes[node.node_id]
        self._offer(parent)
        self._prune(parent)

    def _prune(self, root: Node) -> None:
        """Forget the root of a namespace that holds nothing any more."""
        if root.parent is None and not root.children and not root.locks and root.node_id in self._nodes:
            del self._roots[root.namespace]
            del self._nodes[root.node_id]

    def _touch(self, nodes: Sequence[Node]) -> None:
        now = next(self._clock)
        for node in nodes:
            node.last_used = now
            self._offer(node)

    def _offer(self, node: Node) -> None:
        """Put a node on the eviction heap if it is a leaf that could go; stale entries are skipped when popped."""
        if node.parent is None or node.children or node.locks:
            return
        if len(self._leaves) > 4 * len(self._nodes) + 1024:
            fresh = [
                (n.last_used, n.node_id) for n in self._nodes.values() if n.parent and not n.children and not n.locks
            ]
            heapq.heapify(fresh)
            self._leaves = fresh
        heapq.heappush(self._leaves, (node.last_used, node.node_id))

    @staticmethod
    def _upward(node: Node | None) -> Iterator[Node]:
        step = node
        while step is not None:
            yield step
            step = step.parent

    @staticmethod
    def _below(node: Node) -> Iterator[Node]:
        stack = [node]
        while stack:
            step = stack.pop()
            yield step
            stack.extend(step.children.values())
