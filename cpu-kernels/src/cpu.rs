//! The CPU's instruction sets, and the limit that `ARISTOS_CPU` sets.

use std::env;
use std::sync::OnceLock;

/// Environment variable that limits the instruction sets in use.
const LIMIT: &str = "ARISTOS_CPU";

/// Instruction sets with kernels of their own. Each one includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum InstructionSet {
    /// The architecture's baseline.
    Scalar,
    /// AVX2 with FMA (x86-64-v3).
    Avx2,
    /// AVX-512 (x86-64-v4).
    Avx512,
    /// AVX-512 with `VDPBF16PS`.
    Avx512Bf16,
    /// AMX tiles with `TDPBF16PS`.
    Amx,
}

impl InstructionSet {
    pub(super) const ALL: [InstructionSet; 5] = [Self::Scalar, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::Amx];

    /// The name in `ARISTOS_CPU` and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512bf16",
            Self::Amx => "amx",
        }
    }

    /// The most capable instruction set that this CPU has and `ARISTOS_CPU` allows. faer, which computes f32 products, detects the CPU by itself.
    pub fn in_use() -> InstructionSet {
        static IN_USE: OnceLock<InstructionSet> = OnceLock::new();
        *IN_USE.get_or_init(|| {
            let limit = Self::limit().unwrap_or(Self::Amx);
            Self::ALL.into_iter().take_while(|set| *set <= limit && set.is_supported()).last().unwrap_or(Self::Scalar)
        })
    }

    /// The value of `ARISTOS_CPU`, by default without a limit.
    ///
    /// # Errors
    /// One line, if the value is no instruction set. [`in_use`](Self::in_use) ignores such a value, so programs check it when they start.
    pub fn limit() -> Result<InstructionSet, String> {
        let Some(value) = env::var_os(LIMIT) else { return Ok(Self::Amx) };
        let found = Self::ALL.into_iter().find(|set| value == set.name());
        found.ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("{LIMIT} is {value:?}, expected one of {names}")
        })
    }

    #[cfg(target_arch = "x86_64")]
    fn is_supported(self) -> bool {
        use pulp::Arch;
        let vectors = Arch::new();
        match self {
            Self::Scalar => true,
            Self::Avx2 => !matches!(vectors, Arch::Scalar),
            Self::Avx512 => matches!(vectors, Arch::V4(_)),
            Self::Avx512Bf16 => is_x86_feature_detected!("avx512bf16"),
            Self::Amx => amx_is_supported(),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn is_supported(self) -> bool {
        self == Self::Scalar
    }
}

/// Whether this process may use AMX. Requests Linux's permission, which holds for the whole process, including later threads and forks.
#[cfg(target_arch = "x86_64")]
fn amx_is_supported() -> bool {
    use std::arch::x86_64::{__cpuid_count, _xgetbv};
    /// AMX-BF16 and AMX-TILE in EDX of leaf 7.
    const AMX: u32 = 1 << 22 | 1 << 24;
    /// The tile configuration and data among the states that the kernel saves.
    const TILE_STATE: u64 = 3 << 17;
    if !is_x86_feature_detected!("xsave") || __cpuid_count(7, 0).edx & AMX != AMX {
        return false;
    }
    // SAFETY: the CPU has XSAVE, and the kernel has enabled it.
    let state = unsafe { _xgetbv(0) };
    state & TILE_STATE == TILE_STATE && permitted()
}

/// Requests permission to use tile data. Kernels before Linux 5.16, sandboxes and too small signal stacks refuse.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call takes no pointers. If it is refused, it has no effect.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn permitted() -> bool {
    false
}

/// Proof that kernels may use AVX-512 with `VDPBF16PS`; only [`detect`](Self::detect) creates one.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Avx512Bf16(());

#[cfg(target_arch = "x86_64")]
impl Avx512Bf16 {
    pub(super) fn detect() -> Option<Avx512Bf16> {
        (InstructionSet::in_use() >= InstructionSet::Avx512Bf16).then_some(Avx512Bf16(()))
    }
}

/// Proof that kernels may use AMX; only [`detect`](Self::detect) creates one.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Amx {
    /// AVX-512, which every CPU with AMX has.
    pub avx512: Avx512Bf16,
}

#[cfg(target_arch = "x86_64")]
impl Amx {
    pub(super) fn detect() -> Option<Amx> {
        let avx512 = Avx512Bf16::detect()?;
        (InstructionSet::in_use() >= InstructionSet::Amx).then_some(Amx { avx512 })
    }
}

/// The vectors for loops that [`pulp`] dispatches.
pub(super) fn vectors() -> pulp::Arch {
    #[cfg(target_arch = "x86_64")]
    if InstructionSet::in_use() < InstructionSet::Avx512 {
        let avx2 = (InstructionSet::in_use() == InstructionSet::Avx2).then(pulp::x86::V3::try_new).flatten();
        return avx2.map_or(pulp::Arch::Scalar, pulp::Arch::V3);
    }
    pulp::Arch::new()
}
