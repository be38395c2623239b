//! The report of all PEs' rows: a table, CSV, JSON, and plots.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::{Measure, Op, Row};
use crate::bench::cpus::{CpuPair, CpuSpan, cpu_model};
use crate::plot::{self, Axis, Plot, Scale, Series, Style};
use crate::report::Report;
use crate::report::text::{TextTable, count, or_blank};

/// The measurements of one PE, by the number of the figure, which is the same on all PEs.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PeRows {
    /// The rows.
    pub rows: Vec<(usize, Row)>,
    /// Whether the PE was the initiator, and its CPUs.
    pub cpu_spans: Vec<(usize, bool, CpuSpan)>,
    /// The time of a memcpy of the figure's size, microseconds.
    pub memcpy_us: Vec<(usize, f64)>,
    /// The reasons for missing figures, a line each.
    pub left_out: Vec<String>,
}

impl PeRows {
    /// Rows in the order of figures, without data of another PE.
    pub fn numbered(rows: Vec<Row>) -> PeRows {
        PeRows { rows: rows.into_iter().enumerate().collect(), ..PeRows::default() }
    }
}

/// The result of `aristos bench p2p`; `docs/measurements/README.md` describes its keys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct P2pReport {
    /// The transport: "shm", "mpi" or "nvshmem".
    pub transport: String,
    /// The name of the CPU according to the kernel.
    pub cpu_model: String,
    /// Number of PEs.
    pub pes: usize,
    /// The rows.
    pub rows: Vec<Row>,
}

impl Report for P2pReport {
    fn render_table(&self) -> String {
        let mut text = format!("{}; transport {}\n", self.cpu_model, self.transport);
        let (pairs, scopes) = (self.pairs().len() > 1, self.rows.iter().any(|r| r.scope.is_some()));
        let mut header = vec!["", ""];
        header.extend(pairs.then_some("PEs").into_iter().chain(scopes.then_some("")));
        let labels = header.len();
        header.extend(["bytes", "p50 us", "p99", "min", "round trip", "GB/s", "10^6/s", "% memcpy", "raw us", "/ raw"]);
        header.extend(["flag us", "CPUs"]);
        let mut table = TextTable::new(labels, header);
        for r in &self.rows {
            let mut cells = vec![r.measure.name().to_string(), r.op.name().to_string()];
            cells.extend(pairs.then(|| format!("{},{}", r.pair[0], r.pair[1])));
            cells.extend(scopes.then(|| r.scope.map_or("", |scope| scope.name()).to_string()));
            cells.extend([
                r.bytes.to_string(),
                us(r.p50_us),
                us(r.p99_us),
                us(r.min_us),
                r.round_trip_us.map_or_else(String::new, us),
                format!("{:.3}", r.gb_per_s),
                format!("{:.3}", r.messages_per_s * 1e-6),
                or_blank(r.memcpy_percent, 0),
                r.raw_us.map_or_else(String::new, us),
                or_blank(r.raw_ratio, 3),
                r.flag_us.map_or_else(String::new, us),
                r.placement.map_or_else(String::new, |p| p.render()),
            ]);
            table.row(cells);
        }
        text += &table.render();
        if self.rows.iter().any(|r| r.measure == Measure::Latency && r.round_trip_us.is_some()) {
            text += "Times are of one operation; of ping-pongs one way, half the round trip.\n";
        }
        let shared = self.rows.iter().filter(|r| r.placement.is_some_and(|p| p.shared_cpu)).count();
        if shared > 0 {
            let of = count(shared as u64, "figure");
            let _ = writeln!(text, "The PEs shared a CPU in {of}: these measure the scheduler.");
        }
        text
    }

    /// Plots of latency, bandwidth and non-blocking put, if they were measured. Each of several pairs has its own plots, with the PEs' numbers in
    /// their names.
    fn plot(&self, folder: &Path) -> Result<Vec<PathBuf>> {
        let pairs = self.pairs();
        let mut files = Vec::new();
        for &pair in &pairs {
            let suffix = if pairs.len() > 1 { format!("-{}-{}", pair[0], pair[1]) } else { String::new() };
            for (stem, plot) in [
                ("latency", self.latency_plot(pair)),
                ("bandwidth", self.bandwidth_plot(pair)),
                ("put-nbi", self.put_nbi_plot(pair)),
            ] {
                if plot.series.iter().any(|series| !series.points.is_empty()) {
                    files.extend(plot::save(folder, &format!("{stem}{suffix}"), &plot.svg()?)?);
                }
            }
        }
        Ok(files)
    }
}

