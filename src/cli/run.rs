//! `aristos run`.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail, ensure};
use clap::ValueEnum;

use super::flags::as_flags;
use super::pe::failure;
use super::plan::replication;
use super::progress::Progress;
use super::ranks::Over;
#[cfg(feature = "device")]
use super::shared::KernelArgs;
use super::shared::{TransportArgs, WaitArgs};
use super::values::{
    ActivationArg, BalanceArg, DeviceArg, DtypeArg, MlpArg, ModeArg, NonFiniteArg, OnFailureArg, RowsPerArg,
    TransportArg, WireArg, check_memory_mb, check_pes,
};
use crate::job::launch::settled_pes;
use crate::job::request::{DeviceKind, PlanSource, Replanning, RunRequest, Work};
use crate::job::tcp;
use crate::moe::synthetic::{RouterKind, SyntheticSpec};
use crate::moe::{Activation, Dtype, Glu, LayerConfig, MlpConfig, Options, SharedConfig};
use crate::plan::Replication;
use crate::run::routing::GivenRouting;
use crate::run::{PreparedRun, peers, supervisor};

/// Default tokens of a synthetic layer.
const DEFAULT_TOKENS: usize = 1024;

/// PEs of the bundled example.
const EXAMPLE_PES: usize = 4;

/// Maximum threads of a PE.
const MAX_THREADS: usize = 1024;

