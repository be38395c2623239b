//! Which tiles a layer's matrix products are cut into: those that there are kernels for, and which of them suits a problem.

use std::ffi::{CStr, c_char};
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::gpu::DeviceLimits;

/// Which matrix products a device runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GemmPath {
    /// `mma` on operands that `cp.async` brings: every device from Ampere on.
    Ampere,
    /// `wgmma` on operands that the tensor memory accelerator brings, where it can.
    Hopper,
}

impl GemmPath {
    /// Its name in reports.
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

/// Rows and columns of a tile; as text "64x128".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tile {
    /// Rows of an expert's batch, a multiple of 16.
    pub rows: u32,
    /// Accumulators of a row: columns of the output, but of two matrices where the expert is gated.
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

/// A row of the table in `kernels/launch.h`: `TileLaunch`.
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
    /// `kernels/memory.cpp`.
    fn aristos_tile(i: u32) -> Option<&'static TileKernels>;
}

impl TileKernels {
    /// Those of a path, its usual one first.
    pub(super) fn of(path: GemmPath) -> impl Iterator<Item = &'static TileKernels> {
        // SAFETY: a row of a constant table, or null after the last.
        let all = (0..).map_while(|i| unsafe { aristos_tile(i) });
        all.filter(move |tile| tile.architecture == u32::from(path.is_hopper()))
    }

    pub(super) fn tile(&self) -> Tile {
        Tile { rows: self.rows, columns: self.columns }
    }

    /// Of so many blocks those in whole clusters.
    pub(super) fn whole_clusters(&self, blocks: u32) -> u32 {
        blocks / self.cluster * self.cluster
    }

    /// What the names of its kernels have between the direction and the element type.
    pub(super) fn infix(&self) -> &'static str {
        // SAFETY: a constant of `kernels/launch.h`, which ends with a 0.
        unsafe { CStr::from_ptr(self.infix.as_ptr()) }.to_str().unwrap_or_default()
    }
}

/// The products of a PE in a balanced step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Problem {
    /// Of an expert.
    pub rows: f64,
    /// On a PE.
    pub experts: f64,
    pub hidden: f64,
    pub intermediate: f64,
    pub gated: bool,
    pub multiprocessors: f64,
}

/// What a multiprocessor does in a clock.
struct Rates {
    /// Pairs multiplied.
    pairs: f64,
    /// Bytes from and to shared memory.
    shared: f64,
    /// Bytes from L2, where all ask for as much.
    l2: f64,
    /// The same from DRAM, of the whole device.
    dram: f64,
}

/// From a tile's last product to the first of the next: the epilogue, the look for a task, the first copies. Clocks.
const BETWEEN: f64 = 6000.0;

/// A problem, and the tile that was the fastest: path, multiprocessors, hidden, intermediate, experts of a PE, rows of an expert, tile.
type Measured = (GemmPath, u32, u32, u32, u32, u32, (u32, u32));

/// As `gpu/check.sh tune` prints them. There are none yet: all is by [`Problem::clocks`], on paper.
const MEASURED: &[Measured] = &[];

