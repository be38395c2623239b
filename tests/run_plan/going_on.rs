//! `--on-failure continue`: if a PE dies, the other groups continue.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

use super::binary::{Outcome, Running, Tensor, aristos, aristos_run, read_tensors, run, start, write_tensors};
use super::plan;

/// Sizes of the bundled example.
const EXPERTS: usize = 8;
const HIDDEN: usize = 80;
const TOKENS: usize = 24;
/// Number of jobs whose PEs are killed at random.
const ROUNDS: usize = 12;

/// Number of PEs, groups, the PE that dies, the remaining PEs.
type Case = (usize, &'static [&'static [u64]], usize, &'static [usize]);

/// A folder with the bundled example's model, some of its tokens, and plans.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Folder {
        let dir = Folder(tempfile::tempdir().unwrap());
        let example = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("examples/tiny-moe");
        fs::create_dir(dir.path("model")).unwrap();
        for name in ["config.json", "model.safetensors"] {
            fs::copy(example.join(name), dir.path("model").join(name)).unwrap();
        }
        let all = read_tensors(&example.join("hidden_states.safetensors"));
        dir.write_input("in.safetensors", &all, 0..TOKENS);
        dir
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn tensors(&self, name: &str) -> std::collections::BTreeMap<String, Tensor> {
        read_tensors(&self.path(name))
    }

    fn write_input(
        &self,
        name: &str,
        all: &std::collections::BTreeMap<String, Tensor>,
        tokens: impl IntoIterator<Item = usize> + Clone,
    ) {
        let rows = |tensor: &str| -> Vec<f32> {
            let values = &all[tensor].1;
            tokens.clone().into_iter().flat_map(|t| values[t * HIDDEN..][..HIDDEN].to_vec()).collect()
        };
        let (x, grad) = (rows("hidden_states"), rows("grad_output"));
        let shape = [x.len() / HIDDEN, HIDDEN];
        write_tensors(&self.path(name), &[("hidden_states", &shape, &x), ("grad_output", &shape, &grad)]);
    }

    /// Writes a plan with these groups of PEs, and the experts in equal parts.
    fn write_plan(&self, name: &str, groups: &[&[u64]]) {
        let owners: Vec<Vec<u64>> =
            groups.iter().map(|pes| (0..EXPERTS).map(|e| pes[e * pes.len() / EXPERTS]).collect()).collect();
        let groups: Vec<(&[u64], &[u64])> = groups.iter().zip(&owners).map(|(pes, own)| (*pes, &own[..])).collect();
        fs::write(self.path(name), plan(&groups).to_string()).unwrap();
    }

    /// Steps of SGD on `pes` PEs by a plan; results in `out.safetensors`, weights in `weights.safetensors` after `name`.
    fn training(&self, name: &str, model: &str, input: &str, plan: &str, pes: usize, more: &str) -> Command {
        let mut command = aristos(["run", "--layer", "1", "--json"]);
        command.args(["--pes", &pes.to_string()]).args(more.split_whitespace());
        command.arg("--model").arg(self.path(model)).arg("--input").arg(self.path(input));
        command.arg("--plan").arg(self.path(plan));
        command.arg("--output").arg(self.path(&format!("{name}out.safetensors")));
        command.arg("--save-weights").arg(self.path(&format!("{name}weights.safetensors")));
        command
    }
}

fn report(outcome: &Outcome) -> Value {
    assert!(outcome.status.success(), "{}", outcome.stderr);
    serde_json::from_str(&outcome.stdout).unwrap()
}

fn kill(running: &mut Running, pe: usize, after_ms: u64) {
    let pid = running.pe(pe);
    std::thread::sleep(Duration::from_millis(after_ms));
    kill_process(pid, Signal::KILL).unwrap();
}

