"""POST /v1/embeddings, and /classify, /v1/score and /v1/rerank in vLLM's form: bodies to requests, vectors to answers.

Pure. A score is the cosine of two texts' embeddings; of a classifier with one label, such as a reranker, it is the
label's probability for the pair.
"""

import base64
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from cluster.errors import InvalidRequest
from protos import inference_pb2 as pb
from router.frontend.http.blocks import compact
from router.frontend.http.body.fields import INT32, BodyReader, IgnoredFields, Inputs, Model, Positive, inputs_of
from router.frontend.http.errors import Caller
from router.frontend.http.generation import Answer, Generation, PromptInfo
from router.frontend.openai.request import NAMES, CommonBody, requests_of

MAX_INPUTS = 2048
"""Largest number of inputs of one request, as OpenAI has it."""
MAX_OPEN = 64
"""Inputs of one request that are computed at a time, or wait in the router's queue."""
Vector = NDArray[np.float32]
Input = str | list[int]


@dataclass(slots=True)
class EmbeddingRequest(Generation):
    """One request for embeddings, or for what is made of them."""

    is_base64: bool = False
    """Whether vectors are sent as base64 of little-endian float32."""
    pairs: list[tuple[int, int]] = field(default_factory=list)
    """Inputs to compare, by number."""
    documents: list[str] = field(default_factory=list)
    """Texts to rank."""
    num_wanted: int = 0
    """Number of ranked documents to return."""
    classifies: bool = False
    """Whether the probability of each label is wanted."""
    labels: list[str] = field(default_factory=list)
    """Names of the model's labels; empty for an embedding model."""


class EngineBody(CommonBody):
    dimensions: Positive | None = None


class ClassifyBody(EngineBody, kw_only=True):
    """Body of POST /classify."""

    input: Inputs


class EmbeddingsBody(ClassifyBody):
    """Body of POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] | None = None


class Entry(Model, forbid_unknown_fields=False):
    """Text with whatever else a client keeps beside it."""

    text: str


Entries = str | list[str | Entry]
"""A text, or a list of texts or of objects with one."""


class ScoreBody(EngineBody):
    """Body of POST /v1/score: one text and each of several, or two lists pair by pair."""

    text_1: Entries | None = None
    text_2: Entries | None = None
    queries: Entries | None = None
    documents: Entries | None = None


class RerankBody(EngineBody, kw_only=True):
    """Body of POST /v1/rerank: documents to rank by a query."""

    query: str
    documents: Entries
    top_n: Annotated[int, msgspec.Meta(ge=0, le=INT32 - 1)] | None = None


def _of_input(body: ClassifyBody, caller: Caller, ignored: IgnoredFields) -> EmbeddingRequest:
    api_request = _new_request(body, caller, inputs_of(body.input, "input"), "input")
    api_request.classifies = not isinstance(body, EmbeddingsBody)
    api_request.is_base64 = isinstance(body, EmbeddingsBody) and body.encoding_format == "base64"
    return api_request


def _score(body: ScoreBody, caller: Caller, ignored: IgnoredFields) -> EmbeddingRequest:
    names = ("text_1", "text_2") if body.queries is None else ("queries", "documents")
    for name in ("queries", "documents") if body.queries is None else ("text_1", "text_2"):
        ignored.unread("", name, getattr(body, name))
    left, right = (_texts(getattr(body, name), name) for name in names)
    if len(left) not in (1, len(right)):
        raise InvalidRequest(names[0], f"must be one text or as many as {names[1]}, {len(right)}, not {len(left)}")
    api_request = _new_request(body, caller, [*left, *right], names[1])
    api_request.pairs = [(index if len(left) > 1 else 0, len(left) + index) for index in range(len(right))]
    return api_request


def _rerank(body: RerankBody, caller: Caller, ignored: IgnoredFields) -> EmbeddingRequest:
    documents = _texts(body.documents, "documents")
    api_request = _new_request(body, caller, [body.query, *documents], "documents")
    api_request.documents, api_request.num_wanted = documents, body.top_n or len(documents)
    api_request.pairs = [(0, 1 + index) for index in range(len(documents))]
    return api_request


read_embeddings = BodyReader(EmbeddingsBody, _of_input)
read_classify = BodyReader(ClassifyBody, _of_input)
read_score = BodyReader(ScoreBody, _score)
read_rerank = BodyReader(RerankBody, _rerank)


def fit(api_request: EmbeddingRequest, labels: list[str]) -> None:
    """Fit a request to its model, a classifier with `labels` or an embedding model without.

    Raises InvalidRequest for a model that cannot answer it.
    """
    api_request.labels = labels
    if api_request.classifies != bool(labels) and not api_request.pairs:
        made = "gives probabilities of labels: ask /classify" if labels else "makes embeddings: ask /v1/embeddings"
        raise InvalidRequest("model", f"the model {made}")
    if not api_request.pairs or not labels:
        return
    if len(labels) > 1:
        raise InvalidRequest("model", f"the model has {len(labels)} labels, and a score needs one: ask /classify")
    texts, api_request.requests = api_request.requests, []
    for number, (left, right) in enumerate(api_request.pairs):
        one = pb.GenerateRequest()
        one.CopyFrom(texts[left])
        one.embedding.text_pair = texts[right].text
        one.request_id = f"{api_request.request_id}-{number}"
        api_request.requests.append(one)


def _new_request(body: EngineBody, caller: Caller, inputs: list[Input], many: str) -> EmbeddingRequest:
    """Read the common fields; `many` names the field with the most inputs."""
    if len(inputs) > MAX_INPUTS:
        raise InvalidRequest(many, f"must have at most {MAX_INPUTS} inputs, not {len(inputs)}")
    request = body.request(caller, embedding=pb.EmbeddingOptions(dimensions=body.dimensions))
    names = {**NAMES, "embedding.dimensions": "dimensions"}
    names |= dict.fromkeys(("text", "token_ids", "embedding.text_pair"), many)
    requests = requests_of(request, inputs)
    return EmbeddingRequest(request.request_id, requests, names, deadline_s=body.deadline_s(), max_open=MAX_OPEN)


def _texts(entries: Entries | None, name: str) -> list[str]:
    if entries is None or entries == []:
        raise InvalidRequest(name, "is missing or empty")
    given = [entries] if isinstance(entries, str) else entries
    return [each.text if isinstance(each, Entry) else each for each in given]


class VectorAnswer(Answer):
    """Answer that is made of the inputs' embeddings."""

    id_prefix: str

    def __init__(self, api_request: EmbeddingRequest, answer_id: str) -> None:
        self._api_request = api_request
        self._id = self.id_prefix + answer_id
        self._model = ""
        self._num_tokens = 0
        self._vectors: dict[int, Vector] = {}

    def begin(self, number: int, served: PromptInfo) -> None:
        """Begin an input that was checked."""
        self._model = served.model

    def chunk(self, number: int, message: pb.GenerateResponse) -> bytes:
        """Return nothing: vectors are not streamed."""
        return b""

    @property
    def complete(self) -> bool:
        return len(self._vectors) == len(self._api_request.requests)

    def absorb(self, number: int, message: pb.GenerateResponse) -> None:
        """Add the vector of an input."""
        self._vectors[number] = np.array(message.embedding, np.float32)
        self._num_tokens += message.finish.usage.prompt_tokens

    def whole(self) -> bytes:
        """Return the answer."""
        usage = {"prompt_tokens": self._num_tokens, "total_tokens": self._num_tokens}
        top = {"id": self._id, "object": "list", "created": self._api_request.created, "model": self._model}
        return compact({**top, **self._data(), "usage": usage}).encode()

    @abstractmethod
    def _data(self) -> dict[str, Any]:
        """Return the fields that this API adds."""

    def _scores(self) -> list[float]:
        """Return the score of each wanted pair."""
        if self._api_request.labels:
            return [float(self._vectors[number][0]) for number in range(len(self._vectors))]
        return [_cosine(self._vectors[left], self._vectors[right]) for left, right in self._api_request.pairs]


