//! Computes the shape of a layer for the kernels ([`LayerShape`]), and rejects configurations that devices do not support.

use std::ffi::c_void;

use super::relays::Relays;
use super::tiles::{GemmPath, Problem, Tile, TileKernels};
use super::windows::window_chunks;
use crate::gpu::params::{self, LayerInfo, LayerShape, Tables};
use crate::gpu::{DeviceLimits, GpuError};
use crate::moe::spec::{
    Activation, Balance, ConfigError, Dtype, Glu, GroupScore, Groups, Hosts, LayerConfig, LayerSpec, Layout, Mode,
    MoeError, Norm, Options, Scoring,
};

/// Maximum number of planes into which the router's weights are split (`LayerShape::router_parts`).
pub const MAX_ROUTER_PARTS: u32 = 3;

/// Maximum blocks of a cooperative kernel.
const MAX_BLOCKS: u32 = 1 << 16;

/// Options of a layer on a device, in addition to [`Options`]. They must be the same on every PE.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceOptions {
    /// GEMM path; `None`: chosen for the device.
    pub path: Option<GemmPath>,
    /// GEMM tile; `None`: chosen for the layer's shape.
    pub tile: Option<Tile>,
    /// For the Hopper path: whether threads store 16-bit results and copy operands themselves, instead of the tensor memory accelerator.
    /// The results are bitwise equal; this is for comparing the speed.
    pub lane_stores: bool,
    /// The expert-parallel groups of the world, one of which has the layer's placement; `None`: one group of all PEs.
    pub groups: Option<Groups>,
    /// The host of each PE of the world. Needed if the world has several groups and rows are sent to other hosts once. A layer's
    /// [`Options::hosts`] must be those of its group ([`Hosts::of`]).
    pub hosts: Hosts,
    /// Multiprocessors that the layer leaves for other kernels that wait for peers, such as NCCL's. Without them two PEs could deadlock: on
    /// one PE the layer's blocks are resident, on the other NCCL's, and each waits for the other.
    pub spare_multiprocessors: u32,
}

impl DeviceOptions {
    /// The limits of the device without the spare multiprocessors.
    ///
    /// # Errors
    ///
    /// Returns an error if no multiprocessor remains.
    pub(super) fn without_spare(&self, limits: DeviceLimits) -> Result<DeviceLimits, MoeError> {
        let (all, spare) = (limits.multiprocessors, self.spare_multiprocessors);
        match all.checked_sub(spare) {
            Some(left) if left > 0 => Ok(DeviceLimits { multiprocessors: left, ..limits }),
            _ => Err(config_error("the spare multiprocessors", spare, &format!("fewer than the device's {all}"))),
        }
    }

    /// The groups of the world, for a layer of `spec` on PE `pe` of `n_pes`.
    ///
    /// # Errors
    ///
    /// Returns an error if the groups or the hosts have another number of PEs, or if `spec` does not match this PE's group.
    pub(super) fn groups(&self, spec: &LayerSpec, pe: usize, n_pes: usize) -> Result<Groups, MoeError> {
        let Some(groups) = &self.groups else {
            spec.validate(n_pes)?;
            return Ok(Groups::one(spec.placement.clone()));
        };
        let planned = total_pes(groups);
        if planned != n_pes {
            return Err(config_error("the groups' number of PEs", planned, &n_pes.to_string()));
        }
        let group = groups.position(pe).0;
        spec.validate(groups.members(group).len())?;
        if *groups.placement(group) != spec.placement {
            return Err(config_error("the placement", format!("another than group {group} has"), "the group's"));
        }
        let hosts = self.hosts.n_pes();
        if hosts != 0 && hosts != n_pes {
            return Err(config_error("the hosts' number of PEs", hosts, &n_pes.to_string()));
        }
        if self.hosts_of_group(groups, group, &spec.options) != spec.options.hosts {
            return Err(config_error("the hosts", format!("others than group {group} has"), "the group's"));
        }
        Ok(groups.clone())
    }

    /// The hosts of a group's PEs, for a layer with `options`.
    fn hosts_of_group(&self, groups: &Groups, group: usize, options: &Options) -> Hosts {
        match self.hosts.n_pes() {
            0 => options.hosts.clone(),
            _ => self.hosts.of(groups.members(group)),
        }
    }
}

