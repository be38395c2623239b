//! Mutations of every kind of input file: reading them must not panic, hang, or use disproportionate memory, and non-finite
//! values must be reported. The initial files are in `tests/corpus`, which also keeps every file that was once read
//! incorrectly.

mod mutate;
mod sample;

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use aristos::checkpoint::{Checkpoint, read_input, read_model};
use aristos::cluster::{Cluster, parse_json, read_text};
use aristos::formats::routing::Routing;
use aristos::moe::WeightSource;
use aristos::plan::{self, Options, Outcome, Plan, Workload, expert_weights, loads_of_report, rebalance_experts};
use aristos::report::{RunConfig, RunReport};
use aristos::sim::comms::{Load, Params, Schedule, exchange};
use aristos::sim::linear::{Device, LinearLayer, LinearTime};
use aristos::simulate::{Machine, calibrate};
use mutate::mutate;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sample::Sample;

/// Maximum time per file.
const HANG: Duration = Duration::from_secs(10);
/// Maximum memory per file.
const MEMORY_BYTES: usize = 256 << 20;

/// Counts allocated bytes.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: forwards to the system's allocator with the caller's guarantees; the counters do not affect the memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(live, Ordering::Relaxed);
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: guaranteed by the caller.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The corpus of a kind of file.
fn corpus(kind: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(kind);
    let mut files: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.into_iter().map(|path| (path.clone(), fs::read(&path).unwrap())).collect()
}

/// Calls `read` with the corpus and with mutations of it; `read` returns whether the file was accepted. An error must be one
/// line.
fn fuzz(kind: &str, mut read: impl FnMut(&[u8]) -> Result<(), String>) {
    const AT_ONCE: u64 = 600;
    let corpus = corpus(kind);
    for (path, bytes) in &corpus {
        read(bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
    let (mut accepted, mut refused) = (0, 0);
    let sample = Sample::new(AT_ONCE, 250_000);
    for number in sample.numbers() {
        let mut random = ChaCha8Rng::seed_from_u64(number);
        let bytes = mutate(&corpus[random.random_range(0..corpus.len())].1, &mut random);
        let shown = String::from_utf8_lossy(&bytes).into_owned();
        let before = LIVE.load(Ordering::Relaxed);
        PEAK.store(before, Ordering::Relaxed);
        let start = Instant::now();
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| read(&bytes)));
        let took = start.elapsed();
        let peak = PEAK.load(Ordering::Relaxed).saturating_sub(before);
        assert!(took < HANG, "{kind} {number}: {took:?}: {shown}");
        assert!(peak < MEMORY_BYTES, "{kind} {number}: {peak} bytes for {}: {shown}", bytes.len());
        match outcome {
            Ok(Ok(())) => accepted += 1,
            Ok(Err(line)) => {
                refused += 1;
                assert!(!line.is_empty() && !line.contains('\n'), "{kind} {number}: {line:?}");
            }
            Err(_) => panic!("{kind} {number} panics: {shown}"),
        }
    }
    println!("{kind}: {accepted} accepted, {refused} refused");
    assert!(refused > 0, "no mutation of {kind} is wrong: {accepted}");
}

/// Reads the text like every command does.
fn text(path: &Path, bytes: &[u8]) -> Result<String, String> {
    fs::write(path, bytes).unwrap();
    read_text(path).map_err(|error| error.to_string())
}

