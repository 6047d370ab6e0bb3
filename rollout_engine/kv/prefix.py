"""PrefixCache: pages of finished and running sequences, found again by their tokens.

A tree whose edges are the token ids of one whole page. There is one root for each (commit sequence,
adapter number), so a page is only ever found by sequences that run under the very weights that computed
it: after a commit old pages stop matching, and no flush can be forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from rollout_engine.kv.pages import PagePool

RootKey = tuple[int, int]
"""(commit sequence, number of the adapter's commit; 0 for the base model)."""


@dataclass(eq=False, slots=True)
class Node:
    """One cached page. parent None marks a root, which has no page (-1)."""

    parent: Node | None
    tokens: tuple[int, ...]
    page: int
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)


class PrefixCache:
    """Owns one reference to each page that it caches; evicts the least recently used when asked."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._roots: dict[RootKey, Node] = {}
        self._nodes: dict[int, Node] = {}  # page -> node
        # Nodes that only the cache holds, least recently used first.
        self._idle: OrderedDict[int, Node] = OrderedDict()

    @property
    def num_cached(self) -> int:
        """Pages held by the cache, shared with sequences or not."""
        return len(self._nodes)

    @property
    def num_idle(self) -> int:
        """Pages held by the cache alone: they can be evicted."""
        return len(self._idle)

    def root(self, key: RootKey) -> Node:
        return self._roots.setdefault(key, Node(None, (), -1))

    def match(self, key: RootKey, token_ids: Sequence[int], max_tokens: int) -> tuple[list[int], Node]:
        """The longest cached run of whole pages at the start of `token_ids[:max_tokens]`.

        Returns:
            Their pages, each held once more for the caller, and the node of the last one.
        """
        size = self._pool.page_size
        node, pages = self.root(key), []
        for start in range(0, max_tokens - size + 1, size):
            child = node.children.get(tuple(token_ids[start : start + size]))
            if child is None:
                break
            node = child
            pages.append(child.page)
        for page in pages:
            self.hold(page)
        return pages, node

    def insert(self, parent: Node, tokens: tuple[int, ...], page: int) -> Node:
        """Cache `page`, which holds the KV of `tokens` after the path to `parent`.

        Returns:
            The node of these tokens. If they were cached already its page is another one: the caller must
            take that in place of its own, since whoever has a node in use must hold all pages of the path
            to it, or pages in the middle of a path would count as idle and could not be evicted.
        """
        if (existing := parent.children.get(tokens)) is not None:
            return existing
        node = Node(parent, tokens, page)
        parent.children[tokens] = node
        self._nodes[page] = node
        self._pool.hold(page)
        return node

    def hold(self, page: int) -> None:
        """One more sequence uses `page`."""
        self._pool.hold(page)
        self._idle.pop(page, None)

    def drop(self, page: int) -> None:
        """One sequence less uses `page`."""
        if self._pool.drop(page) == 1 and (node := self._nodes.get(page)) is not None:
            self._idle[page] = node

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages that only the cache holds, leaves first; returns how many."""
        evicted = 0
        while evicted < num_pages:
            node = next((node for node in self._idle.values() if not node.children), None)
            if node is None:
                break
            self._remove(node)
            evicted += 1
        return evicted

    def retire(self, keep: Collection[RootKey] = ()) -> int:
        """Drop all trees but those of `keep`; pages that sequences still use are freed with them.

        Returns:
            The number of pages the cache let go of.
        """
        dropped = 0
        for key in [key for key in self._roots if key not in keep]:
            for node in list(_walk(self._roots.pop(key))):
                dropped += 1
                del self._nodes[node.page]
                self._idle.pop(node.page, None)
                self._pool.drop(node.page)
                # A sequence may still point at this node; nothing may hang below it any more.
                node.parent = None
                node.children = {}
        return dropped

    def is_live(self, node: Node) -> bool:
        """Whether `node` is still in a tree, so that pages may be inserted below it."""
        if node.page < 0:
            return any(node is root for root in self._roots.values())
        return self._nodes.get(node.page) is node

    def pages(self) -> Iterator[int]:
        """Every cached page once."""
        return iter(self._nodes)

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.tokens]
        del self._nodes[node.page]
        del self._idle[node.page]
        self._pool.drop(node.page)


def _walk(root: Node) -> Iterator[Node]:
    """All nodes below `root`."""
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        yield node