/// Number of PEs in all groups.
fn total_pes(groups: &Groups) -> usize {
    (0..groups.len()).map(|group| groups.members(group).len()).sum()
}

/// The kernels' code of an element type.
fn dtype_code(dtype: Dtype) -> Result<u32, MoeError> {
    match dtype {
        Dtype::Bf16 => Ok(params::DTYPE_BF16),
        Dtype::F16 => Ok(params::DTYPE_F16),
        Dtype::F32 => Err(config_error("dtype", "f32", "bf16 or f16 on a device")),
    }
}

/// Checks that devices support a layer.
///
/// # Errors
///
/// Returns an error that names the first unsupported field, its value, and the supported values.
pub fn check(config: &LayerConfig, dtype: Dtype, options: &Options) -> Result<(), MoeError> {
    dtype_code(dtype)?;
    if let Some(rows) = options.tile_rows {
        return Err(config_error("tile rows", rows, "none on a device, whose kernels have tiles of their own"));
    }
    if options.balance != Balance::Shares {
        return Err(config_error(
            "balance",
            "split",
            "shares on a device, which does not exchange counts before dispatch",
        ));
    }
    if let Some(wire) = options.wire {
        return Err(config_error("wire", wire.name(), "none on a device, whose rows are as its weights"));
    }
    check_family(config)?;
    let shared = config.shared.map_or(8, |s| s.mlp.intermediate);
    for (field, value) in
        [("hidden", config.hidden), ("intermediate", config.expert.intermediate), ("shared intermediate", shared)]
    {
        if !value.is_multiple_of(8) {
            return Err(config_error(field, value, "a multiple of 8 on a device"));
        }
    }
    Ok(())
}

/// Rejects features of some model families that are implemented only on the CPU.
fn check_family(config: &LayerConfig) -> Result<(), MoeError> {
    const CPU_ONLY: &str = "none on a device, which has no kernel for it yet: run on the CPU";
    let router = &config.router;
    let usual_norm = match router.scoring {
        Scoring::Sigmoid => Norm::sum(1e-20),
        _ => Norm::sum(0.0),
    };
    let mlps = [Some(config.expert), config.shared.map(|s| s.mlp)].into_iter().flatten();
    let mut glus = mlps.clone().map(|mlp| mlp.glu);
    let mut activations = mlps.map(|mlp| mlp.activation);
    let refused = [
        ("the score sqrt(softplus)", router.scoring == Scoring::SqrtSoftplus),
        // The norm is used only with renormalisation. For sigmoid scores, kernels add 1e-20 to the sum, so that epsilon is allowed. For
        // other scores such a small epsilon is below the rounding error, so it is allowed too.
        ("another norm than the sum", router.renormalise && (router.norm.floor, router.norm.order) != (0.0, 1.0)),
        ("an epsilon of the norm", router.renormalise && router.norm.epsilon > usual_norm.epsilon.max(1e-20)),
        (
            "group-limited selection by the best expert",
            router.groups.is_some() && router.group_score == GroupScore::Best,
        ),
        ("selection by logits", router.select_logits),
        ("a bias of the logits", router.logit_bias),
        ("a softcap of the logits", router.softcap != 0.0),
        ("weights on the inputs", router.weigh_input),
        ("SparseMixer", router.sparse_mixer.is_some()),
        ("identity experts", config.identity_experts != 0),
        ("a factor on the shared expert", config.shared.is_some_and(|s| s.scale != 1.0)),
        ("a clamped or shifted GLU", glus.any(|glu| glu != Glu::PRODUCT)),
        ("the activation ReLU^2 or QuickGELU", activations.any(|a| activation(a).is_none())),
    ];
    match refused.into_iter().find(|(_, is)| *is) {
        Some((what, _)) => Err(config_error("the layer", format!("one with {what}"), CPU_ONLY)),
        None => Ok(()),
    }
}

fn config_error(field: &'static str, value: impl ToString, expected: &str) -> MoeError {
    ConfigError { field, value: value.to_string(), expected: expected.into() }.into()
}