/// The weights equal, bit for bit, those of a run with the lost tokens up to the reported step and without them afterwards.
#[test]
fn the_others_go_on_as_if_the_group_had_left_between_two_steps() {
    let cases: [Case; 2] = [(4, &[&[0, 2], &[1, 3]], 3, &[0, 2]), (4, &[&[1, 3], &[0], &[2]], 1, &[0, 2])];
    for (case, (pes, groups, victim, left)) in cases.into_iter().enumerate() {
        let folder = Folder::new();
        folder.write_plan("plan.json", groups);
        let steps = 1500;
        let flags = format!("--steps {steps} --sgd 0.0009765625 --on-failure continue");
        let mut running = start(folder.training("", "model", "in.safetensors", "plan.json", pes, &flags));
        kill(&mut running, victim, 300 + 100 * case as u64);
        let outcome = running.end();
        let report = report(&outcome);
        let lost = &report["lost"][0];
        let from = lost["from_step"].as_u64().unwrap();
        assert!(from > 0 && from < steps, "{lost}");
        let gone: Vec<usize> = (0..pes).filter(|pe| !left.contains(pe)).collect();
        assert_eq!((report["lost"].as_array().unwrap().len(), &lost["pes"]), (1, &json!(gone)));
        let why = format!("PE {victim} was killed by signal 9 (SIGKILL) in phase ");
        assert!(lost["why"].as_str().unwrap().starts_with(&why), "{lost}");
        assert!(outcome.stderr.contains(&format!("from step {from} on the others go on")), "{}", outcome.stderr);
        assert_eq!(report["config"]["tokens"], json!(left.len() * TOKENS / pes));

        // Reference: all groups up to that step, then the remaining groups on their tokens, from the weights at that step.
        let all = folder.tensors("in.safetensors");
        let tokens: Vec<usize> = left.iter().flat_map(|pe| pe * TOKENS / pes..(pe + 1) * TOKENS / pes).collect();
        folder.write_input("left.safetensors", &all, tokens.clone());
        let group_of = |pe: usize| groups.iter().position(|group| group.contains(&(pe as u64)));
        let mut kept: Vec<Vec<u64>> = Vec::new();
        for group in 0..groups.len() {
            let ranks = (0..left.len()).filter(|&rank| group_of(left[rank]) == Some(group)).map(|rank| rank as u64);
            kept.extend(Some(ranks.collect::<Vec<_>>()).filter(|ranks| !ranks.is_empty()));
        }
        folder.write_plan("left.json", &kept.iter().map(Vec::as_slice).collect::<Vec<_>>());
        let flags = format!("--steps {from} --sgd 0.0009765625");
        run(folder.training("before-", "model", "in.safetensors", "plan.json", pes, &flags)).success();
        fs::create_dir(folder.path("model2")).unwrap();
        fs::copy(folder.path("model/config.json"), folder.path("model2/config.json")).unwrap();
        fs::rename(folder.path("before-weights.safetensors"), folder.path("model2/model.safetensors")).unwrap();
        let scale = pes as f32 / left.len() as f32;
        let flags = format!("--steps {} --sgd {}", steps - from, 0.0009765625 * scale);
        run(folder.training("after-", "model2", "left.safetensors", "left.json", left.len(), &flags)).success();

        for (name, (shape, want)) in folder.tensors("after-weights.safetensors") {
            let got = &folder.tensors("weights.safetensors")[&name];
            assert_eq!((&got.0, &got.1), (&shape, &want), "{name} of {groups:?}");
        }
        let got = folder.tensors("out.safetensors");
        for (name, (shape, want)) in folder.tensors("after-out.safetensors") {
            if name.starts_with("grad.") {
                let want: Vec<f32> = want.iter().map(|x| x * scale).collect();
                assert_eq!((&got[&name].0, &got[&name].1), (&shape, &want), "{name} of {groups:?}");
                continue;
            }
            let row = |values: &[f32], row: usize| values[row * HIDDEN..][..HIDDEN].to_vec();
            for (at, &token) in tokens.iter().enumerate() {
                assert_eq!(row(&got[&name].1, token), row(&want, at), "token {token} of {name}");
            }
            let missing = (0..TOKENS).filter(|token| !tokens.contains(token));
            missing
                .for_each(|token| assert!(row(&got[&name].1, token).iter().all(|x| x.is_nan()), "{token} of {name}"));
        }
    }
}

#[test]
fn losses_follow_each_other_until_nobody_is_left() {
    let folder = Folder::new();
    folder.write_plan("plan.json", &[&[0, 2], &[1], &[3]]);
    let flags = "--steps 100000000 --on-failure continue --timeout 20";
    let mut running = start(folder.training("", "model", "in.safetensors", "plan.json", 4, flags));
    kill(&mut running, 2, 300);
    kill(&mut running, 1, 500);
    kill(&mut running, 3, 500);
    let outcome = running.end();
    for (pe, gone) in [(2, "[0, 2]"), (1, "[1]")] {
        let said =
            outcome.stderr.lines().find(|line| line.contains(&format!("PE {pe} was killed"))).unwrap_or_default();
        assert!(said.contains(&format!("the others go on without PEs {gone}")), "{}", outcome.stderr);
    }
    let last = outcome.stderr.lines().last().unwrap_or_default();
    assert!(last.starts_with("aristos: PE 3 was killed by signal 9 (SIGKILL) in phase "), "{}", outcome.stderr);
    assert_eq!(outcome.status.code(), Some(1));
}

