//! `aristos plan`.

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::ValueEnum;
use serde::Serialize;

use super::files::check_distinct;
use super::shared::{ClusterArgs, LoadArgs};
use super::strategy::{self, Cures, StrategyArgs};
use super::workload::OptionalModelArgs;
use crate::checkpoint::OutputFile;
use crate::cluster::{Cluster, Probe, parse_json, read_text};
use crate::plan::{
    self, Algorithm, Explanation, Infeasible, Objective, Options, Outcome, PlacementKind, Plan, PlanError, Replan,
    Replication, Workload,
};
use crate::plot;
use crate::stdio::{print, print_line, say};

/// The exit code if there is no plan.
const INFEASIBLE: u8 = 2;

/// The flags of `aristos plan`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    on: ClusterArgs,
    /// The workload: a JSON file (docs/planner.md)
    #[arg(long, value_name = "W", required_unless_present = "model")]
    workload: Option<PathBuf>,
    #[command(flatten)]
    of_model: OptionalModelArgs,
    #[command(flatten)]
    strategies: StrategyArgs,
    /// Objective [default: placed; published with --algorithm lysi]
    #[arg(long, value_enum)]
    objective: Option<ObjectiveArg>,
    /// Algorithm for the groups
    #[arg(long, value_enum, default_value = "auto")]
    algorithm: AlgorithmArg,
    /// Placement of the experts in a group [default: auto; lysi with --algorithm lysi]
    #[arg(long, value_enum)]
    placement: Option<PlacementArg>,
    /// Replicate experts on several devices of a group if that helps: at most N more experts on each device, or as many as its memory
    /// holds (auto). With --current, starting from the placement in use
    #[arg(long, value_name = "N|auto", value_parser = replication)]
    replicas: Option<Replication>,
    /// Leave devices idle if that helps
    #[arg(long)]
    allow_idle: bool,
    /// Search with N times the usual effort
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    effort: u32,
    /// Show the terms of the chosen groups next to rejected ones, and the binding constraints
    #[arg(long)]
    explain: bool,
    /// Print the plan as JSON (keys: docs/planner.md)
    #[arg(long)]
    json: bool,
    /// Write the plan as JSON
    #[arg(long, value_name = "PLAN.json")]
    out: Option<PathBuf>,
    /// Maximum residual of a probed link, as a share: the error of its fit by a latency and a rate
    #[arg(long, value_name = "SHARE", default_value_t = Probe::USABLE)]
    max_residual: f64,
    /// Draw the plan on its cluster as SVG, or with the feature `png` as PNG, by the name of the file
    #[arg(long, alias = "plot", value_name = "PLAN.svg|png")]
    draw: Option<PathBuf>,
    /// Draw iteration latency over the number of experts for several group sizes, with out-of-memory points; SVG or PNG
    /// as for `--draw`
    #[arg(long, alias = "plot-latency", value_name = "LATENCY.svg|png")]
    draw_latency: Option<PathBuf>,
    #[command(flatten)]
    load: LoadArgs,
    /// The plan in use: print the gain of the new plan and the cost of moving the experts
    #[arg(long, value_name = "PLAN.json")]
    current: Option<PathBuf>,
    /// Size of a moved expert, MB [default: all_reduce_buffer_mb over the number of experts]
    #[arg(long, value_name = "MB", requires = "current")]
    expert_mb: Option<f64>,
}

/// `--replicas`.
pub(super) fn replication(text: &str) -> Result<Replication, String> {
    match text {
        "auto" => Ok(Replication::Auto),
        _ => text.parse().map(Replication::AtMost).map_err(|_| "expected a number of experts, or auto".to_string()),
    }
}

/// `--algorithm`.
#[derive(Clone, Copy, ValueEnum)]
pub enum AlgorithmArg {
    /// Search, and proof of optimality where the cluster is small
    Auto,
    /// Search and proof of optimality, or an error
    Exact,
    /// Search, with a bound on the gap
    Search,
    /// Lysi, the published algorithm, for comparison
    Lysi,
}

