"""The draft model of `--draft-model-id`: found like any other, and refused unless it speaks of the same tokens."""

from __future__ import annotations

from headrace._common.errors import StartupError
from headrace._common.model_folder import ModelFolder
from headrace_launcher.models.resolve import Resolved


def check_vocabulary(model: Resolved, draft: Resolved) -> None:
    """Compare the tokens of two models, one by one.

    Raises:
        StartupError: they differ; names both models and the first token that does.
    """
    theirs, ours = _tokens(draft), _tokens(model)
    if theirs == ours:
        return
    number = next(i for i in sorted({*ours, *theirs}) if ours.get(i) != theirs.get(i))
    raise StartupError(
        f"--draft-model-id {draft.name} has another vocabulary than {model.name}: token {number} is "
        f"{_name(theirs.get(number))} there and {_name(ours.get(number))} here"
    )


def _tokens(model: Resolved) -> dict[int, str]:
    """Each token's text by its id, as the tokenizer writes it."""
    from tokenizers import Tokenizer

    path = ModelFolder.open(model.folder).tokenizer_path
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise StartupError(f"{path} is not a tokenizer: {error}") from None
    return {number: text for text, number in tokenizer.get_vocab(with_added_tokens=True).items()}


def _name(text: str | None) -> str:
    return "missing" if text is None else repr(text)