/// PEs are killed at any moment, including the start and the recovery: the job ends well, or fails with a death that it names.
#[test]
fn deaths_at_any_moment_end_well_or_are_named() {
    use rand::{RngExt, SeedableRng};
    let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(54);
    let folder = Folder::new();
    folder.write_plan("plan.json", &[&[0], &[1, 3], &[2]]);
    let (mut went_on, mut named) = (0, 0);
    for round in 0..ROUNDS {
        let flags = "--steps 400 --sgd 0.0009765625 --on-failure continue --timeout 20";
        let mut running = start(folder.training("", "model", "in.safetensors", "plan.json", 4, flags));
        let pids = [random.random_range(0..4), random.random_range(0..4)].map(|pe| (pe, running.pe(pe)));
        let mut victims = Vec::new();
        for (pe, pid) in pids.into_iter().take(1 + round % 2) {
            std::thread::sleep(Duration::from_micros(random.random_range(0..400_000)));
            // The process may have ended already, with its group or with the job.
            let _ = kill_process(pid, Signal::KILL);
            victims.push(pe);
        }
        let outcome = running.end();
        if outcome.status.success() {
            went_on += usize::from(!report(&outcome)["lost"].as_array().unwrap().is_empty());
        } else {
            let last = outcome.stderr.lines().last().unwrap_or_default();
            let killed = |pe: &usize| last.starts_with(&format!("aristos: PE {pe} was killed by signal 9"));
            assert!(victims.iter().any(killed), "round {round}: {}", outcome.stderr);
            named += 1;
        }
    }
    assert!(went_on > 0, "{named} of {ROUNDS} failed, none went on");
}

#[test]
fn without_a_loss_nothing_changes() {
    let folder = Folder::new();
    folder.write_plan("plan.json", &[&[0, 2], &[1, 3]]);
    for (name, more) in [("a-", ""), ("b-", "--on-failure continue")] {
        let flags = format!("--steps 5 --sgd 0.01 {more}");
        let outcome = run(folder.training(name, "model", "in.safetensors", "plan.json", 4, &flags)).success();
        assert_eq!(report(&outcome)["lost"], json!([]));
    }
    for file in ["out.safetensors", "weights.safetensors"] {
        assert_eq!(
            fs::read(folder.path(&format!("a-{file}"))).unwrap(),
            fs::read(folder.path(&format!("b-{file}"))).unwrap()
        );
    }
}

#[test]
fn where_nobody_can_go_on_it_is_refused() {
    let folder = Folder::new();
    folder.write_plan("one.json", &[&[0, 1]]);
    let one = folder.path("one.json").display().to_string();
    let flags = "--experts 8 --tokens 8 --pes 2 --on-failure continue";
    let refused = |more: &str, parts: &[&str]| run(aristos_run(&format!("{flags} {more}"))).refused(parts);
    refused(&format!("--plan {one}"), &["--on-failure continue with one EP group", "a plan of several"]);
    run(aristos_run(flags)).misused(&["--plan"]);
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let tcp = format!("--plan {one} --transport tcp --rank 0 --ranks 1 --rendezvous 127.0.0.1:{port} --pes 1");
    run(aristos_run(&format!("--experts 8 --tokens 8 --on-failure continue {tcp}")))
        .refused(&["--on-failure continue with --transport tcp", "--transport shm"]);
    // Lost results cannot be checked.
    folder.write_plan("plan.json", &[&[0, 2], &[1, 3]]);
    let flags = "--steps 1500 --on-failure continue --check";
    let mut running = start(folder.training("", "model", "in.safetensors", "plan.json", 4, flags));
    kill(&mut running, 1, 300);
    let outcome = running.end();
    let last = outcome.stderr.lines().last().unwrap_or_default();
    assert!(last.starts_with("aristos: --check: ") && outcome.status.code() == Some(1), "{}", outcome.stderr);
    assert!(!folder.path("out.safetensors").exists());
}
