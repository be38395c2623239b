//! Weights, tables and gradients of a PE on its device.

use super::elements::{Planes, put_elements, to_elements, to_f32};
use super::relays::Relays;
use super::sums::Sums;
use super::tensor_maps::tensor_maps;
use super::tiles::GemmPath;
use crate::gpu::params::{Kernel, Tables};
use crate::gpu::{Buffer, Gpu, GpuError, Launch, SymmetricBuffer};
use crate::moe::spec::{
    Gradients, LayerConfig, LayerSpec, MlpConfig, MlpGradients, MlpId, MoeError, Placement, Proj, WeightError,
    WeightId, WeightSource, proj_index,
};

/// Alignment of every suballocation, bytes.
const ALIGN_BYTES: u64 = 256;

/// Assigns consecutive offsets in a buffer that is allocated later.
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

/// Byte offsets of the matrices and biases of an MLP in a buffer.
#[derive(Clone, Copy, Default)]
struct MlpOffsets {
    matrix: [Option<u64>; 3],
    bias: [Option<u64>; 3],
}

impl MlpOffsets {
    fn new(bump: &mut Bump, mlp: &MlpConfig, hidden: usize, element_bytes: usize) -> Self {
        let mut offsets = MlpOffsets::default();
        for &proj in mlp.projections() {
            let [out, inp] = mlp.shape(proj, hidden);
            offsets.matrix[proj_index(proj)] = Some(bump.take(out * inp * element_bytes));
            if mlp.bias {
                offsets.bias[proj_index(proj)] = Some(bump.take(out * size_of::<f32>()));
            }
        }
        offsets
    }

    /// Addresses in the order of the kernels' structs; 0 for a missing array.
    fn addresses(&self, base: u64) -> [u64; 6] {
        let at = |location: Option<u64>| location.map_or(0, |location| base + location);
        let ([g, u, d], [gb, ub, db]) = (self.matrix, self.bias);
        [g, u, d, gb, ub, db].map(at)
    }
}

/// Addresses of the arrays of the first of `experts` routed MLPs, the byte strides from one MLP to the next, and the addresses of the
/// arrays of the shared MLP, which is the last in `offsets`. 0 for missing arrays.
fn arrays(offsets: &[MlpOffsets], experts: usize, base: u64) -> ([u64; 6], [u64; 6], [u64; 6]) {
    let (routed, shared) = offsets.split_at(experts);
    let of = |mlp: Option<&MlpOffsets>| mlp.map_or([0; 6], |mlp| mlp.addresses(base));
    let first = of(routed.first());
    let mut strides = [0; 6];
    if let Some(second) = routed.get(1) {
        // All routed MLPs have the same shape, so the strides are the same between all of them.
        let second = second.addresses(base);
        strides = std::array::from_fn(|i| second[i] - first[i]);
    }
    (first, strides, of(shared.first()))
}

/// The weights that a PE holds, the tables that locate them, and their gradients.
pub struct DeviceWeights<'g> {
    /// Tables for the kernels.
    pub tables: Tables,
    /// Device memory, bytes.
    pub bytes: u64,
    /// Number of planes that the router's weights need.
    pub router_parts: u32,
    /// `None` without training.
    pub gradients: Option<DeviceGradients<'g>>,
    /// Matrices and biases of the local experts, then of the shared expert, at the offsets in `offsets`.
    mlps: Buffer<'g>,
    offsets: Vec<MlpOffsets>,
    /// [`MAX_ROUTER_PARTS`] planes, and the weights in f32; `None` if the caller routes.
    router: Option<[Buffer<'g>; 2]>,
    router_bias: Option<Buffer<'g>>,
    shared_gate: Option<Buffer<'g>>,
    /// Other buffers that the tables point to.
    kept: Vec<Buffer<'g>>,
    /// Staging vectors, which are kept so that setting weights needs no allocation.
    elements: Vec<u16>,
    planes: Planes,
}

