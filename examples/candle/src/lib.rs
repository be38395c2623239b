//! The routed experts of a layer as a candle operator, differentiable in tokens, routing weights and expert parameters.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use aristos::moe::cpu::experts::Mlp;
use aristos::moe::cpu::{BorrowedGradients, Saved};
use aristos::moe::kernels::Borrowed;
use aristos::moe::{
    self, Activation, LayerConfig, LayerSpec, MatrixGradientMut, MlpConfig, MlpGradientsMut, MoeLayer, Proj, RouterConfig, proj_index,
};
use aristos::shmem::{ShmTransport, Shmem};
use candle_core::{CpuStorage, CustomOp3, Error, Layout, Result, Shape, Tensor, bail};

type Layer = moe::Layer<Shmem<ShmTransport>, f32>;

/// This PE's part of a layer of experts `down(silu(gate(x)) * up(x))` that are spread over PEs.
#[derive(Clone)]
pub struct Experts(Arc<Mutex<Layer>>);

/// The spec of a layer of `experts` experts, `top_k` per token, over `pes` PEs with at most `max_tokens` tokens each.
pub fn spec(
    hidden: usize,
    intermediate: usize,
    experts: usize,
    top_k: usize,
    pes: usize,
    max_tokens: usize,
) -> LayerSpec {
    let expert = MlpConfig::gated(intermediate, Activation::Silu);
    LayerSpec::new(LayerConfig::new(hidden, experts, RouterConfig::external(top_k), expert), pes, max_tokens)
}

impl Experts {
    /// Makes the layer. Collective over the PEs, as is every forward and backward pass.
    ///
    /// # Errors
    ///
    /// Returns an error if a peer does not join or the heap is too small.
    pub fn new(spec: LayerSpec, pe: Shmem<ShmTransport>) -> Result<Experts> {
        Ok(Experts(Arc::new(Mutex::new(Layer::builder(spec).build_without_weights(pe).map_err(Error::wrap)?))))
    }

    /// The weighted sum of each token's experts, `[tokens, hidden]`. `x` is `[tokens, hidden]`, expert numbers `ids`
    /// and `weights` are `[tokens, top_k]`, and `parameters` are this PE's experts, `[local experts, 3, intermediate *
    /// hidden]` (gate and up `[intermediate, hidden]`, down `[hidden, intermediate]`), all f32. The gradient of
    /// `parameters` is a sum over all PEs' tokens.
    ///
    /// # Errors
    ///
    /// Returns an error if shapes or types do not match, if an id is out of range, or if a peer exceeds the wait limit.
    pub fn forward(&self, x: &Tensor, ids: Vec<i32>, weights: &Tensor, parameters: &Tensor) -> Result<Tensor> {
        let pass = Pass { layer: self.0.clone(), ids, saved: Mutex::new(None) };
        x.contiguous()?.apply_op3(&weights.contiguous()?, &parameters.contiguous()?, pass)
    }
}

/// One forward pass, and its state for the backward.
struct Pass {
    layer: Arc<Mutex<Layer>>,
    ids: Vec<i32>,
    saved: Mutex<Option<Saved<f32>>>,
}

/// An expert's matrix, as a range of all parameters of a PE.
struct Matrix(Arc<[f32]>, Range<usize>);

impl AsRef<[f32]> for Matrix {
    fn as_ref(&self) -> &[f32] {
        &self.0[self.1.clone()]
    }
}

const PROJECTIONS: [Proj; 3] = [Proj::Gate, Proj::Up, Proj::Down];

/// This PE's experts, from their concatenated parameters.
fn experts(layer: &Layer, parameters: &[f32]) -> Result<Vec<Mlp<f32>>> {
    let (hidden, config) = (layer.spec().config.hidden, layer.spec().config.expert);
    let (local, size) = (layer.spec().placement.experts(layer.my_pe()).len(), config.intermediate * hidden);
    if parameters.len() != local * 3 * size {
        bail!("parameters has {} elements, expected {local} experts of 3 matrices of {size}", parameters.len());
    }
    let all: Arc<[f32]> = parameters.into();
    (0..local)
        .map(|expert| {
            let matrices = PROJECTIONS.map(|proj| {
                let start = (3 * expert + proj_index(proj)) * size;
                Some(Box::new(Matrix(all.clone(), start..start + size)) as Borrowed<f32>)
            });
            Mlp::borrowed(config, hidden, matrices, [const { Vec::new() }; 3]).map_err(Error::wrap)
        })
        .collect()
}

