"""Files of texts as other programs write them: pandas 3.1.1 with pyarrow 26.0.1, Python's csv and its encodings.

    python generate.py

writes them beside this script. Every one that can be read holds the records of `RECORDS`, in that order.
"""

import csv
import json
from pathlib import Path

import pandas

HERE = Path(__file__).parent
RECORDS = [
    {"instruction": "Add.", "input": "1, 2", "output": "3"},
    {"instruction": 'Say "no",\nthen\tyes.', "input": "", "output": 'no; "yes"\n'},
    {"instruction": "Grüße, 世界!", "input": "", "output": " ok"},
]

frame = pandas.DataFrame(RECORDS)
frame.to_csv(HERE / "pandas.csv", index=False)
frame.to_csv(HERE / "index.csv", encoding="utf-8-sig")
frame.to_csv(HERE / "semicolon.csv", index=False, sep=";", lineterminator="\r\n")
frame.to_csv(HERE / "tabs.tsv", index=False, sep="\t")
frame.to_json(HERE / "list.json", orient="records")
frame.to_json(HERE / "lines.jsonl", orient="records", lines=True)
frame.to_json(HERE / "columns.json")
frame.to_parquet(HERE / "table.parquet")
frame.to_csv(HERE / "packed.csv.gz", index=False, compression={"method": "gzip", "mtime": 1})
(HERE / "pretty.json").write_text(json.dumps(RECORDS, indent=2), encoding="utf-8")
(HERE / "utf16.csv").write_text(frame.to_csv(index=False), encoding="utf-16")
with open(HERE / "excel.csv", "w", newline="", encoding="utf-8") as file:
    writer = csv.DictWriter(file, frame.columns, dialect="excel", quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows(RECORDS)