/// Position of a weight on the device.
enum WeightLocation<'a, 'g> {
    /// In the layer's element type, at this byte offset.
    Elements(&'a Buffer<'g>, u64),
    /// In f32, at this byte offset.
    Values(&'a Buffer<'g>, u64),
    /// The router's weights: planes, and their sums.
    Router(&'a [Buffer<'g>; 2]),
}

/// The MLPs that `pe` holds: its experts, then the shared expert.
fn mlps(config: &LayerConfig, placement: &Placement, pe: usize) -> Vec<(MlpId, MlpConfig)> {
    let routed = placement.experts(pe).iter().map(|&e| (MlpId::Routed(e), config.expert));
    routed.chain(config.shared.map(|s| (MlpId::Shared, s.mlp))).collect()
}

/// Loads a weight and checks its length against the configuration.
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
    /// Loads the weights of this PE, one weight at a time. `me` is its index in its group.
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
        let offsets: Vec<_> =
            held.iter().map(|(_, mlp)| MlpOffsets::new(&mut bump, mlp, hidden, dtype.bytes())).collect();
        let weights = Buffer::new(gpu, bump.used)?;
        let load = |id| load(source, config, id);
        for ((which, mlp), offsets) in held.iter().zip(&offsets) {
            for &proj in mlp.projections() {
                let (matrix, bias) = which.ids(proj);
                if let Some(at) = offsets.matrix[proj_index(proj)] {
                    weights.write(at, &to_elements(&load(matrix)?, dtype, &source.name(matrix))?)?;
                }
                if let Some(at) = offsets.bias[proj_index(proj)] {
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
            // A layer without a router does not use this, but it must not be 0.
            router_parts: planes.parts.max(1),
            gradients,
            mlps: weights,
            offsets,
            router,
            router_bias,
            shared_gate,
            kept: Vec::new(),
            elements: Vec::new(),
            planes,
        };
        made.set_experts(gpu, placement, &Relays::new(placement, &spec.options.hosts), me)?;
        let experts = placement.experts(me).len();
        let (routed, strides, shared) = arrays(&made.offsets, experts, made.mlps.address());
        made.tables.weights = bytemuck::cast(routed);
        made.tables.weight_strides = bytemuck::cast(strides);
        made.tables.shared_weights = bytemuck::cast(shared);
        if path == GemmPath::Hopper {
            let mut maps = tensor_maps(gpu, &config.expert, hidden, dtype, (routed, strides), experts)?.to_vec();
            let shared_experts = usize::from(config.shared.is_some());
            let shared_mlp = config.shared.map_or(config.expert, |shared| shared.mlp);
            maps.extend(tensor_maps(gpu, &shared_mlp, hidden, dtype, (shared, [0; 6]), shared_experts)?);
            made.tables.tensor_maps = made.keep(gpu, &maps)?;
        }
        if let Some(gradients) = &made.gradients {
            let base = gradients.buffer.address();
            let (routed, strides, shared) = arrays(&gradients.offsets, experts, base);
            made.tables.grad_router = base + gradients.router;
            made.tables.grad_shared_gate = gradients.shared_gate.map_or(0, |at| base + at);
            made.tables.gradients = bytemuck::cast(routed);
            made.tables.gradient_strides = bytemuck::cast(strides);
            made.tables.shared_gradients = bytemuck::cast(shared);
        }
        Ok(made)
    }

    /// The tables of a layer whose caller owns the weights. The addresses of weights, gradients and tensor maps are set in each pass.
    pub fn of_caller(gpu: &'g dyn Gpu, spec: &LayerSpec, me: usize, path: GemmPath) -> Result<Self, MoeError> {
        // This is a flag rather than an address, because a layer's sizes depend on whether it has tensor maps.
        let tensor_maps = u64::from(path == GemmPath::Hopper);
        let mut made = DeviceWeights {
            tables: Tables { tensor_maps, ..Tables::default() },
            bytes: 0,
            router_parts: 1,
            gradients: None,
            mlps: Buffer::new(gpu, 0)?,
            offsets: Vec::new(),
            router: None,
            router_bias: None,
            shared_gate: None,
            kept: Vec::new(),
            elements: Vec::new(),
            planes: Planes::default(),
        };
        made.set_experts(gpu, &spec.placement, &Relays::new(&spec.placement, &spec.options.hosts), me)?;
        Ok(made)
    }

    /// Sets the tables of physical experts, replicas' shares and relays.
    fn set_experts(
        &mut self,
        gpu: &'g dyn Gpu,
        placement: &Placement,
        relays: &Relays,
        me: usize,
    ) -> Result<(), GpuError> {
        let (first_physical, physical_pe) = relays.physical_tables(me);
        let (mut first_holder, mut holder_physical, mut holder_until) = (vec![0u32], Vec::new(), Vec::new());
        for expert in 0..placement.n_experts() {
            for (pe, local, until) in placement.shares(expert, me) {
                holder_physical.push(relays.physical(me, &first_physical, pe, local));
                holder_until.push(until);
            }
            first_holder.push(holder_physical.len() as u32);
        }
        self.tables.first_physical = self.keep(gpu, &first_physical)?;
        self.tables.physical_pe = self.keep(gpu, &physical_pe)?;
        self.tables.first_holder = self.keep(gpu, &first_holder)?;
        self.tables.holder_physical = self.keep(gpu, &holder_physical)?;
        self.tables.holder_until = self.keep(gpu, &holder_until)?;
        if let Some(table) = relays.table(me) {
            self.tables.relay = self.keep(gpu, &table)?;
        }
        Ok(())
    }

    /// Sets the tables of gradient sums.
    pub fn set_sums(&mut self, gpu: &'g dyn Gpu, sums: &Sums) -> Result<(), GpuError> {
        self.tables.sum_units = self.keep(gpu, &sums.units)?;
        self.tables.sum_holders = self.keep(gpu, &sums.holders)?;
        Ok(())
    }

    /// Sets the tables of peers' symmetric memory; `members` are the PEs of the group.
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
            return Err(GpuError::failed("forward rows within a host", why));
        }
        let lists = |linked: &dyn Fn(usize) -> bool| -> Vec<u32> {
            let inter_node: Vec<usize> =
                (1..n).map(|i| (me + i) % n).filter(|&pe| peers[pe] == 0 && linked(pe)).collect();
            let number = |pe: usize| inter_node.iter().position(|&one| one == pe).unwrap_or(0);
            let listed = inter_node.iter().copied().chain(vec![0; n - inter_node.len()]);
            std::iter::once(inter_node.len()).chain(listed).chain((0..n).map(number)).map(|v| v as u32).collect()
        };
        self.tables.inter_node = self.keep(gpu, &lists(&|pe| relays.links(me, pe).0))?;
        self.tables.inter_node_returns = self.keep(gpu, &lists(&|pe| relays.links(me, pe).1))?;
        Ok(())
    }

    /// Copies a table to the device and returns its address.
    fn keep<T: bytemuck::Pod>(&mut self, gpu: &'g dyn Gpu, values: &[T]) -> Result<u64, GpuError> {
        let buffer = Buffer::from_slice(gpu, values)?;
        self.bytes += buffer.bytes();
        self.kept.push(buffer);
        Ok(self.kept.last().map_or(0, Buffer::address))
    }

    /// The position of a weight, after checking its length.
    fn locate(
        &self,
        spec: &LayerSpec,
        me: usize,
        id: WeightId,
        len: usize,
        what: &'static str,
    ) -> Result<WeightLocation<'_, 'g>, MoeError> {
        let (config, placement) = (&spec.config, &spec.placement);
        let routed = |e| placement.local_on(e, me).and_then(|local| self.offsets.get(local));
        // The shared expert follows the local experts.
        let shared = self.offsets.get(placement.experts(me).len());
        let location = match id {
            WeightId::Router => self.router.as_ref().map(WeightLocation::Router),
            // `check` rejects layers with a bias of the logits.
            WeightId::LogitBias => None,
            WeightId::RouterBias => self.router_bias.as_ref().map(|buffer| WeightLocation::Values(buffer, 0)),
            WeightId::SharedGate => self.shared_gate.as_ref().map(|buffer| WeightLocation::Values(buffer, 0)),
            WeightId::Expert(e, p) => {
                routed(e).and_then(|offsets| offsets.matrix[proj_index(p)]).map(|at| self.matrix(at))
            }
            WeightId::Shared(p) => shared.and_then(|offsets| offsets.matrix[proj_index(p)]).map(|at| self.matrix(at)),
            WeightId::ExpertBias(e, p) => {
                routed(e).and_then(|offsets| offsets.bias[proj_index(p)]).map(|at| self.bias(at))
            }
            WeightId::SharedBias(p) => shared.and_then(|offsets| offsets.bias[proj_index(p)]).map(|at| self.bias(at)),
        };
        let location = location.ok_or_else(|| MoeError::Usage { what, why: format!("PE {me} holds no {id:?}") })?;
        let expected: usize = config.shape(id).iter().product();
        if len != expected {
            return Err(MoeError::Shape { what: format!("{id:?}").into(), got: len, expected: expected.to_string() });
        }
        Ok(location)
    }

    fn matrix(&self, at: u64) -> WeightLocation<'_, 'g> {
        WeightLocation::Elements(&self.mlps, at)
    }

    fn bias(&self, at: u64) -> WeightLocation<'_, 'g> {
        WeightLocation::Values(&self.mlps, at)
    }

    /// Reads a weight, as f32.
    pub fn read(&self, spec: &LayerSpec, me: usize, id: WeightId, into: &mut [f32]) -> Result<(), MoeError> {
        match self.locate(spec, me, id, into.len(), "read a weight")? {
            WeightLocation::Router([_, router]) => router.read(0, into)?,
            WeightLocation::Values(buffer, at) => buffer.read(at, into)?,
            WeightLocation::Elements(buffer, at) => {
                // The 16-bit elements are read into the second half of `into` and widened from its start, so that no
                // element is overwritten before it is read.
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
        // Moved out of `self`, because the location borrows `self`.
        let (mut elements, mut planes) = (std::mem::take(&mut self.elements), std::mem::take(&mut self.planes));
        let written = self.locate(spec, me, id, values.len(), "set a weight").and_then(|location| match location {
            WeightLocation::Values(buffer, at) => Ok(buffer.write(at, values)?),
            WeightLocation::Elements(buffer, at) => {
                put_elements(values, spec.dtype, &name(), &mut elements)?;
                Ok(buffer.write(at, &elements)?)
            }
            WeightLocation::Router([on_device, router]) => {
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
    /// Gradients of the last backward, which the kernels write. The first `replicated_bytes` bytes are those of replicated weights.
    buffer: Buffer<'g>,
    replicated_bytes: u64,
    /// Whether the gradients of replicated weights are zeros.
    replicated_zero: bool,
    /// Sums over backward passes. Allocated when accumulation is turned on for the first time.
    sum: Option<Buffer<'g>>,
    accumulate: bool,
    /// Whether the layer's gradients are those in `sum` rather than those in `buffer`.
    summed: bool,
    /// Offsets of the local experts, then of the shared expert.
    offsets: Vec<MlpOffsets>,
    router: u64,
    shared_gate: Option<u64>,
    /// Copy of the gradients on the host.
    read: Gradients,
}

impl<'g> DeviceGradients<'g> {
    fn new(gpu: &'g dyn Gpu, config: &LayerConfig, mlps: &[(MlpId, MlpConfig)]) -> Result<Self, GpuError> {
        let mut bump = Bump::default();
        let bytes = size_of::<f32>();
        let router = bump.take(config.router_rows() * config.hidden * bytes);
        let gated = config.shared.is_some_and(|s| s.sigmoid_gate);
        let shared_gate = gated.then(|| bump.take(config.hidden * bytes));
        let location = |bump: &mut Bump, mlp: &MlpConfig| MlpOffsets::new(bump, mlp, config.hidden, bytes);
        let shared = config.shared.map(|shared| location(&mut bump, &shared.mlp));
        let replicated_bytes = bump.used;
        let routed = mlps.iter().filter(|(which, _)| *which != MlpId::Shared);
        let mut offsets: Vec<_> = routed.map(|(_, mlp)| location(&mut bump, mlp)).collect();
        offsets.extend(shared);
        let buffer = Buffer::new(gpu, bump.used)?;
        buffer.zero(0, buffer.bytes())?;
        Ok(DeviceGradients {
            buffer,
            replicated_bytes,
            replicated_zero: true,
            sum: None,
            accumulate: false,
            summed: false,
            offsets,
            router,
            shared_gate,
            read: Gradients::default(),
        })
    }

    /// Turns accumulation on or off. Returns the number of bytes that it allocated.
    pub fn set_accumulate(&mut self, gpu: &'g dyn Gpu, accumulate: bool) -> Result<u64, GpuError> {
        self.accumulate = accumulate;
        if !accumulate || self.sum.is_some() {
            return Ok(0);
        }
        Ok(self.sum.insert(Buffer::new(gpu, self.buffer.bytes())?).bytes())
    }

    /// Call before launching a backward. If the caller routes (`by_caller`), backward does not write the gradients of replicated weights,
    /// so they are set to zeros. `add` is the launch of [`Kernel::Accumulate`].
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

    /// Call after launching a backward.
    pub fn end(&mut self, gpu: &dyn Gpu, add: Launch) -> Result<(), GpuError> {
        if self.accumulate { self.add(gpu, add, false) } else { Ok(()) }
    }

    /// Launches `sum = last` if `begin`, otherwise `sum += last`.
    fn add(&self, gpu: &dyn Gpu, launch: Launch, begin: bool) -> Result<(), GpuError> {
        let Some(sum) = &self.sum else { return Ok(()) };
        let count = sum.bytes() / size_of::<f32>() as u64;
        let blocks = count.div_ceil(4 * u64::from(launch.block)).clamp(1, u64::from(8 * gpu.limits()?.multiprocessors));
        let launch = Launch { grid: blocks as u32, ..launch };
        let (to, from) = (sum.address(), self.buffer.address());
        let args = [bytemuck::bytes_of(&to), bytemuck::bytes_of(&from), bytemuck::bytes_of(&count)];
        // SAFETY: the kernel takes two addresses of `count` f32, the count, which must be a multiple of 4, and a flag. Both buffers have
        // the same length, which is a multiple of 256 bytes.
        unsafe {
            gpu.launch(
                Kernel::Accumulate.name(),
                launch,
                &[args[0], args[1], args[2], bytemuck::bytes_of(&u32::from(begin))],
            )
        }
    }

    /// Reads the gradients of the last backward, or the sums.
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
        for (offsets, grads) in self.offsets.iter().zip(all.experts.iter_mut().chain(shared)) {
            offsets.read(buffer, grads)?;
        }
        Ok(all)
    }
}

impl MlpOffsets {
    fn read(&self, buffer: &Buffer<'_>, grads: &mut MlpGradients) -> Result<(), GpuError> {
        let pairs = self.matrix.iter().zip(&mut grads.matrix).chain(self.bias.iter().zip(&mut grads.bias));
        for (location, values) in pairs {
            if let Some(at) = location {
                buffer.read(*at, values)?;
            }
        }
        Ok(())
    }
}

const _: () = assert!(matches!((Proj::Gate as usize, Proj::Up as usize, Proj::Down as usize), (0, 1, 2)));
