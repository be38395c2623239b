//! GEMM tiles: the sizes for which kernels exist, and the choice of one of them.

use std::ffi::{CStr, c_char};
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::gpu::DeviceLimits;

/// GEMM implementation of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GemmPath {
    /// `mma`, with operands loaded by `cp.async`, for every device from Ampere on.
    Ampere,
    /// `wgmma`, with operands loaded by the tensor memory accelerator where possible.
    Hopper,
}

impl GemmPath {
    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            GemmPath::Ampere => "ampere",
            GemmPath::Hopper => "hopper",
        }
    }

    pub(super) fn is_hopper(self) -> bool {
        self == GemmPath::Hopper
    }
}

/// Rows and columns of a tile; formatted as "64x128".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tile {
    /// Rows of an expert's batch, a multiple of 16.
    pub rows: u32,
    /// Accumulators per row: output columns, or those of gate and up together in a gated expert.
    pub columns: u32,
}

impl fmt::Display for Tile {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}x{}", self.rows, self.columns)
    }
}

impl FromStr for Tile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers =
            text.split_once('x').and_then(|(rows, columns)| Some((rows.parse().ok()?, columns.parse().ok()?)));
        let (rows, columns) = numbers.ok_or("expected rows and columns, such as 64x128")?;
        Ok(Tile { rows, columns })
    }
}

/// A row of the table of `TileLaunch` in `kernels/launch.h`.
#[repr(C)]
pub(super) struct TileKernels {
    architecture: u32,
    rows: u32,
    columns: u32,
    _threads: u32,
    shared_bytes: u32,
    blocks: u32,
    cluster: u32,
    infix: [c_char; 20],
}

unsafe extern "C" {
    /// Defined in `kernels/memory.cpp`.
    fn aristos_tile(i: u32) -> Option<&'static TileKernels>;
}

impl TileKernels {
    /// All tile kernels of a path, the default one first.
    pub(super) fn of(path: GemmPath) -> impl Iterator<Item = &'static TileKernels> {
        // SAFETY: the function returns a row of a constant table, or null after the last row.
        let all = (0..).map_while(|i| unsafe { aristos_tile(i) });
        all.filter(move |tile| tile.architecture == u32::from(path.is_hopper()))
    }

    pub(super) fn tile(&self) -> Tile {
        Tile { rows: self.rows, columns: self.columns }
    }

    /// Rounds `blocks` down to whole clusters.
    pub(super) fn whole_clusters(&self, blocks: u32) -> u32 {
        blocks / self.cluster * self.cluster
    }

    /// The part of the kernels' names between direction and element type.
    pub(super) fn infix(&self) -> &'static str {
        // SAFETY: `infix` is a NUL-terminated constant of `kernels/launch.h`.
        unsafe { CStr::from_ptr(self.infix.as_ptr()) }.to_str().unwrap_or_default()
    }
}

/// GEMM sizes of a PE in a balanced step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Problem {
    /// Rows per expert.
    pub rows: f64,
    /// Experts per PE.
    pub experts: f64,
    pub hidden: f64,
    pub intermediate: f64,
    pub gated: bool,
    pub multiprocessors: f64,
}

/// Throughput of a multiprocessor per clock.
struct Rates {
    /// Number of multiply-adds.
    pairs: f64,
    /// Bytes to and from shared memory.
    shared: f64,
    /// Bytes from L2, if all multiprocessors load equally.
    l2: f64,
    /// Bytes from DRAM, for the whole device.
    dram: f64,
}

/// Clocks between the last product of a tile and the first product of the next: epilogue, scheduling and first copies.
const TILE_OVERHEAD: f64 = 6000.0;

/// A measured problem and its fastest tile, as (path, multiprocessors, hidden, intermediate, experts per PE, rows per expert, tile).
type Measured = (GemmPath, u32, u32, u32, u32, u32, (u32, u32));

/// Measured problems, in the format printed by `gpu/check.sh tune`. Still empty, so [`Problem::clocks`] decides.
const MEASURED: &[Measured] = &[];

