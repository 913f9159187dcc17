"""The errors of this package."""

from __future__ import annotations


class ModelError(Exception):
    """A model that cannot be used: one clear line saying what is wrong, where, and what would be right."""


class ChatTemplateError(Exception):
    """Messages that the model's chat template cannot render: one line for the caller of the API."""
