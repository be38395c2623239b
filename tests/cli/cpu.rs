//! `ARISTOS_CPU` limits the CPU's instruction sets.

use crate::binary::{aristos, aristos_run, run};

#[test]
fn every_instruction_set_passes_the_check() {
    // Sets that this CPU does not have fall back to the best one below them.
    for set in ["scalar", "avx2", "avx512", "avx512bf16", "amx"] {
        for dtype in ["f32", "bf16"] {
            let mut command =
                aristos_run("--pes 2 --tokens 96 --hidden 80 --intermediate 144 --experts 4 --top-k 2 --check");
            command.args(["--dtype", dtype]).env("ARISTOS_CPU", set);
            run(command).success();
        }
    }
}

#[test]
fn benchmark_names_the_instruction_set() {
    let mut command =
        aristos(["bench", "moe", "--pes", "1", "--tokens", "16", "--hidden", "16", "--intermediate", "16"]);
    command.args(["--experts", "2", "--top-k", "1", "--iterations", "1", "--warmup", "0", "--dtype", "bf16", "--json"]);
    command.env("ARISTOS_CPU", "scalar");
    let summary: serde_json::Value = serde_json::from_str(&run(command).success().stdout).unwrap();
    assert_eq!(summary["setting"]["instruction_set"], "scalar");
}

#[test]
fn unknown_instruction_set_is_refused() {
    let mut command = aristos(["sim", "--help"]);
    command.env("ARISTOS_CPU", "avx");
    run(command).refused(&[r#"ARISTOS_CPU is "avx", expected one of scalar, avx2, avx512, avx512bf16, amx"#]);
}
