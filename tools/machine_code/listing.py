"""Parses listings of nvdisasm -c into kernels and instructions."""

import re
from dataclasses import dataclass, field
from functools import lru_cache

SECTION = re.compile(r"\s*\.section\s+\.text\.([\w$.]+),")
LABEL = re.compile(r"(\S+):\s*$")
INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+) +)?(\S[^;]*?)\s*;")
NAMED = re.compile(r"`\(([^)]+)\)")
INDIRECT = re.compile(r'BRANCH_TARGETS ([^"]*)"')


@dataclass(slots=True)
class Instruction:
    address: int
    guard: str  # Guard predicate: "P0", "!UP1", or "".
    opcode: str  # With its modifiers.
    operands: str
    targets: list = field(default_factory=list)  # Indices of branch targets, including those of indirect branches.

    @property
    def base(self):
        return self.opcode.split(".", 1)[0]

    def __str__(self):
        return f"{self.opcode} {self.operands}".strip() + f" at {self.address:#x}"


@dataclass(slots=True)
class Kernel:
    name: str
    architecture: str = ""
    code: list = field(default_factory=list)
    functions: set = field(default_factory=set)  # Indices of the first instructions of functions that were not inlined.
    resources: dict = field(default_factory=dict)


def kernels(text):
    """The kernels of a listing, in its order."""
    found, architecture, kernel, labels, waiting = [], "", None, {}, []
    for line in text.splitlines():
        if match := INSTRUCTION.match(line):
            if kernel is None:
                continue
            for label in waiting:
                labels[label] = len(kernel.code)
            waiting = []
            opcode, _, operands = match[3].partition(" ")
            kernel.code.append(Instruction(int(match[1], 16), match[2] or "", opcode, operands.strip()))
        elif match := LABEL.match(line):
            waiting.append(match[1])
        elif match := SECTION.match(line):
            resolve(kernel, labels)
            kernel, labels, waiting = Kernel(match[1], architecture), {}, []
            found.append(kernel)
        elif match := re.match(r"\s*\.target\s+(\w+)", line):
            architecture = match[1]
    resolve(kernel, labels)
    return found


def resolve(kernel, labels):
    """Resolves label names to indices."""
    if kernel is None:
        return
    for instruction in kernel.code:
        names = NAMED.findall(instruction.operands)
        if match := INDIRECT.search(instruction.operands):
            names = match[1].split(",")
        instruction.targets = [labels[name] for name in names if name in labels]
    kernel.functions = {index for name, index in labels.items() if name.startswith("$")}


def resources(text):
    """Parses the resources of each kernel from cuobjdump -res-usage."""
    found, name = {}, None
    for line in text.splitlines():
        if match := re.match(r" *Function (\S+):", line):
            name = match[1]
        elif name and (match := re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", line)):
            found[name] = dict(registers=int(match[1]), stack=int(match[2]), shared=int(match[3]))
            name = None
    return found


REGISTER = re.compile(r"(?<![A-Za-z_])R(\d+)(\.64)?")


@lru_cache(maxsize=None)
def spans(opcode, operands):
    """The registers that an instruction names, as (first, count).

    A listing shows only the first register of a group; the opcode determines the count, for the opcodes in these kernels.
    Not covered: widths that neither the opcode nor `width` gives, and uniform registers, which setmaxnreg does not limit.
    """
    found = []
    values = [operand for operand in operands.replace(".reuse", "").split(", ") if not re.match(r"!?U?P(\d|T)", operand)]
    for place, operand in enumerate(values):
        brackets = "[" in operand
        for first, pair in REGISTER.findall(operand):
            if brackets:
                # An address. QSPC's is a pair, which the listing does not show.
                count = 2 if pair or opcode.startswith("QSPC.E") else 1
            else:
                count = 2 if pair else width(opcode, place, values)
            found.append((int(first), count))
    return tuple(found)


def width(opcode, place, values):
    """Number of registers of the operand at index `place`; the result has index 0, predicates are not counted."""
    base, *modifiers = opcode.split(".")
    if base == "HGMMA":
        if place + 1 < len(values) and values[place + 1].startswith("gdesc"):
            return 4 if place else accumulators(opcode)
        return accumulators(opcode)
    if base == "HMMA":
        result = 4 if "F32" in modifiers else 2
        return [result, *((4, 2) if "16816" in modifiers else (2, 1)), result][place]
    if base in ("LDSM", "STSM"):
        return int(modifiers[-1]) if modifiers[-1].isdigit() and len(modifiers) > 2 else 1
    if base == "IMAD":
        return 2 if "WIDE" in modifiers and place in (0, 3) or "HI" in modifiers and place == 3 else 1
    if base == "CS2R":
        return 1 if "32" in modifiers else 2
    if base in ("DADD", "DMUL", "DFMA", "DSETP", "DMNMX", "BRX", "JMX", "RET", "CALL"):
        return 2
    if base in ("I2F", "F2I", "F2F", "FRND"):
        return converted(base, modifiers, place)
    if base == "SHF":
        return 1  # Its 64-bit value has two operands.
    return 4 if "128" in modifiers else 2 if "64" in modifiers else 1


def converted(base, modifiers, place):
    """Number of registers of a conversion's operand, by its type modifiers; the result's type precedes the operand's."""
    types = [m for m in modifiers if re.fullmatch(r"[FSU](16|32|64)", m)]
    if base == "FRND":
        types = types[:1] * 2
    elif base == "I2F":
        types = [t for t in types if t[0] == "F"][:1] + ["S32"] * ("F64" not in types) + [t for t in types if t[0] != "F"]
    elif base == "F2I":
        types = ([t for t in types if t[0] != "F"][:1] or ["S32"]) + [t for t in types if t[0] == "F"]
    return 2 if place < len(types) and types[place].endswith("64") else 1


def accumulators(opcode):
    """Accumulator registers per thread of an HGMMA of 64 rows: 64 x N values over 128 threads."""
    columns = int(re.search(r"\.64x(\d+)x", opcode)[1])
    return columns // 2 if ".F32" in opcode else columns // 4