impl Problem {
    /// What the two products of all experts take with a tile of m x n, in clocks, but no less than the weights need from DRAM:
    /// ```text
    /// sum over both of  waves * products of a tile / pairs * slowdown + waves / blocks * BETWEEN
    /// waves     tiles / multiprocessors, rounded up: blocks on a multiprocessor share its tensor cores, and hide each other's epilogues
    /// tiles     experts * (rows / m + 1/2) * columns / n: an expert's last tile is half empty on average
    /// products  of the rows that warps multiply: a half of a tile that is empty is skipped, and half of the last one is empty
    /// slowdown  1, or by how much shared memory or L2 is slower than the tensor cores
    /// ```
    ///
    /// Backward has three times the products, for all tiles alike.
    fn clocks(&self, path: GemmPath, tile: &TileKernels) -> f64 {
        let (m, n, blocks) = (f64::from(tile.rows), f64::from(tile.columns), f64::from(tile.blocks));
        let rates = match path {
            GemmPath::Ampere => Rates { pairs: 1024.0, shared: 128.0, l2: 32.0, dram: 1100.0 },
            GemmPath::Hopper => Rates { pairs: 2048.0, shared: 128.0, l2: 48.0, dram: 1900.0 },
        };
        // Bytes for one step of the sum: what warps read of shared memory (wgmma: warpgroups of 64 rows, all columns), and what is copied there.
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
            waves * multiplied * n * sum / rates.pairs * slowdown + (waves / blocks).ceil() * BETWEEN
        };
        let of_tile = if self.gated { n / 2.0 } else { n };
        let weights = self.experts * self.hidden * self.intermediate * if self.gated { 6.0 } else { 4.0 };
        let products = product(self.intermediate, of_tile, self.hidden) + product(self.hidden, n, self.intermediate);
        products.max(weights / rates.dram)
    }

    /// By how many doublings the problems differ, at most in anything.
    fn distance(&self, measured: &Measured) -> f64 {
        let &(_, multiprocessors, hidden, intermediate, experts, rows, _) = measured;
        let theirs = [multiprocessors, hidden, intermediate, experts, rows].map(f64::from);
        let ours = [self.multiprocessors, self.hidden, self.intermediate, self.experts, self.rows];
        ours.iter().zip(theirs).map(|(a, b)| (a.max(1.0) / b.max(1.0)).log2().abs()).fold(0.0, f64::max)
    }

    /// The tile of the measured problem that is nearest, if that is within a factor of two in everything; otherwise the fastest on paper, of one block
    /// each, but the path's usual one where that is not slower by more than 5%.
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
        // The formula knows nothing of what blocks of a cluster save, nor of what their waits for each other cost: they are to be measured.
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
    fn small_tiles_where_large_ones_are_fewer_than_multiprocessors() {
        let problem = |experts, rows, hidden, intermediate| problem(108.0, [experts, rows, hidden, intermediate]);
        let tile = |problem| tile(GemmPath::Ampere, problem);
        // One of Mixtral's experts on each of 8 PEs: 16 tiles across for the second product, of which a decoding step has one row, training 32.
        assert_eq!(tile(problem(1.0, 64.0, 4096.0, 14336.0)), "64x128");
        assert_eq!(tile(problem(1.0, 4096.0, 4096.0, 14336.0)), "128x256");
        // Eight of Qwen3's on each of 16: no fewer waves with small ones.
        assert_eq!(tile(problem(8.0, 128.0, 2048.0, 768.0)), "128x256");
        assert_eq!(tile(problem(8.0, 4096.0, 2048.0, 768.0)), "128x256");
        // All 256 of DeepSeek-V3: DRAM takes longer than any tile.
        assert_eq!(tile(problem(256.0, 16.0, 7168.0, 2048.0)), "128x256");
    }

    #[test]
    fn narrow_tiles_where_wide_ones_leave_multiprocessors_without() {
        let problem = |experts, rows, hidden, intermediate| problem(132.0, [experts, rows, hidden, intermediate]);
        let tile = |problem| tile(GemmPath::Hopper, problem);
        // One of Mixtral's experts on each of 8 PEs, for few tokens: 16 wide tiles across for the second product. Training has enough of them.
        assert_eq!(tile(problem(1.0, 64.0, 4096.0, 14336.0)), "128x128");
        assert_eq!(tile(problem(1.0, 4096.0, 4096.0, 14336.0)), "128x256");
        // A narrow tile reads more of shared memory and of L2 for each product.
        assert_eq!(tile(problem(8.0, 4096.0, 2048.0, 768.0)), "128x256");
        assert_eq!(tile(problem(4.0, 64.0, 2048.0, 768.0)), "128x128");
    }

    #[test]
    fn what_is_not_measured_never_takes_a_tile_of_several_blocks() {
        assert!(TileKernels::of(GemmPath::Hopper).any(|tile| tile.cluster > 1));
        for experts in [1.0, 8.0, 64.0] {
            for rows in [1.0, 64.0, 300.0, 4096.0, 65536.0] {
                for (hidden, intermediate) in [(2048.0, 768.0), (4096.0, 14336.0), (7168.0, 2048.0)] {
                    let taken = tile(GemmPath::Hopper, problem(132.0, [experts, rows, hidden, intermediate]));
                    assert!(["128x256", "128x128"].contains(&&*taken), "{taken}");
                }
            }
        }
    }

    #[test]
    fn tiles_are_read_as_they_are_printed() {
        for path in [GemmPath::Ampere, GemmPath::Hopper] {
            let mut infixes: Vec<&str> = TileKernels::of(path).map(TileKernels::infix).collect();
            for kernels in TileKernels::of(path) {
                assert_eq!(kernels.tile().to_string().parse(), Ok(kernels.tile()));
                assert!(kernels.rows % 16 == 0 && kernels.columns % 64 == 0);
            }
            infixes.dedup();
            assert_eq!(infixes.len(), TileKernels::of(path).count());
        }
        for wrong in ["", "64", "64x", "x128", "64,128", "64x128x2", "-64x128"] {
            assert!(wrong.parse::<Tile>().is_err(), "{wrong}");
        }
    }
}
