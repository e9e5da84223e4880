"""Runs unchanged example scripts of Transformers and Accelerate plain and with `--use_ptm`, and compares the results.

    OMP_WAIT_POLICY=passive python tests/scripts/run_scripts.py CHECKOUTS [--only run_glue.py] [--processes 1]

CHECKOUTS is a folder with a checkout of each, `transformers/examples/...` and `accelerate/examples/...`. The models and
data are made on the spot; nothing is downloaded. Beside this package, the scripts need `pip install evaluate nltk
pillow scikit-learn torchvision`. Prints a Markdown table, and on stderr what differs; ends with 1 if a run failed or
any loss, metric or weight differs.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from cases import CASES
from launching import Place, Run, run
from outcomes import differences
from workplace import build

_SHOWN = 20
"""Lines of what differs, or of how a run has failed, that are printed."""


def _verdict(plain: Run, other: Run) -> tuple[bool, str]:
    """Whether two runs agree, and a table's cell that says so."""
    failed = [each.label for each in (plain, other) if each.outcome is None]
    if plain.outcome is None or other.outcome is None:
        return False, f"failed: {', '.join(failed)}"
    if not plain.outcome.numbers:
        return False, "nothing to compare"
    lines = differences(plain.outcome, other.outcome)
    if lines:
        return False, f"{len(lines)} differ"
    return True, f"equal: {len(plain.outcome.numbers)} numbers, {len(plain.outcome.weights)} tensors"


def _explain(plain: Run, other: Run) -> None:
    """Says on stderr what went wrong."""
    for each in (plain, other):
        if each.outcome is None:
            lines = each.log.read_text().splitlines()
            # The first is the script's own; those of the launchers follow it.
            first = next((at for at, line in enumerate(lines) if "Traceback (most recent" in line), -_SHOWN)
            print(f"\nOf the run {each.label}:", *lines[first:][:_SHOWN], sep="\n  ", file=sys.stderr)
    if plain.outcome is not None and other.outcome is not None:
        print("", *differences(plain.outcome, other.outcome)[:_SHOWN], sep="\n  ", file=sys.stderr)


def main() -> int:
    """Runs what is asked for, and prints a row for each script and number of processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", type=Path, help="folder with the checkouts")
    names = [case.name for case in CASES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="SCRIPT", help="file names")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--against", choices=["ptm", "again"], default="ptm", help="`again`: plain a second time")
    parser.add_argument("--output", type=Path, help="a new folder, in which all that runs write is kept")
    options = parser.parse_args()
    # So that a run under way is ended with this one.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    output = options.output or Path(tempfile.mkdtemp(prefix="ptm_accel-scripts-"))
    place = Place(options.scripts.resolve(), output.resolve() / "workplace", output.resolve() / "runs")
    good = True
    try:
        place.folder.mkdir(parents=True)
        build(place.folder)
        print(f"| script | processes | plain / {options.against} | plain s | {options.against} s |")
        print("| --- | --- | --- | --- | --- |", flush=True)
        for case in CASES:
            for processes in options.processes if case.name in options.only else []:
                plain, other = (run(place, case, processes, label) for label in ("plain", options.against))
                same, cell = _verdict(plain, other)
                print(f"| {case.name} | {processes} | {cell} | {plain.seconds:.0f} | {other.seconds:.0f} |", flush=True)
                if not same:
                    _explain(plain, other)
                    good = False
    finally:
        if options.output is None:
            shutil.rmtree(output)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