class EmbeddingsAnswer(VectorAnswer):
    id_prefix = "embd-"

    def _data(self) -> dict[str, Any]:
        ordered = (self._vectors[number] for number in range(len(self._vectors)))
        return {
            "data": [
                {"object": "embedding", "index": number, "embedding": self._sent(vector)}
                for number, vector in enumerate(ordered)
            ]
        }

    def _sent(self, vector: Vector) -> str | list[float]:
        if self._api_request.is_base64:
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        values: list[float] = vector.tolist()
        return values


class ClassifyAnswer(VectorAnswer):
    id_prefix = "classify-"

    def _data(self) -> dict[str, Any]:
        return {"data": [self._classified(number, self._vectors[number]) for number in range(len(self._vectors))]}

    def _classified(self, number: int, probs: Vector) -> dict[str, Any]:
        label = self._api_request.labels[int(probs.argmax())]
        return {"index": number, "label": label, "probs": probs.tolist(), "num_classes": len(probs)}


class ScoreAnswer(VectorAnswer):
    id_prefix = "score-"

    def _data(self) -> dict[str, Any]:
        scores = enumerate(self._scores())
        return {"data": [{"index": index, "object": "score", "score": score} for index, score in scores]}


class RerankAnswer(VectorAnswer):
    id_prefix = "rerank-"

    def _data(self) -> dict[str, Any]:
        ranked = sorted(enumerate(self._scores()), key=lambda each: (-each[1], each[0]))
        return {
            "results": [
                {"index": index, "document": {"text": self._api_request.documents[index]}, "relevance_score": score}
                for index, score in ranked[: self._api_request.num_wanted]
            ]
        }


def _cosine(left: Vector, right: Vector) -> float:
    lengths = float(np.linalg.norm(left)) * float(np.linalg.norm(right))
    return float(left @ right) / lengths if lengths else 0.0
