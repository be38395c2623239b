//! The command line: one thin file per subcommand.

mod bench;
mod bench_p2p;
mod bench_straggler;
mod bench_summary;
mod doctor;
mod plan;
mod probe;
mod run;

use std::ffi::OsString;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Parser, Subcommand};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;

use crate::cluster::ProbeError;
use crate::launch::{self, LaunchError, PeContext, Role, one_line};
use crate::moe::MoeError;

/// A Mixture-of-Experts layer over one-sided communication.
#[derive(Parser)]
#[command(name = "aristos", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a layer, forward and backward, on N PEs of this host; with nothing else given, the bundled example.
    Run(Box<run::Args>),
    /// Measure.
    Bench(Box<bench::Args>),
    /// Look at this machine, and say what is missing for which runs, and the cure.
    Doctor(doctor::Args),
    /// Choose the expert-parallel groups and the placement of experts for a cluster and a workload.
    Plan(Box<plan::Args>),
    /// Measure links, speeds and memories of N PEs, and write the cluster file that `plan` reads.
    Probe(probe::Args),
}

/// Parses the command line and runs it, as supervisor or, where the environment says so, as a PE, or as one of a launcher's
/// processes. Of these, rank 0 alone prints, and all end with its exit code.
///
/// Exit code: 0; 1 for an error, which is one line on standard error, or a failed check; 2 for a command line that
/// cannot be read, or a cluster that cannot hold the experts; 128 + n after signal n.
pub fn main() -> ExitCode {
    let context = match PeContext::from_env() {
        Ok(context) => context,
        Err(error) => return fail(&error.into()).into(),
    };
    // A file size limit is an error of the write then, and not the end of the process without a word.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    log_to_stderr();

    let cli = Cli::try_parse();
    if let Some(context) = context {
        return match cli {
            Ok(cli) => pe_main(&cli.command, context),
            Err(error) => error.exit(),
        };
    }
    // MPI makes its own world of the processes.
    let entered = match &cli {
        Ok(cli) if cli.command.over_mpi() => Ok(Role::Alone),
        _ => launch::enter(),
    };
    let code = match entered {
        Ok(Role::Alone | Role::Supervisor) => match cli {
            Ok(cli) => command_main(cli.command),
            Err(error) => {
                let _ = error.print();
                error.exit_code() as u8
            }
        },
        Ok(Role::Keeper(keeper)) => keeper.serve().unwrap_or_else(|error| fail(&error.into())),
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
    tracing_subscriber::registry().with(layer.with_filter(filter)).init();
}

impl Command {
    /// Whether its PEs are the processes that MPI makes a world of.
    fn over_mpi(&self) -> bool {
        match self {
            Command::Run(args) => args.over_mpi(),
            Command::Bench(args) => args.over_mpi(),
            Command::Probe(args) => args.over_mpi(),
            _ => false,
        }
    }
}

/// Runs a command, the PEs' part excepted; returns its exit code.
fn command_main(command: Command) -> u8 {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let passed = match command {
        Command::Run(run) => run::supervise(&run, args),
        Command::Bench(bench) => bench::supervise(&bench, args),
        Command::Doctor(doctor) => doctor::supervise(&doctor),
        Command::Probe(probe) => probe::supervise(&probe, args),
        Command::Plan(args) => return plan::main(&args).unwrap_or_else(|error| fail(&error)),
    };
    match passed {
        Ok(true) => 0,
        Ok(false) => 1,
        Err(error) => fail(&error),
    }
}

/// A PE's life; its errors reach the user through the supervisor.
fn pe_main(command: &Command, mut context: PeContext) -> ExitCode {
    let result = match command {
        Command::Run(args) => run::pe(args, &mut context),
        Command::Bench(args) => bench::pe(args, &mut context),
        Command::Doctor(args) => doctor::pe(args, &mut context),
        Command::Probe(args) => probe::pe(args, &mut context),
        Command::Plan(_) => Err(anyhow::anyhow!("`aristos plan` has no PEs")),
    };
    if let Err(error) = result {
        let awaited = error.downcast_ref::<MoeError>().and_then(MoeError::awaited_pe);
        match awaited.or_else(|| error.downcast_ref::<ProbeError>().and_then(ProbeError::awaited_pe)) {
            Some(peer) => context.fail_on(&one_line(&format!("{error:#}")), peer),
            None => context.fail(&one_line(&format!("{error:#}"))),
        }
    }
    match context.done() {
        Ok(()) => ExitCode::SUCCESS,
        // The supervisor is gone: nobody is left to be told.
        Err(_) => ExitCode::FAILURE,
    }
}

/// Says it; returns the exit code.
fn fail(error: &anyhow::Error) -> u8 {
    eprintln!("aristos: {}", one_line(&format!("{error:#}")));
    error.downcast_ref::<LaunchError>().map_or(1, LaunchError::exit_code)
}