impl P2pReport {
    /// Merges the PEs' rows.
    pub fn merge(transport: &str, parts: &[PeRows]) -> P2pReport {
        let mut rows: Vec<(usize, Row)> = parts.iter().flat_map(|part| part.rows.iter().cloned()).collect();
        rows.sort_by_key(|(figure, _)| *figure);
        let cpu_spans = parts.iter().flat_map(|part| &part.cpu_spans);
        let cpu_spans: BTreeMap<(usize, bool), CpuSpan> =
            cpu_spans.map(|&(figure, first, span)| ((figure, first), span)).collect();
        let memcpy_us: BTreeMap<usize, f64> = parts.iter().flat_map(|part| part.memcpy_us.iter().copied()).collect();
        let complete = |(figure, row): (usize, Row)| {
            let both = cpu_spans.get(&(figure, true)).zip(cpu_spans.get(&(figure, false)));
            let row = Row { placement: both.map(|(a, b)| CpuPair::of([*a, *b])), ..row };
            // Only operations that move data are compared with a copy.
            match memcpy_us.get(&figure) {
                Some(&us) if row.op != Op::Atomic && row.measure != Measure::Issue => row.with_memcpy(us),
                _ => row,
            }
        };
        P2pReport {
            transport: transport.to_string(),
            cpu_model: cpu_model(),
            pes: parts.len(),
            rows: rows.into_iter().map(complete).collect(),
        }
    }

    /// A line for each row, after a header.
    pub fn to_csv(&self) -> String {
        let mut csv = String::from(
            "pe_a,pe_b,measure,op,scope,bytes,iterations,batch,p50_us,p99_us,min_us,mean_us,round_trip_us,gb_per_s,\
             messages_per_s,memcpy_us,memcpy_percent,raw_us,raw_ratio,flag_us,cpu_a_start,cpu_a_end,cpu_b_start,cpu_b_end,\
             allowed_cpus,shared_cpu,nearness\n",
        );
        for r in &self.rows {
            let _ = write!(
                csv,
                "{},{},{},{},{},{},{},{},{:.4},{:.4},{:.4},{:.4},{},{:.4},{:.0},{},{},{},{},{},",
                r.pair[0],
                r.pair[1],
                r.measure.name(),
                r.op.name(),
                r.scope.map_or("", |scope| scope.name()),
                r.bytes,
                r.iterations,
                r.batch,
                r.p50_us,
                r.p99_us,
                r.min_us,
                r.mean_us,
                or_blank(r.round_trip_us, 4),
                r.gb_per_s,
                r.messages_per_s,
                or_blank(r.memcpy_us, 4),
                or_blank(r.memcpy_percent, 4),
                or_blank(r.raw_us, 4),
                or_blank(r.raw_ratio, 4),
                or_blank(r.flag_us, 4),
            );
            let _ = match &r.placement {
                Some(p) => {
                    let [a, b] = p.cpu_spans;
                    writeln!(
                        csv,
                        "{},{},{},{},{},{},{}",
                        a.start,
                        a.end,
                        b.start,
                        b.end,
                        a.allowed.min(b.allowed),
                        p.shared_cpu,
                        p.nearness.name()
                    )
                }
                None => writeln!(csv, ",,,,,,"),
            };
        }
        csv
    }

    fn pairs(&self) -> Vec<[usize; 2]> {
        let mut pairs: Vec<[usize; 2]> = self.rows.iter().map(|r| r.pair).collect();
        pairs.sort_unstable();
        pairs.dedup();
        pairs
    }

    fn subtitle(&self, pair: [usize; 2]) -> String {
        let mut near: Vec<String> = self.rows.iter().filter_map(|r| r.placement).map(|p| p.render()).collect();
        near.sort();
        near.dedup();
        let near = match &near[..] {
            [] => String::new(),
            [one] => format!("; CPUs {one}"),
            many => format!("; {} placements, see the rows", many.len()),
        };
        format!("{}, {}, PEs {} and {}{near}", self.cpu_model, self.transport, pair[0], pair[1])
    }