/// The flags of `aristos run`.
#[derive(clap::Args)]
pub struct Args {
    /// Number of PEs [default: as many processes as srun, mpirun or torchrun started; 4 for the bundled example, otherwise
    /// one per CPU, or per CUDA device]
    #[arg(long, value_name = "N")]
    pes: Option<usize>,
    /// A directory with a checkpoint in a Hugging Face layout (of the families in docs/families.md)
    #[arg(long, value_name = "DIR", requires = "input", conflicts_with = "Synthetic")]
    model: Option<PathBuf>,
    /// Which layer of the checkpoint
    #[arg(long, value_name = "L", requires = "model", default_value_t = 0)]
    layer: usize,
    /// Tokens: a safetensors file with hidden_states [tokens, hidden] and, for a backward pass, grad_output
    #[arg(long, value_name = "IN", requires = "model")]
    input: Option<PathBuf>,
    /// Output file: output, and with a backward pass grad_hidden_states and grad.<weight>, as safetensors, all F32
    #[arg(long, value_name = "OUT")]
    output: Option<PathBuf>,
    /// Expert-parallel groups and placement: probe the PEs and plan (auto), or read the file of `aristos plan --out`
    /// [default: one group, even shares]
    #[arg(long, value_name = "auto|PLAN.json")]
    plan: Option<PathBuf>,
    /// With --plan auto: memory for experts, MB (10^6 bytes), one number for all PEs or one for each [default: three
    /// quarters of the available memory, in equal parts]
    #[arg(long, value_name = "MB[,MB...]", value_delimiter = ',', requires = "plan")]
    memory_mb: Vec<f64>,
    /// Reaction to the death of a PE: with several EP groups the others can continue
    #[arg(long, value_enum, default_value = "stop", requires = "plan")]
    on_failure: OnFailureArg,
    /// Reaction to a value that is not finite in a result, a loss, a gradient or a weight; it is named with its step, PE and expert
    #[arg(long, value_enum, default_value = "stop")]
    non_finite: NonFiniteArg,
    /// With --plan auto: replicate experts on several PEs of a group if that helps; at most N more experts on each PE, or
    /// as many as its memory holds (auto)
    #[arg(long, value_name = "N|auto", value_parser = replication, requires = "plan")]
    replicas: Option<Replication>,
    /// With --plan auto: plan again for the measured loads after every N steps, and move experts if the remaining steps repay the
    /// move; --replicas is then 1 by default
    #[arg(long, value_name = "N", requires = "plan")]
    replan_every: Option<usize>,
    #[command(flatten)]
    pub(super) between: TransportArgs,
    /// Where the layer runs
    #[arg(long, value_enum, default_value = "cpu")]
    device: DeviceArg,
    /// Element type of activations and expert weights; accumulation is always f32 [default: f32 on the CPU, bf16 on a device]
    #[arg(long, value_enum)]
    dtype: Option<DtypeArg>,
    #[cfg(feature = "device")]
    #[command(flatten)]
    kernels: KernelArgs,
    /// Record the passes once as a CUDA graph and replay it
    #[cfg(feature = "device")]
    #[arg(long)]
    graph: bool,
    /// How the PEs exchange rows
    #[arg(long, value_enum, default_value = "pipelined")]
    mode: ModeArg,
    /// Measured steps
    #[arg(long, value_name = "S", default_value_t = 1)]
    steps: usize,
    /// Update the weights by -RATE times their gradients after each step (stochastic gradient descent)
    #[arg(long, value_name = "RATE", conflicts_with = "check")]
    sgd: Option<f32>,
    /// Write the final weights of the layer with the checkpoint's names and shapes, F32
    #[arg(long, value_name = "W.safetensors")]
    save_weights: Option<PathBuf>,
    /// Take the tokens' experts from the layer's records in a routing file (docs/simulator.md), layer 0 for a synthetic layer; the records
    /// repeat. The router computes the weights. A synthetic layer gets as many tokens as the file has
    #[arg(long, value_name = "ROUTING.json")]
    routing: Option<PathBuf>,
    /// Write the experts of each step's tokens as a routing file
    #[arg(long, value_name = "ROUTING.json")]
    save_routing: Option<PathBuf>,
    /// Compare the results with a dense float64 reference; the exit code is 1 beyond tolerance
    #[arg(long)]
    check: bool,
    /// Print the report as JSON (keys: docs/report.md)
    #[arg(long)]
    json: bool,
    /// Write a timeline that ui.perfetto.dev opens
    #[arg(long, value_name = "T.json")]
    trace: Option<PathBuf>,
    /// Limit each expert to F times the even share of the pairs, and drop the pairs of later tokens [default: dropless]
    #[arg(long, value_name = "F")]
    capacity_factor: Option<f64>,
    /// Coefficient of the load-balancing loss
    #[arg(long, value_name = "C", default_value_t = 0.0)]
    aux_loss_coef: f32,
    /// Coefficient of the router z-loss
    #[arg(long, value_name = "C", default_value_t = 0.0)]
    z_loss_coef: f32,
    /// Receive memory, as a multiple of the even share of the rows; more rows take further rounds
    #[arg(long, value_name = "F", default_value_t = 2.0)]
    budget_factor: f64,
    /// Maximum rows per signal [default: a 16th of a receive window's, between 128 and 256]
    #[arg(long, value_name = "ROWS")]
    chunk_rows: Option<usize>,
    /// Send rows of an f32 layer between PEs in this type: half the bytes, rounded [default: f32]
    #[arg(long, value_enum, value_name = "TYPE")]
    wire: Option<WireArg>,
    /// Divide an expert's rows among its replicas
    #[arg(long, value_enum, default_value = "shares", value_name = "HOW")]
    balance: BalanceArg,
    /// Send a row to each PE that has experts of it, or to each host once, where a relay forwards it and sums the results
    #[arg(long, value_enum, default_value = "pe", value_name = "WHAT")]
    rows_per: RowsPerArg,
    /// Threads of a PE that compute tiles, on the CPUs allowed by its launcher; the results do not depend on it, bit for bit
    #[arg(long, value_name = "N", default_value_t = 1)]
    threads: usize,
    #[command(flatten)]
    wait: WaitArgs,
    /// After every S steps make the next --hot-ratio of a synthetic layer's experts hot
    #[arg(long, value_name = "S", requires = "hot_ratio")]
    hot_shift_every: Option<usize>,
    /// Slow PEs and links down to the devices and links of a cluster file (docs/planner.md), PE i being device i
    #[arg(long, alias = "inject", value_name = "CLUSTER.json")]
    emulate_cluster: Option<PathBuf>,
    #[command(flatten)]
    synthetic: SyntheticArgs,
}

