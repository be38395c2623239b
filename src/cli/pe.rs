//! `aristos pe`: a PE that a supervisor started. It receives its work as a request, not on its command line.

use std::process::ExitCode;

use anyhow::Result;

use crate::bench::{moe, p2p, straggler};
#[cfg(feature = "device")]
use crate::gpu::GpuError;
use crate::job::host::SymmetricRuntime;
use crate::job::launch::PeContext;
use crate::job::request::Request;
use crate::job::{JobError, PeFailure};
use crate::moe::MoeError;
use crate::out_of_memory::leave_to_supervisor;
use crate::probe::ProbeError;
use crate::run::{self, PreparedRun};
use crate::stdio::{one_line, with_causes};

/// Runs a PE; the supervisor prints its errors.
///
/// # Errors
/// No supervisor has started this process.
pub fn main() -> Result<ExitCode> {
    leave_to_supervisor();
    let mut context = PeContext::take()?;
    let request = Request::from_bytes(context.request());
    if let Err(error) = request.map_err(Into::into).and_then(|request| carry_out(request, &mut context)) {
        let failure = failure(&error);
        match failure.awaited {
            Some(peer) => context.fail_on(&one_line(&failure.line), peer),
            None => context.fail(&one_line(&failure.line)),
        }
    }
    Ok(match context.done() {
        Ok(()) => ExitCode::SUCCESS,
        // The supervisor has ended.
        Err(_) => ExitCode::FAILURE,
    })
}

/// Runs this PE's part, with or without a supervisor.
///
/// # Errors
/// One line.
pub fn carry_out(request: Request, host: &mut impl SymmetricRuntime) -> Result<()> {
    match request {
        Request::Run(request) => run::pe::run(&mut PreparedRun::open(*request)?, host),
        Request::BenchMoe(bench) => moe::run(&bench, host),
        Request::BenchP2p(bench) => p2p::pe::run(&bench, host),
        Request::BenchStraggler(bench) => straggler::pe::run(&bench, host),
        Request::Probe(request) => run::probe::run(&request, host),
    }
}

/// The report of a PE's error.
pub fn failure(error: &anyhow::Error) -> PeFailure {
    let awaited = error.downcast_ref::<MoeError>().and_then(MoeError::awaited_pe);
    let awaited = awaited.or_else(|| error.downcast_ref::<ProbeError>().and_then(ProbeError::awaited_pe));
    let awaited = awaited.or_else(|| error.downcast_ref::<JobError>().and_then(JobError::awaited_pe));
    #[cfg(feature = "device")]
    let awaited = awaited.or_else(|| error.downcast_ref::<GpuError>().and_then(GpuError::awaited_pe));
    PeFailure { line: with_causes(error.as_ref()), awaited }
}
