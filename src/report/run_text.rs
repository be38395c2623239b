//! The report of a run as text, at most [`WIDTH`] columns wide.

use super::run::{CheckReport, PassTimes, PlanReport, PlannedPes, RunReport, Spread};
use super::text::{TextTable, WIDTH, count, fields, join, list, mb, ms, shorten};
use super::{PHASES, Report};

/// Up to this many experts are listed one by one.
const EXPERTS_LISTED: usize = 16;
/// Number of the busiest experts that are listed if there are more.
const EXPERTS_BUSIEST: usize = 6;
/// Number of PEs whose CPUs are listed, if they differ.
const CPUS_LISTED: usize = 4;
/// Number of tensors of a check that are listed, the worst first.
const TENSORS_LISTED: usize = 12;
/// Columns of a tensor's name: the other columns of the check's table take 55.
const NAME_WIDTH: usize = WIDTH - 55;

impl Report for RunReport {
    /// Times in ms, memory in MB (10^6 bytes).
    fn render_table(&self) -> String {
        let check = self.check.as_ref().map_or_else(String::new, |check| format!("\n{}", tensors(check)));
        format!("{}\n\n{}\n{}\n{check}", self.heading(), self.times(), self.figures())
    }
}

impl RunReport {
    fn heading(&self) -> String {
        let config = &self.config;
        let layer = config.layer.map_or_else(String::new, |layer| format!(", layer {layer}"));
        let shared = match config.shared_intermediate {
            0 => String::new(),
            width => format!(" and a shared expert of {width}"),
        };
        let passes = if config.backward { "forward and backward" } else { "forward" };
        format!(
            "{}{layer}\n{}, hidden {}, {} of {}{shared}, top-{}, {}\n{}, {}, {}, {passes}",
            shorten(&config.model, WIDTH - layer.len()),
            count(config.tokens, "token"),
            config.hidden,
            count(config.experts as u64, "expert"),
            config.intermediate,
            config.top_k,
            config.dtype,
            count(config.pes as u64, "PE"),
            config.mode,
            count(config.steps, "step"),
        )
    }

    /// A row per phase: median and maximum over the PEs, for each pass.
    fn times(&self) -> String {
        let passes: Vec<(&str, &PassTimes)> = [("forward", Some(&self.forward)), ("backward", self.backward.as_ref())]
            .into_iter()
            .filter_map(|(name, times)| Some((name, times?)))
            .collect();
        let mut header = vec!["time, ms".to_string()];
        for (name, _) in &passes {
            header.extend([format!("{name} median"), format!("{name} max")]);
        }
        let mut table = TextTable::new(1, header);
        let mut keys: Vec<&str> = PHASES.iter().map(|(key, _)| *key).collect();
        let others = passes.iter().flat_map(|(_, times)| times.phases.keys()).map(String::as_str);
        keys.extend(others.filter(|key| PHASES.iter().all(|(known, _)| known != key)));
        keys.dedup();
        for key in keys {
            let spreads: Vec<Option<&Spread>> = passes.iter().map(|(_, times)| times.phases.get(key)).collect();
            if spreads.iter().any(Option::is_some) {
                let name = PHASES.iter().find(|(known, _)| *known == key).map_or(key, |(_, name)| name);
                table.row(time_row(name, spreads.into_iter()));
            }
        }
        table.row(time_row("whole pass", passes.iter().map(|(_, times)| Some(&times.total))));
        table.render()
    }

    /// The threads and the CPUs of a PE: once if all PEs have the same, otherwise of the first few.
    fn cpus(&self) -> String {
        let threads = count(self.config.threads as u64, "thread") + " a PE";
        match &self.cpus_per_pe[..] {
            [first, others @ ..] if others.iter().all(|cpus| cpus == first) => format!("{threads}, on CPUs {first}"),
            all => {
                let mut each: Vec<String> =
                    all.iter().enumerate().map(|(pe, cpus)| format!("PE {pe} on {cpus}")).take(CPUS_LISTED).collect();
                if all.len() > CPUS_LISTED {
                    each.push(format!("and {} more", all.len() - CPUS_LISTED));
                }
                format!("{threads}, {}", each.join("; "))
            }
        }
    }

