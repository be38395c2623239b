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
mod sim;
mod sim_comms;
mod sim_linear;
mod sim_routing;
mod simulate;
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
    /// Run a layer, forward and backward, on N PEs, of this host or of several; with nothing else given, the bundled example.
    Run(Box<run::Args>),
    /// Measure.
    Bench(Box<bench::Args>),
    /// Look at this machine, and say what is missing for which runs, and the cure.
    Doctor(doctor::Args),
    /// Choose the expert-parallel groups and the placement of experts for a cluster and a workload.
    Plan(Box<plan::Args>),
    /// Say what the planner is to plan for, of a model and a batch.
    Workload(workload::Args),
    /// Replicate hot experts, and place all on devices, so that none has much more to do than the mean.
    Rebalance(rebalance::Args),
    /// Measure links, speeds and memories of N PEs, and write the cluster file that `plan` reads.
    Probe(probe::Args),
    /// Compute a model: of a linear layer, of an exchange, of routing.
    Sim(Box<sim::Args>),
    /// Simulate training an MLP with all ways of data, horizontal, pipeline and expert parallelism.
    Sweep(Box<sweep::Args>),
    /// Simulate steps of a layer on a cluster: their time, what waits for what, and what would help.
    Simulate(Box<simulate::Args>),
    /// Fit what work takes on this machine to measured steps, for simulations of it.
    Calibrate(calibrate::Args),
    /// Put what was simulated beside what was measured, phase by phase.
    Compare(compare::Args),
    /// A PE of a job, which its supervisor starts.
    #[command(name = PE_COMMAND, hide = true)]
    Pe,
}

/// Parses the command line and runs it, as supervisor, as a PE that one has started, or as one of a launcher's
/// processes. Of these, rank 0 alone prints, and all end with its exit code.
///
/// Exit code: 0; 1 for an error, which is one line on standard error, or a failed check; 2 for a command line that
/// cannot be read, or a cluster that cannot hold the experts; 128 + n after signal n.
pub fn main() -> ExitCode {
    // A file size limit is an error of the write then, and not the end of the process without a word.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    log_to_stderr();

    let cli = Cli::try_parse();
    if let Ok(Cli { command: Command::Pe }) = &cli {
        return pe::main().unwrap_or_else(|error| fail(&error).into());
    }
    flags::learn(&Cli::command());
    // MPI and TCP make their own world of the processes.
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
            // Some launchers kill all processes when one ends: rank 0 must have spoken.
            std::thread::sleep(std::time::Duration::from_secs(1));
            1
        }
        Err(error) => fail(&error.into()),
    };
    launch::conclude(code);
    code.into()
}

/// Warnings and errors, or what `RUST_LOG` asks for, as `debug` or `aristos::run=debug,warn`.
fn log_to_stderr() {
    let asked = std::env::var("RUST_LOG").ok().filter(|directives| !directives.trim().is_empty());
    let filter: Targets = asked
        .and_then(|directives| directives.parse().ok())
        .unwrap_or_else(|| Targets::new().with_default(tracing::Level::WARN));
    let layer =
        tracing_subscriber::fmt::layer().with_ansi(std::io::stderr().is_terminal()).with_writer(std::io::stderr);
    // Where standard error is full or closed the log is lost, and nothing else.
    let layer = layer.log_internal_errors(false);
    tracing_subscriber::registry().with(layer.with_filter(filter)).init();
}

impl Command {
    /// Whether its PEs are processes that the transport makes a world of.
    fn has_own_world(&self) -> bool {
        match self {
            Command::Run(args) => args.transport.has_own_world(),
            Command::Bench(args) => args.has_own_world(),
            Command::Probe(args) => args.transport.has_own_world(),
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

/// Shows what the parser of command lines says: what is wrong, or the help that was asked for; returns the exit code.
fn refuse(error: &clap::Error) -> u8 {
    if error.use_stderr() {
        let _ = error.print();
        return error.exit_code() as u8;
    }
    // The parser colours its text for a terminal, and writes it itself.
    let shown = match std::io::stdout().is_terminal() {
        true => error.print().map_err(anyhow::Error::from),
        false => print(&error.to_string()).map_err(anyhow::Error::from),
    };
    shown.map_or_else(|error| fail(&error), |()| error.exit_code() as u8)
}

/// Says it; returns the exit code.
fn fail(error: &anyhow::Error) -> u8 {
    if matches!(error.downcast_ref(), Some(OutputError::ReaderGone)) {
        return READER_GONE;
    }
    let line = with_causes(error.as_ref());
    // What a file has wrong is said in the file's words.
    let of_file = error.chain().any(|cause| cause.is::<InputError>());
    say(&format!("aristos: {}", one_line(&if of_file { line } else { flags::as_flags(&line) })));
    let of_job = error.downcast_ref::<JobError>().map(JobError::exit_code);
    of_job.or_else(|| error.downcast_ref::<LaunchError>().map(LaunchError::exit_code)).unwrap_or(1)
}