/// `--objective`.
#[derive(Clone, Copy, ValueEnum)]
pub enum ObjectiveArg {
    /// The time of an iteration with whole experts at their places
    Placed,
    /// Equation (1) of the Lysi poster, with fractional experts, for comparison
    Published,
}

/// `--placement`.
#[derive(Clone, Copy, ValueEnum)]
pub enum PlacementArg {
    /// The least makespan
    Auto,
    /// Lysi's placement, for comparison
    Lysi,
}

/// The output of `--json`: the plan, and the requested additions.
#[derive(Serialize)]
struct Printed<'a> {
    #[serde(flatten)]
    plan: &'a Plan,
    #[serde(skip_serializing_if = "Option::is_none")]
    explanation: Option<&'a Explanation>,
    #[serde(skip_serializing_if = "Option::is_none")]
    replan: Option<&'a Replan>,
}

impl Args {
    fn options(&self) -> Options {
        let algorithm = match self.algorithm {
            AlgorithmArg::Auto => Algorithm::Auto,
            AlgorithmArg::Exact => Algorithm::Exact,
            AlgorithmArg::Search => Algorithm::Search,
            AlgorithmArg::Lysi => Algorithm::Lysi,
        };
        let options = Options::default().algorithm(algorithm).allow_idle(self.allow_idle).effort(self.effort);
        let options = match self.objective {
            None => options,
            Some(ObjectiveArg::Placed) => options.objective(Objective::Placed),
            Some(ObjectiveArg::Published) => options.objective(Objective::Published),
        };
        let options = self.replicas.map_or(options, |replication| options.replicas(replication));
        match self.placement {
            None => options,
            Some(PlacementArg::Auto) => options.placement(PlacementKind::Auto),
            Some(PlacementArg::Lysi) => options.placement(PlacementKind::Lysi),
        }
    }

    fn cluster(&self) -> Result<Cluster> {
        self.usable(self.on.read()?)
    }

    /// Returns an error if a probed link fits a latency and a rate badly.
    fn usable(&self, cluster: Cluster) -> Result<Cluster> {
        let limit = self.max_residual;
        ensure!(limit >= 0.0, "--max-residual is {limit}, expected a share, 0 or more");
        let wild = cluster.probe.as_ref().map(|probe| probe.wild_links(limit)).unwrap_or_default();
        let worst = wild.iter().max_by(|a, b| a.2.total_cmp(&b.2));
        if let Some((from, to, residual)) = worst {
            bail!(
                "{}: probe.residual[{from}][{to}] is {residual:.2}, the largest of {} links, expected at most {limit}: probe again on a quiet \
                 machine, or say --max-residual {:.2}",
                self.on.path.display(),
                wild.len(),
                residual + 0.01
            );
        }
        Ok(cluster)
    }

    fn workload(&self, cluster: &Cluster) -> Result<Workload> {
        let mut workload = match &self.workload {
            Some(path) => Workload::read(path)?,
            None => self.of_model.workload(cluster.devices.len())?,
        };
        self.load.weight(&mut workload, || self.of_model.top_k())?;
        Ok(workload)
    }

    /// The plan in use.
    fn current(&self) -> Result<Option<Plan>> {
        let read = |path: &PathBuf| parse_json(&read_text(path)?).with_context(|| path.display().to_string());
        self.current.as_ref().map(read).transpose()
    }

    fn replan(
        &self,
        cluster: &Cluster,
        workload: &Workload,
        current: Option<&Plan>,
        planned: &Plan,
    ) -> Result<Option<Replan>> {
        let (Some(path), Some(current)) = (&self.current, current) else { return Ok(None) };
        let expert_mb = self.expert_mb.unwrap_or(workload.all_reduce_buffer_mb / workload.n_experts() as f64);
        ensure!(
            (0.0..=1e30).contains(&expert_mb),
            "--expert-mb is {expert_mb}, expected a number of MB from 0 to 1e30"
        );
        let replan = plan::replan(cluster, workload, current, planned, expert_mb);
        replan.map(Some).with_context(|| path.display().to_string())
    }

