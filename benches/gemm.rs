//! Single-thread GFLOP/s of the layer's GEMMs, and of the activations.
//!
//! `cargo bench --bench gemm -- [--csv] [--quick]` prints medians of CPU time, in percent of the peak of a register loop of vector multiply-adds,
//! measured on the same core just before. (AMX's peak is higher.) `tools/bench-products` compares them with oneDNN and MKL in PyTorch.

use std::hint::black_box;

use aristos::moe::kernels::{self, Element, Workspace};
use aristos::moe::{Activation, Glu};
use half::bf16;
use rustix::time::{ClockId, clock_gettime};

const INTERMEDIATE: usize = 4096;
/// `[out, inp]` of weights: gate, or up, and down of Qwen3-30B-A3B, DeepSeek-V3 and Mixtral, the last one with a quarter of its experts' width.
const WEIGHTS: [[usize; 2]; 6] = [[768, 2048], [2048, 768], [2048, 7168], [7168, 2048], [3584, 4096], [4096, 3584]];
/// Rows of an expert.
const ROWS: [usize; 5] = [16, 64, 128, 512, 2048];

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let csv = args.iter().any(|a| a == "--csv");
    let repetitions = if args.iter().any(|a| a == "--quick") { 3 } else { 11 };
    if csv {
        println!("dtype,product,m,n,k,gflops,percent_of_peak");
    } else {
        println!("instruction set: {}", kernels::InstructionSet::in_use().name());
        println!("{:5} {:4} {:>5} {:>5} {:>5} {:>9} {:>7}", "dtype", "", "M", "N", "K", "GFLOP/s", "of peak");
    }
    products::<f32>(csv, repetitions, peak_f32());
    products::<bf16>(csv, repetitions, peak_bf16().unwrap_or_else(peak_f32));
    if !csv {
        activations::<f32>(repetitions);
        activations::<bf16>(repetitions);
    }
}

/// CPU time of one call, s. Unlike wall time, it excludes other work on a busy machine.
fn time(f: impl FnOnce()) -> f64 {
    let now = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
    };
    let start = now();
    f();
    now() - start
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Median CPU time of one call, s.
fn median_time(repetitions: usize, mut f: impl FnMut()) -> f64 {
    f();
    median((0..repetitions).map(|_| time(&mut f)).collect())
}

fn products<E: Element>(csv: bool, repetitions: usize, peak: f64) {
    if !csv {
        println!("{:5} peak of a register loop {:25.1}", E::NAME, peak);
    }
    let mut ws = Workspace::default();
    for [out, inp] in WEIGHTS {
        let w: Vec<f32> = (0..out * inp).map(|i| (i % 13) as f32 * 0.1 - 0.6).collect();
        let weight = E::prepare(&w, out, inp);
        if !csv {
            let t = median_time(3, || drop(E::prepare(&w, out, inp)));
            println!("{:5} prepare [{out}, {inp}] {:.1} ms", E::NAME, t * 1e3);
        }
        for m in ROWS {
            let x: Vec<E> = (0..m * inp).map(|i| E::from_f32((i % 7) as f32 * 0.1 - 0.3)).collect();
            let y: Vec<E> = (0..m * out).map(|i| E::from_f32((i % 11) as f32 * 0.1 - 0.5)).collect();
            let mut c = vec![0.0; (m * out).max(m * inp).max(out * inp)];
            let report = |product: &str, [m, n, k]: [usize; 3], seconds: f64| {
                let gflops = 2e-9 * (m * n * k) as f64 / seconds;
                let percent = 100.0 * gflops / peak;
                if csv {
                    println!("{},{product},{m},{n},{k},{gflops:.2},{percent:.1}", E::NAME);
                } else {
                    println!("{:5} {product:4} {m:5} {n:5} {k:5} {gflops:9.1} {percent:6.1}%", E::NAME);
                }
            };
            let t = median_time(repetitions, || E::gemm_nt(&mut ws, m, &x, &weight, &mut c[..m * out], false));
            report("nt", [m, out, inp], t);
            let t = median_time(repetitions, || E::gemm_nn(&mut ws, m, &y, &weight, &mut c[..m * inp], false));
            report("nn", [m, inp, out], t);
            let c = &mut c[..out * inp];
            let t = median_time(repetitions, || E::gemm_tn(&mut ws, m, out, inp, &y, &x, c, false));
            report("tn", [out, inp, m], t);
            let t = median_time(repetitions, || E::gemm_tn(&mut ws, m, out, inp, &y, &x, c, true));
            report("tn+=", [out, inp, m], t);
        }
    }
}

