"""All the answers to one request: several prompts, and several answers (`n`) to each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from firsttoken_runtime.api.generation import Generation, Piece, Usage
from firsttoken_runtime.engine.requests import TokenScore

_MASK = (1 << 63) - 1


@dataclass(frozen=True)
class Part:
    """A piece of the answer `index`. opens: the generation, when this is the first piece of a prompt."""

    index: int
    piece: Piece
    opens: Generation | None


class Choices:
    """Runs the generations of a request and merges their pieces as they come.

    leads: the first answer to each prompt. n: answers to each prompt; answer i to prompt p has the index
    p * n + i. follow: makes the generation of a further answer (prompt, i). It starts when the first piece of
    its prompt is there: the prompt's pages are in the prefix cache by then, and are not computed n times.
    empty: no tokens were asked for, and the one that is computed all the same counts nowhere.
    """

    def __init__(
        self,
        leads: Sequence[Generation],
        n: int = 1,
        follow: Callable[[int, int], Generation] | None = None,
        *,
        empty: bool = False,
    ) -> None:
        self._leads = leads
        self._n = n
        self._follow = follow
        self._empty = empty
        self._all: list[Generation] = list(leads)
        self.first: Generation = leads[0]  # the one whose first piece came first

    @property
    def count(self) -> int:
        return len(self._leads) * self._n

    def scores(self, index: int) -> Sequence[TokenScore]:
        """Scores of the prompt's tokens that answer `index` belongs to."""
        return self._leads[index // self._n].prompt_scores

    @property
    def usage(self) -> Usage:
        """Every prompt counted once, and all answers."""
        prompts = [lead.usage for lead in self._leads]
        return Usage(
            sum(usage.prompt_tokens for usage in prompts),
            0 if self._empty else sum(generation.usage.completion_tokens for generation in self._all),
            sum(usage.cached_tokens for usage in prompts),
        )

    async def parts(self) -> AsyncGenerator[Part, None]:
        """Pieces of all answers in the order in which they come. Raises what `Generation.pieces` raises."""
        if self.count == 1:
            opens: Generation | None = self.first
            async with aclosing(self.first.pieces()) as pieces:
                async for piece in pieces:
                    yield Part(0, piece, opens)
                    opens = None
            return
        merged: asyncio.Queue[Part | Exception] = asyncio.Queue()
        tasks: list[asyncio.Task[None]] = []

        def start(index: int, generation: Generation) -> None:
            tasks.append(asyncio.create_task(run(index, generation)))

        async def run(index: int, generation: Generation) -> None:
            prompt, answer = divmod(index, self._n)
            opens = generation if answer == 0 else None
            try:
                async with aclosing(generation.pieces()) as pieces:
                    async for piece in pieces:
                        merged.put_nowait(Part(index, piece, opens))
                        if opens is not None:
                            opens = None
                            for other in range(1, self._n):
                                follower = self._new(prompt, other)
                                start(index + other, follower)
            except Exception as error:
                merged.put_nowait(error)

        for prompt, lead in enumerate(self._leads):
            start(prompt * self._n, lead)
        left, begun = self.count, False
        try:
            while left:
                part = await merged.get()
                if isinstance(part, Exception):
                    raise part
                if not begun and part.opens is not None:
                    self.first, begun = part.opens, True
                left -= part.piece.finish is not None
                yield part
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _new(self, prompt: int, answer: int) -> Generation:
        assert self._follow is not None
        follower = self._follow(prompt, answer)
        self._all.append(follower)
        return follower


def choice_seed(seed: int, answer: int) -> int:
    """The seed of a further answer; the first one has the request's own, so that n changes nothing for it."""
    if answer == 0:
        return seed
    mixed = (seed * 0x9E3779B97F4A7C15 + answer * 0xBF58476D1CE4E5B9) & _MASK
    return (mixed ^ (mixed >> 29)) & _MASK
