"""The ablation's page and its sentences, from made-up results. (`make ablation` itself is an hour.)"""

from pathlib import Path
from typing import Any

from benchmarks.ablation import ROWS, conclude, write_page


def results(spread: float) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for place, arm in enumerate(ROWS["tasks"]):
        held_out = {"mlm_loss": 5.0 + place} | ({"nsp_accuracy": 0.7} if place == 0 else {})
        found[arm.name] = [
            {
                "seed": seed,
                "held_out": held_out,
                "curve": [(1, 9.0), (2, 5.0 + place)],
                "accuracy": [(1, 0.0), (2, 0.2)],
                "task": {"accuracy": 0.8 - 0.1 * place + spread * seed},
            }
            for seed in (1, 2, 3)
        ]
    return found


def test_conclusions_follow_the_spread_of_the_seeds() -> None:
    clear = conclude("tasks", results(0.001), "accuracy", 100)
    assert "MLM + NSP against no NSP: +10.0% in accuracy, more than twice" in clear[0]
    assert "within twice the standard error" in conclude("tasks", results(0.2), "accuracy", 100)[0]
    alone = {name: runs[:1] for name, runs in results(0).items()}
    assert "decides nothing" in conclude("tasks", alone, "accuracy", 100)[0]
    assert any("order of rows that lie close together is chance" in line for line in clear)


def test_the_page_has_the_papers_rows_beside(tmp_path: Path) -> None:
    facts = {"metric": "accuracy", "seeds": 3, "steps": 100, "task": "sst2"}
    text = write_page("tasks", results(0.01), tmp_path, facts).read_text()
    for arm in ROWS["tasks"]:
        assert arm.name in text and all(str(value) in text for value in arm.paper.values())
    assert text.count("<svg") == 2


def test_rates_are_those_of_the_papers_rows() -> None:
    for arm in ROWS["mask"]:
        masked, same, random = (int(share) for share in arm.name.split()[0].split("/"))
        assert [round(100 * rate) for rate in arm.pretrain["mask_rates"]] == [masked, random, same]
        assert sum(arm.pretrain["mask_rates"]) == 1
