//! A PE's weights, tables and gradients on its device.

use half::{bf16, f16};

use super::shape::{GemmPath, TENSOR_MAP_BOX};
use crate::gpu::params::{self, Tables};
use crate::gpu::{Buffer, Gpu, GpuError, SymmetricBuffer, TensorMap};
use crate::moe::spec::{
    Dtype, Gradients, LayerConfig, MlpConfig, MlpGradients, MlpId, MoeError, Placement, Proj, WeightError, WeightId,
    WeightSource, proj_index,
};

/// What every piece begins at a multiple of, bytes.
const ALIGN_BYTES: u64 = 256;
/// Most planes that a router's weight is split into.
const MAX_PARTS: usize = 3;

/// Hands out places in a buffer that is still to be made.
#[derive(Default)]
struct Bump {
    used: u64,
}

impl Bump {
    fn take(&mut self, bytes: usize) -> u64 {
        let at = self.used;
        self.used += (bytes as u64).next_multiple_of(ALIGN_BYTES);
        at
    }
}

/// Values in the layer's element type.
///
/// # Errors
/// A finite value that is none there, with its place; `name` is what to call them.
pub fn to_elements(values: &[f32], dtype: Dtype, name: &str) -> Result<Vec<u16>, MoeError> {
    let round = |x: f32| match dtype {
        Dtype::F16 => f16::from_f32(x).to_bits(),
        _ => bf16::from_f32(x).to_bits(),
    };
    let elements: Vec<u16> = values.iter().map(|&x| round(x)).collect();
    let too_large = |(&x, &e): (&f32, &u16)| x.is_finite() && !to_f32(e, dtype).is_finite();
    match values.iter().zip(&elements).position(too_large) {
        None => Ok(elements),
        Some(at) => Err(MoeError::Weights(WeightError::new(format!(
            "{name}: element {at} is {}, too large for {}",
            values[at],
            dtype.name()
        )))),
    }
}

fn to_f32(bits: u16, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F16 => f16::from_bits(bits).to_f32(),
        _ => bf16::from_bits(bits).to_f32(),
    }
}

/// As few planes of the element type as add up to `values`, three at most, which hold 24 bits; of f16's, whose smallest steps are
/// 2^-24, down to these.
pub fn split(values: &[f32], dtype: Dtype, name: &str) -> Result<Vec<Vec<u16>>, MoeError> {
    let mut rest = values.to_vec();
    let mut planes = Vec::new();
    while planes.len() < MAX_PARTS {
        let plane = to_elements(&rest, dtype, name)?;
        // Exact: the difference of a number and its rounding.
        rest.iter_mut().zip(&plane).for_each(|(r, &p)| *r -= to_f32(p, dtype));
        planes.push(plane);
        if rest.iter().all(|&r| r == 0.0) {
            break;
        }
    }
    Ok(planes)
}

/// Where the matrices and biases of an MLP begin in a buffer.
#[derive(Clone, Copy, Default)]
struct MlpPlaces {
    matrix: [Option<u64>; 3],
    bias: [Option<u64>; 3],
}

impl MlpPlaces {
    fn new(bump: &mut Bump, mlp: &MlpConfig, hidden: usize, element_bytes: usize) -> Self {
        let mut places = MlpPlaces::default();
        for &proj in mlp.projections() {
            let [out, inp] = mlp.shape(proj, hidden);
            places.matrix[proj_index(proj)] = Some(bump.take(out * inp * element_bytes));
            if mlp.bias {
                places.bias[proj_index(proj)] = Some(bump.take(out * size_of::<f32>()));
            }
        }
        places
    }

    /// Their addresses in the order of the kernels' structs; 0 where there is none.
    fn addresses(&self, base: u64) -> [u64; 6] {
        let at = |place: Option<u64>| place.map_or(0, |place| base + place);
        let ([g, u, d], [gb, ub, db]) = (self.matrix, self.bias);
        [g, u, d, gb, ub, db].map(at)
    }
}

/// The gradients of a layer's weights on a device, overwritten by each backward.
struct DeviceGradients<'g> {
    buffer: Buffer<'g>,
    /// Of the local experts, then the shared one's.
    places: Vec<MlpPlaces>,
    router: u64,
    shared_gate: Option<u64>,
}

/// The weights that a PE holds, the tables that find them, and their gradients.
pub struct DeviceWeights<'g> {
    /// What the kernels are given.
    pub tables: Tables,
    /// Device memory, bytes.
    pub bytes: u64,
    gradients: Option<DeviceGradients<'g>>,
    /// What the tables point to.
    _buffers: Vec<Buffer<'g>>,
}

/// The router's weights, and the planes that add up to them; needed before anything is allocated.
pub struct Router {
    values: Vec<f32>,
    planes: Vec<Vec<u16>>,
}

impl Router {
    /// Loads and splits it.
    pub fn load(source: &dyn WeightSource, dtype: Dtype) -> Result<Self, MoeError> {
        let values = source.load(WeightId::Router).map_err(MoeError::Weights)?;
        let planes = split(&values, dtype, &source.name(WeightId::Router))?;
        Ok(Router { values, planes })
    }

