"""The served models in the shape of Anthropic's Models API, for requests that its clients send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import Request
from typing_extensions import TypedDict

from ridgeline.serve.openai.objects import ModelCard


class ModelInfo(TypedDict):
    """A served model. `max_input_tokens` bounds prompt and output together."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int


def asks_as_anthropic(request: Request) -> bool:
    """Whether the request has the header that Anthropic's API requires of every request."""
    return "anthropic-version" in request.headers


def anthropic_model(card: ModelCard) -> ModelInfo:
    """One model."""
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": datetime.fromtimestamp(card["created"], UTC).isoformat(),
        "max_input_tokens": card["max_model_len"],
    }


def anthropic_models(cards: Sequence[ModelCard]) -> Mapping[str, Any]:
    """All models, as one page."""
    return {
        "data": [anthropic_model(card) for card in cards],
        "has_more": False,
        "first_id": cards[0]["id"],
        "last_id": cards[-1]["id"],
    }