/// Prints the cost per element of each activation, and its ratio to SwiGLU (the gated Silu) in the same round, which is
/// less sensitive to other load.
fn activations<E: Element>(repetitions: usize) {
    let (m, n) = (64, INTERMEDIATE);
    let wide: Vec<f32> = (0..m * n).map(|i| (i % 4001) as f32 * 0.002 - 4.0).collect();
    let x: Vec<E> = wide.iter().map(|&x| E::from_f32(x)).collect();
    let [mut a, mut b, mut c] = std::array::from_fn(|_| vec![E::default(); m * n]);
    let (w, mut dw) = (vec![0.5; m], vec![0.0; m]);
    use Activation::{Gelu, GeluTanh, QuickGelu, Relu, Relu2, Silu};
    // gpt-oss's activation, which should cost little more than SwiGLU.
    let clamped = Glu { plus_one: true, ..Glu::clamped(7.0) };
    let after = Glu { limit_after: true, ..Glu::clamped(7.0) };
    let mut acts = [Silu, Gelu, GeluTanh, Relu, Relu2].map(|act| (act, Glu::PRODUCT)).to_vec();
    acts.extend([(QuickGelu, clamped), (Silu, Glu::clamped(10.0)), (Silu, after)]);
    let mut rounds = Vec::new();
    for _ in 0..repetitions {
        rounds.push(
            acts.iter()
                .map(|&(act, glu)| {
                    [
                        time(|| kernels::forward_plain(act, &wide, &mut a, &mut b)),
                        time(|| kernels::forward_gated(act, glu, &wide, &wide, &mut a, &mut b, &mut c)),
                        time(|| kernels::backward_plain(act, m, n, &w, &wide, &x, &x, &mut a, &mut b, &mut dw)),
                        time(|| {
                            kernels::backward_gated(
                                act, glu, m, n, &w, &wide, &x, &x, &x, &mut a, &mut b, &mut c, &mut dw,
                            )
                        }),
                    ]
                })
                .collect::<Vec<_>>(),
        );
    }
    for (i, (act, glu)) in acts.into_iter().enumerate() {
        let [plain, gated, back_plain, back_gated] = [0, 1, 2, 3]
            .map(|pass| (m * n) as f64 * 1e-9 / median(rounds.iter().map(|round| round[i][pass]).collect()));
        let of_swiglu =
            |pass: usize, swiglu: usize| median(rounds.iter().map(|round| round[i][pass] / round[0][swiglu]).collect());
        let kind = match glu {
            Glu::PRODUCT => "",
            Glu { limit_after: true, .. } => " clamped after",
            _ => " clamped",
        };
        println!(
            "{:5} {act:?}{kind}: Gelements/s forward {plain:.2}, gated {gated:.2}, backward {back_plain:.2}, gated {back_gated:.2}; \
             cost over SwiGLU's: forward {:.2}, gated {:.2}, backward {:.2}, gated {:.2}",
            E::NAME,
            of_swiglu(0, 1),
            of_swiglu(1, 1),
            of_swiglu(2, 3),
            of_swiglu(3, 3)
        );
    }
}

const PEAK_STEPS: usize = 4_000_000;
/// Independent sums: enough to hide the latency, few enough for 16 registers.
const CHAINS: usize = 12;

/// GFLOP/s of independent f32 multiply-adds on registers.
fn peak_f32() -> f64 {
    struct Steps;
    impl pulp::WithSimd for Steps {
        type Output = usize;

        #[inline(always)]
        fn with_simd<S: pulp::Simd>(self, simd: S) -> usize {
            let x = black_box(simd.splat_f32s(1.0));
            let mut sums = [simd.splat_f32s(0.0); CHAINS];
            for _ in 0..PEAK_STEPS {
                for sum in &mut sums {
                    *sum = simd.mul_add_f32s(x, x, *sum);
                }
            }
            black_box(sums);
            size_of::<S::f32s>() / size_of::<f32>()
        }
    }
    let lanes = pulp::Arch::new().dispatch(Steps);
    let t = median_time(5, || {
        pulp::Arch::new().dispatch(Steps);
    });
    (PEAK_STEPS * CHAINS * lanes * 2) as f64 / t * 1e-9
}

/// GFLOP/s of independent bf16 pair multiply-adds on registers, if the CPU has them.
fn peak_bf16() -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    if kernels::InstructionSet::in_use() >= kernels::InstructionSet::Avx512Bf16 {
        // SAFETY: the CPU has the features.
        let t = median_time(5, || unsafe { bf16_steps() });
        return Some((PEAK_STEPS * CHAINS * 32 * 2) as f64 / t * 1e-9);
    }
    None
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
fn bf16_steps() {
    use std::arch::x86_64::*;
    let x = black_box(_mm512_cvtne2ps_pbh(_mm512_set1_ps(1.0), _mm512_set1_ps(1.0)));
    let mut sums = [_mm512_setzero_ps(); CHAINS];
    for _ in 0..PEAK_STEPS {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, x, x);
        }
    }
    black_box(sums);
}