/// A single test, so that other tests do not allocate at the same time.
#[test]
fn mutated_files_are_read_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    let line = |error: &dyn std::fmt::Display| error.to_string();
    let named = |kind: &str, name: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(kind).join(name);
        fs::read_to_string(path).unwrap()
    };
    let cluster = Cluster::from_json(&named("cluster", "probed.json")).unwrap();
    let tiers = Cluster::from_json(&named("cluster", "tiers.json")).unwrap();
    let [workload, small] =
        ["mixtral.json", "small.json"].map(|name| Workload::from_json(&named("workload", name)).unwrap());

    let planned = |cluster: &Cluster, workload: &Workload| -> Result<(), String> {
        let outcome = plan::plan(cluster, workload, Options::default()).map_err(|error| line(&error))?;
        match &outcome {
            Outcome::Plan(plan) if !plan.objective_ms.is_finite() => panic!("{} ms: {plan:?}", plan.objective_ms),
            _ => Ok(()),
        }
    };
    // Accepted files must also be usable for planning.
    let mut read = 0;
    fuzz("cluster", |bytes| {
        let cluster = Cluster::from_json(&text(&file, bytes)?).map_err(|error| line(&error))?;
        read += 1;
        if read % 16 == 0 { planned(&cluster, &workload) } else { Ok(()) }
    });
    fuzz("workload", |bytes| {
        let workload = Workload::from_json(&text(&file, bytes)?).map_err(|error| line(&error))?;
        read += 1;
        if read % 16 == 0 { planned(&cluster, &workload) } else { Ok(()) }
    });
    fuzz("plan", |bytes| {
        let text = text(&file, bytes)?;
        let plan: Plan = parse_json(&text).map_err(|error| line(&error))?;
        plan::replan(&tiers, &small, &plan, &plan, 1.0).map(drop).map_err(|error| line(&error))
    });
    fuzz("report", |bytes| {
        let text = text(&file, bytes)?;
        loads_of_report(&text).map_err(|error| line(&error))?;
        serde_json::from_str::<RunReport>(&text).map(drop).map_err(|error| line(&error))
    });
    fuzz("measured", |bytes| {
        let report = serde_json::from_str::<RunReport>(&text(&file, bytes)?).map_err(|error| line(&error))?;
        let alone = RunReport { config: RunConfig { pes: 1, ..report.config.clone() }, ..report.clone() };
        calibrate(&[("alone".into(), alone), ("together".into(), report)], 2).map(drop).map_err(|error| line(&error))
    });
    fuzz("calibration", |bytes| Machine::from_json(&text(&file, bytes)?).map(drop).map_err(|error| line(&error)));
    fuzz("loads", |bytes| {
        let weight = expert_weights(&text(&file, bytes)?).map_err(|error| line(&error))?;
        rebalance_experts(&weight, 8, 1, 1, 4).map(drop).map_err(|error| line(&error))
    });

    fuzz("routing", |bytes| Routing::from_json(&text(&file, bytes)?).map(drop).map_err(|error| line(&error)));
    fuzz("params", |bytes| Params::from_json(&text(&file, bytes)?).map(drop).map_err(|error| line(&error)));
    let params = Params::from_json(&named("params", "params.json")).unwrap();
    fuzz("load", |bytes| {
        let load = Load::from_json(&text(&file, bytes)?).map_err(|error| line(&error))?;
        exchange(&params, &load, Schedule::Fair, None).map(drop).map_err(|error| line(&error))
    });
    let layer = LinearLayer::from_json(&named("layer", "layer.json")).unwrap();
    let device = Device::from_json(&named("device", "device.json")).unwrap();
    let finite = |time: LinearTime| assert!(time.fwd_bwd_s.is_finite() && time.end_of_batch_s.is_finite(), "{time:?}");
    fuzz("device", |bytes| {
        let device = Device::from_json(&text(&file, bytes)?).map_err(|error| line(&error))?;
        layer.time(&device, 4096.0).map(finite).map_err(|error| line(&error))
    });
    fuzz("layer", |bytes| {
        let layer = LinearLayer::from_json(&text(&file, bytes)?).map_err(|error| line(&error))?;
        layer.time(&device, 4096.0).map(finite).map_err(|error| line(&error))
    });

    let model = dir.path().join("model");
    fs::create_dir(&model).unwrap();
    let [config, whole, index, shard] =
        ["config.json", "model.safetensors", "model.safetensors.index.json", "model-00001-of-00001.safetensors"]
            .map(|name| model.join(name));
    fuzz("config", |bytes| {
        fs::write(&config, bytes).unwrap();
        read_model(&model).map(drop).map_err(|error| line(&error))
    });
    let tensors = corpus("safetensors").into_iter().find(|(path, _)| path.ends_with("model.safetensors")).unwrap().1;
    let qwen = corpus("config").into_iter().find(|(path, _)| path.ends_with("qwen3_moe.json")).unwrap().1;
    // Every weight of the layer must be finite or refused.
    let load = || -> Result<(), String> {
        let checkpoint = Checkpoint::open(&model, 0).map_err(|error| line(&error))?;
        for id in checkpoint.config().weights() {
            let values = checkpoint.load(id).map_err(|error| line(&error))?;
            assert!(values.iter().all(|value| value.is_finite()), "{id:?} is not finite");
        }
        Ok(())
    };
    fs::write(&whole, &tensors).unwrap();
    let mut number = 0;
    fuzz("config", |bytes| {
        number += 1;
        // The corpus has models whose shape differs from the tensors'.
        fs::write(&config, bytes).unwrap();
        if number <= 2 { Ok(()) } else { load() }
    });
    fs::write(&config, &qwen).unwrap();
    fuzz("safetensors", |bytes| {
        fs::write(&whole, bytes).unwrap();
        match read_input(&whole) {
            Ok(input) => input.check_finite(0..input.tokens()).map_err(|error| line(&error)),
            // The corpus has an input and a model.
            Err(error) => load().map_err(|other| format!("{error}; {other}")),
        }
    });
    fs::remove_file(&whole).unwrap();
    fs::write(&shard, &tensors).unwrap();
    fuzz("index", |bytes| {
        fs::write(&index, bytes).unwrap();
        load()
    });
}
