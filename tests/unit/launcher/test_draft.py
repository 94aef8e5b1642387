"""`--draft-model-id`: a model of the same tokens goes to the shards, another one is refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from headrace._common.errors import StartupError
from headrace_launcher.arguments import Plan
from headrace_launcher.models.resolve import Resolved
from headrace_launcher.serve import with_draft
from headrace_launcher.settings import LauncherSettings
from headrace_shard.settings import DRAFTS, ShardSettings
from tests.models import write_tiny_model


def served(model: Path, draft: Path | str) -> ShardSettings:
    plan = Plan(LauncherSettings(draft_model_id=str(draft)), ShardSettings(), None)
    with contextlib.ExitStack() as stack:
        return with_draft(plan, Resolved(model, "large", None), stack).shard


def test_a_model_of_the_same_tokens(tmp_path: Path) -> None:
    model, draft = write_tiny_model(tmp_path / "large"), write_tiny_model(tmp_path / "small", num_hidden_layers=1)
    settings = served(model, draft)
    assert settings.draft_model_folder == str(draft)
    assert settings.drafts == DRAFTS
    assert served(model, "").drafts == ShardSettings().drafts == 0
    assert ShardSettings(speculate=7, draft_model_folder="x").drafts == 7


def test_a_model_of_other_tokens_is_refused_naming_both(tmp_path: Path) -> None:
    model, draft = write_tiny_model(tmp_path / "large"), write_tiny_model(tmp_path / "small", vocab_size=301)
    with pytest.raises(StartupError, match=rf"{draft} has another vocabulary than large: token 300 is '<filler-300>' there "):
        served(model, draft)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(StartupError, match=r"token \d+ is 'b' there and 'a' here"):
        served(model, draft)


def test_there_must_be_such_a_model(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="nowhere"):
        served(write_tiny_model(tmp_path / "large"), tmp_path / "nowhere")
