"""lm-evaluation-harness: a task through /v1/completions gives what the same weights give in transformers.

Runs as `judge.py URL MODEL FOLDER`: FOLDER holds the weights that the server serves, in Hugging Face's form.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", OPENAI_API_KEY="-")

from checks import check, run

URL, MODEL, FOLDER = sys.argv[1], sys.argv[2], sys.argv[3]
ROWS = [
    {"question": "The opposite of hot is", "choices": [" cold", " red", " seven"], "answer": 0},
    {"question": "Two and two make", "choices": [" water", " four", " slowly"], "answer": 1},
    {"question": "A dog is an", "choices": [" number", " idea", " animal"], "answer": 2},
    {"question": "The sun is very", "choices": [" hot", " wet", " square"], "answer": 0},
]
TASK = """
task: little
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
"""


def loglikelihoods(backend: str, **arguments: object) -> list[float]:
    """Of every choice of every row."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    folder = Path(tempfile.mkdtemp())
    rows = folder / "rows.json"
    rows.write_text("\n".join(json.dumps(row) for row in ROWS))
    (folder / "little.yaml").write_text(TASK.format(rows=rows))
    result = simple_evaluate(
        model=backend, model_args=arguments, tasks=["little"], batch_size=1, log_samples=True, cache_requests=False,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False), device="cpu", bootstrap_iters=0,
    )
    samples = sorted(result["samples"]["little"], key=lambda sample: sample["doc_id"])
    return [float(choice[0]) for sample in samples for choice in sample["filtered_resps"]]


@check("local-completions: log likelihoods equal those of the hf backend")
def same() -> None:
    theirs = loglikelihoods("hf", pretrained=FOLDER, dtype="float32")
    ours = loglikelihoods(
        "local-completions", model=MODEL, base_url=f"{URL}/v1/completions", tokenizer=FOLDER, tokenizer_backend="huggingface",
        tokenized_requests=True, num_concurrent=1, max_retries=1,
    )
    assert len(ours) == len(theirs) == 12
    worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    assert worst < 2e-3, f"they differ by up to {worst}"


run()
