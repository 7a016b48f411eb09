import json
import sys
from pathlib import Path

import pytest

import kvfold
from kvfold.evaluate.tasks import check_tasks, lm_eval_tasks

DOCUMENTS = [
    {"text": "The capital of France is", "choices": ["Paris", "banana"], "right": 0},
    {"text": "The sun rises in the", "choices": ["refrigerator", "east"], "right": 1},
]
COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{text}}"}
CHOOSE = {
    "task": "choose",
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "right",
    "metric_list": [{"metric": "acc"}],
}
WRITE = {
    "task": "write",
    "output_type": "generate_until",
    "doc_to_target": "{{choices[right]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 2},
    "metric_list": [{"metric": "exact_match"}],
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


def test_without_lm_eval_it_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    check_tasks([])
    with pytest.raises(ModuleNotFoundError, match="pip install 'kvfold"):
        check_tasks(["arc_easy"])


def test_unknown_tasks_and_missing_data_are_refused():
    pytest.importorskip("lm_eval")
    with pytest.raises(ValueError, match="nonsense"):
        check_tasks(["nonsense"])
    with pytest.raises(OSError, match="ai2_arc"):
        check_tasks(["arc_easy"])


def test_local_tasks_run_over_packed_caches(embedded, tmp_path: Path):
    """Choices are scored and answers written over fresh caches only: one for each call of the model."""
    pytest.importorskip("lm_eval")
    model, tokenizer = embedded
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, DOCUMENTS)))
    files = []
    for task in (CHOOSE, WRITE):
        data = {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}}}
        files.append(str(tmp_path / f"{task['task']}.yaml"))
        Path(files[-1]).write_text(json.dumps(COMMON | data | task))  # JSON is YAML
    made = []

    def make():
        made.append(kvfold.cache(model, "bf16"))
        return made[-1]

    check_tasks(files)
    found = lm_eval_tasks(model, tokenizer, make, files)
    assert found.keys() == {"choose acc", "write exact_match"}
    assert found["choose acc"] == 1
    assert len(made) == 2
    assert all(cache.get_seq_length() >= 5 for cache in made)
