"""The prefix cache: a radix tree over full KV pages, one node per page.

A node's key is the tuple of the page's own tokens, and a look-up compares tokens: two prompts whose hashes
collide never share a page. Everything else that changes KV (model, precision, window, tenant's salt) is in
the namespace, and every namespace has a root of its own.

    root ─ page(tokens 0..15) ─ page(16..31) ─ page(32..47)     refs = sequences that use the page
                    refs 2           refs 2  └ page(32..47)'    refs never grow downwards, so a page without
                                                                users has only descendants without users
A page without users is cached, one with users locked. Only leaves without users are evicted, least recently
used first; evicting k pages costs k·log n.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from firsttoken_runtime.engine.pages import Holder, PagePool
from firsttoken_runtime.model.windows import Window

PageKey = tuple[int, ...]


class Namespace(NamedTuple):
    """Everything besides the tokens that a page's KV depends on, and who may share it.

    window: of the switch slidingWindow; the model's own windows do not change.
    """

    model: str
    kv_precision: str = "model"
    window: Window | None = None
    cache_salt: str = ""


class Root:
    """Top of one namespace's tree. A detached root is not found any more; it empties as its users leave."""

    __slots__ = ("children", "detached", "handles", "namespace")

    def __init__(self, namespace: Namespace, detached: bool = False) -> None:
        self.namespace = namespace
        self.children: dict[PageKey, Node] = {}
        self.detached = detached
        self.handles = 0


class Node:
    """One full page in the tree. `page` is -1 once the node was removed."""

    __slots__ = ("children", "key", "last_used", "page", "parent", "refs", "root")

    def __init__(self, root: Root, parent: Node | None, key: PageKey, page: int) -> None:
        self.root = root
        self.parent = parent
        self.key = key
        self.page = page
        self.children: dict[PageKey, Node] = {}
        self.refs = 0
        self.last_used = 0

    def siblings(self) -> dict[PageKey, Node]:
        return self.parent.children if self.parent is not None else self.root.children


@dataclass(frozen=True, slots=True)
class PrefixHandle:
    """A sequence's lock on the first `pages` pages of its page table, down to `node`.

    Whoever holds it must give it back exactly once, to `release`; `extend` takes it and returns its
    successor.
    """

    root: Root
    node: Node | None
    pages: int

    def path(self) -> list[Node]:
        """The locked nodes, first page first."""
        nodes = []
        node = self.node
        while node is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


class Hit(NamedTuple):
    """What a look-up would find: pages, and how many of them nobody uses now (evictable until locked)."""

    pages: int
    unlocked: int


NO_HIT = Hit(0, 0)