    /// Returns an error if a written file is also read, or written twice.
    fn check_files(&self) -> Result<()> {
        check_distinct(
            &[
                ("out", self.out.as_deref()),
                ("draw", self.draw.as_deref()),
                ("draw-latency", self.draw_latency.as_deref()),
            ],
            &[
                ("cluster", Some(&self.on.path)),
                ("workload", self.workload.as_deref()),
                ("expert-load-from", self.load.expert_load_from.as_deref()),
                ("routing", self.load.routing.as_deref()),
                ("current", self.current.as_deref()),
            ],
        )
    }
}

/// Plans, prints and writes. The exit code is 0, or 2 when there is no plan.
pub fn main(args: &Args) -> Result<u8> {
    for (name, path) in [("--draw", &args.draw), ("--draw-latency", &args.draw_latency)] {
        path.as_deref().map(plot::check_format).transpose().context(name)?;
    }
    args.check_files()?;
    let (cluster, options) = (args.cluster()?, args.options());
    let workload = args.workload(&cluster)?;
    if args.strategies.top.is_some() {
        return strategy::main(&args.strategies, &args.of_model, &cluster, args.json, INFEASIBLE);
    }
    let current = args.current()?;
    if args.replicas.is_some() {
        ensure!(
            options.minimised() == Objective::Placed,
            "--replicas with the published objective, expected --objective placed, by which experts are whole"
        );
    }
    if let (Some(path), Some(current)) = (&args.current, &current) {
        plan::check(&cluster, &workload, current).with_context(|| path.display().to_string())?;
    }
    let outcome = plan::plan_from(&cluster, &workload, options, current.as_ref()).map_err(|error| match error {
        PlanError::Input(error) => anyhow!(error).context(args.on.path.display().to_string()),
        // The planner rejects no option except `--algorithm exact`.
        error => anyhow!("--{error}"),
    })?;
    let mut files = Vec::new();
    if let Some(path) = &args.draw_latency {
        let svg = plot::plot_latency(&cluster, &workload, options.minimised())?;
        files.push(OutputFile::create_empty(path)?.with_content(&plot::encode(&svg, path)?)?);
    }
    if let (Some(path), Outcome::Plan(plan)) = (&args.draw, &outcome) {
        let svg = plot::plot_plan(&cluster, &workload, plan)?;
        files.push(OutputFile::create_empty(path)?.with_content(&plot::encode(&svg, path)?)?);
    }
    if let Some(path) = &args.out {
        files.push(OutputFile::create_empty(path)?.with_content((outcome.to_json() + "\n").as_bytes())?);
    }
    OutputFile::publish_all(files)?;
    let plan = match &outcome {
        Outcome::Plan(plan) => plan,
        Outcome::Infeasible(Infeasible { shortage, .. }) => {
            let cures = Cures::of(&args.strategies, &args.of_model, &cluster, &args.on.path.to_string_lossy())?;
            match (args.json, &cures) {
                (true, Some(cures)) => print_line(&cures.add_to(&outcome.to_json())?)?,
                (true, None) => print_line(&outcome.to_json())?,
                (false, Some(cures)) => say(&format!("aristos: no plan: {shortage}\n{}", cures.text().trim_end())),
                (false, None) => say(&format!("aristos: no plan: {shortage}")),
            }
            return Ok(INFEASIBLE);
        }
    };
    let explanation = match args.explain {
        true => Some(plan::explain(&cluster, &workload, options, plan)?),
        false => None,
    };
    let replan = args.replan(&cluster, &workload, current.as_ref(), plan)?;
    if args.json {
        let printed = Printed { plan, explanation: explanation.as_ref(), replan: replan.as_ref() };
        print_line(&serde_json::to_string_pretty(&printed)?)?;
        return Ok(0);
    }
    let mut text = crate::report::plan_text(plan, cluster.devices.len(), workload.n_experts());
    if let Some(explanation) = &explanation {
        text += &format!("\n{}", crate::report::explanation_text(explanation));
    }
    if let Some(replan) = &replan {
        text += &format!("\n{}", crate::report::replan_text(replan));
    }
    print(&text)?;
    Ok(0)
}
