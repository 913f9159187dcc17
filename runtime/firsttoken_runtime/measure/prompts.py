"""Prompts of real words: never seen before where nothing may be cached, sharing a prefix where something
should be.

A text is a row of words, and words are added or removed until the server's own tokenizer counts what was
asked for. Where the server has no `/tokenize`, the `usage` of two first answers tells how many tokens a word
has, which is close; what a prompt really had is in its answer's usage anyway.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass

from firsttoken_runtime.measure.words import WORDS

# Enough words for a text to differ from all others in its first page of KV.
TAG_WORDS = 6
_MOST_CORRECTIONS = 6

Count = Callable[[str], Awaitable[int | None]]


@dataclass(frozen=True)
class WordRate:
    """A text of w words has about `fixed + per_word * w` tokens."""

    fixed: float = 0.0
    per_word: float = 1.0

    def words(self, tokens: int) -> int:
        return max(round((tokens - self.fixed) / self.per_word), 1)

    @classmethod
    def of(cls, short: tuple[int, int], long: tuple[int, int]) -> WordRate:
        """From the (words, tokens) of a short and of a long text."""
        per_word = (long[1] - short[1]) / (long[0] - short[0])
        if per_word <= 0:
            raise ValueError(f"{long[0]} words have no more tokens than {short[0]}: {long[1]} and {short[1]}")
        return cls(max(short[1] - per_word * short[0], 0.0), per_word)


@dataclass(frozen=True)
class Prefix:
    """The beginning that a text shares with all others that name it, `tokens` long."""

    name: Hashable
    tokens: int


@dataclass(frozen=True)
class Text:
    """What a prompt is to be: `tokens` long in all, its own from the end of its prefixes on.

    own: texts with different `own` are different. prefixes: one after the other.
    """

    tokens: int
    own: Hashable
    prefixes: tuple[Prefix, ...] = ()


def words_of(seed: int, run: str, name: Hashable, count: int) -> list[str]:
    """`count` words: the first `TAG_WORDS` of them belong to the run, all others to the seed."""
    tag = random.Random(f"{seed} {run} {name!r}")  # noqa: S311 - not for secrets
    rest = random.Random(f"{seed} {name!r}")  # noqa: S311 - not for secrets
    first = tag.choices(WORDS, k=min(count, TAG_WORDS))
    return first + rest.choices(WORDS, k=max(count - TAG_WORDS, 0))


class Prompts:
    """Writes prompts. The same seed and run give the same texts; another run shares no page of KV with them.

    seed: of the words. run: differs from run to run, so that what an earlier run left in a server's prefix
    cache is no help to this one. count: the server's tokenizer, None without. fixed_tokens: what the chat
    template and special tokens add to what `count` says.
    """

    def __init__(
        self,
        seed: int,
        run: str,
        rate: WordRate = WordRate(),
        count: Count | None = None,
        fixed_tokens: int = 0,
    ) -> None:
        self._seed = seed
        self._run = run
        self._rate = rate
        self._count = count
        self._fixed = fixed_tokens
        self._prefixes: dict[tuple[Prefix, ...], list[str]] = {}
        self._made = 0

    def fresh(self) -> int:
        """A name that no text had before."""
        self._made += 1
        return self._made

    async def of(self, tokens: int) -> str:
        """A text of `tokens` tokens that shares nothing with any other."""
        return await self.write(Text(tokens, own=("of", self.fresh())))

    async def write(self, text: Text) -> str:
        """The prompt for `text`; of exactly its length where the server can count."""
        begun = await self._begin(text.prefixes)
        return " ".join(await self._fit(begun, ("own", text.own), text.tokens))

    async def _begin(self, prefixes: tuple[Prefix, ...]) -> list[str]:
        if not prefixes:
            return []
        if prefixes not in self._prefixes:
            *before, last = prefixes
            begun = await self._begin(tuple(before))
            tokens = sum(prefix.tokens for prefix in prefixes)
            self._prefixes[prefixes] = await self._fit(begun, ("prefix", last.name), tokens)
        return self._prefixes[prefixes]

    async def _fit(self, begun: list[str], name: Hashable, tokens: int) -> list[str]:
        """`begun` and as many words of `name` as make `tokens` tokens, at least one."""
        least = len(begun) + 1
        wanted = max(self._rate.words(tokens), least)
        for _ in range(_MOST_CORRECTIONS):
            words = begun + words_of(self._seed, self._run, name, wanted - len(begun))
            found = await self._count(" ".join(words)) if self._count else None
            missing = 0 if found is None else tokens - found - self._fixed
            if not missing:
                break
            step = round(missing / self._rate.per_word) or (1 if missing > 0 else -1)
            corrected = max(wanted + step, least)
            if corrected == wanted:
                break
            wanted = corrected
        return words