    /// All figures that take one line.
    fn figures(&self) -> String {
        let mut rows: Vec<(String, String)> = Vec::new();
        let mut row = |name: &str, value: String| rows.push((name.to_string(), value));
        for lost in &self.lost {
            let without = format!("without PEs {}: {}", join(&lost.pes, ", "), lost.why);
            row(&format!("from step {} on", lost.from_step), without);
        }
        row("step", format!("{} ms (slowest PE, median over steps)", ms(self.step_s)));
        row("tokens/s", format!("{:.0}", self.tokens_per_s));
        row("GFLOP/s", format!("{:.2}", self.gflop_per_s));
        let steps = self.config.steps.max(1) as f64;
        let kinds = self.traffic.remote_bytes.iter();
        let kinds: Vec<String> = kinds.map(|(kind, bytes)| format!("{kind} {}", mb(*bytes as f64 / steps))).collect();
        let kinds = if kinds.is_empty() { String::new() } else { format!(" ({})", kinds.join(", ")) };
        row("remote MB per step", mb(self.remote_bytes_per_step) + &kinds);
        let (network, relayed) = (self.traffic.network_bytes as f64, self.traffic.relay_bytes as f64);
        if network + relayed > 0.0 {
            let relays = format!("; {} through relays within hosts", mb(relayed / steps));
            row("by network, MB per step", mb(network / steps) + if relayed > 0.0 { &relays } else { "" });
        }
        let per_step = |n: u64| n as f64 / steps;
        let (puts, signals, fences) = (self.traffic.puts, self.traffic.signals, self.traffic.fences);
        let counts = [(puts, "puts"), (signals, "signals"), (fences, "fences")];
        row("remote operations", counts.map(|(n, name)| format!("{} {name}", per_step(n))).join(", ") + " per step");
        row(
            "symmetric MB per PE",
            format!(
                "{} peak of {} budget",
                mb(self.symmetric.peak_bytes as f64),
                mb(self.symmetric.budget_bytes as f64)
            ),
        );
        let backward =
            self.backward.as_ref().map_or_else(String::new, |times| format!(" forward, {} backward", times.rounds));
        row("rounds", format!("{}{backward}", self.forward.rounds));
        row("tokens per expert", self.experts());
        let (most, all) =
            self.expert_rows_per_pe.iter().fold((0, 0), |(most, all), &rows| (rows.max(most), all + rows));
        if all > 0 {
            let mean = all as f64 / self.expert_rows_per_pe.len() as f64;
            row(
                "experts' rows of a PE",
                format!("{mean:.1} mean, {most} largest: {:.3} of the mean", most as f64 / mean),
            );
        }
        for (name, balance) in [("balance by expert", &self.balance.experts), ("balance by PE", &self.balance.pes)] {
            let median = super::run::median(balance.imbalance.clone());
            let most = balance.imbalance.iter().copied().fold(0.0, f64::max);
            if let (Some(persistent), Some(changing)) = (balance.persistent, balance.changing) {
                row(
                    name,
                    format!(
                        "largest/mean {median:.2}, worst {most:.2}; \
                         variance {persistent:.3}, between steps {changing:.3}"
                    ),
                );
            }
        }
        if !self.cpus_per_pe.is_empty() {
            row("threads, CPUs", self.cpus());
        }
        if let Some(plan) = &self.plan {
            row("EP groups", plan_groups(plan));
            if let Some(why) = &plan.not_predicted {
                row("planned", format!("not compared: {why}"));
            }
            for (name, times) in [("planned", plan.predicted.as_ref()), ("measured", Some(&plan.measured))] {
                let Some(times) = times else { continue };
                let [step, compute, communication, all_reduce] =
                    [times.step_s, times.compute_s, times.communication_s, times.all_reduce_s].map(ms);
                row(
                    name,
                    format!("{step} ms: compute {compute}, communication {communication}, all-reduce {all_reduce}"),
                );
            }
        }
        for (name, value) in &self.aux_losses {
            row(&format!("auxiliary loss, {name}"), format!("{value:.6}"));
        }
        fields(&rows)
    }

