"""Turn a case study into the table that the documentation quotes.

    ridgeline lab casestudy smollm2 --device cpu --output-json study.json
    python benchmarks/record_casestudy.py study.json

Writes benchmarks/results/casestudy.json: the table, which `scripts/render_results.py` puts into the
pages, and the whole record.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.workflows.lab.case_study import CaseStudy
from ridgeline.workflows.lab.study_rows import COLUMNS, NOTE, conditions, stage_row

RESULT = Path(__file__).resolve().parent / "results" / "casestudy.json"


def table_of(study: CaseStudy, record: dict[str, Any]) -> dict[str, Any]:
    """The result in the form of benchmarks/results."""
    rows = [
        stage_row(study, stage)
        if stage.rounds
        else (stage.name, stage.why_not, *[""] * (len(COLUMNS) - 2))
        for stage in study.stages
    ]
    return {
        "machine": study.machine,
        "date": study.date,
        "command": study.command,
        "note": f"{conditions(study)}. {NOTE}",
        "columns": list(COLUMNS),
        "rows": [list(row) for row in rows],
        "record": record,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("study", type=Path, help="of `lab casestudy --output-json`")
    record = json.loads(parser.parse_args().study.read_text(encoding="utf-8"))
    result = table_of(msgspec.convert(record, CaseStudy), record)
    RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(RESULT)


if __name__ == "__main__":
    main()