class PrefixTree:
    """The tree and its memory cap.

    cap_pages counts locked and cached pages together. It is held at every insertion; when it shrinks, cached
    pages go at once and locked ones as they unlock.
    """

    def __init__(self, pool: PagePool, page_tokens: int, cap_pages: int, enabled: bool = True) -> None:
        self._pool = pool
        self._page_tokens = page_tokens
        self._roots: dict[Namespace, Root] = {}
        self._detached: dict[int, Root] = {}
        # (last used, number, node); an entry is stale when the node is not an unused leaf of that time any
        # more
        self._leaves: list[tuple[int, int, Node]] = []
        self._tick = 0
        self._entries = 0
        self.cap_pages = cap_pages
        self.enabled = enabled
        self.cached = 0
        self.locked = 0
        self.version = 0  # changes with every insertion and removal, so that look-ups can be remembered
        self.evictions = 0
        self.insertions = 0

    @property
    def pages(self) -> int:
        return self.cached + self.locked

    def probe(self, namespace: Namespace, tokens: Sequence[int], most_pages: int) -> Hit:
        """What `match` would find, without locking."""
        pages = unlocked = 0
        for node in self._walk(namespace, tokens, most_pages):
            pages += 1
            unlocked += node.refs == 0
        return Hit(pages, unlocked) if pages else NO_HIT

    def match(
        self, namespace: Namespace, tokens: Sequence[int], most_pages: int
    ) -> tuple[PrefixHandle, list[int]]:
        """Lock the longest cached prefix of whole pages, `most_pages` at most; returns its pages in order."""
        if not self.enabled:
            # Holders of a detached root insert nothing: they keep the pages they compute.
            return PrefixHandle(self._hold(Root(namespace, detached=True)), None, 0), []
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Root(namespace)
        last: Node | None = None
        pages = []
        for last in self._walk(namespace, tokens, most_pages):
            self._lock(last)
            pages.append(last.page)
        return PrefixHandle(self._hold(root), last, len(pages)), pages

    def extend(
        self, handle: PrefixHandle, keys: Iterator[PageKey], pages: Sequence[int]
    ) -> tuple[PrefixHandle, list[int]]:
        """Insert computed full pages that follow the handle's; the new handle locks them too.

        pages: owned by the calling sequence. Where another sequence inserted the same tokens meanwhile, the
        tree's page takes the place of ours and ours becomes free. Returns the tree's pages, maybe fewer than
        given: at the cap with nothing to evict, or detached, the rest stays the sequence's own.
        """
        root, node = handle.root, handle.node
        accepted: list[int] = []
        if root.detached:
            return handle, accepted
        for page in pages:
            children = node.children if node is not None else root.children
            key = next(keys)
            found = children.get(key)
            if found is not None:
                self._pool.put_back((page,), Holder.SEQUENCE)
                self._lock(found)
            else:
                if self.pages >= self.cap_pages and not self.evict(1):
                    break
                found = children[key] = Node(root, node, key, page)
                self._pool.give_to_tree(page)
                found.refs = 1
                self.locked += 1
                self.insertions += 1
                self.version += 1
            node = found
            accepted.append(found.page)
        return PrefixHandle(root, node, handle.pages + len(accepted)), accepted

    def release(self, handle: PrefixHandle) -> None:
        """Unlock. Pages nobody uses any more stay cached if the cap allows, or go at once if detached."""
        root = handle.root
        self._tick += 1
        node = handle.node
        while node is not None:
            parent = node.parent
            self._unlock(node)
            node = parent
        root.handles -= 1
        self._forget(root)
        self._hold_cap()

    def shorten(self, handle: PrefixHandle, pages: int) -> PrefixHandle:
        """Unlock all but the first `pages` pages; the new handle locks those."""
        self._tick += 1
        node, root = handle.node, handle.root
        for _ in range(handle.pages - pages):
            if node is None:
                break
            parent = node.parent
            self._unlock(node)
            node = parent
        self._hold_cap()
        return PrefixHandle(root, node, min(pages, handle.pages))

    def releasable(self, handles: Sequence[PrefixHandle]) -> int:
        """Pages that nobody would use any more if exactly these handles were released."""
        holds: dict[Node, int] = {}
        for handle in handles:
            for node in handle.path():
                holds[node] = holds.get(node, 0) + 1
        return sum(count == node.refs for node, count in holds.items())

    def evict(self, count: int) -> int:
        """Free up to `count` cached pages, least recently used leaves first; returns how many."""
        evicted = 0
        while evicted < count and self.cached:
            last_used, _, node = heapq.heappop(self._leaves)
            if not _is_unused_leaf(node) or node.last_used != last_used:
                continue
            parent = node.parent
            self._remove(node)
            if parent is not None and _is_unused_leaf(parent):
                self._push(parent)
            self._forget(node.root)
            evicted += 1
        self.evictions += evicted
        return evicted

    def set_cap(self, cap_pages: int) -> None:
        """Change the cap; cached pages beyond it go now."""
        self.cap_pages = cap_pages
        self._hold_cap()

    def flush(self) -> None:
        """Forget everything: cached pages become free now, locked ones when released; none is found again."""
        for root in self._roots.values():
            root.detached = True
            if root.handles:
                self._detached[id(root)] = root
            unused = [node for node in _nodes(root.children) if node.refs == 0]
            for node in reversed(unused):  # children before parents
                self._remove(node)
        self._roots = {}
        self._leaves = []

    def set_enabled(self, enabled: bool) -> None:
        """Off: nothing is matched or inserted, and what is there goes as with `flush`."""
        if self.enabled and not enabled:
            self.flush()
        self.enabled = enabled

    def roots(self) -> list[Root]:
        """Every root that has users or pages, detached ones too; for the integrity check."""
        return [*self._roots.values(), *self._detached.values()]

    def nodes(self) -> Iterator[Node]:
        """Every node, parents first."""
        for root in self.roots():
            yield from _nodes(root.children)

    def evictable_leaves(self) -> set[int]:
        """Pages that `evict` could take first; for the integrity check."""
        return {
            node.page
            for last_used, _, node in self._leaves
            if _is_unused_leaf(node) and node.last_used == last_used
        }

    def _walk(self, namespace: Namespace, tokens: Sequence[int], most_pages: int) -> Iterator[Node]:
        root = self._roots.get(namespace) if self.enabled else None
        children = root.children if root is not None else {}
        page_tokens = self._page_tokens
        for start in range(0, most_pages * page_tokens, page_tokens):
            if not children:
                return
            node = children.get(tuple(tokens[start : start + page_tokens]))
            if node is None:
                return
            yield node
            children = node.children

    def _hold(self, root: Root) -> Root:
        root.handles += 1
        if root.detached:
            self._detached[id(root)] = root
        return root

    def _forget(self, root: Root) -> None:
        if root.handles or root.children:
            return
        if root.detached:
            self._detached.pop(id(root), None)
        else:
            self._roots.pop(root.namespace, None)

    def _lock(self, node: Node) -> None:
        if node.refs == 0:
            self.cached -= 1
            self.locked += 1
        node.refs += 1

    def _unlock(self, node: Node) -> None:
        """One user less; all pages behind it were unlocked before."""
        node.refs -= 1
        node.last_used = self._tick
        if node.refs == 0:
            self.locked -= 1
            self.cached += 1
            if node.root.detached:
                self._remove(node)
            elif not node.children:
                self._push(node)

    def _remove(self, node: Node) -> None:
        """Take an unused leaf out of the tree; its page becomes free."""
        del node.siblings()[node.key]
        self._pool.put_back((node.page,), Holder.TREE)
        node.page = -1
        self.cached -= 1
        self.version += 1

    def _push(self, node: Node) -> None:
        self._entries += 1
        heapq.heappush(self._leaves, (node.last_used, self._entries, node))
        if len(self._leaves) > 2 * self.cached + 64:  # mostly stale: at most half can be live
            live = [e for e in self._leaves if _is_unused_leaf(e[2]) and e[2].last_used == e[0]]
            heapq.heapify(live)
            self._leaves = live

    def _hold_cap(self) -> None:
        if self.pages > self.cap_pages:
            self.evict(self.pages - self.cap_pages)


def _is_unused_leaf(node: Node) -> bool:
    return node.page >= 0 and node.refs == 0 and not node.children


def _nodes(children: dict[PageKey, Node]) -> Iterator[Node]:
    stack = list(children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
