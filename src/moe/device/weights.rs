//! A PE's weights, tables and gradients on its device.

use std::sync::atomic::{AtomicUsize, Ordering};

use half::{bf16, f16};

use super::relays::Relays;
use super::shape::{GemmPath, MAX_ROUTER_PARTS};
use super::sums::Sums;
use crate::gpu::params::{self, Kernel, Tables};
use crate::gpu::{Buffer, Gpu, GpuError, Launch, SymmetricBuffer, TensorMap};
use crate::moe::parts::in_parts;
use crate::moe::spec::{
    Dtype, Gradients, LayerConfig, LayerSpec, MlpConfig, MlpGradients, MlpId, MoeError, Placement, Proj, WeightError,
    WeightId, WeightSource, proj_index,
};

/// What every piece begins at a multiple of, bytes.
const ALIGN_BYTES: u64 = 256;
/// Rows and columns of a weight that the tensor memory accelerator brings at once.
pub(super) const TENSOR_MAP_BOX: u32 = 64;

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

/// Rounds values to the layer's element type.
///
/// # Errors
/// A finite value that is none there, with its place; `name` is what to call them.
pub fn to_elements(values: &[f32], dtype: Dtype, name: &str) -> Result<Vec<u16>, MoeError> {
    let mut elements = Vec::new();
    put_elements(values, dtype, name, &mut elements)?;
    Ok(elements)
}

