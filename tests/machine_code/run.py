#!/usr/bin/env python3
"""usage: tests/machine_code/run.py

Tests tools/check-machine-code, without CUDA: two small listings in nvdisasm's form pass, and each fault planted into one of them is found.
"""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOOLS = HERE.parent.parent / "tools"
sys.path.insert(0, str(TOOLS))

from machine_code import checks, document, loops, source  # noqa: E402

HOPPER, AMPERE = (HERE / "hopper.sass").read_text(), (HERE / "ampere.sass").read_text()


def line(instruction):
    return f"        /*fff0*/                   {instruction} ;\n"


def planted(text, place, *instructions, instead=False, after=False, which=0):
    """The listing with instructions before, after or instead of that occurrence of a line that has this."""
    lines = text.splitlines(keepends=True)
    at = [index for index, found in enumerate(lines) if place in found][which]
    lines[at + after:at + after + instead] = [line(instruction) for instruction in instructions]
    return "".join(lines)


def wrong(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "planted.sass"
        path.write_text(text)
        return [error for kernel in source.kernels(path, folder) for error in checks.check("planted", kernel)[2]]


class Planted(unittest.TestCase):
    def found(self, text, *words):
        """Each of these is in one of the errors, and there are no other errors."""
        errors = wrong(text)
        self.assertEqual(len(errors), len(words), errors)
        for word in words:
            self.assertTrue(any(word in error for error in errors), errors)

    def test_nothing_is_wrong_with_what_is_right(self):
        self.found(HOPPER)
        self.found(AMPERE)


class Registers(Planted):
    def test_beyond_the_limit_on_one_branch(self):
        self.found(planted(HOPPER, "LDG.E.64 R54", "MOV R56, RZ"), "uses R56 where setmaxnreg leaves it 56 registers: MOV R56, RZ at 0xfff0")
        self.found(planted(HOPPER, "UTMALDG", "MOV R56, RZ"), "uses R56 ")
        # The same in the consumers' code is right.
        self.found(planted(HOPPER, "CS2R R24", "MOV R56, RZ"))

    def test_under_each_limit(self):
        self.found(planted(HOPPER, "ISETP.GE.U32.AND P0", "MOV R168, RZ"), "uses R168 where setmaxnreg leaves it 168")
        self.found(planted(HOPPER, "CS2R R24", "MOV R224, RZ"), "uses R224 where setmaxnreg leaves it 224")
        self.found(planted(HOPPER, "IMAD.WIDE R166", "MOV R168, RZ"), "uses R168 where setmaxnreg leaves it 168")
        self.found(planted(HOPPER, "BRA `(.L_together)", "MOV R168, RZ"), "uses R168 where setmaxnreg leaves it 168")

    def test_of_groups_the_last(self):
        for instruction, last in [
            ("LDG.E.64 R55, desc[UR8][R2.64]", 56), ("LDG.E.128 R53, desc[UR8][R2.64]", 56), ("LDG.E R4, desc[UR8][R55.64]", 56),
            ("STS.128 [R4], R54", 57), ("IMAD.WIDE R55, R4, 0x4, R2", 56), ("IMAD.WIDE R4, R4, 0x4, R55", 56), ("CS2R R55, SRZ", 56),
            ("STSM.16.M88.4 [R4], R53", 56), ("DADD R4, R55, R6", 56), ("F2I.U64.TRUNC R55, R4", 56),
        ]:
            with self.subTest(instruction):
                self.found(planted(HOPPER, "LDC R6", instruction), f"uses R{last} ")
        for instruction in ["LDG.E.128 R52, desc[UR8][R54.64]", "STS.64 [R55], R4", "IMAD.WIDE R4, R55, 0x4, R2", "F2I.U64.TRUNC R54, R55", "MOV R55, UR63"]:
            with self.subTest(instruction):
                self.found(planted(HOPPER, "LDC R6", instruction))

    def test_of_accumulators_the_last(self):
        def of(first):
            return "".join(wrong(HOPPER.replace("HGMMA.64x256x16.F32 R24, gdesc[UR20], R24", f"HGMMA.64x256x16.F32 R{first}, gdesc[UR20], R{first}")))

        self.assertIn("uses R224 where setmaxnreg leaves it 224", of(97))
        self.assertNotIn("setmaxnreg", of(96))

    def test_beyond_the_limit_behind_an_indirect_branch(self):
        text = planted(HOPPER, ".L_skip:", "MOV R60, RZ", after=True)
        # Reached by nothing but the table of targets.
        text = text.replace("BRA `(.L_skip)", "EXIT").replace("CALL.REL.NOINC `($aristos_forward_hopper_f16$divide)", "BRA `(.L_load)")
        self.assertIn("uses R60 ", "".join(wrong(text)))

    def test_beyond_the_limit_in_a_function(self):
        self.found(planted(HOPPER, "MUFU.RCP", "MOV R100, RZ"), "uses R100 where setmaxnreg leaves it 56")

    def test_an_attempt_whose_outcome_is_not_looked_at(self):
        self.found(planted(HOPPER, "@!P0 BRA `(.L_more)", instead=True), "where setmaxnreg leaves it 168")
        self.found(planted(HOPPER, "@!P0 BRA `(.L_out)", instead=True), "uses R167 where setmaxnreg leaves it 56")

    def test_an_attempt_whose_failure_is_taken_for_success(self):
        errors = "".join(wrong(HOPPER.replace("@!P0 BRA `(.L_out)", " @P0 BRA `(.L_out)")))
        self.assertIn("uses R167 where setmaxnreg leaves it 56", errors)

    def test_an_outcome_that_something_else_overwrites(self):
        self.found(planted(HOPPER, "@!P0 BRA `(.L_out)", "ISETP.NE.AND P0, PT, R5, RZ, PT"), "uses R167 where setmaxnreg leaves it 56")

    def test_what_it_cannot_follow_is_wrong(self):
        self.found(HOPPER.replace('(*"BRANCH_TARGETS .L_load,.L_skip"*)', ""), "does not say where BRX", "are on no path")
        self.found(planted(HOPPER, "EXIT", "MOV R4, RZ", after=True), "1 instructions are on no path")
        self.found(planted(HOPPER, "MUFU.RCP", "USETMAXREG.DEALLOC.CTAPOOL 0x38"), "may be in a function")
        self.found(planted(HOPPER, ".L_out:", "NOP"), "BSYNC B0")

    def test_the_table_says_what_is_used(self):
        row, _, _ = checks.check("m", next(iter(of(HOPPER))))
        self.assertEqual(row["used / limit"], "56 / 56, 168 / 168, 224 / 224")


class Groups(Planted):
    def test_a_wait_within_a_group(self):
        for wait in ["WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.ARRIVE"]:
            with self.subTest(wait):
                errors = wrong(planted(HOPPER, "R2UR UR20, R8", wait))
                self.assertTrue(any("is within a group, after 2 HGMMA" in error for error in errors), errors)

    def test_accumulators_moved_within_a_group(self):
        self.assertIn("MOV R150, R4 at 0xfff0 touches accumulators", "".join(wrong(planted(HOPPER, "R2UR UR20, R8", "MOV R150, R4"))))
        # The last two of a pair's, by the first's name.
        self.assertIn("touches accumulators", "".join(wrong(planted(HOPPER, "R2UR UR20, R8", "LDS.64 R23, [R4]"))))
        self.found(planted(HOPPER, "R2UR UR20, R8", "MOV R152, R4", "MOV R23, R4"))

    def test_accumulators_read_before_the_wait(self):
        self.found(planted(HOPPER, "WARPGROUP.DEPBAR.LE gsb0, 0x0", instead=True), "F2FP", "STSM")
        self.found(planted(HOPPER, "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1", instead=True), "F2FP", "STSM")

    def test_accumulators_read_before_the_wait_on_one_branch(self):
        text = planted(HOPPER, "VIADD R4, R4, 0x1", "@P3 BRA `(.L_early)")
        self.found(planted(text, "WARPGROUP.DEPBAR.LE gsb0, 0x0", "BRA `(.L_late)", "NOP").replace(
            line("NOP"), ".L_early:\n" + line("MOV R4, R151") + ".L_late:\n", 1), "MOV R4, R151 at 0xfff0 touches accumulators")

    def test_each_product_a_group_of_its_own(self):
        serial = HOPPER.replace("R24, gdesc[UR20], R24 ;", "R24, gdesc[UR20], R24, gsb0 ;")
        self.found(serial, *["closes a group of 1, not of 4"] * 4)

    def test_a_step_too_few(self):
        self.found(planted(HOPPER, "HGMMA", instead=True), "closes a group of 3, not of 4")

    def test_no_arrive_after_accumulators_were_set(self):
        errors = wrong(planted(HOPPER, "WARPGROUP.ARRIVE", instead=True))
        self.assertTrue(errors and all("has no WARPGROUP.ARRIVE" in error for error in errors), errors)

    def test_other_accumulators_that_overlap(self):
        self.assertIn("not its own", "".join(wrong(planted(HOPPER, "HGMMA", "HGMMA.64x256x16.F32 R32, gdesc[UR20], R32", instead=True, which=1))))


class Instructions(Planted):
    def test_a_spill(self):
        self.found(planted(AMPERE, "HMMA", "STL [R1], R64"), "spills: 0 bytes of stack, 0 local loads, 1 local stores")
        self.found(planted(HOPPER, "VIADD R4", "LDL.64 R10, [R1+0x8]"), "0 bytes of stack, 1 local loads")
        self.found(AMPERE.replace("STACK:0", "STACK:24"), "spills: 24 bytes of stack")

    def test_no_tensor_instruction(self):
        self.found(AMPERE.replace("HMMA.16816.F32", "FFMA"), "has no HMMA", "has 0 loops with tensor instructions, not 1")
        self.found(HOPPER.replace("HGMMA.64x256x16.F32", "FFMA"), "has no HGMMA", "has 0 loops")

    def test_another_kind_of_tensor_instruction(self):
        errors = wrong(HOPPER.replace("HGMMA.64x256x16.F32", "HMMA.16816.F32"))
        self.assertTrue(any("has no HGMMA" in error for error in errors), errors)

    def test_products_outside_of_a_loop(self):
        self.found(AMPERE.replace("@!P1 BRA `(.L_stage)", "NOP").replace("@!P2 BRA `(.L_tile)", "NOP"), "has 0 loops with tensor")

    def test_a_product_lost(self):
        name = "aristos_forward_hopper_f16"
        self.found(HOPPER.replace(name, "aristos_backward_hopper_f16"), "has 1 groups of HGMMA, not 3", "has 1 loops with tensor instructions, not 3")

    def test_what_is_lost(self):
        for lost in ["UTMALDG", "STSM", "UTMASTG", "LDG.E.128", "STG.E.128"]:
            with self.subTest(lost):
                self.assertEqual(len(wrong(planted(HOPPER, lost, "NOP", instead=True))), 1)
        self.assertIn("has no USETMAXREG", "".join(wrong(HOPPER.replace("USETMAXREG", "NOP"))))
        self.found(HOPPER.replace("hopper_f16", "hopper_256x256_f16"), "has no MULTICAST")


def of(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.sass"
        path.write_text(text)
        return source.kernels(path, folder)


class Mix(unittest.TestCase):
    def test_of_hopper(self):
        (loop,) = loops.mixes(of(HOPPER)[0])
        # From the header to the branch back: not the attempts behind the end.
        self.assertEqual({name: count for name, count in loop.items() if count}, {
            "loop": "HGMMA 1", "instructions": 22, "tensor": 4, "integer": 2, "move": 5, "wait": 6, "control": 4, "other": 1,
            "per tensor": "5.5"})
        self.assertEqual(sum(loop[name] for name in loops.NAMES), loop["instructions"])

    def test_of_ampere_the_innermost(self):
        (loop,) = loops.mixes(of(AMPERE)[0])
        self.assertEqual({name: count for name, count in loop.items() if count}, {
            "loop": "HMMA 1", "instructions": 11, "tensor": 2, "shared": 2, "async copy": 1, "integer": 2, "wait": 3, "control": 1, "per tensor": "5.5"})

    def test_before(self):
        start = dict(module="m", architecture="sm_80", kernel="k", loop="HMMA 1", instructions=11, **dict.fromkeys(loops.NAMES, 1), **{"per tensor": "5.5"})
        first = document.named([start], "mix")
        document.compared(first, {})
        text = document.written("# Machine code\n\nIntroduction.\n", {}, first)
        self.assertIn("Introduction.\n", text)
        second = document.named([start | {"instructions": 12, "integer": 2}], "mix")
        document.compared(second, document.read(text)["mix"])
        (row,) = second.values()
        self.assertEqual(row["before"], "instructions 11, integer 1")
        # Where nothing changes, the last change stays, and the document is the same.
        text = document.written(text, {}, second)
        third = document.named([start | {"instructions": 12, "integer": 2}], "mix")
        document.compared(third, document.read(text)["mix"])
        self.assertEqual(document.written(text, {}, third), text)


class Document(unittest.TestCase):
    def rows(self, module, kernel="k"):
        start = dict(module=module, architecture="sm_80", kernel=kernel)
        code = start | dict.fromkeys(document.CODE[3:], 1)
        mix = start | dict.fromkeys(document.MIX[3:], 1) | {"loop": "HMMA 1"}
        return {"code": document.named([code], "code"), "mix": document.named([mix], "mix")}

    def test_rows_of_other_modules_stay(self):
        text = document.merged("# Machine code\n", self.rows("a"), {("a", "sm_80")})
        text = document.merged(text, self.rows("b"), {("b", "sm_80")})
        text = document.merged(text, self.rows("a", "new"), {("a", "sm_80")})
        self.assertEqual({kind: [name[:3] for name in rows] for kind, rows in document.read(text).items()},
                         dict.fromkeys(["code", "mix"], [("a", "sm_80", "new"), ("b", "sm_80", "k")]))

    def test_a_kernel_and_a_loop_that_are_missing(self):
        here = {("a", "sm_80")}
        text = document.merged("# Machine code\n", self.rows("a"), here)
        self.assertEqual(list(document.missing(text, self.rows("a"), here)), [])
        self.assertEqual(len(list(document.missing(text, self.rows("a", "other"), here))), 2)
        self.assertEqual(list(document.missing(text, self.rows("b"), {("b", "sm_80")})), [])


class Command(unittest.TestCase):
    def run_(self, text):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "planted.sass"
            path.write_text(text)
            return subprocess.run([sys.executable, TOOLS / "check-machine-code", path], capture_output=True, text=True, check=False)

    def test_its_exit_status(self):
        right = self.run_(HOPPER)
        self.assertEqual((right.returncode, right.stdout.splitlines()[-1]), (0, "1 kernels, 0 wrong"), right.stderr)
        fault = self.run_(planted(HOPPER, "LDG.E.64 R54", "MOV R56, RZ"))
        self.assertEqual((fault.returncode, fault.stdout.splitlines()[-1]), (1, "1 kernels, 1 wrong"))
        self.assertIn("planted, sm_90a, aristos_forward_hopper_f16: uses R56", fault.stderr)
        self.assertNotEqual(self.run_("").returncode, 0)


if __name__ == "__main__":
    result = unittest.main(exit=False, verbosity=1).result
    bad = len(result.failures) + len(result.errors)
    print(f"{result.testsRun - bad} passed, {bad} failed, 0 skipped")
    sys.exit(bad > 0)
