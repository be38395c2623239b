//! Values of flags.

use anyhow::{Result, bail, ensure};
use clap::ValueEnum;

use crate::job::launch::{LaunchError, MAX_PES};
use crate::job::request::{DeviceKind, NonFinitePolicy, OnFailure, RowsPer};
use crate::moe::{Activation, Balance, Dtype, Mode};
use crate::simulate::MAX_CORES;

/// The error for `--transport mpi` without the feature.
pub const NO_MPI: &str = "--transport mpi: this binary has no MPI transport; build with `cargo build --release --features \
    mpi` (needs an MPI with its compiler wrapper, and libclang)";

/// The error for `--transport ofi` without the feature.
pub const NO_OFI: &str = "--transport ofi: this binary has no libfabric transport; build with `cargo build --release --features \
    ofi` (needs libfabric's headers; Debian: libfabric-dev)";

/// The largest size of a flag, bytes.
const MAX_SIZE: usize = 1 << 30;

/// Checks a number of PEs.
pub fn check_pes(pes: usize) -> Result<usize> {
    ensure!((1..=MAX_PES).contains(&pes), LaunchError::Pes { pes });
    Ok(pes)
}

/// Checks `--memory-mb`.
pub fn check_memory_mb(memory_mb: &[f64], pes: usize) -> Result<()> {
    let numbers = memory_mb.len();
    ensure!(
        numbers <= 1 || numbers == pes,
        "--memory-mb has {numbers} numbers, expected one, or {pes}, one for each PE"
    );
    for mb in memory_mb {
        ensure!((0.0..=1e15).contains(mb), "--memory-mb is {mb}, expected a number of MB from 0 to 1e15");
    }
    Ok(())
}

/// Parses a number of bytes: 16, 4KiB, 1MiB. KB and MB are powers of ten.
pub fn size(flag: &str, text: &str) -> Result<usize> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit: Option<usize> = match unit.trim() {
        "" | "B" => Some(1),
        "KB" | "kB" => Some(1000),
        "MB" => Some(1_000_000),
        "KiB" => Some(1 << 10),
        "MiB" => Some(1 << 20),
        "GiB" => Some(1 << 30),
        _ => None,
    };
    let bytes = number.parse::<usize>().ok().zip(unit).and_then(|(number, unit)| number.checked_mul(unit));
    match bytes {
        Some(bytes) if (1..=MAX_SIZE).contains(&bytes) => Ok(bytes),
        _ => bail!("--{flag} is {text}, expected 1 byte to 1GiB, as 16, 4KiB or 1MiB"),
    }
}

/// `--transport`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TransportArg {
    /// Shared memory: this command starts the PEs on this host
    Shm,
    /// TCP, between hosts too: the PEs are started by srun, torchrun or mpirun, or one by one
    Tcp,
    /// Shared memory within a host, TCP between hosts; PEs as with tcp
    Hybrid,
    /// libfabric, for Slingshot and other networks; PEs as with tcp (feature `ofi`)
    Ofi,
    /// MPI-3 one-sided windows: the PEs are started by mpirun (feature `mpi`)
    Mpi,
}

impl TransportArg {
    /// The value of the flag.
    pub fn name(self) -> &'static str {
        match self {
            TransportArg::Shm => "shm",
            TransportArg::Tcp => "tcp",
            TransportArg::Hybrid => "hybrid",
            TransportArg::Ofi => "ofi",
            TransportArg::Mpi => "mpi",
        }
    }

    /// Whether the PEs are separate processes that join over the transport, without a supervisor.
    pub fn has_own_world(self) -> bool {
        self != TransportArg::Shm
    }
}

/// `--dtype`.
#[derive(Clone, Copy, ValueEnum)]
pub enum DtypeArg {
    /// 32-bit floats
    F32,
    /// bfloat16
    Bf16,
    /// IEEE half precision, on a device only
    F16,
}

impl From<DtypeArg> for Dtype {
    fn from(dtype: DtypeArg) -> Self {
        match dtype {
            DtypeArg::F32 => Dtype::F32,
            DtypeArg::Bf16 => Dtype::Bf16,
            DtypeArg::F16 => Dtype::F16,
        }
    }
}

/// `--rows-per`.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum RowsPerArg {
    /// To each PE
    Pe,
    /// Once to each host
    Host,
}

impl From<RowsPerArg> for RowsPer {
    fn from(rows_per: RowsPerArg) -> Self {
        match rows_per {
            RowsPerArg::Pe => RowsPer::Pe,
            RowsPerArg::Host => RowsPer::Host,
        }
    }
}

/// `--wire`.
#[derive(Clone, Copy, ValueEnum)]
pub enum WireArg {
    /// bfloat16
    Bf16,
}

/// `--on-failure`.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum OnFailureArg {
    /// The job ends
    Stop,
    /// The PE's EP group ends; the others continue with the gradients of their tokens
    Continue,
}

impl From<OnFailureArg> for OnFailure {
    fn from(on_failure: OnFailureArg) -> Self {
        match on_failure {
            OnFailureArg::Stop => OnFailure::Stop,
            OnFailureArg::Continue => OnFailure::Continue,
        }
    }
}

/// `--non-finite`.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum NonFiniteArg {
    /// The run writes its files and ends with exit code 1; with --sgd on CPUs after the step
    Stop,
    /// The run continues and logs a warning
    Warn,
}