/// A synthetic layer. Any of these flags selects one.
#[derive(clap::Args, Default)]
#[group(id = "Synthetic", multiple = true)]
#[command(next_help_heading = "Synthetic layer")]
pub struct SyntheticArgs {
    /// Tokens, over all PEs [default: 1024]
    #[arg(long)]
    pub(super) tokens: Option<usize>,
    /// Hidden width [default: 256]
    #[arg(long)]
    hidden: Option<usize>,
    /// Width inside an expert [default: 1024]
    #[arg(long)]
    intermediate: Option<usize>,
    /// Routed experts [default: 8]
    #[arg(long)]
    experts: Option<usize>,
    /// Experts per token [default: 2]
    #[arg(long)]
    top_k: Option<usize>,
    /// The experts' nonlinearity [default: silu]
    #[arg(long, value_enum)]
    activation: Option<ActivationArg>,
    /// Gated experts, or plain two-matrix ones [default: gated]
    #[arg(long, value_enum)]
    mlp: Option<MlpArg>,
    /// Give every projection a bias
    #[arg(long)]
    bias: bool,
    /// Width inside a shared expert [default: none]
    #[arg(long, value_name = "WIDTH")]
    shared_intermediate: Option<usize>,
    /// Choice and weights of the experts [default: softmax-renormalised]
    #[arg(long, value_enum)]
    router: Option<RouterArg>,
    /// Share of the experts that are hot [default: 0]
    #[arg(long)]
    pub(super) hot_ratio: Option<f64>,
    /// Share of the routing that the hot experts get [default: 0]
    #[arg(long)]
    pub(super) hot_weight: Option<f64>,
    /// Seed of weights, tokens and routing [default: 0]
    #[arg(long)]
    pub(super) seed: Option<u64>,
    /// No backward pass
    #[arg(long)]
    pub(super) forward_only: bool,
}

/// `--router`.
#[derive(Clone, Copy, ValueEnum)]
pub enum RouterArg {
    /// Softmax over all experts (OLMoE, Qwen2-MoE)
    Softmax,
    /// Softmax, with the chosen weights scaled to a sum of 1 (Mixtral, Qwen3-MoE)
    SoftmaxRenormalised,
    /// Sigmoid with correction bias, group-limited, scaled (DeepSeek-V3)
    Sigmoid,
}

impl SyntheticArgs {
    /// Whether any of the flags was given.
    pub(super) fn given(&self) -> bool {
        let SyntheticArgs { tokens, hidden, intermediate, experts, top_k, activation, mlp, .. } = self;
        let numbers = [tokens, hidden, intermediate, experts, top_k, &self.shared_intermediate];
        numbers.iter().any(|n| n.is_some())
            || activation.is_some()
            || mlp.is_some()
            || self.router.is_some()
            || self.hot_ratio.is_some()
            || self.hot_weight.is_some()
            || self.seed.is_some()
            || self.bias
            || self.forward_only
    }

    /// The layer, with the number of tokens from the flag or from the routing file.
    ///
    /// # Errors
    /// A file that cannot be read, or of another model.
    pub(super) fn work(&self, routing: Option<&Path>) -> Result<Work> {
        let (n_experts, top_k) = (self.experts.unwrap_or(8), self.top_k.unwrap_or(2));
        let expert = MlpConfig {
            intermediate: self.intermediate.unwrap_or(1024),
            gated: self.mlp != Some(MlpArg::Plain),
            activation: self.activation.map_or(Activation::Silu, Into::into),
            bias: self.bias,
            glu: Glu::PRODUCT,
        };
        let shared =
            self.shared_intermediate.map(|intermediate| SharedConfig::new(MlpConfig { intermediate, ..expert }, false));
        let kind = match self.router {
            Some(RouterArg::Softmax) => RouterKind::Softmax,
            None | Some(RouterArg::SoftmaxRenormalised) => RouterKind::SoftmaxRenormalised,
            Some(RouterArg::Sigmoid) => RouterKind::Sigmoid,
        };
        let (hidden, router) = (self.hidden.unwrap_or(256), kind.config(n_experts, top_k));
        let layer = LayerConfig { shared, ..LayerConfig::new(hidden, n_experts, router, expert) };
        let (hot_ratio, hot_weight) = (self.hot_ratio.unwrap_or(0.0), self.hot_weight.unwrap_or(0.0));
        let spec = SyntheticSpec { layer, hot_ratio, hot_weight, seed: self.seed.unwrap_or(0) };
        let tokens = match (self.tokens, routing) {
            (Some(tokens), _) => tokens,
            (None, None) => DEFAULT_TOKENS,
            (None, Some(path)) => GivenRouting::read(path, 0, (n_experts, top_k), None)?.tokens(),
        };
        Ok(Work::Synthetic { spec, tokens, backward: !self.forward_only })
    }
}

