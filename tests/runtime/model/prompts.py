"""Varied prompts of known lengths, each with its own opening and its own order of sentences."""

from __future__ import annotations

COUNT = 6
LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 47, 64, 90, 113, 128, 129, 200, 255, 384, 700, 1500)
OPENINGS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Once upon a time, in a village by the sea,",
    "Q: How many legs does a spider have?\nA:",
    "SELECT name, price FROM products WHERE",
    "Le chat est assis sur la",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Ms. Okafor,\n\nThank you for your letter of 12 May.",
    "日本の首都は",
    '{"name": "Ada", "born": 1815, "field":',
    "In 1969, Apollo 11 landed on",
    "Ingredients: 200 g flour, 3 eggs,",
)
FILLER = (
    "Rivers carry water from the mountains to the sea, and towns grow where two of them meet. ",
    "A cache that is never emptied soon holds nothing that anybody wants. ",
    "She counted the boxes twice: 17 on the left, 23 on the right, none in between. ",
    "for item in items:\n    total += item.price * item.amount\n",
    "Die Sonne scheint heute, aber morgen soll es regnen. ",
    "Light takes about 8 minutes and 20 seconds from the Sun to the Earth. ",
)


def prompts_of(tokenizer) -> list[list[int]]:
    """One prompt per length, as token ids."""
    made = []
    for number, length in enumerate(LENGTHS):
        text = OPENINGS[number % len(OPENINGS)]
        sentence = number
        while len(ids := tokenizer.encode(text)) < length:
            text += " " + FILLER[sentence % len(FILLER)] + str(sentence * sentence)
            sentence += 1 + number % 3
        made.append(ids[:length])
    return made