impl From<NonFiniteArg> for NonFinitePolicy {
    fn from(non_finite: NonFiniteArg) -> Self {
        match non_finite {
            NonFiniteArg::Stop => NonFinitePolicy::Stop,
            NonFiniteArg::Warn => NonFinitePolicy::Warn,
        }
    }
}

/// `--device`.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum DeviceArg {
    /// The CPU
    Cpu,
    /// A CUDA device for each PE
    Cuda,
    /// The CUDA kernels on the CPU, for tests (feature `emulate`)
    #[cfg(feature = "emulate")]
    Emulated,
}

impl DeviceArg {
    /// The device and its element type.
    ///
    /// # Errors
    /// A device that this build lacks, or an element type that the device lacks.
    pub fn device(self, dtype: Option<DtypeArg>) -> Result<(DeviceKind, Dtype)> {
        let device = match self {
            DeviceArg::Cpu => DeviceKind::Cpu,
            DeviceArg::Cuda => DeviceKind::Cuda,
            #[cfg(feature = "emulate")]
            DeviceArg::Emulated => DeviceKind::Emulated,
        };
        ensure!(
            device != DeviceKind::Cuda || cfg!(feature = "cuda"),
            "--device cuda: this build has no CUDA; build it with `cargo build --release --features cuda`"
        );
        let default = if device == DeviceKind::Cpu { Dtype::F32 } else { Dtype::Bf16 };
        let dtype = dtype.map_or(default, Dtype::from);
        ensure!(device == DeviceKind::Cpu || dtype != Dtype::F32, "--dtype f32 on a device, expected bf16 or f16");
        ensure!(device != DeviceKind::Cpu || dtype != Dtype::F16, "--dtype f16 on the CPU, expected f32 or bf16");
        Ok((device, dtype))
    }
}

/// `--gemm`.
#[cfg(feature = "device")]
#[derive(Clone, Copy, ValueEnum)]
pub enum GemmArg {
    /// mma and cp.async: every device from compute capability 8.0 on
    Ampere,
    /// wgmma and the tensor memory accelerator: compute capability 9.0
    Hopper,
}

#[cfg(feature = "device")]
impl From<GemmArg> for crate::moe::device::GemmPath {
    fn from(gemm: GemmArg) -> Self {
        match gemm {
            GemmArg::Ampere => crate::moe::device::GemmPath::Ampere,
            GemmArg::Hopper => crate::moe::device::GemmPath::Hopper,
        }
    }
}

/// `--symmetric`.
#[cfg(feature = "device")]
#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum SymmetricArg {
    /// NVSHMEM: PEs of one host or of many
    Nvshmem,
    /// NCCL: PEs of one host, with peer access between their devices
    Nccl,
}

/// `--mode`.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum ModeArg {
    /// Rows, expert tiles and results are processed as they arrive
    Pipelined,
    /// Bulk-synchronous all-to-all, the baseline
    Bulk,
}

/// `--balance` of `aristos run`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BalanceArg {
    /// By the plan's shares
    Shares,
    /// By the counts of each pass: the most loaded PE gets as few rows as possible
    Split,
}

impl From<BalanceArg> for Balance {
    fn from(balance: BalanceArg) -> Self {
        match balance {
            BalanceArg::Shares => Balance::Shares,
            BalanceArg::Split => Balance::Split,
        }
    }
}

impl From<ModeArg> for Mode {
    fn from(mode: ModeArg) -> Self {
        match mode {
            ModeArg::Pipelined => Mode::Pipelined,
            ModeArg::Bulk => Mode::Bulk,
        }
    }
}

/// `--activation`.
#[derive(Clone, Copy, ValueEnum)]
pub enum ActivationArg {
    /// x sigmoid(x)
    Silu,
    /// Exact, through erf
    Gelu,
    /// Through tanh
    GeluTanh,
    /// max(x, 0)
    Relu,
}

impl From<ActivationArg> for Activation {
    fn from(activation: ActivationArg) -> Self {
        match activation {
            ActivationArg::Silu => Activation::Silu,
            ActivationArg::Gelu => Activation::Gelu,
            ActivationArg::GeluTanh => Activation::GeluTanh,
            ActivationArg::Relu => Activation::Relu,
        }
    }
}

/// `--mlp`.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum MlpArg {
    /// down(act(gate(x)) * up(x))
    Gated,
    /// down(act(up(x)))
    Plain,
}

/// Checks `--cores`.
pub fn check_cores(cores: Option<usize>) -> Result<()> {
    let wrong = cores.filter(|cores| !(1..=MAX_CORES).contains(cores));
    wrong.map_or(Ok(()), |cores| bail!("--cores is {cores}, expected 1 to {MAX_CORES}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_with_units_are_parsed_and_invalid_ones_are_errors() {
        for (text, bytes) in
            [("16", 16), ("16B", 16), ("4KiB", 4096), ("4 KiB", 4096), ("1MiB", 1 << 20), ("64KB", 64000)]
        {
            assert_eq!(size("min", text).unwrap(), bytes, "{text}");
        }
        for text in ["", "x", "-1", "1.5KiB", "0", "4Kib", "2GiB", "99999999999999999999", "18446744073709551615KiB"] {
            let error = size("min", text).unwrap_err().to_string();
            assert_eq!(error, format!("--min is {text}, expected 1 byte to 1GiB, as 16, 4KiB or 1MiB"));
        }
    }
}
