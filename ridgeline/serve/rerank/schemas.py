"""Bodies of `/v1/rerank` and `/v1/score`, in the forms of Cohere, Jina and vLLM."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from ridgeline.serve.openai.objects import EmbeddingUsage, NonNegative
from ridgeline.serve.openai.schemas import CacheSalt, Count, Integer, OpenBody, Priority

Text = Annotated[str, Field(min_length=1)]


class DocumentText(OpenBody):
    """A document as an object, as Jina's and Cohere's clients may send it."""

    text: Text


class RerankRequest(OpenBody):
    """Body of `POST /v1/rerank`.

    `top_n` limits the results. `max_tokens_per_doc` truncates documents, and `instruction` replaces
    the task's description in the prompt.
    """

    model: str | None = None
    query: Text
    documents: Annotated[list[Text | DocumentText], Field(min_length=1)]
    top_n: Annotated[Integer, Field(ge=1)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[Integer, Field(ge=1)] | None = None
    instruction: str | None = None
    user: str | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None


class ScoreRequest(OpenBody):
    """Body of `POST /v1/score`: one text against one or many, or pairs of two lists."""

    model: str | None = None
    text_1: Text | list[Text]
    text_2: Text | list[Text]
    instruction: str | None = None
    truncate_prompt_tokens: Count | None = None
    user: str | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None


class RerankDocument(TypedDict):
    """The document as it was sent."""

    text: str


class RerankResult(TypedDict):
    """One document and its relevance, the probability of "yes"."""

    index: NonNegative
    document: NotRequired[RerankDocument]
    relevance_score: float


class RerankResponse(TypedDict):
    """The results, the most relevant document first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage


class ScoreObject(TypedDict):
    """The score of one pair."""

    index: NonNegative
    object: Literal["score"]
    score: float


class ScoreResponse(TypedDict):
    """One score per pair, in the order of the request."""

    id: str
    object: Literal["list"]
    created: NonNegative
    model: str
    data: list[ScoreObject]
    usage: EmbeddingUsage
