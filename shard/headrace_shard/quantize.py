"""`python -m headrace_shard.quantize`: pack a model folder once. The launcher's `quantize` runs it."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from headrace._common.errors import StartupError
from headrace._common.model_folder import ModelFolder
from headrace_shard.settings import QUANTIZATIONS


@click.command()
@click.argument("folder")
@click.argument("output")
@click.option("--quantize", type=click.Choice(QUANTIZATIONS), default="int8", help="8 bits, or 4 with an output head of 8")
def main(folder: str, output: str, quantize: str) -> None:
    """Write the model in FOLDER, packed, to the empty folder OUTPUT."""
    from headrace_shard.weights import packed_folder

    try:
        packed_folder.write(ModelFolder.open(folder), Path(output), quantize)
    except StartupError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