    /// The series of one quantity and operation, one for each scope: `value` over the size.
    fn series(&self, pair: [usize; 2], of: (Measure, Op), name: &str, value: fn(&Row) -> Option<f64>) -> Vec<Series> {
        let rows: Vec<&Row> =
            self.rows.iter().filter(|r| (r.pair, (r.measure, r.op)) == (pair, of) && r.op != Op::Atomic).collect();
        let mut scopes: Vec<Option<super::Scope>> = Vec::new();
        for row in &rows {
            if !scopes.contains(&row.scope) {
                scopes.push(row.scope);
            }
        }
        let one = |scope: Option<super::Scope>| Series {
            name: scope.map_or_else(|| name.to_string(), |s| format!("{name}, {}", s.name())),
            points: rows
                .iter()
                .filter(|r| r.scope == scope)
                .filter_map(|r| Some((r.bytes as f64, value(r)?)))
                .collect(),
            style: Style::Dotted,
            color: 0,
        };
        scopes.into_iter().map(one).filter(|series| !series.points.is_empty()).collect()
    }

    fn latency_plot(&self, pair: [usize; 2]) -> Plot {
        let p50 = |r: &Row| Some(r.p50_us);
        let mut series = Vec::new();
        for (op, name) in [
            (Op::PutSignal, "put-signal"),
            (Op::SendRecv, "send-recv"),
            (Op::Put, "put + quiet"),
            (Op::PutNbi, "put-nbi + quiet"),
            (Op::Get, "get"),
        ] {
            series.extend(self.series(pair, (Measure::Latency, op), name, p50));
        }
        let put_signal = (Measure::Latency, Op::PutSignal);
        series.extend(dashed(self.series(pair, put_signal, "raw copy + flag", |r| r.raw_us)));
        series.extend(dashed(self.series(pair, (Measure::Latency, Op::Put), "memcpy", |r| r.memcpy_us)));
        self.by_size(pair, "Point-to-point latency, one way (lower is better)", "latency, us (median)", series)
    }

    fn bandwidth_plot(&self, pair: [usize; 2]) -> Plot {
        let gb_per_s = |r: &Row| Some(r.gb_per_s);
        let mut series = Vec::new();
        for (measure, op, name) in [
            (Measure::Bandwidth, Op::Put, "put alone"),
            (Measure::Bandwidth, Op::PutNbi, "put-nbi alone"),
            (Measure::Bandwidth, Op::Get, "get"),
            (Measure::Bandwidth, Op::SendRecv, "send-recv"),
            (Measure::Consume, Op::PutSignal, "put, receiver reads"),
            (Measure::Consume, Op::SendRecv, "send-recv, reads"),
        ] {
            series.extend(self.series(pair, (measure, op), name, gb_per_s));
        }
        let raw = |r: &Row| r.raw_us.and_then(|us| (us > 0.0).then(|| r.bytes as f64 / us * 1e-3));
        series.extend(dashed(self.series(pair, (Measure::Consume, Op::PutSignal), "raw, receiver reads", raw)));
        let memcpy = |r: &Row| r.memcpy_us.and_then(|us| (us > 0.0).then(|| r.bytes as f64 / us * 1e-3));
        series.extend(dashed(self.series(pair, (Measure::Bandwidth, Op::Put), "memcpy", memcpy)));
        self.by_size(pair, "Point-to-point bandwidth (higher is better)", "bandwidth, GB/s (10^9 bytes)", series)
    }

    fn put_nbi_plot(&self, pair: [usize; 2]) -> Plot {
        let p50 = |r: &Row| Some(r.p50_us);
        let mut series = self.series(pair, (Measure::Issue, Op::PutNbi), "issue", p50);
        series.extend(self.series(pair, (Measure::Latency, Op::PutNbi), "issue + quiet", p50));
        self.by_size(pair, "Non-blocking put (lower is better)", "latency, us (median)", series)
    }

    fn by_size(&self, pair: [usize; 2], title: &str, label: &str, mut series: Vec<Series>) -> Plot {
        series.iter_mut().enumerate().for_each(|(place, series)| series.color = place);
        Plot {
            title: title.to_string(),
            subtitle: self.subtitle(pair),
            x: Axis::new("bytes transmitted", Scale::Bytes),
            y: Axis::new(label, Scale::Log),
            series,
            marks: Vec::new(),
        }
    }
}

fn dashed(series: Vec<Series>) -> impl Iterator<Item = Series> {
    series.into_iter().map(|series| Series { style: Style::Dashed, ..series })
}