    /// How many planes.
    pub fn parts(&self) -> u32 {
        self.planes.len() as u32
    }
}

/// The MLPs that `pe` holds: its experts, then the shared one.
fn mlps(config: &LayerConfig, placement: &Placement, pe: usize) -> Vec<(MlpId, MlpConfig)> {
    let routed = placement.experts(pe).iter().map(|&e| (MlpId::Routed(e), config.expert));
    routed.chain(config.shared.map(|s| (MlpId::Shared, s.mlp))).collect()
}

impl<'g> DeviceWeights<'g> {
    /// Loads what this PE holds, one weight at a time.
    pub fn new(
        gpu: &'g dyn Gpu,
        source: &dyn WeightSource,
        placement: &Placement,
        dtype: Dtype,
        path: GemmPath,
        training: bool,
        router: &Router,
    ) -> Result<Self, MoeError> {
        let (config, me) = (source.config(), gpu.my_pe());
        let hidden = config.hidden;
        let mlps = mlps(config, placement, me);
        let mut bump = Bump::default();
        let places: Vec<_> =
            mlps.iter().map(|(_, mlp)| MlpPlaces::new(&mut bump, mlp, hidden, dtype.bytes())).collect();
        let weights = Buffer::new(gpu, bump.used)?;
        for ((which, mlp), places) in mlps.iter().zip(&places) {
            for &proj in mlp.projections() {
                let (matrix, bias) = which.ids(proj);
                let load = |id| source.load(id).map_err(MoeError::Weights);
                if let Some(at) = places.matrix[proj_index(proj)] {
                    weights.write(at, &to_elements(&load(matrix)?, dtype, &source.name(matrix))?)?;
                }
                if let Some(at) = places.bias[proj_index(proj)] {
                    weights.write(at, &load(bias)?)?;
                }
            }
        }
        let gradients = training.then(|| DeviceGradients::new(gpu, config, &mlps)).transpose()?;

        let mut made = DeviceWeights {
            tables: Tables::default(),
            bytes: weights.bytes() + gradients.as_ref().map_or(0, |g| g.buffer.bytes()),
            gradients,
            _buffers: Vec::new(),
        };
        let n = config.n_experts;
        let owner: Vec<u32> = (0..n).map(|e| placement.owner(e) as u32).collect();
        let local: Vec<u32> = (0..n).map(|e| placement.local(e) as u32).collect();
        let optional =
            |id: WeightId, wanted: bool| wanted.then(|| source.load(id)).transpose().map_err(MoeError::Weights);
        let bias = optional(WeightId::RouterBias, config.router.correction_bias)?;
        let gate = optional(WeightId::SharedGate, config.shared.is_some_and(|s| s.sigmoid_gate))?;
        made.tables.router = made.keep(gpu, &router.planes.concat())?;
        made.tables.router_f32 = made.keep(gpu, &router.values)?;
        made.tables.owner = made.keep(gpu, &owner)?;
        made.tables.local_index = made.keep(gpu, &local)?;
        if let Some(bias) = bias {
            made.tables.router_bias = made.keep(gpu, &bias)?;
        }
        if let Some(gate) = gate {
            made.tables.shared_gate = made.keep(gpu, &gate)?;
        }
        let mut addresses: Vec<[u64; 6]> = places.iter().map(|p| p.addresses(weights.address())).collect();
        addresses.resize(placement.experts(me).len() + 1, [0; 6]);
        made.tables.weights = made.keep(gpu, &addresses)?;
        if path == GemmPath::Hopper {
            let maps = tensor_maps(gpu, &mlps, hidden, &addresses, dtype)?;
            made.tables.tensor_maps = made.keep(gpu, &maps)?;
        }
        if let Some(gradients) = &made.gradients {
            let base = gradients.buffer.address();
            let mut of: Vec<[u64; 6]> = gradients.places.iter().map(|p| p.addresses(base)).collect();
            of.resize(addresses.len(), [0; 6]);
            made.tables.grad_router = base + gradients.router;
            made.tables.grad_shared_gate = gradients.shared_gate.map_or(0, |at| base + at);
            made.tables.gradients = made.keep(gpu, &of)?;
        }
        made._buffers.push(weights);
        Ok(made)
    }

    /// Enters where each PE's symmetric memory is.
    pub fn set_peers(&mut self, gpu: &'g dyn Gpu, symmetric: &SymmetricBuffer<'g>) -> Result<(), GpuError> {
        let peers: Vec<u64> = (0..gpu.n_pes()).map(|pe| symmetric.peer(pe)).collect();
        self.tables.peer = self.keep(gpu, &peers)?;
        Ok(())
    }

    /// Copies a table to the device; where it is there.
    fn keep<T: bytemuck::Pod>(&mut self, gpu: &'g dyn Gpu, values: &[T]) -> Result<u64, GpuError> {
        let buffer = Buffer::from_slice(gpu, values)?;
        self.bytes += buffer.bytes();
        self._buffers.push(buffer);
        Ok(self._buffers.last().map_or(0, Buffer::address))
    }