/// The elements of a contiguous f32 tensor on the CPU.
fn elements<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&storage.as_slice::<f32>()?[start..end]),
        None => bail!("expected a contiguous tensor"),
    }
}

fn values(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

impl CustomOp3 for Pass {
    fn name(&self) -> &'static str {
        "aristos-experts"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weights: &CpuStorage,
        weights_layout: &Layout,
        parameters: &CpuStorage,
        parameters_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let mut layer = self.layer.lock().unwrap_or_else(PoisonError::into_inner);
        let (x, weights) = (elements(x, x_layout)?, elements(weights, weights_layout)?);
        let experts = experts(&layer, elements(parameters, parameters_layout)?)?;
        let mut output = vec![0.0; x.len()];
        let saved = layer.experts_borrowed(&experts, x, &self.ids, weights, &mut output).map_err(Error::wrap)?;
        *self.saved.lock().unwrap_or_else(PoisonError::into_inner) = Some(saved);
        Ok((CpuStorage::F32(output), x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weights: &Tensor,
        parameters: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let mut layer = self.layer.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mut saved) = self.saved.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            bail!("the forward pass has had its backward");
        };
        let experts = experts(&layer, &values(parameters)?)?;
        let mut grad_x = vec![0.0; x.elem_count()];
        let mut grad_weights = vec![0.0; weights.elem_count()];
        let mut grad_parameters = vec![0.0; parameters.elem_count()];
        let size = parameters.elem_count() / (3 * experts.len());
        let mut take = |local: usize, compute: &mut dyn FnMut(MlpGradientsMut<'_>)| {
            let (gate, rest) = grad_parameters[3 * local * size..].split_at_mut(size);
            let (up, rest) = rest.split_at_mut(size);
            let matrix = [gate, up, &mut rest[..size]].map(MatrixGradientMut::F32);
            compute(MlpGradientsMut { matrix, bias: [&mut [], &mut [], &mut []] });
        };
        let gradients = BorrowedGradients { input: &mut grad_x, weights: &mut grad_weights, experts: &mut take };
        layer
            .experts_borrowed_backward(&experts, &mut saved, &values(x)?, &values(grad)?, gradients)
            .map_err(Error::wrap)?;
        layer.recycle(saved);
        let tensor = |values, like: &Tensor| Tensor::from_vec(values, like.shape(), like.device()).map(Some);
        Ok((tensor(grad_x, x)?, tensor(grad_weights, weights)?, tensor(grad_parameters, parameters)?))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{D, Device, Var};

    use super::*;

    const HIDDEN: usize = 8;
    const INNER: usize = 12;
    const EXPERTS: usize = 4;
    const TOP_K: usize = 2;
    const TOKENS: usize = 5; // per PE

    /// The same sum with candle's own operators, all experts in one process.
    fn by_hand(x: &Tensor, ids: &[i32], weights: &Tensor, parameters: &Tensor) -> Result<Tensor> {
        let mut sum = x.zeros_like()?;
        for expert in 0..EXPERTS {
            let matrix = |index: usize, rows, cols| parameters.get(expert)?.get(index)?.reshape((rows, cols));
            let gate = x.matmul(&matrix(0, INNER, HIDDEN)?.t()?)?;
            let up = x.matmul(&matrix(1, INNER, HIDDEN)?.t()?)?;
            let out = (gate.silu()? * up)?.matmul(&matrix(2, HIDDEN, INNER)?.t()?)?;
            let chosen: Vec<f32> = ids.iter().map(|&id| if id as usize == expert { 1.0 } else { 0.0 }).collect();
            let chosen = Tensor::from_vec(chosen, weights.shape(), weights.device())?;
            sum = (sum + out.broadcast_mul(&(weights * chosen)?.sum_keepdim(D::Minus1)?)?)?;
        }
        Ok(sum)
    }

    fn error(got: &Tensor, wanted: &Tensor) -> Result<f32> {
        let norm = |t: Tensor| t.sqr()?.sum_all()?.sqrt()?.to_scalar::<f32>();
        Ok(norm((got - wanted)?)? / norm(wanted.clone())?)
    }

    #[test]
    fn outputs_and_gradients_match_candle() {
        for pes in [1, 2] {
            let spec = spec(HIDDEN, INNER, EXPERTS, TOP_K, pes, TOKENS);
            let world = aristos::shmem::threads(pes, spec.heap_bytes().unwrap()).unwrap();
            let tensor = |shape: &[usize]| Tensor::randn(0f32, 0.5, shape, &Device::Cpu).unwrap();
            let all_x = Var::from_tensor(&tensor(&[pes * TOKENS, HIDDEN])).unwrap();
            let all_weights = Var::from_tensor(&tensor(&[pes * TOKENS, TOP_K])).unwrap();
            let all_parameters = Var::from_tensor(&tensor(&[EXPERTS, 3, INNER * HIDDEN])).unwrap();
            let all_grad = tensor(&[pes * TOKENS, HIDDEN]);
            // Two different experts per token.
            let ids: Vec<i32> = (0..pes * TOKENS)
                .flat_map(|t| [t % EXPERTS, (t + 1 + t / 3 % 2) % EXPERTS])
                .map(|e| e as i32)
                .collect();
            let wanted = by_hand(&all_x, &ids, &all_weights, &all_parameters).unwrap();
            let gradients = (&wanted * &all_grad).unwrap().sum_all().unwrap().backward().unwrap();
            std::thread::scope(|scope| {
                for (pe, shmem) in world.into_iter().enumerate() {
                    let (spec, ids, wanted, gradients) = (spec.clone(), &ids, &wanted, &gradients);
                    let (all_x, all_weights, all_parameters, all_grad) =
                        (&all_x, &all_weights, &all_parameters, &all_grad);
                    scope.spawn(move || {
                        let (rows, local) = (pe * TOKENS, EXPERTS / pes);
                        let var =
                            |all: &Tensor, start, len| Var::from_tensor(&all.narrow(0, start, len).unwrap()).unwrap();
                        let (x, weights) = (var(all_x, rows, TOKENS), var(all_weights, rows, TOKENS));
                        let parameters = var(all_parameters, pe * local, local);
                        let experts = Experts::new(spec, shmem).unwrap();
                        let own = ids[rows * TOP_K..(rows + TOKENS) * TOP_K].to_vec();
                        let output = experts.forward(&x, own, &weights, &parameters).unwrap();
                        assert!(error(&output, &wanted.narrow(0, rows, TOKENS).unwrap()).unwrap() < 1e-5);
                        let loss = (output * all_grad.narrow(0, rows, TOKENS).unwrap()).unwrap().sum_all().unwrap();
                        let got = loss.backward().unwrap();
                        for (own, all, start, len) in [
                            (&x, all_x, rows, TOKENS),
                            (&weights, all_weights, rows, TOKENS),
                            (&parameters, all_parameters, pe * local, local),
                        ] {
                            let wanted = gradients.get(all).unwrap().narrow(0, start, len).unwrap();
                            assert!(error(got.get(own).unwrap(), &wanted).unwrap() < 1e-5);
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn wrong_shapes_are_rejected() {
        let spec = spec(HIDDEN, INNER, EXPERTS, TOP_K, 1, TOKENS);
        let shmem = aristos::shmem::threads(1, spec.heap_bytes().unwrap()).unwrap().remove(0);
        let experts = Experts::new(spec, shmem).unwrap();
        let zeros = |shape: &[usize]| Tensor::zeros(shape, candle_core::DType::F32, &Device::Cpu).unwrap();
        let (x, weights) = (zeros(&[1, HIDDEN]), zeros(&[1, TOP_K]));
        let few = experts.forward(&x, vec![0, 1], &weights, &zeros(&[1, 3, INNER * HIDDEN])).unwrap_err().to_string();
        assert!(few.contains("expected 4 experts of 3 matrices of 96"), "{few}");
        let parameters = zeros(&[EXPERTS, 3, INNER * HIDDEN]);
        let far = experts.forward(&x, vec![0, 9], &weights, &parameters).unwrap_err().to_string();
        assert!(far.contains("token 0 has expert 9, expected 0 to 3"), "{far}");
    }
}