/// Inputs of the computation of a layer's shape.
#[derive(Clone, Copy)]
pub struct ShapeOf<'a> {
    /// The layer's spec, with the placement of any group.
    pub spec: &'a LayerSpec,
    pub device: &'a DeviceOptions,
    pub groups: &'a Groups,
    /// This PE's number in the world.
    pub my_pe: usize,
    /// Whether every PE can use loads and stores to the symmetric memory of every other PE.
    pub all_reachable: bool,
    /// Number of planes of the layer's element type into which the router's weights are split.
    pub router_parts: u32,
}

impl ShapeOf<'_> {
    /// The shape, with `blocks` blocks for the cooperative kernels.
    pub fn shape(&self, limits: &DeviceLimits, blocks: u32) -> Result<LayerShape, MoeError> {
        let (group, me) = self.groups.position(self.my_pe);
        let mut spec = self.spec.clone().placement(self.groups.placement(group).clone());
        spec.options.hosts = self.device.hosts_of_group(self.groups, group, &spec.options);
        let LayerSpec { config, placement, options, dtype, max_tokens, training, .. } = &spec;
        check(config, *dtype, options)?;
        if self.groups.len() > 1 && options.hosts.relays() && self.device.hosts.n_pes() == 0 {
            return Err(config_error("the hosts", "one group's", "those of all PEs, where there are several groups"));
        }
        let layout = spec.layout()?;
        let kernels = self.tile(limits)?;
        let tile = kernels.tile();
        let router = &config.router;
        let (shared, gate) = match config.shared {
            Some(shared) => (shared.mlp, shared.sigmoid_gate),
            None => (crate::moe::MlpConfig::plain(0, config.expert.activation), false),
        };
        let relays = Relays::new(placement, &options.hosts);
        // All cooperative kernels have the same number of blocks, and one of them may run in clusters.
        let blocks = kernels.whole_clusters(blocks.clamp(1, MAX_BLOCKS));
        let round_chunks = round_chunks(&spec, &layout) as u32;
        // A window with fewer slots than a round has chunks requires that rows are copied out of the window. Training copies them anyway,
        // for backward. If a network is used, the copy is fast compared with the network.
        let window_chunks = if *training || !self.all_reachable {
            window_chunks(&spec, &layout, round_chunks as usize) as u32
        } else {
            round_chunks
        };
        let mut shape = LayerShape {
            my_pe: me as u32,
            n_pes: placement.n_pes() as u32,
            world_pe: self.my_pe as u32,
            n_world: total_pes(self.groups) as u32,
            hidden: config.hidden as u32,
            intermediate: config.expert.intermediate as u32,
            shared_intermediate: shared.intermediate as u32,
            shared_gate: gate.into(),
            n_experts: config.n_experts as u32,
            n_local: placement.experts(me).len() as u32,
            max_local: placement.max_local() as u32,
            hosts: placement.hosts() as u32,
            top_k: router.top_k as u32,
            dtype: dtype_code(*dtype)?,
            gated: config.expert.gated.into(),
            activation: activation(config.expert.activation).unwrap_or_default(),
            bias: config.expert.bias.into(),
            shared_gated: shared.gated.into(),
            shared_activation: activation(shared.activation).unwrap_or_default(),
            shared_bias: shared.bias.into(),
            router_parts: self.router_parts,
            scoring: match router.scoring {
                Scoring::Softmax => params::SCORING_SOFTMAX,
                // `check` rejects other scorings.
                Scoring::Sigmoid | Scoring::SqrtSoftplus => params::SCORING_SIGMOID,
            },
            renormalise: router.renormalise.into(),
            n_groups: router.groups.map_or(0, |g| g.n_groups as u32),
            top_groups: router.groups.map_or(0, |g| g.top_groups as u32),
            correction_bias: router.correction_bias.into(),
            scaling: router.scaling,
            aux_loss_coef: config.aux_loss_coef,
            z_loss_coef: config.z_loss_coef,
            capacity_factor: config.capacity_factor.unwrap_or(0.0),
            max_tokens: (*max_tokens).max(1) as u32,
            chunk_rows: layout.chunk_rows as u32,
            round_chunks,
            window_chunks,
            round_slots: round_slots(&spec, &layout),
            training: (*training).into(),
            stage: (!self.all_reachable).into(),
            bulk: (options.mode == Mode::Bulk).into(),
            blocks,
            channels: limits.multiprocessors.clamp(1, MAX_BLOCKS),
            summed: self.groups.holders().iter().any(|holders| holders.len() > 1).into(),
            tile_m: tile.rows,
            tile_n: tile.columns,
            lane_stores: self.device.lane_stores.into(),
            wait_limit_ns: u64::try_from(options.wait_limit.as_nanos()).unwrap_or(u64::MAX).max(1),
            ..LayerShape::default()
        };
        relays.shape(me, &mut shape);
        Ok(shape)
    }

    /// The GEMM path in use.
    pub fn path(&self, limits: &DeviceLimits) -> GemmPath {
        let default = if limits.hopper() { GemmPath::Hopper } else { GemmPath::Ampere };
        self.device.path.unwrap_or(default)
    }

    /// The kernels for the GEMM tile in use.
    ///
    /// # Errors
    ///
    /// Returns an error if no kernels exist for the requested tile.
    pub(super) fn tile(&self, limits: &DeviceLimits) -> Result<&'static TileKernels, MoeError> {
        let path = self.path(limits);
        let found = match self.device.tile {
            Some(requested) => TileKernels::of(path).find(|kernels| kernels.tile() == requested),
            None => self.problem(limits).tile(path, limits),
        };
        found.ok_or_else(|| {
            let all: Vec<String> = TileKernels::of(path).map(|kernels| kernels.tile().to_string()).collect();
            let requested = self.device.tile.map_or_else(String::new, |tile| tile.to_string());
            config_error(
                "the tile",
                requested,
                &format!("{}, which there are kernels for ({})", all.join(" or "), path.name()),
            )
        })
    }

    /// Sizes of the GEMMs, which are the same on all PEs of a group.
    fn problem(&self, limits: &DeviceLimits) -> Problem {
        let LayerSpec { config, max_tokens, .. } = self.spec;
        let placement = self.groups.placement(self.groups.position(self.my_pe).0);
        let n_pes = placement.n_pes();
        let held: usize = (0..n_pes).map(|pe| placement.experts(pe).len()).sum();
        Problem {
            rows: (max_tokens * n_pes * config.router.top_k) as f64 / held.max(1) as f64,
            experts: placement.max_local() as f64,
            hidden: config.hidden as f64,
            intermediate: config.expert.intermediate as f64,
            gated: config.expert.gated,
            multiprocessors: f64::from(limits.multiprocessors.max(1)),
        }
    }

    /// Symmetric memory of every PE, bytes: the maximum over groups.
    pub fn symmetric_bytes(&self, limits: &DeviceLimits, blocks: u32) -> Result<u64, MoeError> {
        let mut most = 0;
        for group in 0..self.groups.len() {
            // All PEs of a group need the same.
            let Some(&my_pe) = self.groups.members(group).first() else { continue };
            let shape = ShapeOf { my_pe, ..*self }.shape(limits, blocks)?;
            most = most.max(lay_out(&shape, &Tables::default(), 0, 0)?.0.symmetric_bytes);
        }
        Ok(most)
    }
}

