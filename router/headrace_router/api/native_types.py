"""JSON shapes of TGI's native API."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from headrace._common.tokenizing import Piece

UInt32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
UInt = Annotated[int, Meta(ge=0)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]


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
    stop: list[str] | None = None
    truncate: UInt | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: UInt | None = None
    top_n_tokens: UInt32 | None = None
    grammar: Any = None
    adapter_id: str | None = None


class GenerateBody(Struct):
    """Body of /generate, /generate_stream and /tokenize."""

    inputs: str
    parameters: Parameters | None = None


class CompatBody(GenerateBody):
    """Body of /."""

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


class DetailsOut(Struct):
    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillOut]
    tokens: list[TokenOut]
    top_tokens: list[list[TokenOut]] | UnsetType = UNSET


class GenerateOut(Struct):
    generated_text: str
    details: DetailsOut | UnsetType = UNSET


class StreamDetailsOut(Struct):
    finish_reason: str
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