/// Microseconds with the digits that the clock can resolve.
fn us(value: f64) -> String {
    if value < 10.0 { format!("{value:.3}") } else { format!("{value:.1}") }
}

#[cfg(test)]
mod tests {
    use super::super::Figure;
    use super::*;

    /// Two PEs, one of which ended on the other's CPU in the last figure.
    fn example() -> P2pReport {
        let of = |measure, op, bytes| Figure { pair: [0, 1], measure, op, scope: None, bytes, batch: 1 };
        let latency = of(Measure::Latency, Op::PutSignal, 4096);
        let first = PeRows {
            rows: vec![
                (0, of(Measure::Latency, Op::Put, 4096).row(&[0.5, 0.25, 1.0])),
                (1, latency.row(&[0.4, 0.6, 0.5]).with_raw(latency, &[0.4])),
                (3, of(Measure::Latency, Op::Atomic, 8).row(&[0.1])),
                (4, of(Measure::Issue, Op::PutNbi, 4096).row(&[0.1])),
            ],
            cpu_spans: (0..5).map(|figure| (figure, true, CpuSpan { start: 0, end: 0, allowed: 1 })).collect(),
            memcpy_us: (0..5).map(|figure| (figure, 0.125)).collect(),
            left_out: Vec::new(),
        };
        let span = |figure: usize| CpuSpan { start: 1, end: usize::from(figure != 4), allowed: 1 };
        let second = PeRows {
            rows: vec![(2, of(Measure::Consume, Op::PutSignal, 4096).row(&[0.25]))],
            cpu_spans: (0..5).map(|figure| (figure, false, span(figure))).collect(),
            memcpy_us: Vec::new(),
            left_out: Vec::new(),
        };
        P2pReport::merge("shm", &[first, second])
    }

    #[test]
    fn rows_of_both_pes_are_merged_in_order_with_both_cpus() {
        let report = example();
        let kinds: Vec<_> = report.rows.iter().map(|r| (r.measure.name(), r.op.name())).collect();
        let want = [
            ("latency", "put"),
            ("latency", "put-signal"),
            ("consume", "put-signal"),
            ("latency", "atomic"),
            ("issue", "put-nbi"),
        ];
        assert_eq!(kinds, want);
        let percents: Vec<_> = report.rows.iter().map(|r| r.memcpy_percent).collect();
        assert_eq!(percents, [Some(25.0), Some(50.0), Some(50.0), None, None]);
        let shared: Vec<bool> = report.rows.iter().map(|r| r.placement.unwrap().shared_cpu).collect();
        assert_eq!(shared, [false, false, false, false, true]);
        assert_eq!(report.rows[1].raw_ratio, Some(1.25));
    }

    #[test]
    fn table_and_csv_have_a_line_for_each_row() {
        let report = example();
        let csv = report.to_csv();
        let columns = |line: &str| line.split(',').count();
        assert_eq!(csv.lines().count(), 6);
        assert!(csv.lines().all(|line| columns(line) == columns(csv.lines().next().unwrap())), "{csv}");
        assert!(csv.contains("\n0,1,latency,put-signal,,4096,3,1,0.2500,0.3000,0.2000,0.2500,0.5000,16.3840,4000000,"));
        let table = report.render_table();
        assert!(table.lines().skip(1).all(|line| line.chars().count() <= 150), "{table}");
        assert!(table.contains("The PEs shared a CPU in 1 figure"), "{table}");
        assert!(table.contains("same CPU"), "{table}");
        let back: P2pReport = serde_json::from_str(&report.to_json()).unwrap();
        assert_eq!(back.rows.len(), report.rows.len());
    }

    #[test]
    fn measured_figures_are_plotted() {
        let folder = tempfile::tempdir().unwrap();
        let files = example().plot(folder.path()).unwrap();
        let names: Vec<_> = files.iter().map(|f| f.file_name().unwrap().to_string_lossy().into_owned()).collect();
        let formats: &[&str] = if cfg!(feature = "png") { &["svg", "png"] } else { &["svg"] };
        let stems = ["latency", "bandwidth", "put-nbi"].into_iter();
        let want: Vec<_> =
            stems.flat_map(|stem| formats.iter().map(move |format| format!("{stem}.{format}"))).collect();
        assert_eq!(names, want);
        let svg = std::fs::read_to_string(&files[0]).unwrap();
        assert!(svg.contains("latency, us (median)") && svg.contains("raw copy + flag") && svg.contains("memcpy"));
    }
}