/// Maximum number of chunks per source and window refill. Without relays that of the layout; with relays, the chunks for the budget factor
/// times a host's even share of the rows.
fn round_chunks(spec: &LayerSpec, layout: &Layout) -> usize {
    let LayerSpec { config, options, max_tokens, .. } = spec;
    if !options.hosts.relays() {
        return layout.window_chunks;
    }
    let hosts = options.hosts.count();
    let rows = options.window_rows(*max_tokens, config.router.top_k.min(hosts), hosts);
    rows.div_ceil(layout.chunk_rows).max(layout.window_chunks)
}

/// Maximum number of slots per source and window refill: the budget factor times an even share of the slots, but at least the slots of one
/// chunk, and at most those of a whole window.
fn round_slots(spec: &LayerSpec, layout: &Layout) -> u32 {
    let LayerSpec { config, placement, options, max_tokens, .. } = spec;
    let hosts = placement.hosts().max(1);
    let even = (max_tokens * config.router.top_k).div_ceil(hosts);
    let budget = (even as f64 * options.budget_factor).ceil() as usize;
    let per_chunk = layout.chunk_rows * layout.max_slots_per_row;
    budget.clamp(per_chunk, per_chunk * layout.window_chunks) as u32
}

/// Symmetric memory of a layer on a device with these limits, bytes; used for the size of a fixed heap. `all_reachable` is whether every PE
/// can use loads and stores to every other PE's memory.
///
/// # Errors
///
/// Returns an error if devices do not support the layer.
pub fn symmetric_bytes(
    spec: &LayerSpec,
    device: &DeviceOptions,
    limits: &DeviceLimits,
    all_reachable: bool,
) -> Result<u64, MoeError> {
    let one;
    let groups = match &device.groups {
        Some(groups) => groups,
        None => {
            one = Groups::one(spec.placement.clone());
            &one
        }
    };
    let shape_of = ShapeOf { spec, device, groups, my_pe: 0, all_reachable, router_parts: MAX_ROUTER_PARTS };
    shape_of.symmetric_bytes(limits, limits.multiprocessors)
}

