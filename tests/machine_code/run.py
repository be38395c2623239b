#!/usr/bin/env python3
"""usage: tests/machine_code/run.py

Tests tools/check-machine-code without CUDA: two small listings in nvdisasm's format pass, and each fault injected into one is found.
"""

import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOOLS = HERE.parent.parent / "tools"
sys.path.insert(0, str(TOOLS))

from machine_code import checks, loops, source, tables  # noqa: E402

HOPPER, AMPERE = (HERE / "hopper.sass").read_text(), (HERE / "ampere.sass").read_text()


def line(instruction):
    return f"        /*fff0*/                   {instruction} ;\n"


def injected(text, pattern, *instructions, instead=False, after=False, which=0):
    """The listing with instructions inserted before, after or instead of a line that contains `pattern`."""
    lines = text.splitlines(keepends=True)
    at = [index for index, found in enumerate(lines) if pattern in found][which]
    lines[at + after:at + after + instead] = [line(instruction) for instruction in instructions]
    return "".join(lines)


def wrong(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "injected.sass"
        path.write_text(text)
        return [error for kernel in source.kernels(path, folder) for error in checks.check("injected", kernel)[2]]


class InjectedFault(unittest.TestCase):
    def found(self, text, *words):
        """Checks that the errors are exactly these: each of `words` is in one of them."""
        errors = wrong(text)
        self.assertEqual(len(errors), len(words), errors)
        for word in words:
            self.assertTrue(any(word in error for error in errors), errors)

    def test_valid_listings_pass(self):
        self.found(HOPPER)
        self.found(AMPERE)


class Registers(InjectedFault):
    def test_register_above_the_limit_on_one_branch(self):
        self.found(injected(HOPPER, "LDG.E.64 R54", "MOV R56, RZ"), "uses R56 where setmaxnreg leaves it 56 registers: MOV R56, RZ at 0xfff0")
        self.found(injected(HOPPER, "UTMALDG", "MOV R56, RZ"), "uses R56 ")
        # The consumers' code may use this register.
        self.found(injected(HOPPER, "CS2R R24", "MOV R56, RZ"))

    def test_register_above_each_limit(self):
        self.found(injected(HOPPER, "ISETP.GE.U32.AND P0", "MOV R168, RZ"), "uses R168 where setmaxnreg leaves it 168")
        self.found(injected(HOPPER, "CS2R R24", "MOV R224, RZ"), "uses R224 where setmaxnreg leaves it 224")
        self.found(injected(HOPPER, "IMAD.WIDE R166", "MOV R168, RZ"), "uses R168 where setmaxnreg leaves it 168")
        self.found(injected(HOPPER, "BRA `(.L_together)", "MOV R168, RZ"), "uses R168 where setmaxnreg leaves it 168")

    def test_last_register_of_a_group(self):
        for instruction, last in [
            ("LDG.E.64 R55, desc[UR8][R2.64]", 56), ("LDG.E.128 R53, desc[UR8][R2.64]", 56), ("LDG.E R4, desc[UR8][R55.64]", 56),
            ("STS.128 [R4], R54", 57), ("IMAD.WIDE R55, R4, 0x4, R2", 56), ("IMAD.WIDE R4, R4, 0x4, R55", 56), ("CS2R R55, SRZ", 56),
            ("STSM.16.M88.4 [R4], R53", 56), ("DADD R4, R55, R6", 56), ("F2I.U64.TRUNC R55, R4", 56),
        ]:
            with self.subTest(instruction):
                self.found(injected(HOPPER, "LDC R6", instruction), f"uses R{last} ")
        for instruction in ["LDG.E.128 R52, desc[UR8][R54.64]", "STS.64 [R55], R4", "IMAD.WIDE R4, R55, 0x4, R2", "F2I.U64.TRUNC R54, R55", "MOV R55, UR63"]:
            with self.subTest(instruction):
                self.found(injected(HOPPER, "LDC R6", instruction))

    def test_last_accumulator(self):
        def of(first):
            return "".join(wrong(HOPPER.replace("HGMMA.64x256x16.F32 R24, gdesc[UR20], R24", f"HGMMA.64x256x16.F32 R{first}, gdesc[UR20], R{first}")))

        self.assertIn("uses R224 where setmaxnreg leaves it 224", of(97))
        self.assertNotIn("setmaxnreg", of(96))

    def test_register_above_the_limit_behind_an_indirect_branch(self):
        text = injected(HOPPER, ".L_skip:", "MOV R60, RZ", after=True)
        # Only reached through the table of targets.
        text = text.replace("BRA `(.L_skip)", "EXIT").replace("CALL.REL.NOINC `($aristos_forward_hopper_f16$divide)", "BRA `(.L_load)")
        self.assertIn("uses R60 ", "".join(wrong(text)))

    def test_register_above_the_limit_in_a_function(self):
        self.found(injected(HOPPER, "MUFU.RCP", "MOV R100, RZ"), "uses R100 where setmaxnreg leaves it 56")

    def test_ignored_outcome_of_an_attempt(self):
        self.found(injected(HOPPER, "@!P0 BRA `(.L_more)", instead=True), "where setmaxnreg leaves it 168")
        self.found(injected(HOPPER, "@!P0 BRA `(.L_out)", instead=True), "uses R167 where setmaxnreg leaves it 56")

    def test_inverted_outcome_of_an_attempt(self):
        errors = "".join(wrong(HOPPER.replace("@!P0 BRA `(.L_out)", " @P0 BRA `(.L_out)")))
        self.assertIn("uses R167 where setmaxnreg leaves it 56", errors)

    def test_overwritten_outcome_of_an_attempt(self):
        self.found(injected(HOPPER, "@!P0 BRA `(.L_out)", "ISETP.NE.AND P0, PT, R5, RZ, PT"), "uses R167 where setmaxnreg leaves it 56")

    def test_unsupported_control_flow_is_an_error(self):
        self.found(HOPPER.replace('(*"BRANCH_TARGETS .L_load,.L_skip"*)', ""), "does not say where BRX", "are on no path")
        self.found(injected(HOPPER, "EXIT", "MOV R4, RZ", after=True), "1 instructions are on no path")
        self.found(injected(HOPPER, "MUFU.RCP", "USETMAXREG.DEALLOC.CTAPOOL 0x38"), "may be in a function")
        self.found(injected(HOPPER, ".L_out:", "NOP"), "BSYNC B0")

    def test_table_shows_used_registers(self):
        row, _, _ = checks.check("m", next(iter(of(HOPPER))))
        self.assertEqual(row["used / limit"], "56 / 56, 168 / 168, 224 / 224")


class Groups(InjectedFault):
    def test_a_wait_within_a_group(self):
        for wait in ["WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.ARRIVE"]:
            with self.subTest(wait):
                errors = wrong(injected(HOPPER, "R2UR UR20, R8", wait))
                self.assertTrue(any("is within a group, after 2 HGMMA" in error for error in errors), errors)

    def test_accumulators_moved_within_a_group(self):
        self.assertIn("MOV R150, R4 at 0xfff0 touches accumulators", "".join(wrong(injected(HOPPER, "R2UR UR20, R8", "MOV R150, R4"))))
        # A pair of registers, named by the first one; the second is an accumulator.
        self.assertIn("touches accumulators", "".join(wrong(injected(HOPPER, "R2UR UR20, R8", "LDS.64 R23, [R4]"))))
        self.found(injected(HOPPER, "R2UR UR20, R8", "MOV R152, R4", "MOV R23, R4"))

    def test_accumulators_read_before_the_wait(self):
        self.found(injected(HOPPER, "WARPGROUP.DEPBAR.LE gsb0, 0x0", instead=True), "F2FP", "STSM")
        self.found(injected(HOPPER, "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1", instead=True), "F2FP", "STSM")

    def test_accumulators_read_before_the_wait_on_one_branch(self):
        text = injected(HOPPER, "VIADD R4, R4, 0x1", "@P3 BRA `(.L_early)")
        self.found(injected(text, "WARPGROUP.DEPBAR.LE gsb0, 0x0", "BRA `(.L_late)", "NOP").replace(
            line("NOP"), ".L_early:\n" + line("MOV R4, R151") + ".L_late:\n", 1), "MOV R4, R151 at 0xfff0 touches accumulators")

    def test_serialised_products(self):
        serial = HOPPER.replace("R24, gdesc[UR20], R24 ;", "R24, gdesc[UR20], R24, gsb0 ;")
        self.found(serial, *["closes a group of 1, not of 4"] * 4)

    def test_missing_step(self):
        self.found(injected(HOPPER, "HGMMA", instead=True), "closes a group of 3, not of 4")

    def test_missing_arrive(self):
        errors = wrong(injected(HOPPER, "WARPGROUP.ARRIVE", instead=True))
        self.assertTrue(errors and all("has no WARPGROUP.ARRIVE" in error for error in errors), errors)

    def test_overlapping_accumulators(self):
        self.assertIn("not its own", "".join(wrong(injected(HOPPER, "HGMMA", "HGMMA.64x256x16.F32 R32, gdesc[UR20], R32", instead=True, which=1))))


class Instructions(InjectedFault):
    def test_spills(self):
        self.found(injected(AMPERE, "HMMA", "STL [R1], R64"), "spills: 0 bytes of stack, 0 local loads, 1 local stores")
        self.found(injected(HOPPER, "VIADD R4", "LDL.64 R10, [R1+0x8]"), "0 bytes of stack, 1 local loads")
        self.found(AMPERE.replace("STACK:0", "STACK:24"), "spills: 24 bytes of stack")

    def test_missing_tensor_instruction(self):
        self.found(AMPERE.replace("HMMA.16816.F32", "FFMA"), "has no HMMA", "has 0 loops with tensor instructions, not 1")
        self.found(HOPPER.replace("HGMMA.64x256x16.F32", "FFMA"), "has no HGMMA", "has 0 loops")

    def test_wrong_kind_of_tensor_instruction(self):
        errors = wrong(HOPPER.replace("HGMMA.64x256x16.F32", "HMMA.16816.F32"))
        self.assertTrue(any("has no HGMMA" in error for error in errors), errors)

    def test_products_outside_of_a_loop(self):
        self.found(AMPERE.replace("@!P1 BRA `(.L_stage)", "NOP").replace("@!P2 BRA `(.L_tile)", "NOP"), "has 0 loops with tensor")

    def test_missing_product(self):
        name = "aristos_forward_hopper_f16"
        self.found(HOPPER.replace(name, "aristos_backward_hopper_f16"), "has 1 groups of HGMMA, not 3", "has 1 loops with tensor instructions, not 3")

    def test_missing_instructions(self):
        for lost in ["UTMALDG", "STSM", "UTMASTG", "LDG.E.128", "STG.E.128"]:
            with self.subTest(lost):
                self.assertEqual(len(wrong(injected(HOPPER, lost, "NOP", instead=True))), 1)
        self.assertIn("has no USETMAXREG", "".join(wrong(HOPPER.replace("USETMAXREG", "NOP"))))
        self.found(HOPPER.replace("hopper_f16", "hopper_256x256_f16"), "has no MULTICAST")


def of(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.sass"
        path.write_text(text)
        return source.kernels(path, folder)


class Mix(unittest.TestCase):
    def test_hopper_loop(self):
        (loop,) = loops.mixes(of(HOPPER)[0])
        # From the header to the branch back, without the retry code behind the kernel's end.
        self.assertEqual({name: count for name, count in loop.items() if count}, {
            "loop": "HGMMA 1", "instructions": 22, "tensor": 4, "integer": 2, "move": 5, "wait": 6, "control": 4, "other": 1,
            "proxy fences": 1, "per tensor": "5.5"})
        self.assertEqual(sum(loop[name] for name in loops.NAMES), loop["instructions"])

    def test_innermost_ampere_loop(self):
        (loop,) = loops.mixes(of(AMPERE)[0])
        self.assertEqual({name: count for name, count in loop.items() if count}, {
            "loop": "HMMA 1", "instructions": 11, "tensor": 2, "shared": 2, "async copy": 1, "integer": 2, "wait": 3, "control": 1, "per tensor": "5.5"})


class Fences(unittest.TestCase):
    def row(self, text):
        (loop,) = loops.mixes(of(text)[0])
        return tables.named([dict(module="m", architecture="sm_90a", kernel="aristos_forward_hopper_f16", **loop)], "fences")

    def loop(self, text):
        (loop,) = loops.mixes(of(text)[0])
        return tables.named([dict(module="m", architecture="sm_90a", kernel="aristos_forward_hopper_f16", **loop)], "loops")

    def test_fences_between_groups(self):
        old = self.row(HOPPER)
        self.assertEqual([row["fences"] for row in old.values()], ["0"])
        self.assertEqual(list(tables.more_fences(old, old)), [])
        for fence in ["MEMBAR.ALL.GPU", "MEMBAR.ALL.CTA", "CCTL.IVALL", "ERRBAR", "CGAERRBAR"]:
            with self.subTest(fence):
                now = self.row(injected(HOPPER, "VIADD R4, R4, 0x1", fence))
                (error,) = tables.more_fences(old, now)
                self.assertIn("has 1 fences", error)
                # The list may shrink, and a new loop has no fence to add to.
                self.assertEqual(list(tables.more_fences(now, old)), [])
                self.assertEqual(len(list(tables.more_fences({}, now))), 1)
                # After the loop a fence is allowed.
                self.assertEqual(self.row(injected(HOPPER, "LDG.E.128 R216", fence)), old)

    def test_fence_in_code_behind_the_kernels_end(self):
        # A branch that leaves the loop's lines and returns to it.
        text = injected(HOPPER, "VIADD R4, R4, 0x1", "@P3 BRA `(.L_report)").replace(
            "        /*01d0*/", ".L_reported:\n        /*01d0*/").replace(
            ".L_retry:\n", ".L_report:\n" + line("MEMBAR.ALL.GPU") + line("BRA `(.L_reported)") + ".L_retry:\n")
        (row,) = self.row(text).values()
        self.assertEqual(row["fences"], "1")

    def test_second_proxy_fence(self):
        old = self.row(HOPPER)
        now = self.row(injected(HOPPER, "VIADD R4, R4, 0x1", "MEMBAR.ALL.CTA", "FENCE.VIEW.ASYNC.S"))
        (error,) = tables.more_fences(old, now)
        self.assertIn("has 2 proxy fences a stage, not 1", error)

    def test_growth_of_a_loop(self):
        old = self.loop(HOPPER)
        for count in range(4):
            now = self.loop(injected(HOPPER, "VIADD R4, R4, 0x1", *["MOV R4, R5"] * count))
            # 22 instructions; two more are 9%, three 14%.
            self.assertEqual(len(list(tables.longer(old, now))), count > 2, count)
        self.assertEqual(list(tables.longer({}, old)), [])


class Tables(unittest.TestCase):
    def rows(self, kind, module, kernel="k"):
        row = dict.fromkeys(tables.COLUMNS[kind], 1) | dict(module=module, architecture="sm_80", kernel=kernel)
        return tables.named([row], kind)

    def test_rows_of_other_modules_are_kept(self):
        for kind in tables.COLUMNS:
            rows = self.rows(kind, "a")
            for module, kernel in [("b", "k"), ("a", "new")]:
                rows = tables.merged(rows, self.rows(kind, module, kernel), {(module, "sm_80")})
            text = tables.written(rows, kind)
            self.assertEqual([line.split(",")[:3] for line in text.splitlines()[1:]], [["a", "sm_80", "new"], ["b", "sm_80", "k"]])
            self.assertEqual(tables.parsed(text, kind), rows)

    def test_missing_row(self):
        here = {("a", "sm_80")}
        for kind in tables.COLUMNS:
            rows = self.rows(kind, "a")
            self.assertEqual(tables.missing(rows, self.rows(kind, "a"), here), [])
            self.assertEqual([name[:3] for name in tables.missing(rows, self.rows(kind, "a", "other"), here)], [("a", "sm_80", "k")])
            self.assertEqual(tables.missing(rows, self.rows(kind, "b"), {("b", "sm_80")}), [])


class Command(unittest.TestCase):
    def run_(self, text):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "injected.sass"
            path.write_text(text)
            return subprocess.run([sys.executable, TOOLS / "check-machine-code", path], capture_output=True, text=True, check=False)

    def test_exit_status(self):
        right = self.run_(HOPPER)
        self.assertEqual((right.returncode, right.stdout.splitlines()[-1]), (0, "1 kernels, 0 wrong"), right.stderr)
        fault = self.run_(injected(HOPPER, "LDG.E.64 R54", "MOV R56, RZ"))
        self.assertEqual((fault.returncode, fault.stdout.splitlines()[-1]), (1, "1 kernels, 1 wrong"))
        self.assertIn("injected, sm_90a, aristos_forward_hopper_f16: uses R56", fault.stderr)
        self.assertNotEqual(self.run_("").returncode, 0)

    def test_tables_accept_no_fence_more(self):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            shutil.copytree(TOOLS / "machine_code", root / "tools/machine_code", ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copy(TOOLS / "check-machine-code", root / "tools")
            (root / "docs").mkdir()
            listing, table = root / "m.sass", root / "docs/machine-code/fences.csv"

            def run(text, *flags):
                listing.write_text(text)
                command = [sys.executable, root / "tools/check-machine-code", *flags, listing]
                return subprocess.run(command, capture_output=True, text=True, check=False)

            fenced = injected(HOPPER, "VIADD R4, R4, 0x1", "MEMBAR.ALL.GPU")
            self.assertEqual(run(HOPPER, "--write").returncode, 0)
            before = table.read_text()
            for flags in [[], ["--write"]]:
                fault = run(fenced, *flags)
                self.assertEqual((fault.returncode, table.read_text()), (1, before))
                self.assertIn("m, sm_90a, aristos_forward_hopper_f16, HGMMA 1 has 1 fences", fault.stderr)
            longer = injected(HOPPER, "VIADD R4, R4, 0x1", *["MOV R4, R5"] * 3)
            self.assertIn("HGMMA 1 has 25 instructions a stage, not at most 10% more than 22", run(longer).stderr)
            self.assertEqual((run(longer, "--write").returncode, run(longer).returncode), (0, 0))


if __name__ == "__main__":
    result = unittest.main(exit=False, verbosity=1).result
    bad = len(result.failures) + len(result.errors)
    print(f"{result.testsRun - bad} passed, {bad} failed, 0 skipped")
    sys.exit(bad > 0)
