"""What the package costs a process that does not use it: importing and calling the entry point, after `import torch`.

    python tests/benchmarks/import_cost.py [--rounds 15]

Each round is a process of its own, with torch's entry points off, that imports torch and then does by hand what torch
would have done for this package. The rest of what torch does there (it reads the metadata of all installed packages)
it does whether this one is there or not. Prints the result as Markdown; the target is less than 5 ms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from machine_facts import facts

CODE = """
import time, torch, sys
before = set(sys.modules)
begin = time.perf_counter()
import ptm_accel.autoload
ptm_accel.autoload.install()
print((time.perf_counter() - begin) * 1e3, len(set(sys.modules) - before), len(sys.meta_path))
"""


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PTM_", "ACCELERATE_"))}
    env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    print("# What it costs unused\n")
    print(facts(f"python tests/benchmarks/import_cost.py --rounds {options.rounds}"))
    print("\n| | importing the entry point and calling it | modules it imports |")
    print("| --- | --- | --- |")
    times, modules = [], 0
    for _ in range(options.rounds):
        done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True)
        taken, modules = float(done.stdout.split()[0]), int(done.stdout.split()[1])
        times.append(taken)
    quarter = statistics.quantiles(times, n=4)
    print(
        f"| unused | median {statistics.median(times):.2f} ms, middle half {quarter[0]:.2f} to {quarter[2]:.2f} ms, "
        f"most {max(times):.2f} ms, of {len(times)} processes | {modules} |"
    )


if __name__ == "__main__":
    main()