impl Args {
    /// The request. `started` is the number of PEs that a launcher has started, if one has.
    fn request(&self, started: Option<usize>) -> Result<RunRequest> {
        let (work, example) = match (&self.model, &self.input) {
            (Some(model), Some(input)) => {
                (Work::Checkpoint { model: model.clone(), layer: self.layer, input: input.clone() }, false)
            }
            _ if self.synthetic.given() => (self.synthetic.work(self.routing.as_deref())?, false),
            _ => (example()?, true),
        };
        ensure!(self.steps > 0, "--steps is 0, expected at least 1");
        ensure!(self.chunk_rows != Some(0), "--chunk-rows is 0, expected at least 1");
        ensure!(
            self.budget_factor.is_finite() && self.budget_factor > 0.0,
            "--budget-factor is {}, expected a finite number above 0",
            self.budget_factor
        );
        ensure!(
            (1..=MAX_THREADS).contains(&self.threads),
            "--threads is {}, expected 1 to {MAX_THREADS}",
            self.threads
        );
        let wait_limit = self.wait.limit()?;
        if let Some(rate) = self.sgd {
            ensure!(rate.is_finite(), "--sgd is {rate}, expected a finite number");
        }
        let (device, dtype) = self.device.device(self.dtype)?;
        #[cfg(feature = "device")]
        self.kernels.check(device)?;
        #[cfg(feature = "device")]
        ensure!(device != DeviceKind::Cpu || !self.graph, "--graph on the CPU, expected --device too");
        ensure!(
            device == DeviceKind::Cpu || self.threads == 1,
            "--threads {} on a device, expected --device cpu",
            self.threads
        );
        let wire = self.wire.map(|WireArg::Bf16| Dtype::Bf16);
        ensure!(wire.is_none() || device == DeviceKind::Cpu, "--wire bf16 on a device, expected --device cpu");
        ensure!(
            device == DeviceKind::Cpu || self.balance == BalanceArg::Shares,
            "--balance split on a device, expected --device cpu"
        );
        if self.rows_per == RowsPerArg::Host {
            let transport = self.between.transport.name();
            if device == DeviceKind::Emulated {
                let reach = self.between.transport == TransportArg::Hybrid;
                ensure!(
                    reach,
                    "--rows-per host with --transport {transport} on emulated devices, expected --transport hybrid"
                );
            }
            let meets = matches!(self.between.transport, TransportArg::Hybrid | TransportArg::Tcp | TransportArg::Ofi);
            ensure!(meets, "--rows-per host with --transport {transport}, expected --transport hybrid, tcp or ofi");
        }
        let is_f32 = dtype == Dtype::F32;
        ensure!(wire.is_none() || is_f32, "--wire bf16 with --dtype {}, expected --dtype f32", dtype.name());
        ensure!(
            device == DeviceKind::Cpu || self.on_failure == OnFailureArg::Stop,
            "--on-failure continue on a device, expected --device cpu"
        );
        ensure!(
            self.save_routing.is_none() || self.on_failure == OnFailureArg::Stop,
            "--save-routing with --on-failure continue, expected one of them: a group that is lost leaves no routing"
        );
        ensure!(
            self.replan_every.is_none() || self.on_failure == OnFailureArg::Stop,
            "--replan-every with --on-failure continue, expected one of them"
        );
        let plan = self.plan.as_deref().map(|plan| plan_source(plan, &self.memory_mb, self.replicas));
        if let Some(PlanSource::File(path)) = &plan {
            ensure!(self.memory_mb.is_empty(), "--memory-mb with --plan {}, expected --plan auto", path.display());
            ensure!(self.replan_every.is_none(), "--replan-every with --plan {}, expected --plan auto", path.display());
            ensure!(self.replicas.is_none(), "--replicas with --plan {}, expected --plan auto", path.display());
        }
        let pes = self.pes.or(started).or_else(settled_pes).unwrap_or_else(|| default_pes(device, example));
        check_memory_mb(&self.memory_mb, pes)?;
        Ok(RunRequest {
            work,
            pes,
            plan,
            on_failure: self.on_failure.into(),
            hot_shift_every: self.hot_shift_every,
            replan: self.replan_every.map(|every| Replanning {
                every,
                replicas: self.replicas.unwrap_or(Replication::AtMost(1)),
                cluster: String::new(),
            }),
            inject: self.emulate_cluster.clone(),
            device,
            #[cfg(feature = "device")]
            symmetric: self.kernels.symmetric(),
            #[cfg(feature = "device")]
            gemm: self.kernels.gemm(),
            #[cfg(feature = "device")]
            tile: self.kernels.tile,
            #[cfg(feature = "device")]
            lane_stores: self.kernels.lane_stores,
            #[cfg(feature = "device")]
            graph: self.graph,
            dtype,
            rows_per: self.rows_per.into(),
            steps: self.steps,
            sgd: self.sgd,
            save_weights: self.save_weights.clone(),
            routing: self.routing.clone(),
            save_routing: self.save_routing.clone(),
            non_finite: self.non_finite.into(),
            options: Options {
                mode: self.mode.into(),
                budget_factor: self.budget_factor,
                chunk_rows: self.chunk_rows,
                wire,
                balance: self.balance.into(),
                threads: self.threads,
                wait_limit,
                ..Options::default()
            },
            losses: (self.aux_loss_coef, self.z_loss_coef),
            capacity_factor: self.capacity_factor,
            output: self.output.clone(),
            check: self.check || example,
            trace: self.trace.clone(),
            json: self.json,
        })
    }
}

