"""The tables in docs/machine-code/: kernels, their main loops, and the fences in these, a row each."""

import csv
import io

from . import checks, loops

COLUMNS = {
    "kernels": checks.COLUMNS,
    "loops": ["module", "architecture", "kernel", "loop", "instructions", *loops.NAMES, "per tensor"],
    "fences": ["module", "architecture", "kernel", "loop", "fences", "proxy fences"],
}
# Number of columns that identify a row.
NAMES = {"kernels": 3, "loops": 4, "fences": 4}
# Maximum growth of a Hopper loop's instructions: each is issued once per stage, by warps that share a scheduler with the products.
GROWTH = 1.1
MAX_PROXY_FENCES = 1


def named(rows, kind):
    """The rows by their identifying columns, with text values."""
    columns = COLUMNS[kind]
    return {tuple(str(row[c]) for c in columns[:NAMES[kind]]): {c: str(row[c]) for c in columns} for row in rows}


def parsed(text, kind):
    return named(csv.DictReader(io.StringIO(text)), kind)


def written(rows, kind):
    """The rows as CSV, in the order of their names."""
    out = io.StringIO()
    table = csv.DictWriter(out, COLUMNS[kind], lineterminator="\n")
    table.writeheader()
    table.writerows(row for _, row in sorted(rows.items()))
    return out.getvalue()


def merged(old, now, here):
    """The old rows, with those of these modules and architectures replaced by the new ones."""
    return {name: row for name, row in old.items() if name[:2] not in here} | now


def missing(old, now, here):
    """Names of the rows of these modules and architectures that only the old table has."""
    return [name for name in old if name[:2] in here and name not in now]


def fenced(rows):
    """The rows of the table of fences: main loops with HGMMA."""
    return [row for row in rows if row["loop"].startswith("HGMMA")]


def longer(old, now):
    """Errors of Hopper's loops with more instructions than the table of loops allows."""
    for name, row in now.items():
        if "hopper" not in name[2] or name not in old:
            continue
        before, count = int(old[name]["instructions"]), int(row["instructions"])
        if count > GROWTH * before:
            yield f"{', '.join(name)} has {count} instructions a stage, not at most 10% more than {before}: shorten it, or justify it and use --write"


def more_fences(old, now):
    """Errors of loops with more fences than the table of fences has. A new loop may have none."""
    for name, row in now.items():
        before, count = int(old[name]["fences"]) if name in old else 0, int(row["fences"])
        if count > before:
            yield f"{', '.join(name)} has {count} fences ({', '.join(loops.FENCES)}) between groups of HGMMA, not {before}"
        if int(row["proxy fences"]) > MAX_PROXY_FENCES:
            yield f"{', '.join(name)} has {row['proxy fences']} proxy fences a stage, not {MAX_PROXY_FENCES}"
