"""Recounts every page from the live sequences and the tree, and says in words what does not agree.

Costs time linear in pages and tokens: for the admin port, for when the engine is idle, and for tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from firsttoken_runtime.engine.page_needs import GIVEN_BACK, pages_for
from firsttoken_runtime.engine.pages import Holder
from firsttoken_runtime.engine.sequence import Sequence
from firsttoken_runtime.engine.tables import PageTables


def problems(tables: PageTables, running: Collection[Sequence], waiting: Collection[Sequence]) -> list[str]:
    """Every discrepancy; empty when each page is in exactly one of free, cached, locked and owned, and each
    running sequence has the right ones."""
    return [
        *_tree(tables, running),
        *(problem for sequence in running for problem in _running(tables, sequence)),
        *(
            f"sequence {sequence.id} waits with {len(sequence.pages)} pages, {sequence.computed} computed"
            for sequence in waiting
            if sequence.pages or sequence.handle is not None or sequence.computed
        ),
        *_pool(tables, running),
    ]


def _running(tables: PageTables, sequence: Sequence) -> Iterator[str]:
    name, size = f"sequence {sequence.id}", tables.page_tokens
    handle = sequence.handle
    if handle is None:
        yield f"{name} runs without a handle"
        return
    path = handle.path()
    if len(path) != handle.pages:
        yield f"{name}: its handle says {handle.pages} locked pages, its path has {len(path)}"
    for place, (node, page) in enumerate(zip(path, sequence.pages, strict=False)):
        if node.page != page:
            yield f"{name}: page {place} of its table is {page}, the tree's is {node.page}"
        if node.key != tuple(sequence.tokens[place * size : (place + 1) * size]):
            yield f"{name}: page {place} of its table holds other tokens than its own"
    if handle.pages * size > sequence.computed:
        yield f"{name}: {handle.pages} pages in the tree, only {sequence.computed} tokens computed"
    if handle.root.namespace != sequence.namespace:
        yield f"{name}: its pages are of {handle.root.namespace}, it is of {sequence.namespace}"
    if not 0 <= sequence.computed < len(sequence.tokens):
        yield f"{name}: {sequence.computed} tokens computed of {len(sequence.tokens)} known"
    covered = len(sequence.pages)
    if not pages_for(sequence.computed, size) <= covered <= pages_for(len(sequence.tokens), size):
        yield (
            f"{name}: {covered} pages of {size} tokens for {sequence.computed} computed and "
            f"{len(sequence.tokens)} known tokens"
        )
    yield from _given_back(tables, sequence, handle.pages)


def _given_back(tables: PageTables, sequence: Sequence, locked: int) -> Iterator[str]:
    """Whether just the pages that no layer sees any more are given back, and it holds just what it needs."""
    name, needs = f"sequence {sequence.id}", tables.needs
    gone = needs.gone(sequence.computed)
    places = list(range(needs.sinks, gone)) if locked <= max(needs.sinks, gone) else []
    found = [place for place, page in enumerate(sequence.pages) if page == GIVEN_BACK]
    if found != places or sequence.given_back != len(places):
        yield (
            f"{name}: pages {found} of its table are given back, {sequence.given_back} counted; "
            f"it sees none of {places} any more"
        )
    if locked > needs.shareable:
        yield f"{name}: {locked} pages in the tree, its window allows {needs.shareable}"
    if sequence.held > needs.needed(sequence):
        yield f"{name}: it holds {sequence.held} pages and needs {needs.needed(sequence)} at most"


def _tree(tables: PageTables, running: Collection[Sequence]) -> Iterator[str]:
    tree = tables.tree
    users = Counter(id(node) for s in running if s.handle is not None for node in s.handle.path())
    handles = Counter(id(s.handle.root) for s in running if s.handle is not None)
    locked = cached = 0
    leaves = tree.evictable_leaves()
    expected_leaves = set()
    seen: set[int] = set()
    for root in tree.roots():
        if root.handles != handles[id(root)]:
            yield f"{root.namespace}: {root.handles} handles counted, {handles[id(root)]} held"
    for node in tree.nodes():
        seen.add(id(node))
        if node.refs != users[id(node)]:
            yield f"page {node.page} in the tree: {node.refs} users counted, {users[id(node)]} have it"
        if len(node.key) != tables.page_tokens:
            yield f"page {node.page} in the tree has a key of {len(node.key)} tokens"
        if node.siblings().get(node.key) is not node:
            yield f"page {node.page} in the tree is not where its key says"
        if node.root.detached and node.refs == 0:
            yield f"page {node.page} was flushed and nobody uses it, but it was not freed"
        if any(child.refs > node.refs for child in node.children.values()):
            yield f"page {node.page} in the tree has fewer users than a page behind it"
        if node.refs:
            locked += 1
        else:
            cached += 1
            if not node.children:
                expected_leaves.add(node.page)
    lost = set(users) - seen
    if lost:
        yield f"{len(lost)} locked pages are in no tree"
    if (locked, cached) != (tree.locked, tree.cached):
        yield (
            f"tree: {tree.locked} locked and {tree.cached} cached pages counted, {locked} and {cached} found"
        )
    if leaves != expected_leaves:
        yield f"tree: evictable {sorted(leaves)}, unused leaves are {sorted(expected_leaves)}"
    if tree.pages > tree.cap_pages and tree.cached:
        yield f"tree: {tree.pages} pages over the cap of {tree.cap_pages}, {tree.cached} of them unused"


def _pool(tables: PageTables, running: Collection[Sequence]) -> Iterator[str]:
    pool = tables.pool
    places: dict[int, list[str]] = {page: [] for page in range(pool.total)}
    holders = dict.fromkeys(places, Holder.FREE)

    def put(page: int, where: str, holder: Holder) -> Iterator[str]:
        if page not in places:
            yield f"{where}: there is no page {page}"
            return
        places[page].append(where)
        holders[page] = holder

    for page in pool.free_pages:
        yield from put(page, "free", Holder.FREE)
    for node in tables.tree.nodes():
        yield from put(node.page, "the tree", Holder.TREE)
    owned = 0
    for sequence in running:
        if sequence.handle is not None:
            for page in sequence.pages[sequence.handle.pages :]:
                if page == GIVEN_BACK:
                    continue
                owned += 1
                yield from put(page, f"sequence {sequence.id}", Holder.SEQUENCE)
    for page, where in places.items():
        if len(where) != 1:
            yield f"page {page} is in {' and '.join(where) or 'no place: lost'}"
        elif pool.holder(page) is not holders[page]:
            yield f"page {page} is in {where[0]}, the pool says {pool.holder(page).name.lower()}"
    if pool.owned != owned:
        yield f"pool: {pool.owned} owned pages counted, {owned} found"
    if pool.in_tree != tables.tree.pages:
        yield f"pool: {pool.in_tree} pages given to the tree, the tree has {tables.tree.pages}"