/// The kernels' code of an activation; `None` if they do not implement it.
fn activation(activation: Activation) -> Option<u32> {
    match activation {
        Activation::Silu => Some(params::ACT_SILU),
        Activation::Gelu => Some(params::ACT_GELU),
        Activation::GeluTanh => Some(params::ACT_GELU_TANH),
        Activation::Relu => Some(params::ACT_RELU),
        Activation::Relu2 | Activation::QuickGelu => None,
    }
}

unsafe extern "C" {
    /// Defined in `kernels/memory.cpp`.
    fn aristos_layer(
        shape: *const LayerShape,
        tables: *const Tables,
        local_base: u64,
        symmetric_base: u64,
        layer: *mut c_void,
        info: *mut LayerInfo,
    ) -> i32;
    fn aristos_sum_steps(shape: *const LayerShape, parts: u32, replicated: u32) -> u32;
}

/// Number of steps in which `parts` PEs sum the gradients of an expert, or of the replicated weights.
pub fn sum_steps(shape: &LayerShape, parts: u32, replicated: bool) -> u32 {
    // SAFETY: the function only reads the shape.
    unsafe { aristos_sum_steps(shape, parts, replicated.into()) }
}

/// Computes the sizes and addresses of a layer of this shape whose memory blocks start at `local` and `symmetric`, and the bytes of its
/// `Layer`.
///
/// # Errors
///
/// Returns an error that names the invalid field of the shape.
pub fn lay_out(
    shape: &LayerShape,
    tables: &Tables,
    local: u64,
    symmetric: u64,
) -> Result<(LayerInfo, Vec<u8>), MoeError> {
    let mut info = LayerInfo::default();
    let refuse = |field: i32| {
        let name = usize::try_from(field - 1).ok().and_then(|i| LayerShape::FIELDS.get(i)).unwrap_or(&"a field");
        MoeError::Device(GpuError::failed("lay out the layer on the device", format!("{name} is invalid in {shape:?}")))
    };
    // SAFETY: the function reads the first two arguments and writes `info`. `layer` may be null. Addresses are not dereferenced.
    let field = unsafe { aristos_layer(shape, tables, local, symmetric, std::ptr::null_mut(), &mut info) };
    if field != 0 {
        return Err(refuse(field));
    }
    // u128 has the alignment of a C struct.
    let mut layer = vec![0u128; (info.layer_bytes as usize).div_ceil(16)];
    // SAFETY: as above; `layer` has the size that the first call returned.
    let field = unsafe { aristos_layer(shape, tables, local, symmetric, layer.as_mut_ptr().cast(), &mut info) };
    if field != 0 {
        return Err(refuse(field));
    }
    let mut bytes = bytemuck::cast_slice(&layer).to_vec();
    bytes.truncate(info.layer_bytes as usize);
    Ok((info, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::spec::{MlpConfig, RouterConfig};

    /// DeepSeek-V3's layer for training on 16 PEs, four per host, with 4096 tokens each.
    #[test]
    fn symmetric_memory_is_windows_returns_and_two_waves() {
        let config = LayerConfig::new(7168, 256, RouterConfig::softmax(8), MlpConfig::gated(2048, Activation::Silu));
        let spec = LayerSpec::new(config, 16, 4096).dtype(Dtype::Bf16).training(true);
        let limits = DeviceLimits::a100();
        let device = DeviceOptions::default();
        let groups = Groups::one(spec.placement.clone());
        let bytes = |all_reachable| {
            let (spec, device, groups) = (&spec, &device, &groups);
            let shape_of = ShapeOf { spec, device, groups, my_pe: 0, all_reachable, router_parts: 3 };
            let shape = shape_of.shape(&limits, 108).unwrap();
            (lay_out(&shape, &Tables::default(), 0, 0).unwrap().0.symmetric_bytes, shape)
        };
        let ((local_bytes, shape), (remote_bytes, _)) = (bytes(true), bytes(false));
        let (chunk, window) = (u64::from(shape.chunk_rows), u64::from(shape.window_chunks));
        // A sent row has one word and up to 8 slots of two words; a returned row has 8 weight gradients.
        let (sent, returned) = (chunk * (2 * 7168 + 4 + 8 * 8), chunk * (2 * 7168 + 4 * 8));
        let returns = 4096 * 8 / chunk + 16;
        let rows = 15 * window * sent + returns * returned;
        let stages = 2 * window * (sent + returned);
        let small = 64 << 20; // signals, headers, pieces of gradients of replicated weights
        assert!(local_bytes >= rows && local_bytes <= rows + small, "{local_bytes} bytes, {rows} of rows");
        assert!(
            remote_bytes >= rows + stages && remote_bytes <= rows + stages + 2 * small,
            "{remote_bytes} bytes, {rows} of rows, {stages} of stages"
        );
        assert!(remote_bytes <= 1 << 30, "{remote_bytes} bytes");

        // With relays: windows for the three other PEs of the host and for three sources on other hosts, results of seven PEs, and four
        // buffers for partial results of each stream.
        let mut spec = spec;
        spec.options.hosts = Hosts::new((0..16).map(|pe| pe / 4).collect());
        let shape_of =
            ShapeOf { spec: &spec, device: &device, groups: &groups, my_pe: 0, all_reachable: false, router_parts: 3 };
        let relayed_bytes =
            lay_out(&shape_of.shape(&limits, 108).unwrap(), &Tables::default(), 0, 0).unwrap().0.symmetric_bytes;
        let rows = 6 * window * sent + 7 * (4096 / chunk) * returned + stages + 3 * 3 * 4 * chunk * (2 * 7168 + 4 * 8);
        assert!(
            relayed_bytes >= rows && relayed_bytes <= rows + 2 * small && relayed_bytes < remote_bytes,
            "{relayed_bytes} bytes, {rows} of rows, {remote_bytes} without"
        );
    }

    #[test]
    fn cpu_only_features_are_rejected() {
        let base = LayerConfig::new(16, 4, RouterConfig::softmax(2), MlpConfig::gated(8, Activation::Silu));
        check(&base, Dtype::Bf16, &Options::default()).unwrap();
        type Change = fn(&mut LayerConfig);
        let changes: [(Change, &str); 8] = [
            (|l| l.router.scoring = Scoring::SqrtSoftplus, "sqrt(softplus)"),
            (|l| l.router.norm.order = 2.0, "norm"),
            (|l| l.router.logit_bias = true, "bias of the logits"),
            (|l| l.router.weigh_input = true, "weights on the inputs"),
            (|l| l.router.softcap = 1.0, "softcap"),
            (|l| l.identity_experts = 1, "identity experts"),
            (|l| l.expert.glu = Glu::clamped(7.0), "GLU"),
            (|l| l.expert.activation = Activation::Relu2, "ReLU^2"),
        ];
        for (change, what) in changes {
            let mut layer = base.clone();
            change(&mut layer);
            let line = check(&layer, Dtype::Bf16, &Options::default()).unwrap_err().to_string();
            assert!(line.contains(what) && line.contains("on a device") && !line.contains('\n'), "{line}");
        }
    }
}
