//! Two PEs, as threads, train a MoE layer to reproduce another one: `cargo run --release --example train_step`.

use aristos::moe::synthetic::{Synthetic, SyntheticSpec};
use aristos::moe::{Activation, Layer, LayerConfig, LayerSpec, MlpConfig, MoeError, MoeLayer, RouterConfig};
use aristos::shmem::{ShmTransport, Shmem};

const PES: usize = 2;
const TOKENS: usize = 64; // per PE

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let layer = LayerConfig::new(32, 8, RouterConfig::softmax(2), MlpConfig::gated(64, Activation::Silu));
    let weights = |seed| Synthetic::new(SyntheticSpec::new(layer.clone(), seed));
    let (teacher, student) = (weights(1)?, weights(2)?);
    let spec = LayerSpec::new(layer.clone(), PES, TOKENS);
    // Heap for both the teacher and the student.
    let world = aristos::shmem::threads(PES, 2 * spec.heap_bytes()?)?;
    let losses = std::thread::scope(|scope| {
        let threads: Vec<_> =
            world.iter().map(|pe| scope.spawn(|| train(pe, spec.clone(), &teacher, &student))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a PE panicked")).collect::<Result<Vec<_>, _>>()
    })?;
    let loss = |step: usize| losses.iter().map(|pe| pe[step]).sum::<f32>() / PES as f32;
    (0..losses[0].len()).step_by(20).for_each(|step| println!("step {step:3}  loss {:.5}", loss(step)));
    let (first, last) = (loss(0), loss(losses[0].len() - 1));
    if last < 0.5 * first { Ok(()) } else { Err(format!("the loss went from {first} to {last}").into()) }
}

fn train(
    pe: &Shmem<ShmTransport>,
    spec: LayerSpec,
    teacher: &Synthetic,
    student: &Synthetic,
) -> Result<Vec<f32>, MoeError> {
    let x = teacher.hidden_states(pe.my_pe() * TOKENS..(pe.my_pe() + 1) * TOKENS);
    let (mut wanted, mut y, mut dx) = (x.clone(), x.clone(), x.clone());
    Layer::<_, f32>::builder(spec.clone().training(false)).build(pe, teacher)?.forward(&x, &mut wanted)?;
    let mut layer = Layer::<_, f32>::builder(spec).build(pe, student)?;
    let held = layer.spec().held(pe.my_pe());
    let mut weights: Vec<_> =
        held.iter().map(|&id| vec![0.0; layer.spec().config.shape(id).iter().product()]).collect();
    held.iter().zip(&mut weights).try_for_each(|(&id, weight)| layer.weights(id, weight))?;
    let mut losses = Vec::new();
    for _ in 0..200 {
        let mut saved = layer.forward(&x, &mut y)?;
        let error: Vec<f32> = y.iter().zip(&wanted).map(|(y, wanted)| y - wanted).collect();
        losses.push(error.iter().map(|e| e * e).sum::<f32>() / error.len() as f32);
        layer.backward(&mut saved, &x, &error, &mut dx)?;
        layer.recycle(saved);
        let gradients = layer.gradients()?.clone();
        for (&id, weight) in held.iter().zip(&mut weights) {
            let gradient = gradients.get(id, &layer.spec().placement, pe.my_pe()).unwrap_or_default();
            weight.iter_mut().zip(gradient).for_each(|(w, g)| *w -= 0.01 * g);
            layer.set_weights(id, weight)?;
        }
    }
    Ok(losses)
}
