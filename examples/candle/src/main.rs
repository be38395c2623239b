//! Two PEs, as threads, train a router and experts to reproduce a fixed function: `cargo run --release`, in this
//! folder.

use std::sync::{Barrier, Mutex};

use aristos::shmem::{ShmTransport, Shmem};
use aristos_candle::{Experts, spec};
use candle_core::{D, Device, Error, Result, Tensor, Var};

const PES: usize = 2;
const TOKENS: usize = 128; // per PE
const HIDDEN: usize = 32;
const INNER: usize = 64;
const EXPERTS: usize = 8;
const TOP_K: usize = 2;
const STEPS: usize = 200;
const RATE: f64 = 0.05;

/// Sums a tensor over PEs.
struct Sum {
    total: Mutex<Option<Tensor>>,
    all: Barrier,
}

impl Sum {
    fn of(&self, own: &Tensor) -> Result<Tensor> {
        let lock = || self.total.lock().expect("a PE panicked");
        {
            let mut total = lock();
            *total = Some(match total.take() {
                Some(others) => (others + own)?,
                None => own.clone(),
            });
        }
        self.all.wait();
        let sum = lock().clone().ok_or_else(|| Error::Msg("no PE has added its part".into()))?;
        if self.all.wait().is_leader() {
            *lock() = None;
        }
        self.all.wait();
        Ok(sum)
    }
}

fn main() -> Result<()> {
    let spec = spec(HIDDEN, INNER, EXPERTS, TOP_K, PES, TOKENS);
    let world = aristos::shmem::threads(PES, spec.heap_bytes().map_err(Error::wrap)?).map_err(Error::wrap)?;
    let sum = Sum { total: Mutex::new(None), all: Barrier::new(PES) };
    let router = Tensor::randn(0f32, 0.2, (HIDDEN, EXPERTS), &Device::Cpu)?;
    let losses = std::thread::scope(|scope| {
        let start = |pe: Shmem<ShmTransport>| {
            let (spec, sum, router) = (spec.clone(), &sum, &router);
            scope.spawn(move || train(Experts::new(spec, pe)?, sum, router))
        };
        let pes: Vec<_> = world.into_iter().map(start).collect();
        pes.into_iter().map(|pe| pe.join().expect("a PE panicked")).collect::<Result<Vec<_>>>()
    })?;
    let loss = |step: usize| losses.iter().map(|pe| pe[step]).sum::<f32>() / PES as f32;
    (0..STEPS).step_by(20).for_each(|step| println!("step {step:3}  loss {:.5}", loss(step)));
    let (first, last) = (loss(0), loss(STEPS - 1));
    if last < 0.5 * first { Ok(()) } else { Err(Error::Msg(format!("the loss went from {first} to {last}"))) }
}

fn train(experts: Experts, sum: &Sum, router: &Tensor) -> Result<Vec<f32>> {
    let cpu = &Device::Cpu;
    let router = Var::from_tensor(router)?;
    let parameters = Var::randn(0f32, 0.15, (EXPERTS / PES, 3, INNER * HIDDEN), cpu)?;
    let x = Tensor::randn(0f32, 1f32, (TOKENS, HIDDEN), cpu)?;
    let wanted = x.sin()?;
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        let scores = softmax(&x.matmul(&router)?)?;
        let chosen = scores.arg_sort_last_dim(false)?.narrow(D::Minus1, 0, TOP_K)?.contiguous()?;
        let weights = scores.gather(&chosen, D::Minus1)?;
        let ids = chosen.flatten_all()?.to_vec1::<u32>()?.into_iter().map(|id| id as i32).collect();
        let loss = (experts.forward(&x, ids, &weights, &parameters)? - &wanted)?.sqr()?.sum(D::Minus1)?.mean_all()?;
        losses.push(loss.to_scalar::<f32>()? / HIDDEN as f32);
        let gradients = loss.backward()?;
        let gradient =
            |var: &Var| gradients.get(var).cloned().ok_or_else(|| Error::Msg("a gradient is missing".into()));
        // Gradients of experts are already sums over all PEs' tokens; the loss is a mean over PEs.
        let rate = RATE / PES as f64;
        parameters.set(&(parameters.as_tensor() - (gradient(&parameters)? * rate)?)?)?;
        router.set(&(router.as_tensor() - (sum.of(&gradient(&router)?)? * rate)?)?)?;
    }
    Ok(losses)
}

fn softmax(logits: &Tensor) -> Result<Tensor> {
    let e = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?)?.exp()?;
    e.broadcast_div(&e.sum_keepdim(D::Minus1)?)
}
