//! Single-thread GFLOP/s of the layer's matrix products, and of the activations around them.
//!
//! `cargo bench --bench gemm [-- --csv] [-- --quick]`: medians over repetitions, in percent of the best that a loop of
//! multiply-adds on registers reaches on the same core just before.

use std::time::Instant;

use aristos::moe::Activation;
use aristos::moe::kernels::{self, Element, Workspace};
use half::bf16;

const HIDDEN: usize = 1024;
const INTERMEDIATE: usize = 4096;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let csv = args.iter().any(|a| a == "--csv");
    let repetitions = if args.iter().any(|a| a == "--quick") { 3 } else { 11 };
    if csv {
        println!("dtype,product,m,n,k,gflops,percent_of_peak");
    } else {
        println!("AVX512-BF16 kernel: {}", kernels::uses_avx512_bf16());
        println!("{:5} {:4} {:>5} {:>5} {:>5} {:>9} {:>7}", "dtype", "", "M", "N", "K", "GFLOP/s", "of peak");
    }
    if std::env::var("ACT").is_err() {
        products::<f32>(csv, repetitions, peak_f32());
        products::<bf16>(csv, repetitions, peak_bf16().unwrap_or_else(peak_f32));
    }
    activations::<f32>(csv, repetitions);
    activations::<bf16>(csv, repetitions);
}

/// The median time of one call, s.
fn median(repetitions: usize, mut f: impl FnMut()) -> f64 {
    f();
    let mut times: Vec<f64> = (0..repetitions)
        .map(|_| {
            let start = Instant::now();
            f();
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[repetitions / 2]
}

fn products<E: Element>(csv: bool, repetitions: usize, peak: f64) {
    if !csv {
        println!("{:5} peak of a register loop {:25.1}", E::NAME, peak);
    }
    let mut ws = Workspace::default();
    for (out, inp) in [(INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)] {
        let w: Vec<f32> = (0..out * inp).map(|i| (i % 13) as f32 * 0.1 - 0.6).collect();
        let weight = E::prepare(&w, out, inp);
        for m in [32, 128, 512, 2048] {
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
            let t = median(repetitions, || E::gemm_nt(&mut ws, m, &x, &weight, &mut c[..m * out], false));
            report("nt", [m, out, inp], t);
            let t = median(repetitions, || E::gemm_nn(&mut ws, m, &y, &weight, &mut c[..m * inp], false));
            report("nn", [m, inp, out], t);
            let c = &mut c[..out * inp];
            let t = median(repetitions, || E::gemm_tn(&mut ws, m, out, inp, &y, &x, c, false));
            report("tn", [out, inp, m], t);
            let t = median(repetitions, || E::gemm_tn(&mut ws, m, out, inp, &y, &x, c, true));
            report("tn+=", [out, inp, m], t);
        }
    }
}

fn activations<E: Element>(csv: bool, repetitions: usize) {
    let (m, n) = (64, INTERMEDIATE);
    let wide: Vec<f32> = (0..m * n).map(|i| (i % 4001) as f32 * 0.002 - 4.0).collect();
    let x: Vec<E> = wide.iter().map(|&x| E::from_f32(x)).collect();
    let [mut a, mut b, mut c] = std::array::from_fn(|_| vec![E::default(); m * n]);
    let (w, mut dw) = (vec![0.5; m], vec![0.0; m]);
    let t = median(repetitions, || {
        for r in 0..m {
            dw[r] = kernels::dot(&wide[r * n..(r + 1) * n], &wide[r * n..(r + 1) * n]);
        }
    });
    println!("dot {:.2}", (m * n) as f64 / t * 1e-9);
    for act in [Activation::Silu, Activation::Gelu, Activation::GeluTanh, Activation::Relu] {
        let plain = median(repetitions, || kernels::forward_plain(act, &wide, &mut a, &mut b));
        let gated = median(repetitions, || kernels::forward_gated(act, &wide, &wide, &mut a, &mut b, &mut c));
        let back_plain =
            median(repetitions, || kernels::backward_plain(act, m, n, &w, &wide, &x, &x, &mut a, &mut b, &mut dw));
        let back_gated = median(repetitions, || {
            kernels::backward_gated(act, m, n, &w, &wide, &x, &x, &x, &mut a, &mut b, &mut c, &mut dw);
        });
        if !csv {
            let rate = |t: f64| (m * n) as f64 / t * 1e-9;
            println!(
                "{:5} {act:?}: Gelements/s forward {:.2}, gated {:.2}, backward {:.2}, gated {:.2}",
                E::NAME,
                rate(plain),
                rate(gated),
                rate(back_plain),
                rate(back_gated)
            );
        }
    }
}

const PEAK_STEPS: usize = 2_000_000;

/// GFLOP/s of independent f32 multiply-adds on registers.
fn peak_f32() -> f64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the CPU has the feature.
        let t = median(5, || unsafe { peak::f32_steps(PEAK_STEPS) });
        return (PEAK_STEPS * peak::CHAINS * 16 * 2) as f64 / t * 1e-9;
    }
    f64::NAN
}

/// GFLOP/s of independent bf16 pair multiply-adds on registers, if the CPU has them.
fn peak_bf16() -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    if kernels::uses_avx512_bf16() {
        // SAFETY: the CPU has the feature.
        let t = median(5, || unsafe { peak::bf16_steps(PEAK_STEPS) });
        return Some((PEAK_STEPS * peak::CHAINS * 32 * 2) as f64 / t * 1e-9);
    }
    None
}

#[cfg(target_arch = "x86_64")]
mod peak {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    pub const CHAINS: usize = 24;

    #[target_feature(enable = "avx512f")]
    pub fn f32_steps(steps: usize) {
        let x = black_box(_mm512_set1_ps(1.0));
        let mut sums = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(x, x, *sum);
            }
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub fn bf16_steps(steps: usize) {
        let x = black_box(_mm512_cvtneps_pbh_zero());
        let mut sums = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, x, x);
            }
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    fn _mm512_cvtneps_pbh_zero() -> __m512bh {
        _mm512_cvtne2ps_pbh(_mm512_set1_ps(1.0), _mm512_set1_ps(1.0))
    }
}
