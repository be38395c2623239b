"""The main loops of a kernel, and their instructions by class."""

from .flow import Blocks

# Instructions that make a loop a main loop; a loop is named after the instruction and its index. Loops that only copy count as main loops on Hopper,
# where other warps compute; elsewhere copies outside of the GEMM loops fill the pipeline.
TENSOR = ("HGMMA", "HMMA")
KEYS = {"HGMMA": ("HGMMA", "LDGSTS"), "HMMA": ("HMMA",)}

CLASSES = {
    "tensor": "HGMMA HMMA IMMA DMMA QGMMA",
    "shared": "LDS LDSM STS STSM ATOMS",
    "async copy": "LDGSTS UTMALDG UTMASTG UBLKCP UTMACMDFLUSH UTMACCTL UTMAPF",
    "global": "LD LDG ST STG ATOM ATOMG RED",
    "integer": "IMAD IADD3 VIADD IADD LEA LOP3 PLOP3 SHF ISETP SEL PRMT IABS IMNMX VIMNMX VIMNMX3 VIADDMNMX POPC FLO SGXT BMSK I2I P2R R2P VOTE "
               "UIMAD UIADD3 ULEA ULOP3 UPLOP3 USHF UISETP USEL UPRMT UPOPC UFLO VOTEU LOP UIADD3X",
    "move": "MOV UMOV R2UR CS2R S2R S2UR LDC ULDC SHFL REDUX",
    "float": "FFMA FMUL FADD FMNMX FSEL FSET FSETP FCHK HADD2 HMUL2 HFMA2 HMNMX2 HSETP2 HSET2 MUFU F2FP F2F F2I I2F I2FP FRND DADD DMUL DFMA DSETP",
    "wait": "SYNCS BAR WARPSYNC WARPGROUP MEMBAR FENCE DEPBAR LDGDEPBAR ARRIVES ERRBAR CGAERRBAR UCGABAR_ARV UCGABAR_WAIT CCTL ELECT ENDCOLLECTIVE NANOSLEEP",
    "control": "BRA BRX JMP JMX CALL RET EXIT BSSY BSYNC BREAK YIELD BMOV KILL",
}
CLASS = {base: name for name, bases in CLASSES.items() for base in bases.split()}
NAMES = [*CLASSES, "other"]
# Instructions that wait for memory beyond the block. A fence between proxies has a MEMBAR of the block before it, which does not count.
FENCES = ("MEMBAR", "CCTL", "ERRBAR", "CGAERRBAR")
PROXY_FENCE = "FENCE.VIEW"


def classified(at):
    """The class of an instruction. Instructions that never run, such as loads that ptxas puts before a fence, are "other"; an IMAD that moves is a move."""
    if at.guard == "!PT":
        return "other"
    if at.opcode.startswith(("IMAD.MOV", "IMAD.U32")):
        return "move"
    return CLASS.get(at.base, "other")


def mixes(kernel):
    """For each main loop: its name, number of instructions, number per class, and number of fences.

    A loop extends from its header to the last jump back. Loops inside it are excluded, since they only wait; ptxas puts the code after a
    failed first wait behind the kernel's end.
    """
    keys = next((KEYS[base] for base in TENSOR if any(at.base == base for at in kernel.code)), ())
    if not keys:
        return []
    places = {key: [index for index, at in enumerate(kernel.code) if at.base == key] for key in keys}
    blocks = Blocks(kernel)
    loops = blocks.loops()
    owner = innermost(loops)
    found, taken, counts = [], set(), dict.fromkeys(keys, 0)
    inside = {index: block for block in owner for index in range(blocks.begins[block], blocks.ends[block])}
    for key in keys:
        for index in places[key]:
            header = owner.get(inside.get(index))
            if header is None or header in taken:
                continue
            taken.add(header)
            counts[key] += 1
            found.append(mix(kernel, blocks, loops, owner, header, f"{key} {counts[key]}"))
    return found


def innermost(loops):
    """The header of the innermost loop of each block."""
    owner = {}
    for header, (body, _) in sorted(loops.items(), key=lambda item: -len(item[1][0])):
        owner.update(dict.fromkeys(body, header))
    return owner


def mix(kernel, blocks, loops, owner, header, name):
    body, latches = loops[header]
    last = max(latches)
    row = {"loop": name, "instructions": 0, **dict.fromkeys(NAMES, 0), "fences": 0, "proxy fences": 0}
    for block in body:
        if owner[block] != header:
            continue
        code = kernel.code[blocks.begins[block]:blocks.ends[block]]
        # Also in code behind the kernel's end: it runs between two groups too.
        for at, after in zip(code, [*code[1:], None]):
            is_proxy = after is not None and after.opcode.startswith(PROXY_FENCE) and at.opcode == "MEMBAR.ALL.CTA"
            row["fences"] += at.base in FENCES and not is_proxy
            row["proxy fences"] += at.opcode.startswith(PROXY_FENCE)
        if header <= block <= last:
            for at in code:
                row["instructions"] += 1
                row[classified(at)] += 1
    row["per tensor"] = f"{row['instructions'] / row['tensor']:.1f}" if row["tensor"] else "-"
    return row