    /// The gradients of the last backward, read back; `None` without training.
    pub fn gradients(
        &self,
        config: &LayerConfig,
        placement: &Placement,
        pe: usize,
    ) -> Result<Option<Gradients>, GpuError> {
        let Some(on_device) = &self.gradients else { return Ok(None) };
        let mut all = Gradients::zeros(config, placement, pe);
        let buffer = &on_device.buffer;
        buffer.read(on_device.router, &mut all.router)?;
        if let Some(at) = on_device.shared_gate {
            buffer.read(at, &mut all.shared_gate)?;
        }
        let shared = config.shared.is_some().then_some(&mut all.shared);
        for (places, grads) in on_device.places.iter().zip(all.experts.iter_mut().chain(shared)) {
            places.read(buffer, grads)?;
        }
        Ok(Some(all))
    }
}

impl MlpPlaces {
    fn read(&self, buffer: &Buffer<'_>, grads: &mut MlpGradients) -> Result<(), GpuError> {
        let pairs = self.matrix.iter().zip(&mut grads.matrix).chain(self.bias.iter().zip(&mut grads.bias));
        for (place, values) in pairs {
            if let Some(at) = place {
                buffer.read(*at, values)?;
            }
        }
        Ok(())
    }
}

impl<'g> DeviceGradients<'g> {
    fn new(gpu: &'g dyn Gpu, config: &LayerConfig, mlps: &[(MlpId, MlpConfig)]) -> Result<Self, GpuError> {
        let mut bump = Bump::default();
        let bytes = size_of::<f32>();
        let router = bump.take(config.n_experts * config.hidden * bytes);
        let gated = config.shared.is_some_and(|s| s.sigmoid_gate);
        let shared_gate = gated.then(|| bump.take(config.hidden * bytes));
        let places = mlps.iter().map(|(_, mlp)| MlpPlaces::new(&mut bump, mlp, config.hidden, bytes)).collect();
        Ok(DeviceGradients { buffer: Buffer::new(gpu, bump.used)?, places, router, shared_gate })
    }
}

/// Tensor maps of gate, up and down of each MLP; zeros where there is none.
fn tensor_maps(
    gpu: &dyn Gpu,
    mlps: &[(MlpId, MlpConfig)],
    hidden: usize,
    addresses: &[[u64; 6]],
    dtype: Dtype,
) -> Result<Vec<[u8; 128]>, GpuError> {
    let mut maps = vec![[0u8; 128]; 3 * addresses.len()];
    for (i, (_, mlp)) in mlps.iter().enumerate() {
        for &proj in mlp.projections() {
            let [rows, cols] = mlp.shape(proj, hidden);
            maps[3 * i + proj_index(proj)] = gpu.tensor_map(TensorMap {
                base: addresses[i][proj_index(proj)],
                rows: rows as u32,
                cols: cols as u32,
                row_stride_bytes: (cols * dtype.bytes()) as u64,
                box_rows: TENSOR_MAP_BOX,
                box_cols: TENSOR_MAP_BOX,
                element_bytes: dtype.bytes() as u32,
            })?;
        }
    }
    Ok(maps)
}

const _: () = assert!(size_of::<params::MlpWeights>() == size_of::<[u64; 6]>());
const _: () = assert!(size_of::<params::MlpGradients>() == size_of::<[u64; 6]>());
const _: () = assert!(matches!((Proj::Gate as usize, Proj::Up as usize, Proj::Down as usize), (0, 1, 2)));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_add_up_to_24_bits_and_are_as_few_as_can_be() {
        let add =
            |planes: &[Vec<u16>], i: usize, dtype| planes.iter().map(|p| f64::from(to_f32(p[i], dtype))).sum::<f64>();
        for (values, dtype, parts) in [
            (vec![1.0f32, -0.5, 3.0], Dtype::Bf16, 1),
            (vec![1.0 + f32::EPSILON * 32768.0, 0.0], Dtype::Bf16, 2),
            (vec![1.0 / 3.0, 0.1, -1e-3], Dtype::Bf16, 3),
            (vec![1.0 + 1.0 / 1024.0, 2.0], Dtype::F16, 1),
        ] {
            let planes = split(&values, dtype, "w").unwrap();
            assert_eq!(planes.len(), parts, "{values:?}");
            for (i, &v) in values.iter().enumerate() {
                assert!((add(&planes, i, dtype) - f64::from(v)).abs() <= f64::from(v).abs() * 2f64.powi(-23));
            }
        }
    }

    #[test]
    fn a_value_too_large_is_named() {
        assert_eq!(to_elements(&[1.0, 65504.0], Dtype::F16, "w").unwrap()[1], f16::MAX.to_bits());
        let error = to_elements(&[1.0, 70000.0], Dtype::F16, "experts.0.up").unwrap_err();
        assert_eq!(error.to_string(), "experts.0.up: element 1 is 70000, too large for f16");
        assert!(to_elements(&[f32::INFINITY], Dtype::F16, "w").is_ok());
    }
}