/// The default number of PEs. A missing CUDA device is reported later.
fn default_pes(device: DeviceKind, example: bool) -> usize {
    match device {
        #[cfg(feature = "cuda")]
        DeviceKind::Cuda => crate::gpu::cuda::visible_devices().map_or(1, |devices| devices.max(1)),
        _ if example => EXAMPLE_PES,
        _ => std::thread::available_parallelism().map_or(1, usize::from),
    }
}

impl Args {
    /// The request of one of `started` PEs that have joined over the transport.
    fn peer_request(&self, started: usize) -> Result<RunRequest> {
        let transport = self.between.transport.name();
        if let Some(pes) = self.pes.filter(|&pes| pes != started) {
            bail!(
                "--pes {pes} with --transport {transport}: {started} processes were started, expected {started} or no --pes"
            );
        }
        ensure!(
            self.on_failure == OnFailureArg::Stop,
            "--on-failure continue with --transport {transport}, expected --transport shm"
        );
        ensure!(
            self.emulate_cluster.is_none(),
            "--emulate-cluster with --transport {transport}, expected --transport shm"
        );
        self.request(Some(started))
    }
}

/// The bundled example, in the source tree of this binary or below the current directory.
fn example() -> Result<Work> {
    const DIR: &str = "examples/tiny-moe";
    let places = [Path::new(env!("CARGO_MANIFEST_DIR")).join(DIR), PathBuf::from(DIR)];
    let Some(model) = places.iter().find(|p| p.join("config.json").is_file()) else {
        bail!(
            "the bundled example is not at {}; give --model and --input, or flags of a synthetic layer",
            places[0].display()
        )
    };
    Ok(Work::Checkpoint { model: model.clone(), layer: 1, input: model.join("hidden_states.safetensors") })
}

/// Runs the layer and prints its report. Returns `false` if a check failed.
pub fn command(args: &Args) -> Result<bool> {
    let over = args.between.over()?;
    #[cfg(feature = "cuda")]
    over.set_heap(|started| {
        let request = args.peer_request(started)?;
        if request.device != DeviceKind::Cuda {
            return Ok(None);
        }
        let mut job = PreparedRun::open(request)?;
        job.read_plan()?;
        job.heap_variable()
    })?;
    match over {
        Over::Tcp(place, sockets) => {
            let pes = tcp::join(&place, sockets, peers::PHASES, as_flags)?;
            return Ok(peers::run(&pes, |started| args.peer_request(started), failure));
        }
        #[cfg(feature = "ofi")]
        Over::Ofi(place) => {
            let pes = tcp::join(&place, tcp::Ofi, peers::PHASES, as_flags)?;
            return Ok(peers::run(&pes, |started| args.peer_request(started), failure));
        }
        #[cfg(feature = "mpi")]
        Over::Mpi => {
            let pes = crate::job::mpi::join(peers::PHASES, as_flags)?;
            return Ok(pes.is_some_and(|pes| peers::run(&pes, |started| args.peer_request(started), failure)));
        }
        // Without the features these flags are errors earlier.
        #[cfg(not(feature = "mpi"))]
        Over::Mpi => {}
        #[cfg(not(feature = "ofi"))]
        Over::Ofi(_) => {}
        Over::Processes => {}
    }
    let request = args.request(None)?;
    check_pes(request.pes)?;
    let progress = Progress::of_slowest_pe("step");
    let mut run = PreparedRun::open(request)?;
    let report = supervisor::measure(&mut run, |status| progress.show(status));
    progress.clear();
    supervisor::print(&run, &report?)
}

/// Parses `--plan`.
fn plan_source(plan: &Path, memory_mb: &[f64], replicas: Option<Replication>) -> PlanSource {
    match plan == Path::new("auto") {
        true => PlanSource::Auto { memory_mb: memory_mb.to_vec(), replicas },
        false => PlanSource::File(plan.to_owned()),
    }
}