    /// The tokens of each expert, or their distribution if there are many.
    fn experts(&self) -> String {
        let tokens = &self.tokens_per_expert;
        if tokens.len() <= EXPERTS_LISTED {
            return list(tokens);
        }
        let mut order: Vec<usize> = (0..tokens.len()).collect();
        order.sort_by_key(|&expert| (std::cmp::Reverse(tokens[expert]), expert));
        let at = |place: usize| tokens[order[place]];
        let last = tokens.len() - 1;
        let middle = super::run::median(tokens.iter().map(|&n| n as f64).collect());
        let busiest: Vec<String> =
            order.iter().take(EXPERTS_BUSIEST).map(|&expert| format!("{expert} ({})", tokens[expert])).collect();
        let idle = tokens.iter().filter(|&&n| n == 0).count();
        format!(
            "min {}, median {middle}, max {}; {idle} of {} got none; busiest: {}",
            at(last),
            at(0),
            tokens.len(),
            busiest.join(", ")
        )
    }
}

/// The groups of a plan: the PEs of each, with their numbers of experts.
fn plan_groups(plan: &PlanReport) -> String {
    let group = |group: &PlannedPes| {
        let pe = |(pe, experts): (&usize, &Vec<usize>)| format!("{pe} ({})", experts.len());
        group.pes.iter().zip(&group.experts).map(pe).collect::<Vec<_>>().join(" ")
    };
    let groups: Vec<String> = plan.groups.iter().map(group).collect();
    format!("{} by {} ({}), PEs and their experts: {}", groups.len(), plan.algorithm, plan.source, groups.join(" | "))
}

/// The verdict of the check in one line, and the worst tensors.
fn tensors(check: &CheckReport) -> String {
    let failed = check.tensors.iter().filter(|tensor| !tensor.passed).count();
    let all = count(check.tensors.len() as u64, "tensor");
    let verdict = match check.passed {
        true => format!("check passed: {all} within tolerance of the float64 reference"),
        false => format!("check FAILED: {failed} of {all} beyond tolerance of the float64 reference"),
    };
    let mut worst: Vec<_> = check.tensors.iter().collect();
    worst.sort_by(|a, b| b.severity().total_cmp(&a.severity()));
    let mut table = TextTable::new(1, ["tensor", "rel. error", "tolerance", "worst", "of bound", ""]);
    for tensor in worst.iter().take(TENSORS_LISTED) {
        let (error, tolerance) = (format!("{:.2e}", tensor.relative_error), format!("{:.1e}", tensor.tolerance));
        let (slice, of_bound) = match &tensor.worst {
            Some(slice) => (format!("{} {}", slice.axis, slice.index), share(slice.severity())),
            None => Default::default(),
        };
        let verdict = if tensor.passed { "ok" } else { "FAILED" };
        table.row([shorten(&tensor.name, NAME_WIDTH), error, tolerance, slice, of_bound, verdict.to_string()]);
    }
    let more = match check.tensors.len().saturating_sub(TENSORS_LISTED) {
        0 => String::new(),
        more => format!("({more} more, with smaller errors relative to their tolerance)\n"),
    };
    format!("{verdict}\n{}{more}", table.render())
}

fn time_row<'s>(name: &str, spreads: impl Iterator<Item = Option<&'s Spread>>) -> Vec<String> {
    let cells = spreads.flat_map(|spread| match spread {
        Some(spread) => [ms(spread.median_s), ms(spread.max_s)],
        None => [String::new(), String::new()],
    });
    std::iter::once(name.to_string()).chain(cells).collect()
}

/// An error as a multiple of its bound.
fn share(severity: f64) -> String {
    if severity < 100.0 { format!("{severity:.3}") } else { format!("{severity:.0e}") }
}

#[cfg(test)]
mod tests {
    use super::super::run::tests::example;
    use super::super::run::{SliceCheck, TensorCheck};
    use super::*;

    fn fits(text: &str) {
        for line in text.lines() {
            assert!(line.chars().count() <= WIDTH, "{} columns: {line}", line.chars().count());
            assert_eq!(line, line.trim_end(), "blanks at the end");
        }
    }

    fn slice(axis: &str, index: usize, error: f64) -> Option<SliceCheck> {
        Some(SliceCheck { axis: axis.into(), index, error, bound: 1e-4 })
    }

