"""The packed columns of a Step, read as Intermediates."""

from __future__ import annotations

import dataclasses

import pytest

import headrace
from headrace._common.intermediate import Intermediate, Token, read_step
from headrace.v1 import generation_pb2 as pb


def step(rows: list[tuple[int, int, float]], *details: pb.Detail) -> pb.Step:
    made = pb.Step(batch_id=1, details=details)
    for request_id, token_id, logprob in rows:
        made.intermediates.request_id.append(request_id)
        made.intermediates.token_id.append(token_id)
        made.intermediates.logprob.append(logprob)
    return made


def test_one_token_for_each_request() -> None:
    read = list(read_step(step([(7, 40, -0.5), (2**64 - 1, 41, -1.5)], pb.Detail(request_id=7, is_end=True))))
    assert read == [Intermediate(7, Token(40, -0.5), True), Intermediate(2**64 - 1, Token(41, -1.5), False)]


def test_of_several_tokens_only_the_last_is_the_end() -> None:
    rows = [(7, 40, 0.0), (8, 50, 0.0), (7, 41, 0.0), (8, 51, 0.0), (7, 42, 0.0)]
    read = list(read_step(step(rows, pb.Detail(request_id=7, is_end=True), pb.Detail(request_id=8))))
    assert [(i.request_id, i.token.id) for i in read] == [(request_id, token) for request_id, token, _ in rows]
    assert [i.token.id for i in read if i.is_end] == [42]


def test_an_end_without_a_token_is_no_token() -> None:
    error = pb.Detail(request_id=7, is_end=True, finish_reason=pb.Detail.ERROR)
    assert list(read_step(step([(8, 50, 0.0)], error))) == [Intermediate(8, Token(50, 0.0), False)]
    assert list(read_step(pb.Step())) == []


def test_columns_of_different_length_are_an_error() -> None:
    broken = step([(7, 40, 0.0)])
    broken.intermediates.token_id.append(41)
    with pytest.raises(ValueError, match="longer"):
        list(read_step(broken))


def test_the_classes_are_frozen_and_public() -> None:
    assert headrace.Intermediate is Intermediate
    assert headrace.Token is Token
    with pytest.raises(dataclasses.FrozenInstanceError):
        Token(1, 0.0).id = 2  # type: ignore[misc]
