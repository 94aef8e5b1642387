"""Every error has a row, and the most specific one counts."""

from __future__ import annotations

import grpc
import pytest

from headrace._common import errors
from headrace._common.errors import TABLE, HeadraceError, InvalidRequest, mapping


def subclasses(cls: type[HeadraceError]) -> list[type[HeadraceError]]:
    return [found for sub in cls.__subclasses__() for found in (sub, *subclasses(sub))]


def ours() -> list[type[HeadraceError]]:
    return [cls for cls in subclasses(HeadraceError) if cls.__module__ == errors.__name__]


@pytest.mark.parametrize("cls", ours(), ids=lambda cls: cls.__name__)
def test_every_error_has_a_row_of_its_own(cls: type[HeadraceError]) -> None:
    assert mapping(cls("text")) is TABLE[cls]


def test_there_is_no_row_without_an_error() -> None:
    assert set(TABLE) == set(ours())


@pytest.mark.parametrize("cls", ours(), ids=lambda cls: cls.__name__)
def test_rows_hold_what_the_protocols_know(cls: type[HeadraceError]) -> None:
    row = TABLE[cls]
    assert 400 <= row.http < 600
    assert row.openai_http is None or 400 <= row.openai_http < 600
    assert hasattr(grpc.StatusCode, row.grpc)
    assert row.native
    assert row.openai


def test_the_most_specific_row_counts() -> None:
    class Narrow(errors.AlreadyExists):
        pass

    assert mapping(Narrow("text")) is TABLE[errors.AlreadyExists]
    assert mapping(errors.AlreadyExists("text")) is not TABLE[InvalidRequest]


def test_bad_input_names_its_field() -> None:
    error = InvalidRequest("`top_k` must be strictly positive", "top_k", "code")
    assert (str(error), error.field, error.code) == ("`top_k` must be strictly positive", "top_k", "code")
    assert InvalidRequest("text").field is None
