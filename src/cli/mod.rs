//! The command line: one thin file per subcommand.

mod bench;
mod bench_p2p;
mod bench_straggler;
mod bench_summary;
mod calibrate;
mod compare;
mod doctor;
mod files;
mod flags;
mod job;
mod pe;
mod plan;
mod probe;
mod progress;
mod ranks;
mod rebalance;
mod run;
mod shared;
mod sim;
mod sim_comms;
mod sim_linear;
mod sim_routing;
mod simulate;
mod simulate_balance;
mod strategy;
mod sweep;
mod values;
mod workload;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{CommandFactory, Parser, Subcommand};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;

use crate::job::JobError;
use crate::job::launch::{self, LaunchError, PE_COMMAND, Role};
use crate::moe::kernels::InstructionSet;
use crate::plan::InputError;
use crate::stdio::{OutputError, READER_GONE, one_line, print, say, with_causes};

/// A Mixture-of-Experts layer over one-sided communication.
#[derive(Parser)]
#[command(name = "aristos", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a layer, forward and backward, on N PEs of one or several hosts. Without flags: the bundled example.
    Run(Box<run::Args>),
    /// Run a benchmark.
    Bench(Box<bench::Args>),
    /// Check the requirements of each kind of run on this machine, and name the missing ones with their installation.
    Doctor(doctor::Args),
    /// Choose the expert-parallel groups and the placement of experts for a cluster and a workload.
    Plan(Box<plan::Args>),
    /// Compute the planner's workload from a model and a batch.
    Workload(workload::Args),
    /// Replicate hot experts and place all experts on devices with balanced loads.
    Rebalance(rebalance::Args),
    /// Measure links, compute rates and memory of N PEs, and write the cluster file for `plan`.
    Probe(probe::Args),
    /// Evaluate a model of a linear layer, an exchange, or routing.
    Sim(Box<sim::Args>),
    /// Simulate training of an MLP with all combinations of data, horizontal, pipeline and expert parallelism.
    Sweep(Box<sweep::Args>),
    /// Simulate steps of a layer on a cluster: times, waits, and the changes that would help.
    Simulate(Box<simulate::Args>),
    /// Fit the simulator's constants to measured steps of this machine.
    Calibrate(calibrate::Args),
    /// Compare simulated times with measured ones, phase by phase.
    Compare(compare::Args),
    /// A PE of a job, started by its supervisor.
    #[command(name = PE_COMMAND, hide = true)]
    Pe,
}

/// Parses the command line and runs the command: as a supervisor, as a PE of one, or as a process of a launcher. Among a launcher's
/// processes rank 0 alone prints, and all exit with its code.
///
/// Exit code: 0; 1 for an error, which is one line on standard error, or a failed check; 2 for a command line that
/// cannot be read, or a cluster that cannot hold the experts; 128 + n after signal n.
pub fn main() -> ExitCode {
    // With a handler a write beyond the file size limit returns an error. Without one SIGXFSZ kills the process.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    log_to_stderr();
    if let Err(line) = InstructionSet::limit() {
        return fail(&anyhow::Error::msg(line)).into();
    }

    let cli = Cli::try_parse();
    if let Ok(Cli { command: Command::Pe }) = &cli {
        return pe::main().unwrap_or_else(|error| fail(&error).into());
    }
    flags::learn(&Cli::command());
    // With MPI and TCP the processes join over the transport.
    let entered = match &cli {
        Ok(cli) if cli.command.has_own_world() => Ok(Role::Alone),
        _ => launch::enter(),
    };
    let code = match entered {
        Ok(Role::Alone | Role::Supervisor) => match cli {
            Ok(cli) => command_main(cli.command),
            Err(error) => refuse(&error),
        },
        Ok(Role::RankParent(parent)) => parent.serve().unwrap_or_else(|error| fail(&error.into())),
        Ok(Role::Silent) => {
            // Some launchers kill all processes when one ends: give rank 0 the time to print.
            std::thread::sleep(std::time::Duration::from_secs(1));
            1
        }
        Err(error) => fail(&error.into()),
    };
    launch::conclude(code);
    code.into()
}

/// Logs warnings and errors, or the levels in `RUST_LOG`, such as `debug` or `aristos::run=debug,warn`.
fn log_to_stderr() {
    let asked = std::env::var("RUST_LOG").ok().filter(|directives| !directives.trim().is_empty());
    let filter: Targets = asked
        .and_then(|directives| directives.parse().ok())
        .unwrap_or_else(|| Targets::new().with_default(tracing::Level::WARN));
    let layer =
        tracing_subscriber::fmt::layer().with_ansi(std::io::stderr().is_terminal()).with_writer(std::io::stderr);
    // A log line that standard error does not take is dropped.
    let layer = layer.log_internal_errors(false);
    tracing_subscriber::registry().with(layer.with_filter(filter)).init();
}

impl Command {
    /// Whether the PEs are separate processes that join over the transport.
    fn has_own_world(&self) -> bool {
        match self {
            Command::Run(args) => args.between.transport.has_own_world(),
            Command::Bench(args) => args.has_own_world(),
            Command::Probe(args) => args.between.transport.has_own_world(),
            _ => false,
        }
    }
}

/// Runs a command; returns its exit code.
fn command_main(command: Command) -> u8 {
    let passed = match command {
        Command::Run(args) => run::command(&args),
        Command::Bench(args) => bench::command(&args),
        Command::Calibrate(args) => calibrate::command(&args),
        Command::Compare(args) => compare::command(&args),
        Command::Doctor(args) => doctor::command(&args),
        Command::Probe(args) => probe::command(&args),
        Command::Rebalance(args) => rebalance::command(&args),
        Command::Sim(args) => sim::command(&args),
        Command::Simulate(args) => simulate::command(&args),
        Command::Sweep(args) => sweep::command(&args),
        Command::Workload(args) => workload::command(&args),
        Command::Plan(args) => return plan::main(&args).unwrap_or_else(|error| fail(&error)),
        Command::Pe => unreachable!("a PE has its own main"),
    };
    match passed {
        Ok(true) => 0,
        Ok(false) => 1,
        Err(error) => fail(&error),
    }
}

/// Prints the parser's error or help text; returns the exit code.
fn refuse(error: &clap::Error) -> u8 {
    if error.use_stderr() {
        let _ = error.print();
        return error.exit_code() as u8;
    }
    // clap prints to a terminal itself, in colour.
    let shown = match std::io::stdout().is_terminal() {
        true => error.print().map_err(anyhow::Error::from),
        false => print(&error.to_string()).map_err(anyhow::Error::from),
    };
    shown.map_or_else(|error| fail(&error), |()| error.exit_code() as u8)
}

/// Prints the error; returns the exit code.
fn fail(error: &anyhow::Error) -> u8 {
    if matches!(error.downcast_ref(), Some(OutputError::ReaderGone)) {
        return READER_GONE;
    }
    let line = with_causes(error.as_ref());
    // Errors about a file keep the file's own field names.
    let of_file = error.chain().any(|cause| cause.is::<InputError>());
    say(&format!("aristos: {}", one_line(&if of_file { line } else { flags::as_flags(&line) })));
    let of_job = error.downcast_ref::<JobError>().map(JobError::exit_code);
    of_job.or_else(|| error.downcast_ref::<LaunchError>().map(LaunchError::exit_code)).unwrap_or(1)
}