impl Problem {
    /// Estimated clocks of both GEMMs of all experts with tiles of m x n, or the clocks to load the weights from DRAM if these are more:
    /// ```text
    /// sum over both of  waves * products of a tile / rate * slowdown + waves / blocks * BETWEEN
    /// waves     tiles / multiprocessors, rounded up; blocks of a multiprocessor share its tensor cores and hide each other's epilogues
    /// tiles     experts * (rows / m + 1/2) * columns / n; the last tile of an expert is half empty on average
    /// products  of the rows that warps multiply: an empty half of a tile is skipped, and half of the last tile is empty
    /// slowdown  1, or the factor by which shared memory or L2 is slower than the tensor cores
    /// ```
    ///
    /// Training has three times the products, because of backward, for every tile size. That does not affect the choice.
    fn clocks(&self, path: GemmPath, tile: &TileKernels) -> f64 {
        let (m, n, blocks) = (f64::from(tile.rows), f64::from(tile.columns), f64::from(tile.blocks));
        let rates = match path {
            GemmPath::Ampere => Rates { pairs: 1024.0, shared: 128.0, l2: 32.0, dram: 1100.0 },
            GemmPath::Hopper => Rates { pairs: 2048.0, shared: 128.0, l2: 48.0, dram: 1900.0 },
        };
        // Bytes per step of K: those that warps read from shared memory (with wgmma, warpgroups read 64 rows and all columns), and those
        // copied to it.
        let read = match path {
            GemmPath::Ampere => n / 64.0 * 2.0 * (m / 2.0 + 64.0) * 2.0,
            GemmPath::Hopper => m / 64.0 * (64.0 + n) * 2.0,
        };
        let copied = (m + n) * 2.0;
        let multiply = m * n / rates.pairs;
        let slowdown = ((read + copied) / rates.shared / multiply).max(copied / rates.l2 / multiply).max(1.0);

        let down = (self.rows / m + 0.5).max(1.0);
        let multiplied = (self.rows + m / 4.0).max(m / 2.0) / down;
        let product = |columns: f64, of_tile: f64, sum: f64| {
            let waves = (self.experts * down * (columns / of_tile).ceil() / self.multiprocessors).ceil();
            waves * multiplied * n * sum / rates.pairs * slowdown + (waves / blocks).ceil() * TILE_OVERHEAD
        };
        let of_tile = if self.gated { n / 2.0 } else { n };
        let weights = self.experts * self.hidden * self.intermediate * if self.gated { 6.0 } else { 4.0 };
        let products = product(self.intermediate, of_tile, self.hidden) + product(self.hidden, n, self.intermediate);
        products.max(weights / rates.dram)
    }

    /// Distance of two problems: the maximum of |log2(ratio)| over the ratios of their sizes.
    fn distance(&self, measured: &Measured) -> f64 {
        let &(_, multiprocessors, hidden, intermediate, experts, rows, _) = measured;
        let measured = [multiprocessors, hidden, intermediate, experts, rows].map(f64::from);
        let sizes = [self.multiprocessors, self.hidden, self.intermediate, self.experts, self.rows];
        sizes.iter().zip(measured).map(|(a, b)| (a.max(1.0) / b.max(1.0)).log2().abs()).fold(0.0, f64::max)
    }

    /// Chooses the tile of the nearest measured problem, if all sizes are within a factor of two. Otherwise chooses the tile with the
    /// lowest estimate among those of one block, or the path's default tile if its estimate is at most 5% higher.
    pub(super) fn tile(&self, path: GemmPath, limits: &DeviceLimits) -> Option<&'static TileKernels> {
        let fits = |tile: &&TileKernels| tile.shared_bytes <= limits.shared_bytes_per_block;
        let nearest =
            MEASURED.iter().filter(|m| m.0 == path).min_by(|a, b| self.distance(a).total_cmp(&self.distance(b)));
        if let Some(m) = nearest.filter(|m| self.distance(m) <= 1.0) {
            let found = TileKernels::of(path).filter(fits).find(|tile| (tile.rows, tile.columns) == m.6);
            if found.is_some() {
                return found;
            }
        }
        let usual = TileKernels::of(path).next()?;
        // The estimate includes neither the loads that a cluster saves nor the waits between the cluster's blocks, so clusters are chosen
        // only by measurement.
        let best = TileKernels::of(path)
            .filter(fits)
            .filter(|tile| tile.cluster == 1)
            .min_by(|a, b| self.clocks(path, a).total_cmp(&self.clocks(path, b)))
            .unwrap_or(usual);
        Some(if self.clocks(path, best) < 0.95 * self.clocks(path, usual) { best } else { usual })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(multiprocessors: f64, [experts, rows, hidden, intermediate]: [f64; 4]) -> Problem {
        Problem { rows, experts, hidden, intermediate, gated: true, multiprocessors }
    }