    #[test]
    fn small_run_shows_every_figure() {
        let (config, pes) = example();
        let mut report = RunReport::merge(config, &pes);
        report.aux_losses.insert("load_balancing".into(), 0.0125);
        report.check = Some(CheckReport::new(vec![
            TensorCheck::new("output", 2.5e-7, 1e-5, slice("row", 17, 2e-6)),
            TensorCheck::new("grad_hidden_states", 2e-6, 1e-5, slice("row", 299, 5e-4)),
            TensorCheck::new("grad.router.weight", 2e-5, 1e-5, slice("column", 2, 0.0)),
            TensorCheck::new("grad.experts.0.up_proj.weight", 0.0, 1e-5, None),
        ]));
        let want = "\
synthetic
300 tokens, hidden 64, 4 experts of 128, top-2, f32
2 PEs, pipelined, 3 steps, forward and backward

time, ms     forward median  forward max  backward median  backward max
expert GEMM         200.000      250.000          400.000       500.000
whole pass          400.000      500.000          800.000      1000.000

step                            1800.000 ms (slowest PE, median over steps)
tokens/s                        167
GFLOP/s                         3.33
remote MB per step              0.002 (combine 0.000, dispatch 0.002)
remote operations               4 puts, 6 signals, 0 fences per step
symmetric MB per PE             0.000 peak of 0.000 budget
rounds                          3 forward, 1 backward
tokens per expert               10 400 0 190
experts' rows of a PE           300.0 mean, 410 largest: 1.367 of the mean
balance by expert               largest/mean 2.39, worst 2.67; variance 0.843, between steps 0.024
balance by PE                   largest/mean 1.31, worst 1.37; variance 0.096, between steps 0.003
auxiliary loss, load_balancing  0.012500

check FAILED: 2 of 4 tensors beyond tolerance of the float64 reference
tensor                         rel. error  tolerance     worst  of bound
grad_hidden_states                2.00e-6     1.0e-5   row 299     5.000  FAILED
grad.router.weight                2.00e-5     1.0e-5  column 2     0.000  FAILED
output                            2.50e-7     1.0e-5    row 17     0.020      ok
grad.experts.0.up_proj.weight      0.00e0     1.0e-5                          ok
";
        assert_eq!(report.render_table(), want);
        fits(want);
    }

    #[test]
    fn many_experts_and_long_names_are_shortened() {
        let (mut config, mut pes) = example();
        config.experts = 256;
        config.layer = Some(61);
        config.model = "/a/very/long/path/".repeat(10);
        config.shared_intermediate = 2048;
        pes[0].expert_rows =
            (0..256).map(|expert| super::super::ExpertRows { expert, rows: (expert as u64 * 37) % 101 }).collect();
        pes[1].expert_rows = Vec::new();
        let kinds = ["dispatch", "combine", "counts", "dispatch of gradients", "combine of gradients"];
        pes[0].traffic.remote_bytes = kinds.map(|kind| (kind.to_string(), 123_456_789_012)).into();
        (pes[0].traffic.network_bytes, pes[0].traffic.relay_bytes) = (1_500_000, 6_000);
        let mut report = RunReport::merge(config, &pes);
        let name = |i: usize| format!("grad.model.layers.61.mlp.experts.{i}.a_rather_long_projection_name.weight");
        let tensors = (0..768).map(|i| {
            TensorCheck::new(&name(i), if i == 700 { f64::NAN } else { 1e-7 }, 1e-5, slice("column", 16383, 1e9))
        });
        report.check = Some(CheckReport::new(tensors.collect()));
        let text = report.render_table();
        fits(&text);
        assert!(text.lines().count() < 50, "{text}");
        assert!(text.contains("min 0, median 49.5, max 100; 3 of 256 got none; busiest: "), "{text}");
        let first = text.lines().find(|line| line.ends_with("FAILED")).unwrap();
        assert!(first.contains("NaN") && first.contains(".700."), "{first}");
        assert!(text.contains("(756 more, "));
        let network = text.lines().find(|line| line.starts_with("by network, MB per step")).unwrap();
        assert!(network.ends_with(" 0.500; 0.002 through relays within hosts"), "{network}");
    }

    #[test]
    fn forward_only_has_no_backward_columns() {
        let (mut config, mut pes) = example();
        config.backward = false;
        pes.iter_mut().flat_map(|pe| &mut pe.steps).for_each(|step| step.backward = None);
        let text = RunReport::merge(config, &pes).render_table();
        assert!(!text.contains("backward"), "{text}");
        fits(&text);
    }
}
