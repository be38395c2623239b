"""The tables of docs/machine-code.md."""

from . import checks, loops

CODE = checks.COLUMNS
MIX = ["module", "architecture", "kernel", "loop", "instructions", *loops.NAMES, "per tensor", "before"]
# Number of columns that identify a row.
NAMES = {"code": 3, "mix": 4}


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def read(text):
    """The rows of both tables, by their identifying columns: kernels in "code", their main loops in "mix"."""
    found, header, kind = {"code": {}, "mix": {}}, None, None
    for line in text.splitlines():
        if not line.startswith("|"):
            header = None
        elif header is None:
            header = cells(line)
            kind = "mix" if "loop" in header else "code"
        elif not line.startswith("| ---"):
            row = dict(zip(header, cells(line)))
            found[kind][tuple(cells(line)[:NAMES[kind]])] = row
    return found


def named(rows, kind):
    columns = CODE if kind == "code" else MIX
    return {tuple(str(row[c]) for c in columns[:NAMES[kind]]): {c: str(v) for c, v in row.items()} for row in rows}


def compared(rows, committed):
    """Fills the column "before" with the committed values that have changed; without a change it is copied from the committed table."""
    for name, row in rows.items():
        old = committed.get(name)
        if old is None:
            row["before"] = "-"
            continue
        changed = [f"{c} {old.get(c, '-')}" for c in MIX[NAMES["mix"]:-1] if old.get(c) != row[c]]
        row["before"] = ", ".join(changed) or old["before"]


def table(rows, kind):
    columns, names = (CODE if kind == "code" else MIX), NAMES[kind]
    words = ("before", "used / limit")
    rule = ["---" if place < names or c in words else "---:" for place, c in enumerate(columns)]
    lines = [columns, rule, *([row.get(c, "-") for c in columns] for _, row in sorted(rows.items()))]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def written(text, code, mix):
    """The document with these tables; the text before and between them is kept."""
    parts, lines, inside = [[]], text.splitlines(keepends=True), False
    for line in lines:
        if line.startswith("|"):
            inside = True
        else:
            if inside:
                parts.append([])
            inside = False
            parts[-1].append(line)
    prose = ["".join(part).strip("\n") for part in parts] + ["", ""]
    return f"{prose[0]}\n\n{table(code, 'code')}\n{prose[1] or '## The main loops'}\n\n{table(mix, 'mix')}"


def merged(text, now, here):
    """The document with these rows; rows of other modules and architectures are kept."""
    rows = read(text)
    kept = {kind: {name: row for name, row in rows[kind].items() if name[:2] not in here} for kind in rows}
    return written(text, kept["code"] | now["code"], kept["mix"] | now["mix"])


def missing(text, now, here):
    """Errors for rows of these modules and architectures that the document has but the build has not."""
    for kind, rows in read(text).items():
        for name in rows:
            if name[:2] in here and name not in now[kind]:
                yield f"{', '.join(name)} is in docs/machine-code.md, and was not found"
