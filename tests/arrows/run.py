#!/usr/bin/env python3
"""usage: tests/arrows/run.py

Tests tools/check-arrows: it accepts this tree, and reports each bad import that is injected into a copy of it.
"""
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# A file, the code injected into it, and the expected parts of the report.
INJECTED = [
    # Against the order.
    ("src/moe/parallel.rs", "use crate::job::request::Request;", ["src/moe uses src/job", "src/moe/parallel.rs -> src/job/request/mod.rs"]),
    ("sim/src/network.rs", "use crate::step::Step as Other;", ["a circle of", "sim/src/network.rs -> sim/src/step/mod.rs"]),
    ("formats/src/model.rs", "fn wrong() { aristos_plan::plan(); }", ["formats uses plan", "formats/src/model.rs -> plan/src/lib.rs"]),
    ("src/gpu/params.rs", "use crate::moe::Dtype as Other;", ["src/gpu uses src/moe", "src/gpu and src/moe use each other"]),
    # Cycles: between sibling modules, through a glob, and between a module and its submodule.
    ("src/run/inject.rs", "use super::pe;\nfn wrong() { pe::run(); }", ["a circle of", "src/run/inject.rs -> src/run/pe.rs"]),
    ("src/run/inject.rs", "use super::pe::*;\nfn wrong() { run(); }", ["a circle of", "src/run/inject.rs -> src/run/pe.rs"]),
    ("src/check/error.rs", "type Wrong<'a> = super::Problem<'a>;", ["a circle of", "src/check/error.rs -> src/check/mod.rs"]),
    # Valid: uses in tests, comments and strings, and a `mod` line.
    ("src/moe/parallel.rs", "#[cfg(test)]\nmod more {\n    use crate::job::request::Request;\n}", []),
    ("src/moe/parallel.rs", '// crate::job::request::Request\nconst TEXT: &str = "crate::job::request::Request";', []),
]


def check(root):
    return subprocess.run([ROOT / "tools/check-arrows", root], capture_output=True, text=True)


def main():
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        names = subprocess.run(["git", "ls-files", "*.rs", "*Cargo.toml"], cwd=ROOT, capture_output=True, text=True, check=True)
        for name in names.stdout.split():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
        clean = check(copy)
        if clean.returncode != 0:
            print(f"the tree as it is:\n{clean.stdout}{clean.stderr}")
            return 1
        for name, line, expected in INJECTED:
            text = (copy / name).read_text()
            (copy / name).write_text(f"{text}\n{line}\n")
            found = check(copy)
            (copy / name).write_text(text)
            if found.returncode != bool(expected) or any(part not in found.stdout for part in expected):
                wrong += 1
                print(f"{name} with `{line}`, expected {expected or 'no finding'}:\n{found.stdout}{found.stderr}")
    print(clean.stdout.strip())
    print(f"{len(INJECTED) - wrong} passed, {wrong} failed, 0 skipped")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