    fn tile(path: GemmPath, problem: Problem) -> String {
        let limits = DeviceLimits {
            capability: if path.is_hopper() { (9, 0) } else { (8, 0) },
            multiprocessors: problem.multiprocessors as u32,
            shared_bytes_per_block: if path.is_hopper() { 227 << 10 } else { 163 << 10 },
            memory_total: 0,
            memory_free: 0,
            symmetric_total: 0,
        };
        problem.tile(path, &limits).unwrap().tile().to_string()
    }

    #[test]
    fn small_tiles_if_large_tiles_are_fewer_than_multiprocessors() {
        let problem = |experts, rows, hidden, intermediate| problem(108.0, [experts, rows, hidden, intermediate]);
        let tile = |problem| tile(GemmPath::Ampere, problem);
        // One of Mixtral's experts on each of 8 PEs: the second GEMM has 16 tiles per row of tiles. A decoding step has one row of tiles,
        // and training has 32.
        assert_eq!(tile(problem(1.0, 64.0, 4096.0, 14336.0)), "64x128");
        assert_eq!(tile(problem(1.0, 4096.0, 4096.0, 14336.0)), "128x256");
        // Eight of Qwen3's experts on each of 16 PEs: smaller tiles do not reduce the number of waves.
        assert_eq!(tile(problem(8.0, 128.0, 2048.0, 768.0)), "128x256");
        assert_eq!(tile(problem(8.0, 4096.0, 2048.0, 768.0)), "128x256");
        // All 256 experts of DeepSeek-V3: DRAM is the limit for every tile.
        assert_eq!(tile(problem(256.0, 16.0, 7168.0, 2048.0)), "128x256");
    }

    #[test]
    fn narrow_tiles_if_wide_tiles_leave_multiprocessors_idle() {
        let problem = |experts, rows, hidden, intermediate| problem(132.0, [experts, rows, hidden, intermediate]);
        let tile = |problem| tile(GemmPath::Hopper, problem);
        // One of Mixtral's experts on each of 8 PEs, for few tokens: the second GEMM has only 16 wide tiles per row of tiles. In training
        // there are enough rows of tiles.
        assert_eq!(tile(problem(1.0, 64.0, 4096.0, 14336.0)), "128x128");
        assert_eq!(tile(problem(1.0, 4096.0, 4096.0, 14336.0)), "128x256");
        // A narrow tile reads more from shared memory and L2 per product.
        assert_eq!(tile(problem(8.0, 4096.0, 2048.0, 768.0)), "128x256");
        assert_eq!(tile(problem(4.0, 64.0, 2048.0, 768.0)), "128x128");
    }

    #[test]
    fn unmeasured_architectures_use_tiles_of_one_block() {
        assert!(TileKernels::of(GemmPath::Hopper).any(|tile| tile.cluster > 1));
        for experts in [1.0, 8.0, 64.0] {
            for rows in [1.0, 64.0, 300.0, 4096.0, 65536.0] {
                for (hidden, intermediate) in [(2048.0, 768.0), (4096.0, 14336.0), (7168.0, 2048.0)] {
                    let chosen = tile(GemmPath::Hopper, problem(132.0, [experts, rows, hidden, intermediate]));
                    assert!(["128x256", "128x128"].contains(&&*chosen), "{chosen}");
                }
            }
        }
    }

    #[test]
    fn tile_text_round_trips() {
        for path in [GemmPath::Ampere, GemmPath::Hopper] {
            let mut infixes: Vec<&str> = TileKernels::of(path).map(TileKernels::infix).collect();
            for kernels in TileKernels::of(path) {
                assert_eq!(kernels.tile().to_string().parse(), Ok(kernels.tile()));
                assert!(kernels.rows % 16 == 0 && kernels.columns % 64 == 0);
            }
            infixes.dedup();
            assert_eq!(infixes.len(), TileKernels::of(path).count());
        }
        for invalid in ["", "64", "64x", "x128", "64,128", "64x128x2", "-64x128"] {
            assert!(invalid.parse::<Tile>().is_err(), "{invalid}");
        }
    }
}
