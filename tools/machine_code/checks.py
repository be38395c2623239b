"""The requirements of each kernel: its table row and its errors."""

import re
from functools import lru_cache

from . import groups, limits, loops

# Columns of the table and the opcodes that each counts.
COUNTS = {
    "HMMA": r"HMMA\.",
    "HGMMA": r"HGMMA\.",
    "LDGSTS": r"LDGSTS\.",
    "UTMALDG": r"UTMALDG\.",
    "MULTICAST": r"UTMALDG\.\S*MULTICAST",
    "STSM": r"STSM\.",
    "UTMASTG": r"UTMASTG\.",
    "LDG.128": r"LDG?\.E\.[A-Z0-9.]*128",
    "STG.128": r"STG?\.E\.[A-Z0-9.]*128",
    "LDL": r"LDL(\.|$)",
    "STL": r"STL(\.|$)",
    "USETMAXREG": r"USETMAXREG",
}
COLUMNS = ["module", "architecture", "kernel", "registers", "used / limit", "shared", "stack", *COUNTS]

TILES = r"(_\d+x\d+)?_b?f16"
# Instructions that a kernel with a matching name must have.
MUST = [
    (rf"aristos_(forward|backward){TILES}", ["HMMA", "LDGSTS", "LDG.128", "STG.128"]),
    (rf"aristos_(forward|backward)_hopper{TILES}", ["HGMMA", "UTMALDG", "STSM", "UTMASTG", "USETMAXREG", "LDG.128", "STG.128"]),
    (r"aristos_(forward|backward)_hopper_256x256_b?f16", ["MULTICAST"]),
    (r"aristos_route", ["HMMA"]),
]
# Minimum number of products of a kernel with a matching name: main loops with tensor instructions and, on Hopper, groups of HGMMA.
PRODUCTS = [(rf"aristos_forward(_hopper)?{TILES}", 1), (rf"aristos_backward(_hopper)?{TILES}", 3)]


@lru_cache(maxsize=None)
def counted(opcode):
    return [column for column, pattern in COUNTS.items() if re.match(pattern, opcode)]


def check(module, kernel):
    """Returns (the kernel's row, the rows of its main loops, its errors)."""
    start = dict(module=module, architecture=kernel.architecture, kernel=kernel.name)
    row = {**start, **kernel.resources, "used / limit": "-", **dict.fromkeys(COUNTS, 0)}
    for at in kernel.code:
        for column in counted(at.opcode):
            row[column] += 1
    wrong = list(spilled(row)) + list(lacking(row))
    if row["USETMAXREG"]:
        errors, used = limits.check(kernel)
        wrong += errors
        row["used / limit"] = ", ".join(f"{most} / {limit}" for limit, most in used.items())
    found = loops.mixes(kernel) if any(re.match(pattern, kernel.name) for pattern, _ in PRODUCTS) else []
    wrong += products(kernel, row, found)
    where = f"{module}, {kernel.architecture}, {kernel.name}"
    return row, [{**start, **loop} for loop in found], [f"{where}: {error}" for error in wrong]


def spilled(row):
    if row["stack"] or row["LDL"] or row["STL"]:
        yield f"spills: {row['stack']} bytes of stack, {row['LDL']} local loads, {row['STL']} local stores"


def lacking(row):
    for pattern, columns in MUST:
        if re.fullmatch(pattern, row["kernel"]):
            for column in columns:
                if not row[column]:
                    yield f"has no {column}"


def products(kernel, row, found):
    """Errors of groups of HGMMA and of loops around products."""
    least = next((least for pattern, least in PRODUCTS if re.fullmatch(pattern, kernel.name)), 0)
    if row["HGMMA"]:
        errors, count = groups.check(kernel)
        yield from errors
        if count < least:
            yield f"has {count} groups of HGMMA, not {least}"
    count = sum(loop["tensor"] > 0 for loop in found)
    if count < least:
        yield f"has {count} loops with tensor instructions, not {least}"
