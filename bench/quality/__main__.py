"""Policies and remedies on three tasks: the quality of one device, and the time it takes.

    python -m bench.quality                          # all rows that the record lacks: hours of a core
    python -m bench.quality --task gpt --seeds 1     # a look
    python -m bench.quality --report                 # table and picture of docs/quality.md, from the record

Rows are settings of `bench.quality.cluster`, run on virtual time: a result depends on the seed alone, not on
the machine's speed. A run that the record has is not repeated.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from bench.quality.report import read, write_page
from bench.quality.rows import jobs, run
from bench.quality.tasks import TASKS

RECORD = Path(__file__).resolve().parents[1] / "results" / "quality.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", action="append", choices=TASKS, help="default: all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on one core")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--report", action="store_true", help="only write the page, from the record")
    options = parser.parse_args()
    record: Path = options.record
    if options.report:
        write_page(read(record))
        return
    known = set()
    if record.exists():
        lines = map(json.loads, record.read_text().splitlines())
        known = {(line["task"], line["mix"], line["row"], line["seed"]) for line in lines}
    missing = [job for job in jobs(options.task or list(TASKS), options.seeds) if job.key not in known]
    print(f"{len(missing)} runs", flush=True)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool, record.open("a") as file:
        for done in as_completed([pool.submit(run, job) for job in missing]):
            line = done.result()
            file.write(json.dumps(line) + "\n")
            file.flush()
            loss = line["curve"][-1][2]  # type: ignore[index]
            print(
                f"{line['task']:<8} {line['mix']:<8} {line['row']:<32} seed {line['seed']}: {loss:.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
