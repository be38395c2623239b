"""The tables in docs/machine-code/: kernels and their main loops, a row each."""

import csv
import io

from . import checks, loops

COLUMNS = {
    "kernels": checks.COLUMNS,
    "loops": ["module", "architecture", "kernel", "loop", "instructions", *loops.NAMES, "per tensor"],
}
# Number of columns that identify a row.
NAMES = {"kernels": 3, "loops": 4}


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