/// [`to_elements`] into a vector that is kept.
fn put_elements(values: &[f32], dtype: Dtype, name: &str, elements: &mut Vec<u16>) -> Result<(), MoeError> {
    let round = |x: f32| match dtype {
        Dtype::F16 => f16::from_f32(x).to_bits(),
        _ => bf16::from_f32(x).to_bits(),
    };
    elements.resize(values.len(), 0);
    let first_too_large = AtomicUsize::new(usize::MAX);
    in_parts(elements, |first, part| {
        for (at, (e, &x)) in (first..).zip(part.iter_mut().zip(&values[first..])) {
            *e = round(x);
            if x.is_finite() && !to_f32(*e, dtype).is_finite() {
                first_too_large.fetch_min(at, Ordering::Relaxed);
                return;
            }
        }
    });
    match first_too_large.into_inner() {
        usize::MAX => Ok(()),
        at => Err(MoeError::Weights(WeightError::new(format!(
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

/// A router's weights as planes of the element type that add up to them: vectors that are kept from one split to the next.
#[derive(Default)]
struct Planes {
    /// [`MAX_ROUTER_PARTS`] planes, those that are not needed all zeros.
    planes: Vec<u16>,
    /// How many are needed.
    parts: u32,
    rest: Vec<f32>,
    plane: Vec<u16>,
}

impl Planes {
    /// Three planes at most, which hold 24 bits; of f16's, whose smallest steps are 2^-24, down to these.
    fn split(&mut self, values: &[f32], dtype: Dtype, name: &str) -> Result<(), MoeError> {
        self.planes.clear();
        self.parts = 0;
        self.rest.clear();
        self.rest.extend_from_slice(values);
        while self.parts < MAX_ROUTER_PARTS {
            put_elements(&self.rest, dtype, name, &mut self.plane)?;
            // Exact: the difference of a number and its rounding.
            self.rest.iter_mut().zip(&self.plane).for_each(|(r, &p)| *r -= to_f32(p, dtype));
            self.planes.extend_from_slice(&self.plane);
            self.parts += 1;
            if self.rest.iter().all(|&r| r == 0.0) {
                break;
            }
        }
        self.planes.resize(MAX_ROUTER_PARTS as usize * values.len(), 0);
        Ok(())
    }
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

/// The weights that a PE holds, the tables that find them, and their gradients.
pub struct DeviceWeights<'g> {
    /// What the kernels are given.
    pub tables: Tables,
    /// Device memory, bytes.
    pub bytes: u64,
    /// Planes that the router's weights need.
    pub router_parts: u32,
    /// `None` without training.
    pub gradients: Option<DeviceGradients<'g>>,
    /// Matrices and biases of the local experts, then of the shared one, at `places`.
    mlps: Buffer<'g>,
    places: Vec<MlpPlaces>,
    /// Room for [`MAX_ROUTER_PARTS`] planes, and the values that they add up to; `None` where the caller routes.
    router: Option<[Buffer<'g>; 2]>,
    router_bias: Option<Buffer<'g>>,
    shared_gate: Option<Buffer<'g>>,
    /// What else the tables point to.
    kept: Vec<Buffer<'g>>,
    /// What is being written, so that new weights need no allocation.
    elements: Vec<u16>,
    planes: Planes,
}

/// Where a weight is.
enum Place<'a, 'g> {
    /// In the layer's element type, from this byte on.
    Elements(&'a Buffer<'g>, u64),
    /// In f32.
    Values(&'a Buffer<'g>, u64),
    /// The router's: planes, and the values that they add up to.
    Router(&'a [Buffer<'g>; 2]),
}

/// The MLPs that `pe` holds: its experts, then the shared one.
fn mlps(config: &LayerConfig, placement: &Placement, pe: usize) -> Vec<(MlpId, MlpConfig)> {
    let routed = placement.experts(pe).iter().map(|&e| (MlpId::Routed(e), config.expert));
    routed.chain(config.shared.map(|s| (MlpId::Shared, s.mlp))).collect()
}

/// Loads a weight of the length that the configuration says.
fn load(source: &dyn WeightSource, config: &LayerConfig, id: WeightId) -> Result<Vec<f32>, MoeError> {
    let values = source.load(id)?;
    let expected: usize = config.shape(id).iter().product();
    if values.len() != expected {
        let (name, got) = (source.name(id), values.len());
        return Err(MoeError::Weights(WeightError::new(format!("{name} has {got} elements, expected {expected}"))));
    }
    Ok(values)
}

impl<'g> DeviceWeights<'g> {
    /// Loads what this PE, number `me` of its group, holds, one weight at a time.
    pub fn new(
        gpu: &'g dyn Gpu,
        spec: &LayerSpec,
        me: usize,
        source: &dyn WeightSource,
        path: GemmPath,
    ) -> Result<Self, MoeError> {
        let LayerSpec { config, placement, dtype, .. } = spec;
        let (hidden, dtype) = (config.hidden, *dtype);
        let held = mlps(config, placement, me);
        let mut bump = Bump::default();
        let places: Vec<_> =
            held.iter().map(|(_, mlp)| MlpPlaces::new(&mut bump, mlp, hidden, dtype.bytes())).collect();
        let weights = Buffer::new(gpu, bump.used)?;
        let load = |id| load(source, config, id);
        for ((which, mlp), places) in held.iter().zip(&places) {
            for &proj in mlp.projections() {
                let (matrix, bias) = which.ids(proj);
                if let Some(at) = places.matrix[proj_index(proj)] {
                    weights.write(at, &to_elements(&load(matrix)?, dtype, &source.name(matrix))?)?;
                }
                if let Some(at) = places.bias[proj_index(proj)] {
                    weights.write(at, &load(bias)?)?;
                }
            }
        }
        let gradients = spec.training.then(|| DeviceGradients::new(gpu, config, &held)).transpose()?;

        let mut planes = Planes::default();
        let mut router = None;
        if !config.router.external {
            let values = load(WeightId::Router)?;
            planes.split(&values, dtype, &source.name(WeightId::Router))?;
            router = Some([Buffer::from_slice(gpu, &planes.planes)?, Buffer::from_slice(gpu, &values)?]);
        }
        let optional = |id: WeightId, wanted: bool| -> Result<_, MoeError> {
            wanted.then(|| Ok(Buffer::from_slice(gpu, &load(id)?)?)).transpose()
        };
        let router_bias = optional(WeightId::RouterBias, config.router.correction_bias)?;
        let shared_gate = optional(WeightId::SharedGate, config.shared.is_some_and(|s| s.sigmoid_gate))?;
        let address = |buffer: &Option<Buffer<'g>>| buffer.as_ref().map_or(0, Buffer::address);
        let own = router.iter().flatten().chain(&router_bias).chain(&shared_gate).chain([&weights]);
        let mut made = DeviceWeights {
            tables: Tables {
                router: router.as_ref().map_or(0, |[planes, _]| planes.address()),
                router_f32: router.as_ref().map_or(0, |[_, values]| values.address()),
                router_bias: address(&router_bias),
                shared_gate: address(&shared_gate),
                ..Tables::default()
            },
            bytes: own.map(Buffer::bytes).sum::<u64>() + gradients.as_ref().map_or(0, |g| g.buffer.bytes()),
            // A layer without a router launches nothing that asks.
            router_parts: planes.parts.max(1),
            gradients,
            mlps: weights,
            places,
            router,
            router_bias,
            shared_gate,
            kept: Vec::new(),
            elements: Vec::new(),
            planes,
        };
        made.set_places(gpu, placement, &Relays::new(placement, &spec.options.hosts), me)?;
        let mut addresses: Vec<[u64; 6]> = made.places.iter().map(|p| p.addresses(made.mlps.address())).collect();
        addresses.resize(placement.experts(me).len() + 1, [0; 6]);
        made.tables.weights = made.keep(gpu, &addresses)?;
        if path == GemmPath::Hopper {
            let maps = tensor_maps(gpu, &held, hidden, &addresses, dtype)?;
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
        Ok(made)
    }

    /// Enters where experts are, and who sends which of its pairs with them where.
    fn set_places(
        &mut self,
        gpu: &'g dyn Gpu,
        placement: &Placement,
        relays: &Relays,
        me: usize,
    ) -> Result<(), GpuError> {
        let (first_place, place_pe) = relays.place_tables(me);
        let (mut first_holder, mut holder_place, mut holder_until) = (vec![0u32], Vec::new(), Vec::new());
        for expert in 0..placement.n_experts() {
            for (pe, local, until) in placement.shares(expert, me) {
                holder_place.push(relays.place(me, &first_place, pe, local));
                holder_until.push(until);
            }
            first_holder.push(holder_place.len() as u32);
        }
        self.tables.first_place = self.keep(gpu, &first_place)?;
        self.tables.place_pe = self.keep(gpu, &place_pe)?;
        self.tables.first_holder = self.keep(gpu, &first_holder)?;
        self.tables.holder_place = self.keep(gpu, &holder_place)?;
        self.tables.holder_until = self.keep(gpu, &holder_until)?;
        if let Some(table) = relays.table(me) {
            self.tables.relay = self.keep(gpu, &table)?;
        }
        Ok(())
    }

    /// Enters which gradients are summed with whom.
    pub fn set_sums(&mut self, gpu: &'g dyn Gpu, sums: &Sums) -> Result<(), GpuError> {
        self.tables.sum_units = self.keep(gpu, &sums.units)?;
        self.tables.sum_holders = self.keep(gpu, &sums.holders)?;
        Ok(())
    }

    /// Enters where each PE's symmetric memory is; `members` are the PEs of the group.
    pub fn set_peers(
        &mut self,
        gpu: &'g dyn Gpu,
        symmetric: &SymmetricBuffer<'g>,
        members: &[usize],
        relays: &Relays,
    ) -> Result<(), GpuError> {
        let world: Vec<u64> = (0..gpu.n_pes()).map(|pe| symmetric.peer(pe)).collect();
        self.tables.world_peer = self.keep(gpu, &world)?;
        let numbers: Vec<u32> = members.iter().map(|&pe| pe as u32).collect();
        self.tables.world = self.keep(gpu, &numbers)?;
        let n = members.len();
        let me = members.iter().position(|&pe| pe == gpu.my_pe()).unwrap_or(0);
        let peers: Vec<u64> = members.iter().map(|&pe| world[pe]).collect();
        self.tables.peer = self.keep(gpu, &peers)?;
        if let Some(pe) = relays.members(me).iter().find(|&&pe| peers[pe] == 0) {
            let (mine, other) = (gpu.my_pe(), members[*pe]);
            let why = format!("the device of PE {mine} does not reach the memory of PE {other}'s, on the same host");
            return Err(GpuError::failed("pass rows on within a host", why));
        }
        let lists = |linked: &dyn Fn(usize) -> bool| -> Vec<u32> {
            let far: Vec<usize> = (1..n).map(|i| (me + i) % n).filter(|&pe| peers[pe] == 0 && linked(pe)).collect();
            let number = |pe: usize| far.iter().position(|&one| one == pe).unwrap_or(0);
            let listed = far.iter().copied().chain(vec![0; n - far.len()]);
            std::iter::once(far.len()).chain(listed).chain((0..n).map(number)).map(|v| v as u32).collect()
        };
        self.tables.inter_node = self.keep(gpu, &lists(&|pe| relays.links(me, pe).0))?;
        self.tables.inter_node_returns = self.keep(gpu, &lists(&|pe| relays.links(me, pe).1))?;
        Ok(())
    }

    /// Copies a table to the device; where it is there.
    fn keep<T: bytemuck::Pod>(&mut self, gpu: &'g dyn Gpu, values: &[T]) -> Result<u64, GpuError> {
        let buffer = Buffer::from_slice(gpu, values)?;
        self.bytes += buffer.bytes();
        self.kept.push(buffer);
        Ok(self.kept.last().map_or(0, Buffer::address))
    }

    /// Where a weight is, whose length is checked.
    fn place(
        &self,
        spec: &LayerSpec,
        me: usize,
        id: WeightId,
        len: usize,
        what: &'static str,
    ) -> Result<Place<'_, 'g>, MoeError> {
        let (config, placement) = (&spec.config, &spec.placement);
        let routed = |e| placement.local_on(e, me).and_then(|local| self.places.get(local));
        // Behind the local experts, where there is one.
        let shared = self.places.get(placement.experts(me).len());
        let place = match id {
            WeightId::Router => self.router.as_ref().map(Place::Router),
            // `check` refuses a layer that has one.
            WeightId::LogitBias => None,
            WeightId::RouterBias => self.router_bias.as_ref().map(|buffer| Place::Values(buffer, 0)),
            WeightId::SharedGate => self.shared_gate.as_ref().map(|buffer| Place::Values(buffer, 0)),
            WeightId::Expert(e, p) => {
                routed(e).and_then(|places| places.matrix[proj_index(p)]).map(|at| self.matrix(at))
            }
            WeightId::Shared(p) => shared.and_then(|places| places.matrix[proj_index(p)]).map(|at| self.matrix(at)),
            WeightId::ExpertBias(e, p) => {
                routed(e).and_then(|places| places.bias[proj_index(p)]).map(|at| self.bias(at))
            }
            WeightId::SharedBias(p) => shared.and_then(|places| places.bias[proj_index(p)]).map(|at| self.bias(at)),
        };
        let place = place.ok_or_else(|| MoeError::Usage { what, why: format!("PE {me} holds no {id:?}") })?;
        let expected: usize = config.shape(id).iter().product();
        if len != expected {
            return Err(MoeError::Shape { what: format!("{id:?}").into(), got: len, expected: expected.to_string() });
        }
        Ok(place)
    }

    fn matrix(&self, at: u64) -> Place<'_, 'g> {
        Place::Elements(&self.mlps, at)
    }

    fn bias(&self, at: u64) -> Place<'_, 'g> {
        Place::Values(&self.mlps, at)
    }

    /// Reads a weight back.
    pub fn read(&self, spec: &LayerSpec, me: usize, id: WeightId, into: &mut [f32]) -> Result<(), MoeError> {
        match self.place(spec, me, id, into.len(), "read a weight")? {
            Place::Router([_, router]) => router.read(0, into)?,
            Place::Values(buffer, at) => buffer.read(at, into)?,
            Place::Elements(buffer, at) => {
                // Half the bytes come to the second half of the place, and are widened from its beginning: no value is written
                // over an element that is still to be read.
                let len = into.len();
                let halves: &mut [u16] = bytemuck::cast_slice_mut(into);
                buffer.read(at, &mut halves[len..])?;
                for i in 0..len {
                    let bits = to_f32(halves[len + i], spec.dtype).to_bits();
                    halves[2 * i..2 * i + 2].copy_from_slice(bytemuck::cast_slice(&[bits]));
                }
            }
        }
        Ok(())
    }

    /// Replaces a weight.
    pub fn write(&mut self, spec: &LayerSpec, me: usize, id: WeightId, values: &[f32]) -> Result<(), MoeError> {
        let name = || format!("{id:?}");
        // Taken for as long as the place borrows all else.
        let (mut elements, mut planes) = (std::mem::take(&mut self.elements), std::mem::take(&mut self.planes));
        let written = self.place(spec, me, id, values.len(), "set a weight").and_then(|place| match place {
            Place::Values(buffer, at) => Ok(buffer.write(at, values)?),
            Place::Elements(buffer, at) => {
                put_elements(values, spec.dtype, &name(), &mut elements)?;
                Ok(buffer.write(at, &elements)?)
            }
            Place::Router([on_device, router]) => {
                planes.split(values, spec.dtype, &name())?;
                on_device.write(0, &planes.planes)?;
                Ok(router.write(0, values)?)
            }
        });
        if id == WeightId::Router && written.is_ok() {
            self.router_parts = planes.parts;
        }
        (self.elements, self.planes) = (elements, planes);
        written
    }
}

/// The gradients of a layer's weights on a device.
pub struct DeviceGradients<'g> {
    /// Of the last backward: what the kernels write. First those of replicated weights, of `replicated_bytes`.
    buffer: Buffer<'g>,
    replicated_bytes: u64,
    /// Whether those of replicated weights are zeros.
    replicated_zero: bool,
    /// The sums over backward passes, once they were accumulated.
    sum: Option<Buffer<'g>>,
    accumulate: bool,
    /// Whether the layer's gradients are in `sum`.
    summed: bool,
    /// Of the local experts, then the shared one's.
    places: Vec<MlpPlaces>,
    router: u64,
    shared_gate: Option<u64>,
    /// As the host has read them.
    read: Gradients,
}

impl<'g> DeviceGradients<'g> {
    fn new(gpu: &'g dyn Gpu, config: &LayerConfig, mlps: &[(MlpId, MlpConfig)]) -> Result<Self, GpuError> {
        let mut bump = Bump::default();
        let bytes = size_of::<f32>();
        let router = bump.take(config.router_rows() * config.hidden * bytes);
        let gated = config.shared.is_some_and(|s| s.sigmoid_gate);
        let shared_gate = gated.then(|| bump.take(config.hidden * bytes));
        let place = |bump: &mut Bump, mlp: &MlpConfig| MlpPlaces::new(bump, mlp, config.hidden, bytes);
        let shared = config.shared.map(|shared| place(&mut bump, &shared.mlp));
        let replicated_bytes = bump.used;
        let routed = mlps.iter().filter(|(which, _)| *which != MlpId::Shared);
        let mut places: Vec<_> = routed.map(|(_, mlp)| place(&mut bump, mlp)).collect();
        places.extend(shared);
        let buffer = Buffer::new(gpu, bump.used)?;
        buffer.zero(0, buffer.bytes())?;
        Ok(DeviceGradients {
            buffer,
            replicated_bytes,
            replicated_zero: true,
            sum: None,
            accumulate: false,
            summed: false,
            places,
            router,
            shared_gate,
            read: Gradients::default(),
        })
    }

    /// Adds those of the backward passes from now on, or no longer; the bytes of memory that it took.
    pub fn set_accumulate(&mut self, gpu: &'g dyn Gpu, accumulate: bool) -> Result<u64, GpuError> {
        self.accumulate = accumulate;
        if !accumulate || self.sum.is_some() {
            return Ok(0);
        }
        Ok(self.sum.insert(Buffer::new(gpu, self.buffer.bytes())?).bytes())
    }

    /// Before a backward is launched, which leaves those of replicated weights alone where the caller has routed: they are zeros.
    /// `add` is how [`Kernel::Accumulate`] is launched, as in [`DeviceGradients::end`].
    pub fn begin(&mut self, gpu: &dyn Gpu, add: Launch, by_caller: bool) -> Result<(), GpuError> {
        if self.accumulate && !self.summed {
            self.add(gpu, add, true)?;
        }
        self.summed = self.accumulate;
        if by_caller && !self.replicated_zero {
            self.buffer.zero(0, self.replicated_bytes)?;
        }
        self.replicated_zero = by_caller;
        Ok(())
    }

    /// After a backward was launched.
    pub fn end(&mut self, gpu: &dyn Gpu, add: Launch) -> Result<(), GpuError> {
        if self.accumulate { self.add(gpu, add, false) } else { Ok(()) }
    }

    /// Launches `sum = last` or `sum += last`.
    fn add(&self, gpu: &dyn Gpu, launch: Launch, begin: bool) -> Result<(), GpuError> {
        let Some(sum) = &self.sum else { return Ok(()) };
        let count = sum.bytes() / size_of::<f32>() as u64;
        let blocks = count.div_ceil(4 * u64::from(launch.block)).clamp(1, u64::from(8 * gpu.limits()?.multiprocessors));
        let launch = Launch { grid: blocks as u32, ..launch };
        let (to, from) = (sum.address(), self.buffer.address());
        let args = [bytemuck::bytes_of(&to), bytemuck::bytes_of(&from), bytemuck::bytes_of(&count)];
        // SAFETY: the kernel takes two addresses of `count` f32, a multiple of 4, the count, and a flag; the buffers are as long
        // as each other, of pieces that are rounded up to whole 256 bytes.
        unsafe {
            gpu.launch(
                Kernel::Accumulate.name(),
                launch,
                &[args[0], args[1], args[2], bytemuck::bytes_of(&u32::from(begin))],
            )
        }
    }

    /// The gradients of the last backward, or the sums.
    pub fn read(&mut self, spec: &LayerSpec, me: usize) -> Result<&Gradients, GpuError> {
        let all = &mut self.read;
        if all.experts.is_empty() && all.router.is_empty() {
            *all = Gradients::zeros(&spec.config, &spec.placement, me);
        }
        let buffer = self.sum.as_ref().filter(|_| self.summed).unwrap_or(&self.buffer);
        buffer.read(self.router, &mut all.router)?;
        if let Some(at) = self.shared_gate {
            buffer.read(at, &mut all.shared_gate)?;
        }
        let shared = spec.config.shared.is_some().then_some(&mut all.shared);
        for (places, grads) in self.places.iter().zip(all.experts.iter_mut().chain(shared)) {
            places.read(buffer, grads)?;
        }
        Ok(all)
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
        // Split one after the other into the same vectors.
        let mut split = Planes::default();
        for (values, dtype, parts) in [
            (vec![1.0f32, -0.5, 3.0], Dtype::Bf16, 1),
            (vec![1.0 + f32::EPSILON * 32768.0, 0.0], Dtype::Bf16, 2),
            (vec![1.0 / 3.0, 0.1, -1e-3], Dtype::Bf16, 3),
            (vec![1.0 + 1.0 / 1024.0, 2.0], Dtype::F16, 1),
            (vec![1.0], Dtype::Bf16, 1),
        ] {
            split.split(&values, dtype, "w").unwrap();
            assert_eq!(split.parts, parts, "{values:?}");
            assert_eq!(split.planes.len(), 3 * values.len());
            for (i, &v) in values.iter().enumerate() {
                let sum: f64 = split.planes.chunks(values.len()).map(|p| f64::from(to_f32(p[i], dtype))).sum();
                assert!((sum - f64::from(v)).abs() <= f64::from(v).abs() * 2f64.powi(-23));
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
