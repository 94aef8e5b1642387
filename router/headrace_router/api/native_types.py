"""JSON shapes of TGI's native API, and of the wrappings that clouds put around it."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from headrace._common.tokenizing import Piece
from headrace_router.types import FinishReason

UInt32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
UInt = Annotated[int, Meta(ge=0)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
# documented here, and refused by the rules of `validation` with TGI's words
NotEmpty = Meta(extra_json_schema={"minLength": 1})
SomeOf = Meta(extra_json_schema={"minItems": 1})


class Parameters(Struct):
    """`parameters` of a request. Null means not given."""

    best_of: UInt | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool | None = None
    max_new_tokens: UInt32 | None = None
    return_full_text: bool | None = None
    stop: str | list[str] | None = None
    truncate: UInt | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: UInt | None = None
    top_n_tokens: UInt32 | None = None
    grammar: Any = None
    adapter_id: str | None = None


class GenerateBody(Struct):
    """Body of /generate and /generate_stream."""

    inputs: Annotated[str, NotEmpty]
    parameters: Parameters | None = None


class CompatBody(Struct):
    """Body of /. Several inputs get an answer each."""

    inputs: Annotated[str, NotEmpty] | Annotated[list[Annotated[str, NotEmpty]], SomeOf]
    parameters: Parameters | None = None
    stream: bool | None = None


class TokenOut(Struct):
    id: int
    text: str
    logprob: float
    special: bool


class PrefillOut(Struct):
    id: int
    text: str
    logprob: float | None


class BestOfOut(Struct):
    """One of the sequences of `best_of` that did not win."""

    generated_text: str
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillOut]
    tokens: list[TokenOut]
    top_tokens: list[list[TokenOut]] | UnsetType = UNSET


class DetailsOut(Struct):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillOut]
    tokens: list[TokenOut]
    best_of_sequences: list[BestOfOut] | UnsetType = UNSET
    top_tokens: list[list[TokenOut]] | UnsetType = UNSET


class GenerateOut(Struct):
    generated_text: str
    details: DetailsOut | UnsetType = UNSET


class StreamDetailsOut(Struct):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamOut(Struct):
    """One event of a stream."""

    index: int
    token: TokenOut
    generated_text: str | None
    details: StreamDetailsOut | None
    top_tokens: list[TokenOut] | UnsetType = UNSET


class SimpleToken(Struct):
    id: int
    text: str
    start: int
    stop: int


def simple_tokens(pieces: list[Piece]) -> list[SimpleToken]:
    """The answer of /tokenize."""
    return [SimpleToken(p.id, p.text, p.start, p.stop) for p in pieces]


encode = msgspec.json.Encoder().encode
generate_decoder = msgspec.json.Decoder(GenerateBody)
compat_decoder = msgspec.json.Decoder(CompatBody)
